"""A worker's side of the control service: join, then heartbeats until it must leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from services.errors import HeadLost as HeadLost
from services.errors import JoinRefused
from services.rpc.errors import error_from_rpc
from stagemesh.v1 import control_pb2, control_pb2_grpc, stage_worker_pb2

log = logging.getLogger("stagemesh.control")

RETRY_SECONDS = 0.2
CALL_TIMEOUT_SECONDS = 3.0


class ControlClient:
    """Calls one head."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = control_pb2_grpc.ControlServiceStub(channel)
        self._address = address

    async def join(
        self, request: control_pb2.JoinRequest, timeout_seconds: float
    ) -> control_pb2.JoinResponse:
        """Joins, waiting for a head that is not up yet.

        Raises `JoinRefused` with the head's reason, or naming the address that
        nobody answers at.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            try:
                response: control_pb2.JoinResponse = await self._stub.Join(
                    request, timeout=CALL_TIMEOUT_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                waiting = error.code() in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    # As many calls as its server takes at a time.
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                )
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise JoinRefused(
                        f"what answers at {self._address} is no head of a mesh: compare "
                        '--master-addr and --master-port with the line "workers join at" in the '
                        "head's log"
                    ) from None
                if not waiting:
                    raise error_from_rpc(error) from None
                if loop.time() > deadline:
                    raise JoinRefused(
                        f"no head answers at {self._address} after {timeout_seconds:.0f} s "
                        f"({error.details()}). Check --master-addr and --master-port, and that "
                        "the gateway runs there"
                    ) from None
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return response

    async def heartbeats(
        self,
        joined: control_pb2.JoinResponse,
        status: Callable[[], stage_worker_pb2.StatusResponse],
    ) -> None:
        """Sends heartbeats until the head sends the worker away, which returns.

        Raises `HeadLost` when the head has been silent for its time-out.
        """
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while True:
            request = control_pb2.HeartbeatRequest(worker_id=joined.worker_id, status=status())
            try:
                response = await self._stub.Heartbeat(request, timeout=CALL_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                silent = loop.time() - answered_at
                if silent > joined.head_timeout_seconds:
                    raise HeadLost(
                        f"the head at {self._address} has not answered for {silent:.0f} s "
                        f"({error.details()}); this worker leaves"
                    ) from None
            else:
                answered_at = loop.time()
                if response.leave:
                    log.warning("the head sends this worker away: %s", response.leave_reason)
                    return
            await asyncio.sleep(joined.heartbeat_interval_seconds)
