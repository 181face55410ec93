"""What a rank has posted and waits for, and the error of a wait for a neighbour that is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

Arrived = Callable[[float], bool]
"""Waits so many seconds at most until what this thread's stream waits for is there; see
`Platform.finish`."""


class PeerLost(Exception):
    """A neighbour on the data plane is gone or silent. Rarely the first cause."""


@dataclass(frozen=True, slots=True)
class PendingReceive:
    """Receives that are posted; the tensors are valid after `wait`."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    timeout: timedelta
    what: str
    """What comes, and from whom, for messages."""
    arrived: Arrived

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Blocks until all tensors are there. Raises `PeerLost`."""
        try:
            for work in self.works:
                # NCCL's and HCCL's make the stream wait, and return.
                work.wait(self.timeout)
        except RuntimeError as error:
            raise PeerLost(f"receiving {self.what} failed: {first_line(error)}") from error
        seconds = self.timeout.total_seconds()
        if self.works and not self.arrived(seconds):
            raise PeerLost(f"receiving {self.what} took more than {seconds:.0f} s")
        return self.tensors


def at_once(timeout_seconds: float) -> bool:
    """Of a platform whose `work.wait` is the whole wait."""
    return True


NOTHING = PendingReceive((), (), timedelta(0), "nothing", at_once)


def first_line(error: BaseException) -> str:
    """A collective library's message without its advice and stack."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
