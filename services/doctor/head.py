"""Asks the head: name, connection and service each have their own deadline and their own words."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.control.diagnosis import MAX_ECHO_BYTES
from services.models.content_hash import ContentHash
from services.rpc.addresses import join_host_port
from services.rpc.channel import create_channel
from stagemesh.v1 import control_pb2, control_pb2_grpc

ROUND_TRIPS = 10
BANDWIDTH_ROUNDS = 3
POLL_SECONDS = 0.5

# What a client of HTTP/2 sends first: the connection preface and an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEAD_BYTES = 9
_FRAME_TYPE = 3
_SETTINGS_FRAME = 4


class Obstacle(str, Enum):
    """What is in the way of an answer."""

    NAME = "name"
    """The address does not resolve."""
    ROUTE = "route"
    """No way leads there."""
    SILENCE = "silence"
    """Nobody answers the connection in time."""
    REFUSED = "refused"
    """The machine is there and nothing listens on the port."""
    NOT_GRPC = "not gRPC"
    """Something listens that speaks another protocol."""
    OTHER_SERVICE = "other service"
    """A gRPC server without the control service, or of a version without diagnoses."""
    HUNG = "hung"
    """It takes the connection and does not answer."""
    ERROR = "error"
    """It is a head and answers with an error."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer, and why."""

    address: str
    obstacle: Obstacle
    detail: str


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
) -> HeadFacts | Unanswered:
    """Asks the control service at host:port; `timeout_seconds` is for each question.

    With `weights` both sides hash theirs at the same time, and the answer is there when both
    have, or when the head's has not moved on for `timeout_seconds`.
    """
    address = join_host_port(host, port)
    unreachable = await _connect(host, port, address, timeout_seconds)
    if unreachable is not None:
        return unreachable
    async with _channel(address) as channel:
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
        peers = await _ask_peers([member.address for member in answer.members], timeout_seconds)
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


async def _connect(host: str, port: int, address: str, timeout_seconds: float) -> Unanswered | None:
    """Tries name and connection by themselves: gRPC has one word for all that may go wrong."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_seconds):
            await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        return Unanswered(address, Obstacle.NAME, str(error))
    except TimeoutError:
        detail = f"the name server did not answer in {timeout_seconds:g} s"
        return Unanswered(address, Obstacle.NAME, detail)
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return Unanswered(address, Obstacle.SILENCE, f"no answer in {timeout_seconds:g} s")
    except ConnectionRefusedError:
        return Unanswered(address, Obstacle.REFUSED, "connection refused")
    except OSError as error:
        return Unanswered(address, Obstacle.ROUTE, error.strerror or str(error))
    try:
        async with asyncio.timeout(timeout_seconds):
            greeting = await _greet(reader, writer)
    except TimeoutError:
        return Unanswered(address, Obstacle.HUNG, f"no answer in {timeout_seconds:g} s")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if greeting[_FRAME_TYPE] != _SETTINGS_FRAME:
        return Unanswered(address, Obstacle.NOT_GRPC, "it does not speak HTTP/2")
    return None


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The head of the first frame that the other side sends to a client of HTTP/2; a server's
    is SETTINGS (RFC 9113, 3.4). Something else where it speaks another protocol."""
    try:
        writer.write(_PREFACE)
        await writer.drain()
        return await reader.readexactly(_FRAME_HEAD_BYTES)
    except (OSError, asyncio.IncompleteReadError):
        return bytes(_FRAME_HEAD_BYTES)


def _obstacle(error: grpc.aio.AioRpcError) -> Obstacle:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Obstacle.OTHER_SERVICE
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


async def _ask_peers(addresses: list[str], timeout_seconds: float) -> tuple[PeerFacts, ...]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(_ask_peer(each, timeout_seconds)) for each in addresses]
    return tuple(one.result() for one in asked)


async def _ask_peer(address: str, timeout_seconds: float) -> PeerFacts:
    shortest: float | None = None
    async with _channel(address) as channel:
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
async def _channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    channel = create_channel(address)
    try:
        yield channel
    finally:
        await channel.close()
