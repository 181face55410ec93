"""Whatever a stage answers: it is applied, or the pipeline fails with a word about it; nothing
else is ever raised."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable

import pytest
from simulated_mesh import new_sequence, prompt_of

from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.types import SamplingParams
from gateway.pipeline.bring_up import Stage
from gateway.pipeline.mesh_pipeline import MeshPipeline
from services.errors import StageFailed
from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2, step_pb2
from tests.mutation import mutated_message

CASES = 5_000
EPOCH = 1
STEPS = 3
LIMITS = SchedulerLimits(
    num_blocks=32,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_stages=2,
)


def scheduled_step() -> tuple[Scheduler, step_pb2.StepResult]:
    """A scheduler with a step of three rows in flight, and the step's right result."""
    scheduler = Scheduler(LIMITS, EPOCH)
    for index in range(3):
        sampling = SamplingParams(num_logprobs=2)
        scheduler.add(new_sequence(prompt_of(5, index), 9, name=str(index), sampling=sampling))
    scheduled = scheduler.schedule()
    assert scheduled is not None
    result = step_pb2.StepResult(epoch=EPOCH, step_id=scheduled.step.step_id)
    for index, row in enumerate(scheduled.step.rows):
        if row.num_sampled:
            logprobs = step_pb2.TokenLogprobs(top_token_ids=[1, 2], top_logprobs=[-1.0, -2.0])
            result.rows.add(row=index, token_ids=[7], logprobs=[logprobs])
    return scheduler, result


def test_the_scheduler_refuses_what_does_not_fit_its_step() -> None:
    generator = random.Random(1)
    refused = 0
    for _ in range(CASES):
        scheduler, result = scheduled_step()
        try:
            scheduler.apply(mutated_message(generator, result))
        except StageFailed:
            refused += 1
    assert CASES / 10 < refused < CASES
    scheduler, result = scheduled_step()
    assert [output.token_ids for output in scheduler.apply(result)] == [(7,)] * 3


class ScriptedClient:
    """A stage worker's client whose step stream gives what it was made with."""

    address = "127.0.0.1:9"

    def __init__(self, responses: Iterable[stage_worker_pb2.ExecuteResponse]) -> None:
        self._responses = responses
        self.given = asyncio.Event()

    def execute(self, requests: AsyncIterator[bytes]) -> ScriptedClient:
        return self

    async def __aiter__(self) -> AsyncIterator[stage_worker_pb2.ExecuteResponse]:
        for response in self._responses:
            yield response
        self.given.set()
        await asyncio.Event().wait()

    def cancel(self) -> None:
        """Nothing to end."""


async def answers(responses: Iterable[stage_worker_pb2.ExecuteResponse]) -> str:
    """What a pipeline of one stage, with `STEPS` steps sent, says of them; empty for nothing."""
    client = ScriptedClient(responses)
    placement = StagePlacement(0, 0, 0, (0,), (0,), 0, 1)
    pipeline = MeshPipeline(
        [Stage(client, placement)],  # type: ignore[arg-type]
        EPOCH,
        lambda pp_rank, result: None,
        lambda seconds: None,
    )
    for step_id in range(1, STEPS + 1):
        pipeline.send(step_pb2.Step(epoch=EPOCH, step_id=step_id))
    running = asyncio.ensure_future(pipeline.run())
    said = ""
    try:
        for _ in range(STEPS):
            next_result = asyncio.ensure_future(pipeline.next_result())
            await asyncio.wait(
                [next_result, running, asyncio.ensure_future(client.given.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if running.done():
                running.result()
            if not next_result.done():
                next_result.cancel()
                break
            try:
                next_result.result()
            except StageFailed as failure:
                said = failure.message
                break
    finally:
        running.cancel()
        await asyncio.wait([running])
    return said


def result_of(step_id: int) -> stage_worker_pb2.ExecuteResponse:
    result = step_pb2.StepResult(epoch=EPOCH, step_id=step_id, clock=step_pb2.StageClock(end_ns=1))
    return stage_worker_pb2.ExecuteResponse(result=result)


async def test_the_pipeline_refuses_what_is_out_of_turn() -> None:
    generator = random.Random(2)
    refused = 0
    for _ in range(CASES // 10):
        responses = [result_of(step_id) for step_id in range(1, STEPS + 1)]
        index = generator.randrange(STEPS)
        responses[index] = mutated_message(generator, responses[index])  # type: ignore[call-overload]
        refused += bool(await answers(responses))
    assert CASES // 100 < refused < CASES // 10
    assert await answers(map(result_of, range(1, STEPS + 1))) == ""


@pytest.mark.parametrize(
    ("step_ids", "words"),
    [
        ((1, 1), "answered steps 1 to 1; it has 2 to 3 to answer"),
        ((2,), "answered steps 2 to 2; it has 1 to 3 to answer"),
        ((1, 2, 3, 4), ""),
    ],
    ids=["twice", "too early", "more than there are"],
)
async def test_an_answer_out_of_turn_is_named(step_ids: tuple[int, ...], words: str) -> None:
    assert words in await answers(map(result_of, step_ids))
