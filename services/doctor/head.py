"""Asks the head: name, connection and service each have their own deadline and their own words."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.control.diagnosis import MAX_ECHO_BYTES
from services.models.content_hash import ContentHash
from services.rpc.addresses import join_host_port
from services.rpc.channel import create_channel
from services.rpc.reach import Obstacle, Unanswered, connect
from services.rpc.tls_files import TlsFiles
from stagemesh.v1 import control_pb2, control_pb2_grpc

ROUND_TRIPS = 10
BANDWIDTH_ROUNDS = 3
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One gRPC path, measured. Not that of the collective library, which may use other links."""

    round_trip_seconds: float
    """The shortest of several, with no payload."""
    bytes_per_second: float
    """One way: the best of several messages of 4 MiB there and back."""
    clock_offset_seconds: float
    """The other side's wall clock less ours."""
    clock_uncertainty_seconds: float
    """Half of the round trip in which the clock was read."""


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """One worker's service, called from this node."""

    address: str
    round_trip_seconds: float | None
    """The shortest of several health checks; None where it did not answer in time."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the head has said, and how well it is reached."""

    address: str
    answer: control_pb2.DiagnoseResponse
    link: LinkFacts
    peers: tuple[PeerFacts, ...]
    """Every worker that has joined, in the answer's order."""


async def ask_head(
    host: str,
    port: int,
    node_rank: int,
    timeout_seconds: float,
    weights: ContentHash | None = None,
    tls: TlsFiles | None = None,
) -> HeadFacts | Unanswered:
    """Asks the control service at host:port; `timeout_seconds` is for each question. `tls` is
    what this doctor shows, None without TLS.

    With `weights` both sides hash theirs at the same time, and the answer is there when both
    have, or when the head's has not moved on for `timeout_seconds`.
    """
    address = join_host_port(host, port)
    unreachable = await connect(host, port, timeout_seconds, tls)
    if unreachable is not None:
        return unreachable
    async with _channel(address, tls) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        request = control_pb2.DiagnoseRequest(node=socket.gethostname(), node_rank=node_rank)
        try:
            answer = await stub.Diagnose(request, timeout=timeout_seconds)
            link = await _measure(stub, timeout_seconds)
            if weights is not None:
                weights.start()
                answer = await _with_hash(stub, request, timeout_seconds)
        except grpc.aio.AioRpcError as error:
            return Unanswered(address, _obstacle(error), str(error.details()))
        addresses = [member.address for member in answer.members]
        peers = await _ask_peers(addresses, timeout_seconds, tls)
    return HeadFacts(address, answer, link, peers)


async def _with_hash(
    stub: control_pb2_grpc.ControlServiceStub,
    request: control_pb2.DiagnoseRequest,
    timeout_seconds: float,
) -> control_pb2.DiagnoseResponse:
    """The answer with the head's hash, complete or as far as it came."""
    asking = control_pb2.DiagnoseRequest()
    asking.CopyFrom(request)
    asking.hash_weights = True
    loop = asyncio.get_running_loop()
    moved_at, hashed_bytes = loop.time(), -1
    while True:
        answer = await stub.Diagnose(asking, timeout=timeout_seconds)
        state = answer.content_hash
        if state.files or state.error or loop.time() - moved_at > timeout_seconds:
            return answer
        if state.hashed_bytes > hashed_bytes:
            moved_at, hashed_bytes = loop.time(), state.hashed_bytes
        await asyncio.sleep(POLL_SECONDS)


def _obstacle(error: grpc.aio.AioRpcError) -> Obstacle:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Obstacle.OTHER_SERVICE
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Obstacle.ROLE
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Obstacle.HUNG
    return Obstacle.ERROR


async def _measure(stub: control_pb2_grpc.ControlServiceStub, timeout_seconds: float) -> LinkFacts:
    """The connection is there: the first call has made it."""
    shortest, offset = timeout_seconds, 0.0
    for _ in range(ROUND_TRIPS):
        clock, started = time.time(), time.perf_counter()
        answer = await stub.Echo(control_pb2.EchoRequest(), timeout=timeout_seconds)
        seconds = time.perf_counter() - started
        if seconds < shortest:
            shortest, offset = seconds, answer.clock_seconds - (clock + seconds / 2)
    payload = control_pb2.EchoRequest(payload=bytes(MAX_ECHO_BYTES))
    best = 0.0
    for _ in range(BANDWIDTH_ROUNDS):
        started = time.perf_counter()
        await stub.Echo(payload, timeout=timeout_seconds)
        best = max(best, 2 * MAX_ECHO_BYTES / (time.perf_counter() - started))
    return LinkFacts(shortest, best, offset, shortest / 2)


async def _ask_peers(
    addresses: list[str], timeout_seconds: float, tls: TlsFiles | None
) -> tuple[PeerFacts, ...]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(_ask_peer(each, timeout_seconds, tls)) for each in addresses]
    return tuple(one.result() for one in asked)


async def _ask_peer(address: str, timeout_seconds: float, tls: TlsFiles | None) -> PeerFacts:
    shortest: float | None = None
    async with _channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            async with asyncio.timeout(timeout_seconds):
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
                for _ in range(ROUND_TRIPS):
                    started = time.perf_counter()
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
                    seconds = time.perf_counter() - started
                    shortest = seconds if shortest is None else min(shortest, seconds)
        except (grpc.aio.AioRpcError, TimeoutError):
            return PeerFacts(address, None)
    return PeerFacts(address, shortest)


@contextlib.asynccontextmanager
async def _channel(address: str, tls: TlsFiles | None) -> AsyncIterator[grpc.aio.Channel]:
    channel = create_channel(address, tls=tls)
    try:
        yield channel
    finally:
        await channel.close()
