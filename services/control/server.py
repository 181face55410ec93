"""The server of the control service, at a head or at a doctor that listens, and what it takes
at a time: whoever reaches its port may ask it, without a key."""

from __future__ import annotations

import grpc

from services.control.diagnosis import MAX_ECHO_BYTES
from services.errors import Saturated
from services.rpc.server import RpcServer
from services.rpc.settings import MessageLimits
from stagemesh.v1 import control_pb2_grpc

CONTROL_SERVICE = "stagemesh.v1.ControlService"
CONTROL_MAX_REQUEST_BYTES = MAX_ECHO_BYTES + (64 << 10)
"""The largest that is sent back, and room for the message around it and for the reason why one
that is slightly larger is not."""
MAX_CONTROL_RPCS = 128
"""Calls of workers and doctors. Each lasts milliseconds, and workers who are refused try again."""
MAX_DOCTOR_CALLS = 16
"""Of these, calls of doctors: they are the large and the slow ones."""


def control_server(servicer: control_pb2_grpc.ControlServiceServicer) -> RpcServer:
    """The server, not bound and not started yet. Made inside a running event loop."""
    server = RpcServer(
        [CONTROL_SERVICE],
        limits=MessageLimits(receive_bytes=CONTROL_MAX_REQUEST_BYTES),
        max_calls=MAX_CONTROL_RPCS,
    )
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server.grpc_server)
    return server


class DoctorCalls:
    """Counts the calls of doctors, from their request until the answer is sent."""

    def __init__(self) -> None:
        self._running = 0

    @property
    def running(self) -> int:
        """Calls that are being answered."""
        return self._running

    def enter(self, context: grpc.aio.ServicerContext) -> None:
        """Raises `Saturated` where as many are answered as may be."""
        if self._running >= MAX_DOCTOR_CALLS:
            raise Saturated(
                f"{MAX_DOCTOR_CALLS} calls of doctors are being answered here; try again in a "
                "moment"
            )
        self._running += 1
        context.add_done_callback(self._leave)

    def _leave(self, context: grpc.aio.ServicerContext) -> None:
        self._running -= 1
