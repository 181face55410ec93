"""What the gateway asks of whoever starts its stage workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.topology.placement import StagePlacement


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A stage worker that has ended."""

    placement: StagePlacement | None
    """That it was started for; None for a spare."""
    node_rank: int
    how: str
    """In words that go on from "the worker ...": "exited with 1"."""
    code: int | None = None
    """Exit code, negative for a signal; None where it is not known."""
    pid: int = 0
    """On its node; 0 where it is not known."""
    had_joined: bool = True
    """Whether a worker has ever been in the mesh at this place: one that cannot join is told why
    by its head, and would be told the same again."""

    @property
    def is_spare(self) -> bool:
        """Whether it was started as one."""
        return self.placement is None

    @property
    def name(self) -> str:
        """In words that go before `how`."""
        return worker_name(self.placement)

    @property
    def dismissed(self) -> bool:
        """It was told to leave, and did."""
        return self.code == 0


def worker_name(placement: StagePlacement | None) -> str:
    """A worker by what it was started for."""
    return "a spare worker" if placement is None else f"the worker of stage {placement.pp_rank}"


GoesOn = Callable[[WorkerExit], bool]
"""Hears of a worker's end, and says whether another may take its place."""
IsMissed = Callable[[WorkerExit], bool]
"""Hears of an end after which there is no other, and says whether the others cannot go on."""


class Launcher(Protocol):
    """Starts stage workers, starts them again, sees them out."""

    async def start(self, master_addr: str, master_port: int) -> None:
        """Starts every worker. They join the control service at this address by themselves.

        Raises a `StagemeshError` where that fails.
        """

    async def watch(self, goes_on: GoesOn, is_missed: IsMissed) -> WorkerExit:
        """Starts another worker where one has ended, as long as `goes_on` says so and not too
        often. Returns the first end after which there is no other and which `is_missed`; the
        last of all where none is."""

    async def stop(self) -> None:
        """Makes sure, within seconds, that no worker is left."""
