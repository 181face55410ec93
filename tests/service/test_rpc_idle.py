"""An idle connection stays: the client's keepalive pings are not too many for the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from services.rpc import settings
from services.rpc.channel import create_channel
from services.rpc.server import RpcServer
from stagemesh.v1 import stage_worker_pb2, stage_worker_pb2_grpc, step_pb2

NAME = "stagemesh.v1.StageWorkerService"


class Echo(stage_worker_pb2_grpc.StageWorkerServiceServicer):
    async def Execute(
        self,
        request_iterator: AsyncIterator[stage_worker_pb2.ExecuteRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[stage_worker_pb2.ExecuteResponse]:
        async for request in request_iterator:
            result = step_pb2.StepResult(step_id=request.step.step_id)
            yield stage_worker_pb2.ExecuteResponse(result=result)


async def test_a_step_stream_that_is_idle_for_many_pings_still_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 40 times the real pace: gRPC closes a connection after a few pings too many."""
    monkeypatch.setattr(settings, "KEEPALIVE_SECONDS", settings.KEEPALIVE_SECONDS / 40)
    monkeypatch.setattr(
        settings, "MIN_PING_INTERVAL_SECONDS", settings.MIN_PING_INTERVAL_SECONDS / 40
    )
    server = RpcServer([NAME])
    stage_worker_pb2_grpc.add_StageWorkerServiceServicer_to_server(Echo(), server.grpc_server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    channel = create_channel(f"127.0.0.1:{port}")
    try:
        call = stage_worker_pb2_grpc.StageWorkerServiceStub(channel).Execute()
        for step_id in (1, 2):
            step = step_pb2.Step(step_id=step_id)
            await call.write(stage_worker_pb2.ExecuteRequest(step=step))
            response = await asyncio.wait_for(call.read(), 5)
            assert response.result.step_id == step_id
            await asyncio.sleep(4)
        call.cancel()
    finally:
        await channel.close()
        await server.stop(grace_seconds=0)
