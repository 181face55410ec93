"""gRPC's health service, for services whose answer changes while they run.

`Check` asks at once, so that it never says what is over. `Watch` looks while
somebody watches, and costs nothing otherwise. A watcher that does not read
is in nobody's way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

OVERALL_HEALTH = ""
"""Health's name for the server as a whole."""
WATCH_INTERVAL_SECONDS = 0.5
"""How late a watcher hears of a change."""

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Says SERVING as long as `is_serving` does, of the server and of each of its services."""

    def __init__(self, service_names: Sequence[str], is_serving: Callable[[], bool]) -> None:
        self._names = frozenset((OVERALL_HEALTH, *service_names))
        self._is_serving = is_serving
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """From now on nothing is served; watchers are told so, and their calls end."""
        self._leaving.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """See the protocol."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service is here")
        return _Response(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """See the protocol; ends when the caller or the server leaves."""
        told: int | None = None
        while True:
            leaving = self._leaving.is_set()
            status = self._status(request.service)
            if status != told:
                told = status
                yield _Response(status=status)
            if leaving:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), WATCH_INTERVAL_SECONDS)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._names:
            return _Response.SERVICE_UNKNOWN
        serving = self._is_serving() and not self._leaving.is_set()
        return _Response.SERVING if serving else _Response.NOT_SERVING
