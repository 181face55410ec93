"""A result that answers for several steps."""

from __future__ import annotations

from gateway.pipeline.mesh_pipeline import results_of
from stagemesh.v1 import step_pb2


def test_every_step_gets_its_own_clock() -> None:
    clocks = [step_pb2.StageClock(compute_ns=n) for n in (5, 6, 7)]
    result = step_pb2.StepResult(epoch=3, step_id=12, clock=clocks[2], earlier_clocks=clocks[:2])
    found = results_of(result)
    assert [(r.epoch, r.step_id, r.clock.compute_ns) for r in found] == [
        (3, 10, 5),
        (3, 11, 6),
        (3, 12, 7),
    ]


def test_one_step_is_itself() -> None:
    result = step_pb2.StepResult(epoch=1, step_id=1)
    assert results_of(result) == [result]
