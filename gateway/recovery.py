"""What a replica may spend on a recovery, and how an attempt ends when something fails in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass

from services.errors import StageFailed

FIRST_PAUSE_SECONDS = 0.1
MOST_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """What is done after a failure. With no attempts nothing is: the mesh ends with its cause."""

    max_attempts: int
    """Failures in a row, without a new token, that a request survives."""
    timeout_seconds: float
    """From a failure until the replica serves again; beyond it the mesh ends."""

    @property
    def recovers(self) -> bool:
        """Whether anything is done."""
        return self.max_attempts > 0


def epochs_above(last_epoch: Callable[[], int]) -> Iterator[int]:
    """Each is above the one before, and above all that workers have been in under an earlier
    gateway: so that what is of old epochs is known as such."""
    epoch = 0
    while True:
        epoch = max(epoch, last_epoch()) + 1
        yield epoch


def pause_seconds(attempt: int) -> float:
    """Between a failed attempt and the next; the first is 1."""
    doubled: float = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)
    return min(doubled, MOST_PAUSE_SECONDS)


class Tripwire:
    """Ends an attempt for a reason that is seen from outside: its own calls may hang for long."""

    def __init__(self) -> None:
        self._tripped: asyncio.Future[StageFailed] | None = None

    def trip(self, failure: StageFailed) -> None:
        """Ends what runs now, if anything does."""
        if self._tripped is not None and not self._tripped.done():
            self._tripped.set_result(failure)

    async def run(self, attempt: Coroutine[None, None, None]) -> None:
        """Runs an attempt. Raises what it raises, or the failure of `trip`, in a group."""
        self._tripped = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._raise(self._tripped))
                await attempt
                watch.cancel()
        finally:
            self._tripped = None

    @staticmethod
    async def _raise(tripped: asyncio.Future[StageFailed]) -> None:
        raise await tripped
