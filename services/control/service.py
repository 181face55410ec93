"""The control service: workers meet here, on every node, before a mesh runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc

from services.control.devices import Holder
from services.control.diagnosis import MeshState, diagnose, echo
from services.control.member import MEMBER_TIMEOUT_SECONDS, Member
from services.control.membership import Membership
from services.control.server import DoctorCalls
from services.control.worker_reports import WorkerReports
from services.errors import JoinRefused, PipelineUnavailable, StageFailed
from services.models.content_hash import ContentHash
from services.rpc.channel import create_channel
from services.rpc.tls import RenewedCredentials
from services.rpc.tls_files import TlsFiles
from stagemesh.v1 import (
    control_pb2,
    control_pb2_grpc,
    stage_worker_pb2,
    stage_worker_pb2_grpc,
    step_pb2,
)

log = logging.getLogger("stagemesh.control")

HOLDER_TIMEOUT_SECONDS = 1.0
"""For the holder of a place that another asks for: below the time that a join may take."""
LOOK_INTERVAL_SECONDS = 0.5
OWN_STALL_SECONDS = 0.5
"""A timer that is later than this says that the event loop did not run, for whatever reason."""


class MemberListener(Protocol):
    """Hears of members of a mesh that runs. Must not raise."""

    def on_member_lost(self, member: Member, why: str) -> None:
        """A member is silent or gone; `why` is a whole message."""
        ...

    def on_stage_error(self, member: Member, error: step_pb2.StageError) -> None:
        """A member says that a stage has failed; said again with every heartbeat."""
        ...


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """`Membership` behind gRPC, with the waits around it."""

    def __init__(self, membership: Membership, *, tls: TlsFiles | None = None) -> None:
        """`tls` is the gateway's, which it shows to workers; None without TLS."""
        self.membership = membership
        self._credentials = None if tls is None else RenewedCredentials(tls)
        self._changed = asyncio.Event()
        self._listener: MemberListener | None = None
        self._mesh: MeshState | None = None
        self._weights: ContentHash | None = None
        self._workers = WorkerReports(self.connect)
        self._doctor_calls = DoctorCalls()

    def connect(self, address: str) -> grpc.aio.Channel:
        """A channel to a worker; its owner closes it."""
        return create_channel(address, tls=self._credentials)

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
        loop = asyncio.get_running_loop()
        for holder in self.membership.in_the_way(request, loop.time()):
            if await self._is_gone(holder):
                self.lost(holder, f"another takes its place: {request.address}")
        now = loop.time()
        gone = self.membership.making_way(request, now)
        try:
            response = self.membership.join(request, now)
        except JoinRefused as refusal:
            log.warning("join refused: %s", refusal.message)
            raise
        for member in gone:
            # One that asks again since it did not hear that it had joined has taken no part.
            if member.has_beaten or (member.address, member.pid) != (request.address, request.pid):
                self._tell_lost(member, f"its place is taken by {request.address}")
        missing = ", ".join(self.membership.missing())
        log.info(
            "%s joined: node %s at %s; %s",
            "a spare" if response.standby else f"stage {response.placement.pp_rank}",
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
        member = self.membership.member(request.worker_id)
        if member is not None and request.status.HasField("error") and self._listener is not None:
            self._listener.on_stage_error(member, request.status.error)
        # Whoever waits for somebody silent looks again.
        self._changed.set()
        return response

    async def status(self, member: Member) -> stage_worker_pb2.StatusResponse | None:
        """What a member says of itself now; nothing (an empty message) where nobody is at its
        address, None where it does not answer in time."""
        channel = self.connect(member.address)
        try:
            stub = stage_worker_pb2_grpc.StageWorkerServiceStub(channel)
            request = stage_worker_pb2.StatusRequest()
            response: stage_worker_pb2.StatusResponse = await stub.Status(
                request, timeout=HOLDER_TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            gone = error.code() is grpc.StatusCode.UNAVAILABLE
            return stage_worker_pb2.StatusResponse() if gone else None
        finally:
            await channel.close()
        return response

    async def _is_gone(self, holder: Holder) -> bool:
        """Whether nobody answers at a holder's address. Raises `PipelineUnavailable`, at which the
        asking worker tries again, where it is there and does not answer: stopped, or busy."""
        channel = self.connect(holder.address)
        try:
            stub = stage_worker_pb2_grpc.StageWorkerServiceStub(channel)
            await stub.Status(stage_worker_pb2.StatusRequest(), timeout=HOLDER_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return True
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PipelineUnavailable(
                    f"{describe(holder)} is in the way and does not answer; ask again"
                ) from None
        finally:
            await channel.close()
        return False

    def lost(self, worker: Holder, why: str) -> None:
        """A worker is known to be gone; its place is free."""
        if (member := self.membership.forget(worker.worker_id)) is not None:
            self._tell_lost(member, why)

    def _tell_lost(self, member: Member, why: str) -> None:
        if self._listener is not None:
            self._listener.on_member_lost(member, f"{describe(member)} is gone: {why}")

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
        """Waits until every place is held by a worker that is heard of. Raises `StageFailed`
        naming who is missing."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._absent():
                    await self.change()
        except TimeoutError:
            joined = ", ".join(member.address for member in self.membership.members) or "nobody"
            raise StageFailed(
                f"not all stage workers joined within {timeout_seconds:.0f} s: missing "
                f"{', '.join(self._absent())}; joined: {joined}. Their log lines say why"
            ) from None

    def _absent(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        replicas = range(self.membership.shape.dp_size)
        return [place for dp_rank in replicas for place in self.membership.absent(dp_rank, now)]

    async def present(
        self,
        dp_rank: int,
        on_waiting: Callable[[str], None],
        fill: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until every place of a replica is held by a worker that is heard of.
        `on_waiting` hears for whom; before each look `fill` may give a place to another."""
        loop = asyncio.get_running_loop()
        while True:
            fill()
            absent = self.membership.absent(dp_rank, loop.time())
            if not absent:
                return
            on_waiting(f"waiting for the worker of {', '.join(absent)} to come back")
            await self.change()

    async def change(self) -> None:
        """Waits until a worker joins or is heard of."""
        self._changed.clear()
        await self._changed.wait()

    async def watch(self, listener: MemberListener) -> None:
        """Tells of members that fail or go silent, each time once; runs until cancelled."""
        self._listener = listener
        known: set[str] = set()
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_INTERVAL_SECONDS)
            stood_still = time.monotonic() - looked_at - LOOK_INTERVAL_SECONDS
            looked_at = time.monotonic()
            now = asyncio.get_running_loop().time()
            if stood_still > OWN_STALL_SECONDS:
                # It was this process that did not run; their heartbeats are yet to be read.
                log.warning("this process stood still for %.1f s", stood_still)
                self.membership.forgive(now)
            silent = self.membership.silent(now)
            for member in silent:
                if member.worker_id not in known:
                    listener.on_member_lost(
                        member,
                        f"{describe(member)} has been silent for more than "
                        f"{MEMBER_TIMEOUT_SECONDS:.0f} s: it is stopped, hung or cut off",
                    )
            known = {member.worker_id for member in silent}


def describe(worker: Holder) -> str:
    """A worker for a message."""
    name = "a spare worker"
    if isinstance(worker, Member):
        name = f"the worker of stage {worker.placement.pp_rank}"
    return f"{name} ({worker.address}, pid {worker.pid} on {worker.node})"
