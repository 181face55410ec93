"""Requests through the whole engine, over simulated stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from simulated_mesh import SimulatedMesh, reference_tokens
from tiny_tokenizers import byte_level

from gateway.engine.engine import EngineConfig, MeshEngine
from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.stream import RequestTimings
from gateway.engine.types import (
    ADMITTED,
    ChoiceDelta,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StopConditions,
)
from services.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    PipelineUnavailable,
    Saturated,
    StageFailed,
    StagemeshError,
)
from stagemesh.v1 import step_pb2

TOKENIZER = byte_level()
NUM_BLOCKS = 64
BLOCK_SIZE = 4
MAX_NUM_SEQS = 8


class GatedPipeline:
    """Simulated stages whose results come when the test lets them."""

    num_stages = 2

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.gate = asyncio.Event()
        self.gate.set()
        self._lost: StagemeshError | None = None
        self._mesh = SimulatedMesh(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=32,
            num_stages=self.num_stages,
            epoch=epoch,
        )
        self._results: asyncio.Queue[StagemeshError | None] = asyncio.Queue()

    @property
    def num_steps(self) -> int:
        return len(self._mesh.steps)

    def send(self, step: step_pb2.Step) -> None:
        self._mesh.send(step, 0.0)
        self._results.put_nowait(None)

    async def next_result(self) -> step_pb2.StepResult:
        error = await self._results.get()
        if error is not None:
            raise error
        await self.gate.wait()
        if self._lost is not None:
            raise self._lost
        await asyncio.sleep(0)
        return self._mesh.finish_next()

    def break_down(self, error: StagemeshError, *, at_once: bool = False) -> None:
        """Fails, after the results of what was sent; or at once, and they are lost."""
        if at_once:
            self._lost = error
        self._results.put_nowait(error)


class Recorder:
    """Keeps what the engine reports about finished requests."""

    def __init__(self) -> None:
        self.timings: list[RequestTimings] = []

    def on_request_finished(self, timings: RequestTimings) -> None:
        self.timings.append(timings)


class Rig:
    """An engine at work, with what surrounds it."""

    def __init__(self, max_waiting: int) -> None:
        self.pipeline = GatedPipeline()
        self.recorder = Recorder()
        limits = SchedulerLimits(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=32,
            num_stages=self.pipeline.num_stages,
        )
        self.engine = MeshEngine(
            self.pipeline, TOKENIZER, EngineConfig(limits, max_waiting), self.recorder
        )

    async def drive(self) -> None:
        """As an owner does who does not recover."""
        self.engine.fail(await self.engine.run())

    async def settle(self, rounds: int = 400) -> None:
        """Lets the event loop turn: enough for any request here, unless `rounds` says less."""
        for _ in range(rounds):
            await asyncio.sleep(0)

    def assert_empty(self) -> None:
        stats = self.engine.stats()
        assert stats.free_blocks == NUM_BLOCKS
        assert (stats.waiting_requests, stats.running_requests, stats.steps_in_flight) == (0, 0, 0)


@asynccontextmanager
async def rig(max_waiting: int = 1024) -> AsyncIterator[Rig]:
    """Runs an engine; at the end it must be empty, unless it failed, and leave no task."""
    made = Rig(max_waiting)
    tasks_before = asyncio.all_tasks()
    run = asyncio.create_task(made.drive())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        if made.engine.error is None:
            made.pipeline.gate.set()
            await made.settle()
            made.assert_empty()
            run.cancel()
        await asyncio.wait([run])
        assert asyncio.all_tasks() == tasks_before


def request(
    prompt: str = "Hello",
    *,
    max_tokens: int = 12,
    stop_strings: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    sampling: SamplingParams | None = None,
    n: int = 1,
    deadline: float | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"req-{prompt}",
        prompt_token_ids=tuple(TOKENIZER.encode(prompt).ids),
        sampling=sampling or SamplingParams(seed=5),
        stop=StopConditions(max_tokens, stop_strings, stop_token_ids),
        n=n,
        deadline=deadline,
    )


def expected(asked: GenerationRequest, choice_index: int = 0) -> list[int]:
    return reference_tokens(asked.prompt_token_ids, asked.stop, asked.sampling.seed, choice_index)


async def answer(engine: MeshEngine, asked: GenerationRequest) -> list[ChoiceDelta]:
    async with aclosing(engine.generate(asked)) as deltas:
        assert await anext(deltas) is ADMITTED
        return [delta async for delta in deltas]


def tokens_of(deltas: list[ChoiceDelta], choice_index: int = 0) -> list[int]:
    return [t for d in deltas if d.choice_index == choice_index for t in d.token_ids]


def text_of(deltas: list[ChoiceDelta], choice_index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice_index == choice_index)


async def test_an_answer_is_streamed() -> None:
    async with rig() as made:
        asked = request()
        deltas = await answer(made.engine, asked)
        assert tokens_of(deltas) == expected(asked)
        assert text_of(deltas) == TOKENIZER.decode(expected(asked))
        assert len(deltas) > 3
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_many_clients_at_once_are_all_right() -> None:
    async with rig() as made:
        asked = [request(f"{'x' * (i % 17)}{i}", max_tokens=1 + i % 23) for i in range(32)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(made.engine, one)) for one in asked]
        for one, task in zip(asked, tasks, strict=True):
            assert tokens_of(task.result()) == expected(one)
        assert len(made.recorder.timings) == 32


async def test_choices_are_interleaved() -> None:
    async with rig() as made:
        asked = request(n=3)
        deltas = await answer(made.engine, asked)
        for choice_index in range(3):
            assert tokens_of(deltas, choice_index) == expected(asked, choice_index)
        ends = [delta.choice_index for delta in deltas if delta.finish_reason is not None]
        assert sorted(ends) == [0, 1, 2]
        assert {delta.choice_index for delta in deltas[:3]} == {0, 1, 2}


async def test_a_stop_string_cuts_text_and_work() -> None:
    async with rig() as made:
        whole = TOKENIZER.decode(expected(request(max_tokens=40)))
        stop = whole[6:9]
        deltas = await answer(made.engine, request(max_tokens=40, stop_strings=("none", stop)))
        assert text_of(deltas) == whole[: whole.index(stop)]
        assert tokens_of(deltas) == expected(request(max_tokens=40))[: len(tokens_of(deltas))]
        assert len(tokens_of(deltas)) < 12
        # One decode may have been sent ahead of the token that completes the stop.
        assert made.pipeline.num_steps <= len(tokens_of(deltas)) + 1
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)


async def test_a_stop_string_in_the_last_token_is_still_a_stop() -> None:
    async with rig() as made:
        whole = TOKENIZER.decode(expected(request(max_tokens=5)))
        deltas = await answer(made.engine, request(max_tokens=5, stop_strings=(whole[-2:],)))
        assert text_of(deltas) == whole[:-2]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, whole[-2:])


async def test_a_stop_token_has_no_text_but_counts() -> None:
    async with rig() as made:
        stop_id = expected(request())[4]
        asked = request(stop_token_ids=frozenset({stop_id}))
        deltas = await answer(made.engine, asked)
        assert tokens_of(deltas) == expected(asked)
        assert text_of(deltas) == TOKENIZER.decode(expected(asked)[:-1])
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop_id)


async def test_logprobs_stay_with_their_tokens() -> None:
    async with rig() as made:
        stop = TOKENIZER.decode(expected(request(max_tokens=40)))[8:10]
        asked = request(
            max_tokens=40, stop_strings=(stop,), sampling=SamplingParams(seed=5, num_logprobs=0)
        )
        for delta in await answer(made.engine, asked):
            assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids
            assert [entry.logprob for entry in delta.logprobs] == [
                -t / 128 for t in delta.token_ids
            ]


async def test_a_client_that_closes_frees_its_blocks() -> None:
    async with rig() as made:
        async with aclosing(made.engine.generate(request(max_tokens=200))) as deltas:
            assert await anext(deltas) is ADMITTED
            await anext(deltas)
            assert made.engine.stats().free_blocks < NUM_BLOCKS
        await made.settle()
        made.assert_empty()
        assert made.recorder.timings[0].finish_reason == "abort"


async def test_a_cancelled_reader_frees_its_blocks() -> None:
    async with rig() as made:
        made.pipeline.gate.clear()
        reader = asyncio.create_task(answer(made.engine, request(max_tokens=200)))
        await made.settle()
        assert made.engine.stats().running_requests == 1
        reader.cancel()
        await asyncio.wait([reader])
        assert made.engine.stats().running_requests == 0
        assert made.engine.stats().free_blocks < NUM_BLOCKS  # Fenced: its step is in flight.
        made.pipeline.gate.set()
        await made.settle()
        made.assert_empty()


async def test_a_deadline_ends_a_request() -> None:
    async with rig() as made:
        made.pipeline.gate.clear()
        soon = asyncio.get_running_loop().time() + 0.01
        with pytest.raises(DeadlineExceeded):
            await answer(made.engine, request(deadline=soon))
        assert made.recorder.timings[0].finish_reason == "deadline_exceeded"


async def test_a_full_queue_refuses() -> None:
    async with rig(max_waiting=2) as made:
        made.pipeline.gate.clear()
        readers = [
            asyncio.create_task(answer(made.engine, request(str(i))))
            for i in range(MAX_NUM_SEQS + 2)
        ]
        await made.settle()
        assert made.engine.stats().waiting_requests == 2
        with pytest.raises(Saturated) as caught:
            await answer(made.engine, request("late"))
        assert caught.value.retry_after_seconds is not None
        assert 1.0 <= caught.value.retry_after_seconds <= 60.0
        made.pipeline.gate.set()
        await asyncio.wait(readers)
        assert all(reader.exception() is None for reader in readers)


async def test_more_choices_than_could_ever_wait_are_no_matter_of_time() -> None:
    async with rig(max_waiting=2) as made:
        most = MAX_NUM_SEQS + 2
        with pytest.raises(InvalidRequest, match=f"n is {most + 1}, .*at most {most}") as caught:
            await answer(made.engine, request(n=most + 1))
        assert caught.value.param == "n"
        await answer(made.engine, request(n=most))


async def test_a_failed_stage_ends_everything() -> None:
    """F1, F22: readers get the first cause, newcomers a 503."""
    async with rig() as made:
        made.pipeline.gate.clear()
        readers = [asyncio.create_task(answer(made.engine, request(str(i)))) for i in range(12)]
        await made.settle()
        was_ready = made.engine.ready
        made.pipeline.gate.set()
        made.pipeline.break_down(StageFailed("stage 1: rank 0 died"))
        await asyncio.wait(readers)
        for reader in readers:
            with pytest.raises(StageFailed, match="stage 1: rank 0 died"):
                reader.result()
        assert (was_ready, made.engine.ready) == (True, False)
        with pytest.raises(PipelineUnavailable, match="stage 1: rank 0 died"):
            await answer(made.engine, request())
        assert made.engine.stats().running_requests == made.engine.stats().waiting_requests == 0


async def test_what_came_before_an_error_is_read_first() -> None:
    async with rig() as made:
        deltas = made.engine.generate(request(max_tokens=200))
        assert await anext(deltas) is ADMITTED
        got = list((await anext(deltas)).token_ids)
        await made.settle(rounds=40)
        made.engine.fail(StageFailed("broken"))
        got.extend((await anext(deltas)).token_ids)
        assert len(got) > 10
        assert got == expected(request(max_tokens=200))[: len(got)]
        with pytest.raises(StageFailed, match="broken"):
            await anext(deltas)


async def test_a_slow_reader_gets_merged_deltas() -> None:
    async with rig() as made:
        asked = request(max_tokens=50)
        async with aclosing(made.engine.generate(asked)) as deltas:
            assert await anext(deltas) is ADMITTED
            first = await anext(deltas)
            await made.settle()
            made.assert_empty()
            rest = [delta async for delta in deltas]
        assert len(rest) == 1
        assert tokens_of([first, *rest]) == expected(asked)
        assert rest[0].finish_reason is FinishReason.LENGTH


async def test_drain_lets_requests_finish() -> None:
    async with rig() as made:
        reader = asyncio.create_task(answer(made.engine, request()))
        await asyncio.sleep(0)
        clock = asyncio.get_running_loop().time
        started = clock()
        await made.engine.drain(started + 30)
        assert clock() < started + 10
        assert not made.engine.ready
        assert tokens_of(await reader) == expected(request())
        with pytest.raises(PipelineUnavailable, match="shutting down"):
            await answer(made.engine, request())


async def test_drain_ends_what_is_too_slow() -> None:
    async with rig() as made:
        made.pipeline.gate.clear()
        reader = asyncio.create_task(answer(made.engine, request()))
        await made.settle()
        await made.engine.drain(asyncio.get_running_loop().time() + 0.01)
        with pytest.raises(PipelineUnavailable, match="shutting down"):
            await reader


async def test_before_it_is_driven_an_engine_takes_nothing() -> None:
    made = Rig(max_waiting=4)
    with pytest.raises(PipelineUnavailable, match="starting"):
        await answer(made.engine, request())


async def test_what_cannot_be_served_changes_nothing() -> None:
    async with rig() as made:
        for wrong, error in [
            (request(""), InvalidRequest),
            (request(max_tokens=0), InvalidRequest),
            (request(n=0), InvalidRequest),
            (request(max_tokens=NUM_BLOCKS * BLOCK_SIZE), ContextTooLong),
        ]:
            with pytest.raises(error):
                await answer(made.engine, wrong)
        await made.settle()
        assert made.pipeline.num_steps == 0
        assert made.recorder.timings == []


async def test_timings_of_a_request() -> None:
    async with rig() as made:
        asked = request(n=2)
        await answer(made.engine, asked)
        (timings,) = made.recorder.timings
        assert timings.finish_reason == "length"
        assert timings.num_prompt_tokens == 5
        assert timings.num_completion_tokens == 24
        assert len(timings.inter_token_seconds) == 22
        assert timings.time_to_first_token_seconds is not None
        assert (
            0.0
            <= timings.queue_seconds
            <= timings.time_to_first_token_seconds
            <= timings.total_seconds
        )


async def test_nobody_polls() -> None:
    """An idle engine, and a reader that waits for a slow pipeline, cost nothing."""
    async with rig() as made:
        await answer(made.engine, request())
        assert await callbacks_while_asleep() <= 2  # Our own sleep.
        async with aclosing(made.engine.generate(request(max_tokens=200))) as deltas:
            assert await anext(deltas) is ADMITTED
            await anext(deltas)
            made.pipeline.gate.clear()
            await anext(deltas)
            reader = asyncio.create_task(anext(deltas))
            await made.settle()
            assert not reader.done()
            assert await callbacks_while_asleep() <= 2
            made.pipeline.gate.set()
            await reader


async def callbacks_while_asleep() -> int:
    """How much the event loop has to do while the test sleeps for a moment."""
    loop = asyncio.get_running_loop()
    original = loop.call_soon
    callbacks = 0

    def counting(*args: Any, **kwargs: Any) -> asyncio.Handle:
        nonlocal callbacks
        callbacks += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon", counting)
        await asyncio.sleep(0.02)
    return callbacks


async def test_a_slot_that_comes_free_is_used_at_once() -> None:
    async with rig() as made:
        made.pipeline.gate.clear()
        readers = [
            asyncio.create_task(answer(made.engine, request(str(i))))
            for i in range(MAX_NUM_SEQS + 1)
        ]
        await made.settle()
        assert (made.pipeline.num_steps, made.engine.stats().waiting_requests) == (1, 1)
        readers[0].cancel()
        await made.settle()
        assert made.engine.stats().waiting_requests == 0
        assert made.pipeline.num_steps > 1
        made.pipeline.gate.set()
        await asyncio.wait(readers)
