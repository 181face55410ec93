"""The stage worker's real gRPC service over one rank process, as the gateway calls it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.rpc import RpcServer, create_channel
from stage_worker.rank_arguments import RankArguments
from stage_worker.rank_process import RankProcess
from stage_worker.rank_supervisor import RankSupervisor
from stage_worker.service import SERVICE_NAME, StageWorker, add_to_server
from stagemesh.v1 import stage_worker_pb2, stage_worker_pb2_grpc, step_pb2

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 10.0
REAL_RANK_SECONDS = 60.0
"""It imports torch, next to other work on the machine."""
ARGUMENTS = RankArguments(
    fd=-1,
    parent_pid=0,
    host="127.0.0.1",
    device="cpu",
    device_index=0,
    num_threads=1,
    pp_rank=1,
    tp_rank=0,
    step_timeout_seconds=5.0,
)

Execute = grpc.aio.StreamStreamCall


class Stage:
    """A worker with one rank, and calls to it as the gateway makes them."""

    def __init__(
        self, worker: StageWorker, rank: RankSupervisor, channel: grpc.aio.Channel
    ) -> None:
        self.worker, self.rank = worker, rank
        self.stub = stage_worker_pb2_grpc.StageWorkerServiceStub(channel)
        self._execute = channel.stream_stream(
            f"/{SERVICE_NAME}/Execute",
            request_serializer=None,
            response_deserializer=stage_worker_pb2.ExecuteResponse.FromString,
        )

    async def load(
        self, num_blocks: int = 1, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> tuple[list[int], list[int]]:
        """Progress, and the numbers of blocks in the reports."""
        plan = stage_worker_pb2.StagePlan(num_blocks=num_blocks)
        progress, blocks = [], []
        call = self.stub.Load(stage_worker_pb2.LoadRequest(plan=plan), timeout=timeout_seconds)
        async for response in call:
            if response.HasField("progress"):
                progress.append(response.progress.loaded_bytes)
            else:
                blocks.append(response.report.num_blocks)
        return progress, blocks

    async def form_group(self, epoch: int) -> None:
        request = stage_worker_pb2.FormGroupRequest(epoch=epoch, timeout_seconds=5)
        await self.stub.FormGroup(request, timeout=TIMEOUT_SECONDS)

    async def reset(self, epoch: int, *, replace: bool = False) -> None:
        request = stage_worker_pb2.ResetRanksRequest(epoch=epoch, replace=replace)
        await self.stub.ResetRanks(request, timeout=TIMEOUT_SECONDS)

    async def status(self) -> stage_worker_pb2.StatusResponse:
        response: stage_worker_pb2.StatusResponse = await self.stub.Status(
            stage_worker_pb2.StatusRequest(), timeout=TIMEOUT_SECONDS
        )
        return response

    async def execute(self, *requests: bytes) -> Execute:
        """An open stream with some requests written."""
        call: Execute = self._execute(timeout=REAL_RANK_SECONDS)
        for request in requests:
            await call.write(request)
        return call

    async def pid(self) -> int:
        return (await self.rank.process.started()).pid


def step(step_id: int) -> bytes:
    request = stage_worker_pb2.ExecuteRequest(step=step_pb2.Step(step_id=step_id))
    return request.SerializeToString()


@asynccontextmanager
async def stage(
    mode: str = "", command: tuple[str, ...] | None = None, *, waits_for_head: bool = False
) -> AsyncIterator[Stage]:
    worker = StageWorker(waits_for_head=waits_for_head)
    server = RpcServer([SERVICE_NAME])
    add_to_server(worker, server.grpc_server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    command = command or (sys.executable, "-m", "tests.service.fake_rank", mode)
    rank = RankSupervisor(
        lambda: RankProcess(ARGUMENTS, worker.on_result, worker.on_failure, command)
    )
    worker.ranks.append(rank)
    async with create_channel(f"127.0.0.1:{port}") as channel, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rank.run())
        try:
            yield Stage(worker, rank, channel)
        finally:
            await worker.stop_ranks()
            await asyncio.wait_for(running, TIMEOUT_SECONDS)
            await server.stop(grace_seconds=0)


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.01)
    assert condition(), what


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def refused(call: Execute) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def results(call: Execute, count: int) -> list[int]:
    read = [await call.read() for _ in range(count)]
    return [response.result.step_id for response in read]
