"""What the gateway asks of whoever starts its stage workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.topology.placement import StagePlacement


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A stage worker that has ended."""

    placement: StagePlacement
    how: str
    """In words that go on from "the worker ...": "exited with 1"."""
    dismissed: bool = False
    """It was told to leave, and did."""


class Launcher(Protocol):
    """Starts stage workers, hears of their end, sees them out."""

    async def start(self, master_addr: str, master_port: int) -> None:
        """Starts every worker. They join the control service at this address by themselves.

        Raises a `StagemeshError` where that fails.
        """

    async def first_exit(self) -> WorkerExit:
        """Waits until one worker ends."""

    async def stop(self) -> None:
        """Makes sure, within seconds, that no worker is left."""
