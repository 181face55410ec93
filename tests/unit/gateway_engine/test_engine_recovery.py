"""A pipeline that fails takes no request with it: the engine goes on over another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from test_engine_mesh_engine import (
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    GatedPipeline,
    Rig,
    answer,
    expected,
    request,
    tokens_of,
)

from gateway.engine.types import ADMITTED
from services.errors import DeadlineExceeded, Saturated, StageFailed
from stagemesh.v1 import step_pb2

MAX_ATTEMPTS = 3
BROKEN = StageFailed("stage 1: rank 0 died")


class RecoveringRig(Rig):
    """An engine whose owner brings another pipeline when told to."""

    def __init__(self, max_waiting: int = 1024) -> None:
        super().__init__(max_waiting)
        self.run = asyncio.create_task(self.engine.run())

    async def break_down(self, *, at_once: bool = False) -> None:
        """The pipeline fails; the engine waits for another."""
        self.pipeline.break_down(BROKEN, at_once=at_once)
        self.pipeline.gate.set()
        self.engine.suspend(await self.run, MAX_ATTEMPTS)

    def recover(self) -> int:
        epoch = self.pipeline.epoch + 1
        self.pipeline = GatedPipeline(epoch)
        replayed = self.engine.resume(self.pipeline)
        self.run = asyncio.create_task(self.engine.run())
        return replayed


@asynccontextmanager
async def rig(max_waiting: int = 1024) -> AsyncIterator[RecoveringRig]:
    made = RecoveringRig(max_waiting)
    await asyncio.sleep(0)
    try:
        yield made
        await made.settle()
        made.assert_empty()
    finally:
        made.run.cancel()
        await asyncio.wait([made.run])


async def test_streams_go_on_with_no_token_lost_or_doubled() -> None:
    async with rig() as made:
        asked = [request(f"{'x' * i}{i}", max_tokens=40) for i in range(12)]
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(answer(made.engine, one)) for one in asked]
            for rounds in (3, 30, 60):
                await made.settle(rounds)
                await made.break_down()
                assert not made.engine.ready
                assert made.engine.stats().waiting_requests + made.engine.stats().running_requests
                made.recover()
                assert made.engine.stats().free_blocks == NUM_BLOCKS
        for one, reader in zip(asked, readers, strict=True):
            assert tokens_of(reader.result()) == expected(one)


async def test_what_the_stages_had_been_sent_is_counted() -> None:
    async with rig() as made:
        async with aclosing(made.engine.generate(request("Hello", max_tokens=20))) as deltas:
            assert await anext(deltas) is ADMITTED
            got = list((await anext(deltas)).token_ids)
            made.pipeline.gate.clear()
            await made.break_down()
            replayed = made.recover()
            got += [token async for delta in deltas for token in delta.token_ids]
        assert got == expected(request("Hello", max_tokens=20))
        assert 5 <= replayed < 5 + 20


async def test_new_requests_wait_for_the_recovery_and_too_many_are_refused() -> None:
    """429, not 503: they will be served."""
    async with rig(max_waiting=2) as made:
        await made.break_down()
        asked = [request(str(i)) for i in range(MAX_NUM_SEQS + 2)]
        readers = [asyncio.create_task(answer(made.engine, one)) for one in asked]
        await made.settle()
        with pytest.raises(Saturated):
            await answer(made.engine, request("late"))
        made.recover()
        for one, reader in zip(asked, readers, strict=True):
            assert tokens_of(await reader) == expected(one)


async def test_deadlines_go_on_counting() -> None:
    async with rig() as made:
        await made.break_down()
        soon = asyncio.get_running_loop().time() + 0.01
        with pytest.raises(DeadlineExceeded):
            await answer(made.engine, request(deadline=soon))
        made.recover()


async def test_a_client_may_leave_meanwhile() -> None:
    async with rig() as made:
        reader = asyncio.create_task(answer(made.engine, request(max_tokens=200)))
        await made.settle(20)
        await made.break_down()
        reader.cancel()
        await asyncio.wait([reader])
        made.recover()


async def test_a_request_that_is_at_work_at_every_failure_is_given_up() -> None:
    """It may be the cause. One that waits, and one that gets tokens, goes on."""
    async with rig() as made:
        made.pipeline.gate.clear()
        poison = asyncio.create_task(answer(made.engine, request("poison")))
        await made.settle()
        for _ in range(MAX_ATTEMPTS):
            await made.break_down(at_once=True)
            made.recover()
            made.pipeline.gate.clear()
            await made.settle()
            assert not poison.done()
        await made.break_down(at_once=True)
        waiting = asyncio.create_task(answer(made.engine, request("patient")))
        with pytest.raises(StageFailed, match=r"4 times.*rank 0 died"):
            await poison
        made.recover()
        assert tokens_of(await waiting) == expected(request("patient"))


async def test_a_new_token_makes_up_for_earlier_failures() -> None:
    async with rig() as made:
        asked = request("steady", max_tokens=40)
        reader = asyncio.create_task(answer(made.engine, asked))
        for _ in range(2 * MAX_ATTEMPTS):
            await made.settle(20)
            await made.break_down()
            made.recover()
        assert tokens_of(await reader) == expected(asked)


class BreaksBetweenTwo(GatedPipeline):
    """Known to be broken while a result waits to be read: the next step cannot be sent."""

    def __init__(self, num_sent: int) -> None:
        super().__init__()
        self._num_left = num_sent

    def send(self, step: step_pb2.Step) -> None:
        if self._num_left == 0:
            raise BROKEN
        self._num_left -= 1
        super().send(step)


@pytest.mark.parametrize("num_sent", range(1, 8))
async def test_tokens_that_came_with_the_failure_are_delivered(num_sent: int) -> None:
    """They are in the log: the next epoch computes what follows them, also where it is nothing."""
    async with rig() as made:
        made.run.cancel()
        await asyncio.wait([made.run])
        made.pipeline = BreaksBetweenTwo(num_sent)
        made.engine.resume(made.pipeline)
        made.run = asyncio.create_task(made.engine.run())
        asked = [request("ab", max_tokens=2), request("c", max_tokens=9)]
        readers = [asyncio.create_task(answer(made.engine, one)) for one in asked]
        made.engine.suspend(await made.run, MAX_ATTEMPTS)
        made.recover()
        for one, reader in zip(asked, readers, strict=True):
            assert tokens_of(await asyncio.wait_for(reader, 5)) == expected(one)


async def test_a_result_that_is_not_whole_changes_nothing() -> None:
    """The rows before the bad one are computed again with it."""

    class Spoilt(GatedPipeline):
        async def next_result(self) -> step_pb2.StepResult:
            result = await super().next_result()
            if len(result.rows) > 1:
                del result.rows[-1]
            return result

    async with rig() as made:
        made.run.cancel()
        await asyncio.wait([made.run])
        made.pipeline = Spoilt()
        made.engine.resume(made.pipeline)
        made.run = asyncio.create_task(made.engine.run())
        asked = [request(name, max_tokens=9) for name in ("ab", "c", "d")]
        readers = [asyncio.create_task(answer(made.engine, one)) for one in asked]
        failure = await made.run
        assert "brought no token for its row" in failure.message
        made.engine.suspend(failure, MAX_ATTEMPTS)
        made.recover()
        for one, reader in zip(asked, readers, strict=True):
            assert tokens_of(await asyncio.wait_for(reader, 5)) == expected(one)
