"""The gateway's own view of how far each stage is, over real step streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from gateway.pipeline import mesh_pipeline, stuck_step
from gateway.pipeline.bring_up import Stage
from gateway.pipeline.mesh_pipeline import MeshPipeline
from gateway.pipeline.stage_client import StageClient
from services.errors import StageFailed
from services.rpc.channel import create_channel
from services.rpc.server import RpcServer
from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2, stage_worker_pb2_grpc, step_pb2

EPOCH = 1


class ScriptedStage(stage_worker_pb2_grpc.StageWorkerServiceServicer):
    """Answers as many steps as it is allowed to."""

    def __init__(self) -> None:
        self.allowed = asyncio.Semaphore(0)
        self.requests: list[list[int]] = []
        """Step ids of each."""

    async def Execute(
        self,
        requests: AsyncIterator[stage_worker_pb2.ExecuteRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[stage_worker_pb2.ExecuteResponse]:
        async for request in requests:
            steps = [request.step, *request.further_steps]
            self.requests.append([step.step_id for step in steps])
            for step in steps:
                await self.allowed.acquire()
                yield stage_worker_pb2.ExecuteResponse(
                    result=step_pb2.StepResult(epoch=EPOCH, step_id=step.step_id)
                )


@asynccontextmanager
async def pipeline(num_stages: int) -> AsyncIterator[tuple[MeshPipeline, list[ScriptedStage]]]:
    scripted = [ScriptedStage() for _ in range(num_stages)]
    stages = []
    async with AsyncExitStack() as stack:
        for pp_rank, servicer in enumerate(scripted):
            server = RpcServer(["stagemesh.v1.StageWorkerService"])
            stage_worker_pb2_grpc.add_StageWorkerServiceServicer_to_server(
                servicer, server.grpc_server
            )
            address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
            await server.start()
            stack.push_async_callback(server.stop, grace_seconds=0.0)
            client = StageClient(create_channel(address), address, pp_rank)
            stack.push_async_callback(client.close)
            placement = StagePlacement(0, 0, pp_rank, (0,), (pp_rank,), pp_rank, pp_rank + 1)
            stages.append(Stage(client, placement))
        made = MeshPipeline(stages, EPOCH, lambda pp_rank, result: None, lambda seconds: None)
        running = asyncio.ensure_future(made.run())
        try:
            yield made, scripted
        finally:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running


async def until_done(made: MeshPipeline, *step_ids: int) -> None:
    for _ in range(1000):
        if [stage.done_step_id for stage in made.progress()] == list(step_ids):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(made.progress())


async def test_each_stage_s_last_answer_and_silence() -> None:
    async with pipeline(2) as (made, (first, second)):
        assert all(stage.is_idle for stage in made.progress())
        for step_id in (1, 2):
            made.send(step_pb2.Step(epoch=EPOCH, step_id=step_id))
        first.allowed.release()
        first.allowed.release()
        second.allowed.release()
        await until_done(made, 2, 1)
        assert {stage.sent_step_id for stage in made.progress()} == {2}
        before = [stage.silent_seconds for stage in made.progress()]
        assert all(0 <= seconds < 5 for seconds in before)
        await asyncio.sleep(0.05)
        after = [stage.silent_seconds for stage in made.progress()]
        assert all(later - sooner > 0.04 for sooner, later in zip(before, after, strict=True))


def send_decodes(made: MeshPipeline, *step_ids: int) -> None:
    for step_id in step_ids:
        row = step_pb2.StepRow(token_ids=[1])
        made.send(step_pb2.Step(epoch=EPOCH, step_id=step_id, rows=[row]))


def allow(stages: list[ScriptedStage], *counts: int) -> None:
    for stage, count in zip(stages, counts, strict=True):
        for _ in range(count):
            stage.allowed.release()


async def test_a_stage_that_has_answered_all_it_was_given_is_not_stalled() -> None:
    async with pipeline(4) as (made, stages):
        send_decodes(made, 1, 2, 3, 4, 5)
        allow(stages, 5, 5, 4, 0)
        await until_done(made, 5, 5, 4, 0)
        found = made.progress()
        assert [stage.sent_step_id for stage in found] == [5, 5, 4, 3]
        assert [stage.stalled_seconds > 0 for stage in found] == [False, False, False, True]
        allow(stages, 0, 0, 0, 2)
        async with asyncio.timeout(5):
            for step_id in (1, 2):
                assert (await made.next_result()).step_id == step_id
        assert [stage.sent_step_id for stage in made.progress()] == [5] * 4


async def test_steps_that_were_held_back_are_watched_once_a_stage_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All stages had answered all they had, and the last results were yet to be taken."""
    monkeypatch.setattr(stuck_step, "UNKNOWN_SECONDS", 0.3)
    monkeypatch.setattr(mesh_pipeline, "WATCH_INTERVAL_SECONDS", 0.05)
    async with pipeline(4) as (made, stages):
        send_decodes(made, 1, 2, 3, 4, 5)
        allow(stages, 5, 5, 4, 3)
        await until_done(made, 5, 5, 4, 3)
        assert all(stage.is_idle for stage in made.progress())
        await asyncio.sleep(0.15)
        async with asyncio.timeout(5):
            for step_id in (1, 2, 3):
                assert (await made.next_result()).step_id == step_id
            with pytest.raises(StageFailed, match="it has done step 3 and holds step 4"):
                await made.next_result()
        assert made.failed_by == "STEP_STUCK"
        assert made.stuck_step is not None
        assert made.stuck_step.pp_rank == 3


