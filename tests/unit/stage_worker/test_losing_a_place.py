"""What a worker does, and remembers, when another takes over its place."""

from __future__ import annotations

import asyncio

import pytest

from services.errors import StageFailed
from stage_worker.place import _request_again
from stage_worker.rank_supervisor import RankSupervisor
from stage_worker.service import StageWorker
from stagemesh.v1 import control_pb2, topology_pb2

PLACE = topology_pb2.Placement(pp_rank=1, tp_ranks=[0], layer_start=2, layer_end=4)


class IdleProcess:
    """A rank process that runs until it is stopped."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        await self._stopped.wait()

    async def stop(self, timeout_seconds: float) -> None:
        self._stopped.set()

    def leave_epoch(self) -> None:
        """It does."""


class BrokenRank(RankSupervisor):
    """A rank whose processes end while they start."""

    asked = 0

    async def reset(self, *, replace: bool) -> None:
        self.asked += 1
        raise StageFailed("the process of TP rank 0 exited with 1 while it started")


async def test_a_rank_that_is_not_there_yet_does_not_end_the_worker() -> None:
    """Whoever keeps the rank's place filled ends it where that stays so."""
    worker = StageWorker()
    ranks = [BrokenRank(IdleProcess), BrokenRank(IdleProcess)]  # type: ignore[arg-type]
    worker.ranks.extend(ranks)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(rank.run()) for rank in ranks]
        await asyncio.sleep(0)
        await worker.become_spare()
        assert [rank.asked for rank in ranks] == [1, 1]
        assert not any(task.done() for task in running)
        await worker.stop_ranks()


@pytest.mark.parametrize(
    ("formed", "given", "lost", "expected"),
    [(3, 0, 0, 3), (3, 5, 0, 5), (3, 5, 7, 7), (8, 5, 7, 8), (0, 0, 0, 0)],
    ids=["formed", "given", "lost", "formed later", "none"],
)
def test_the_next_head_hears_of_every_epoch(
    formed: int, given: int, lost: int, expected: int
) -> None:
    """Its own begin above: one that the worker had been given a place in, or lost one in, would be
    refused, whether or not its groups were formed."""
    worker = StageWorker(waits_for_head=True)
    worker._epoch = formed
    worker.standing.joined(PLACE, standby=False)
    if given:
        worker.standing.take(given, PLACE, 1)
    if lost:
        worker.standing.lose(lost)
    held = control_pb2.JoinResponse(placement=PLACE)
    again = _request_again(control_pb2.JoinRequest(), worker, held)
    assert again.last_epoch == expected
