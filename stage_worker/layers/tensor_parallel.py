"""What a layer needs from its tensor-parallel group, and nothing more.

Every rank of a stage calls the same collectives in the same order. At size 1
they return their argument untouched. No wait is without a bound: a peer that
dies is seen at once, one that hangs after `timeout_seconds`; both are `PeerLost`.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from services.errors import StageFailed
from stage_worker.pending_receive import PeerLost, first_line
from stage_worker.rank_arguments import STEP_TIMEOUT_SECONDS


class TensorParallel:
    """Rank and size inside a stage, and its collectives.

    `group` is replaced when a new epoch forms; it is None at size 1.
    """

    __slots__ = ("group", "rank", "size", "timeout_seconds")

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = STEP_TIMEOUT_SECONDS,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.timeout_seconds = timeout_seconds

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sums `t` over the group, in place, and returns it."""
        if self.size == 1:
            return t
        work = dist.all_reduce(t, group=self._formed_group(), async_op=True)
        self._wait(work)
        return t

    def all_gather_last_dim(self, t: Tensor) -> Tensor:
        """[..., d] on each rank becomes [..., size * d] in rank order on all."""
        if self.size == 1:
            return t
        t = t.contiguous()
        gathered = t.new_empty((self.size, *t.shape))
        # Flat views: gloo and hccl agree on one-dimensional buffers.
        work = dist.all_gather_into_tensor(
            gathered.view(-1), t.view(-1), group=self._formed_group(), async_op=True
        )
        self._wait(work)
        return gathered.movedim(0, -2).reshape(*t.shape[:-1], self.size * t.shape[-1])

    def _formed_group(self) -> dist.ProcessGroup:
        if self.group is None:
            raise StageFailed(
                f"tensor-parallel rank {self.rank} of {self.size} has no group: "
                "FormGroup must come before the first step"
            )
        return self.group

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:
            raise StageFailed(f"tensor-parallel rank {self.rank} is not part of its group")
        try:
            work.wait(timedelta(seconds=self.timeout_seconds))
        except RuntimeError as error:
            raise PeerLost(
                f"a collective of tensor-parallel rank {self.rank} of {self.size} failed: "
                f"{first_line(error)}"
            ) from error
