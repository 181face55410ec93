"""What a worker does, and remembers, when another takes over its place."""

from __future__ import annotations

import pytest

from services.errors import StageFailed
from stage_worker.place import _request_again
from stage_worker.service import StageWorker
from stage_worker.service_main import _become_spare
from stagemesh.v1 import control_pb2, topology_pb2

PLACE = topology_pb2.Placement(pp_rank=1, tp_ranks=[0], layer_start=2, layer_end=4)


class BrokenProcess:
    """A rank process that holds a step, or is in none."""

    def leave_epoch(self) -> None:
        """It does."""


class BrokenRank:
    """A rank whose processes end while they start."""

    process = BrokenProcess()
    asked = 0

    async def reset(self, *, replace: bool = False) -> None:
        self.asked += 1
        raise StageFailed("the process of TP rank 0 exited with 1 while it started")


async def test_a_rank_that_is_not_there_yet_does_not_end_the_worker() -> None:
    """Whoever keeps the rank's place filled ends it where that stays so."""
    worker = StageWorker()
    ranks = [BrokenRank(), BrokenRank()]
    worker.ranks.extend(ranks)  # type: ignore[arg-type]
    await _become_spare(worker)
    assert ranks[0].asked == 1


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