async def test_later_stages_are_given_several_steps_at_a_time() -> None:
    """All steps in order, on every stage; the last of four gets three and more together."""
    async with pipeline(4) as (made, stages):
        send_decodes(made, *range(1, 6))
        for step_id in range(1, 41):
            for stage in stages:
                stage.allowed.release()
            async with asyncio.timeout(5):
                assert (await made.next_result()).step_id == step_id
            if step_id + 5 <= 40:
                send_decodes(made, step_id + 5)
        for stage in stages:
            given = [each for request in stage.requests for each in request]
            assert given == list(range(1, 41))
        assert len(stages[0].requests) == 40
        assert len(stages[-1].requests) <= 40 / 3 + 5


async def test_a_step_that_no_stage_moves_ends_in_the_words_of_the_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stuck_step, "UNKNOWN_SECONDS", 0.3)
    monkeypatch.setattr(mesh_pipeline, "WATCH_INTERVAL_SECONDS", 0.05)
    async with pipeline(3) as (made, (first, _, _)):
        made.send(step_pb2.Step(epoch=EPOCH, step_id=1))
        first.allowed.release()
        with pytest.raises(StageFailed) as failure:
            async with asyncio.timeout(5):
                await made.next_result()
    message = failure.value.message
    assert message.startswith("stage 1 has been silent for 0.")
    assert "holds step 1, whose activations stage 0 has sent: it computes" in message
    assert "stage 2 waits for activations of step 1 from stage 1" in message
    assert made.failed_by == "STEP_STUCK"
    assert made.stuck_step is not None
    assert (made.stuck_step.pp_rank, made.stuck_step.limit_seconds) == (1, 0.3)
    assert asyncio.get_running_loop().time() - made.stuck_step.since >= 0.3


async def test_a_stall_of_the_gateway_is_no_stage_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers came meanwhile and are yet to be read."""
    monkeypatch.setattr(stuck_step, "UNKNOWN_SECONDS", 1.0)
    monkeypatch.setattr(mesh_pipeline, "WATCH_INTERVAL_SECONDS", 0.05)
    async with pipeline(1) as (made, (stage,)):
        made.send(step_pb2.Step(epoch=EPOCH, step_id=1))
        await asyncio.sleep(0.1)
        time.sleep(1.5)  # noqa: ASYNC251 - the stall itself
        await asyncio.sleep(0.3)
        stage.allowed.release()
        async with asyncio.timeout(5):
            assert (await made.next_result()).step_id == 1
