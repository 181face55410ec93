"""gRPC's health service, for services whose answer changes while they run.

`Check` asks at once, so that it never says what is over. `Watch` looks while
somebody watches, and costs nothing otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2

OVERALL_HEALTH = ""
"""Health's name for the server as a whole."""
WATCH_INTERVAL_SECONDS = 0.5
"""How late a watcher hears of a change."""


class Health(health.aio.HealthServicer):
    """Says SERVING as long as `is_serving` does, of the server and of each of its services."""

    def __init__(self, service_names: Sequence[str], is_serving: Callable[[], bool]) -> None:
        super().__init__()
        self._names = (OVERALL_HEALTH, *service_names)
        self._is_serving = is_serving

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """See the protocol."""
        await self._look()
        return await super().Check(request, context)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """See the protocol; ends when the caller leaves."""
        await self._look()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_looking())
            await super().Watch(request, context)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)
            await self._look()

    async def _look(self) -> None:
        serving = self._is_serving()
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        for name in self._names:
            if self._server_status.get(name) != status:
                await self.set(name, status)
