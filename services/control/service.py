"""The control service: workers meet here, on every node, before a mesh runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import grpc

from services.control.diagnosis import MeshState, diagnose, echo
from services.control.membership import MEMBER_TIMEOUT_SECONDS, Membership
from services.control.server import DoctorCalls
from services.control.worker_reports import WorkerReports
from services.errors import JoinRefused, StageFailed
from services.models.content_hash import ContentHash
from services.rpc.channel import create_channel
from services.rpc.tls import TlsFiles
from stagemesh.v1 import control_pb2, control_pb2_grpc

log = logging.getLogger("stagemesh.control")

ECHO_REASON = "PEER_LOST"
"""What a rank reports whose neighbour is gone."""
LOOK_INTERVAL_SECONDS = 0.5
OWN_STALL_SECONDS = 0.5
"""A timer that is later than this says that the event loop did not run, for whatever reason."""


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """`Membership` behind gRPC, with the waits around it."""

    def __init__(self, membership: Membership, *, tls: TlsFiles | None = None) -> None:
        """`tls` is the gateway's, which it shows to workers; None without TLS."""
        self.membership = membership
        self._tls = tls
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""
        self._mesh: MeshState | None = None
        self._weights: ContentHash | None = None
        self._workers = WorkerReports(self.connect)
        self._doctor_calls = DoctorCalls()

    def connect(self, address: str) -> grpc.aio.Channel:
        """A channel to a worker; its owner closes it."""
        return create_channel(address, tls=self._tls)

    def tell_of(self, mesh: MeshState, model_path: Path) -> None:
        """Lets `Diagnose` tell of the mesh that is driven from here, and of its model's weights."""
        self._mesh = mesh
        self._weights = ContentHash(model_path)

    async def close(self) -> None:
        """Ends what doctors have started: questions to workers, a hash of the weights."""
        await self._workers.close()
        if self._weights is not None:
            self._weights.close()

    async def Join(
        self, request: control_pb2.JoinRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.JoinResponse:
        """A worker offers itself."""
        now = asyncio.get_running_loop().time()
        try:
            response = self.membership.join(request, now)
        except JoinRefused as refusal:
            log.warning("join refused: %s", refusal.message)
            raise
        missing = ", ".join(self.membership.missing())
        log.info(
            "stage %d joined: node %s at %s; %s",
            response.placement.pp_rank,
            request.node,
            request.address,
            f"waiting for {missing}" if missing else "all are here",
        )
        self._changed.set()
        return response

    async def Heartbeat(
        self, request: control_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.HeartbeatResponse:
        """A worker lives, or says that it has failed."""
        response = self.membership.heartbeat(request, asyncio.get_running_loop().time())
        error = request.status.error
        # A lost neighbour is an echo; who has failed says so itself.
        if not response.leave and error.reason not in ("", ECHO_REASON):
            self._failure = f"stage {error.pp_rank} failed: {error.message}"
            self._failed.set()
        return response

    async def Diagnose(
        self, request: control_pb2.DiagnoseRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.DiagnoseResponse:
        """A doctor asks."""
        self._doctor_calls.enter(context)
        log.debug("a doctor on node %d (%.64r) asks", request.node_rank, request.node)
        return await diagnose(
            request,
            self.membership,
            self._mesh,
            self._weights,
            self._workers,
            context.time_remaining(),
        )

    async def Echo(
        self, request: control_pb2.EchoRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.EchoResponse:
        """A doctor measures."""
        self._doctor_calls.enter(context)
        return echo(request)

    async def complete(self, timeout_seconds: float) -> None:
        """Waits until every place is taken. Raises `StageFailed` naming who is missing."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self.membership.complete:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            joined = ", ".join(member.address for member in self.membership.members) or "nobody"
            raise StageFailed(
                f"not all stage workers joined within {timeout_seconds:.0f} s: missing "
                f"{', '.join(self.membership.missing())}; joined: {joined}. Their log lines say why"
            ) from None

    async def watch(self) -> None:
        """Runs until a member fails or goes silent, and then raises `StageFailed` naming it."""
        looked_at = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), LOOK_INTERVAL_SECONDS)
            if self._failed.is_set():
                raise StageFailed(self._failure)
            stood_still = time.monotonic() - looked_at - LOOK_INTERVAL_SECONDS
            looked_at = time.monotonic()
            now = asyncio.get_running_loop().time()
            if stood_still > OWN_STALL_SECONDS:
                # It was this process that did not run; their heartbeats are yet to be read.
                log.warning("this process stood still for %.1f s", stood_still)
                self.membership.forgive(now)
            for member in self.membership.silent(now):
                raise StageFailed(
                    f"the worker of stage {member.placement.pp_rank} ({member.address}, pid "
                    f"{member.pid} on {member.node}) has been silent for more than "
                    f"{MEMBER_TIMEOUT_SECONDS:.0f} s: it is stopped, hung or cut off"
                )
