"""How every worker of a mesh is, asked by the head for whichever doctors want to know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from services.control.membership import Member
from services.topology.wire import placement_to_proto
from stagemesh.v1 import control_pb2, stage_worker_pb2, stage_worker_pb2_grpc

WORKER_TIMEOUT_SECONDS = 2.0
"""For all round trips to one worker: workers never compute, so a late one is a finding."""
WORKER_ROUND_TRIPS = 3
CLOSE_SECONDS = 1.0


Connect = Callable[[str], grpc.aio.Channel]


@dataclass(frozen=True, slots=True)
class _Answer:
    round_trip_seconds: float
    """The shortest of several."""
    status: stage_worker_pb2.StatusResponse


class WorkerReports:
    """Has one question to each worker open at a time, however many doctors ask."""

    def __init__(self, connect: Connect) -> None:
        """`connect` opens a channel to a worker's address."""
        self._connect = connect
        self._asking: dict[str, asyncio.Future[_Answer | None]] = {}

    async def ask(
        self, members: Iterable[Member], timeout_seconds: float
    ) -> list[control_pb2.MemberReport]:
        """A report of each, after `timeout_seconds` at most; of who has not answered by then
        without status and round trip."""
        asked = [(member, self._question(member)) for member in members]
        if asked:
            await asyncio.wait([question for _, question in asked], timeout=timeout_seconds)
        now = asyncio.get_running_loop().time()
        return [_report(member, question, now) for member, question in asked]

    def _question(self, member: Member) -> asyncio.Future[_Answer | None]:
        """The open one, or a new one."""
        question = self._asking.get(member.worker_id)
        if question is None:
            question = asyncio.ensure_future(_ask(self._connect, member.address))
            self._asking[member.worker_id] = question
            question.add_done_callback(lambda _: self._asking.pop(member.worker_id))
        return question

    async def close(self) -> None:
        """Ends what is still being asked."""
        asking = tuple(self._asking.values())
        for question in asking:
            question.cancel()
        if asking:
            await asyncio.wait(asking, timeout=CLOSE_SECONDS)


def _report(
    member: Member, question: asyncio.Future[_Answer | None], now: float
) -> control_pb2.MemberReport:
    report = control_pb2.MemberReport(
        node=member.node,
        node_rank=member.node_rank,
        address=member.address,
        pid=member.pid,
        placement=placement_to_proto(member.placement),
        silent_seconds=max(0.0, now - member.heard_at),
    )
    answer = question.result() if question.done() and not question.cancelled() else None
    if answer is not None:
        report.round_trip_seconds = answer.round_trip_seconds
        report.status.CopyFrom(answer.status)
    return report


async def _ask(connect: Connect, address: str) -> _Answer | None:
    """None where the worker does not answer in time."""
    channel = connect(address)
    try:
        async with asyncio.timeout(WORKER_TIMEOUT_SECONDS):
            return await _round_trips(channel)
    except (grpc.aio.AioRpcError, TimeoutError):
        return None
    finally:
        await channel.close()


async def _round_trips(channel: grpc.aio.Channel) -> _Answer:
    """The first call, which connects, is not counted."""
    stub = stage_worker_pb2_grpc.StageWorkerServiceStub(channel)
    request = stage_worker_pb2.StatusRequest()
    status = await stub.Status(request, timeout=WORKER_TIMEOUT_SECONDS)
    shortest = WORKER_TIMEOUT_SECONDS
    for _ in range(WORKER_ROUND_TRIPS):
        started = time.perf_counter()
        status = await stub.Status(request, timeout=WORKER_TIMEOUT_SECONDS)
        shortest = min(shortest, time.perf_counter() - started)
    return _Answer(shortest, status)
