"""A step is stuck where it takes far longer than steps do; a long or an unknown one is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pipeline import mesh_pipeline, stuck_step
from gateway.pipeline.bring_up import Stage
from gateway.pipeline.mesh_pipeline import MeshPipeline
from gateway.pipeline.stuck_step import (
    LEAST_KNOWN_STEPS,
    LEAST_SECONDS,
    TIMES_PREDICTED,
    UNKNOWN_SECONDS,
    StepTimes,
)
from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2, step_pb2


def times_of(*steps: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for num_tokens, seconds in steps:
        times.observe(num_tokens, seconds)
    return times


def test_first_steps_may_take_as_long_as_ranks_wait() -> None:
    """They compile, allocate, and nothing is known of them."""
    assert StepTimes().stuck_after(1) == UNKNOWN_SECONDS
    few = times_of(*[(1, 0.01)] * (LEAST_KNOWN_STEPS - 1))
    assert few.stuck_after(1) == UNKNOWN_SECONDS


def test_short_steps_have_three_seconds() -> None:
    assert times_of(*[(8, 0.02)] * 10).stuck_after(8) == LEAST_SECONDS


def test_long_steps_have_five_times_theirs() -> None:
    assert times_of(*[(8, 2.0)] * 10).stuck_after(8) == pytest.approx(10.0)


def test_a_prompt_larger_than_all_before_has_more_in_proportion() -> None:
    times = times_of(*[(8, 0.2)] * 10)
    assert times.predict(512) == pytest.approx(0.2 * 64)
    assert times.predict(4) == pytest.approx(0.2)


@given(
    st.lists(st.integers(1, 4096), min_size=LEAST_KNOWN_STEPS, max_size=80),
    st.integers(1, 8192),
    st.floats(0, 0.1),
    st.floats(1e-6, 0.01),
)
def test_no_step_of_linear_cost_is_taken_for_stuck(
    seen: list[int], next_tokens: int, fixed: float, per_token: float
) -> None:
    """Nor one that takes four times as long on a busy machine."""
    times = times_of(*((n, fixed + per_token * n) for n in seen))
    seconds = fixed + per_token * next_tokens
    limit = times.stuck_after(next_tokens)
    assert min(4 * seconds, UNKNOWN_SECONDS - 1) < limit <= UNKNOWN_SECONDS
    assert limit >= min(LEAST_SECONDS, TIMES_PREDICTED * seconds)


class SlowLink:
    """The client of a stage that answers late and says that it has computed nothing."""

    address = "127.0.0.1:9"

    def execute(self, requests: AsyncIterator[bytes]) -> SlowLink:
        self._requests = requests
        return self

    async def __aiter__(self) -> AsyncIterator[stage_worker_pb2.ExecuteResponse]:
        async for data in self._requests:
            await asyncio.sleep(0.1)
            step = stage_worker_pb2.ExecuteRequest.FromString(data).step
            result = step_pb2.StepResult(epoch=step.epoch, step_id=step.step_id)
            yield stage_worker_pb2.ExecuteResponse(result=result)

    def cancel(self) -> None:
        """Nothing to end."""


async def test_a_slow_link_is_no_stuck_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned is what is tested: the time of the activations' transfer counts in both."""
    monkeypatch.setattr(stuck_step, "LEAST_SECONDS", 0.05)
    monkeypatch.setattr(mesh_pipeline, "WATCH_INTERVAL_SECONDS", 0.02)
    stage = Stage(SlowLink(), StagePlacement(0, 0, 0, (0,), (0,), 0, 1))  # type: ignore[arg-type]
    pipeline = MeshPipeline([stage], 1, lambda pp_rank, result: None, lambda seconds: None)
    running = asyncio.create_task(pipeline.run())
    try:
        async with asyncio.timeout(10):
            for step_id in range(1, LEAST_KNOWN_STEPS + 5):
                pipeline.send(step_pb2.Step(epoch=1, step_id=step_id))
                assert (await pipeline.next_result()).step_id == step_id
    finally:
        running.cancel()
        await asyncio.wait([running])
