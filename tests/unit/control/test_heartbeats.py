"""How often a worker that was stopped asks a head that does not answer."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from services.control import client as control_client
from services.control.client import ControlClient
from services.errors import HeadLost
from stagemesh.v1 import control_pb2, stage_worker_pb2

JOINED = control_pb2.JoinResponse(heartbeat_interval_seconds=0.01, head_timeout_seconds=0.5)
STOP_SECONDS = 1.0


class Head:
    """Answers some heartbeats; meanwhile this process is stopped."""

    def __init__(self, answers: str, stops: set[int]) -> None:
        """`answers` has one of each heartbeat: + is an answer, . sends the worker away, - is
        none; `stops` are those, from 1, during which this process is stopped."""
        self._answers = answers
        self._stops = stops
        self.asked = 0

    async def Heartbeat(
        self,
        request: control_pb2.HeartbeatRequest,
        *,
        timeout: float,  # noqa: ASYNC109 - gRPC's
    ) -> control_pb2.HeartbeatResponse:
        self.asked += 1
        if self.asked in self._stops:
            time.sleep(STOP_SECONDS)  # noqa: ASYNC251 - the stop itself
        answer = self._answers[self.asked - 1]
        if answer != "-":
            return control_pb2.HeartbeatResponse(leave=answer == ".")
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing)


async def beat(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "CALL_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(control_client, "OWN_STALL_SECONDS", 0.2)
    client = ControlClient("127.0.0.1", 9)

    async def connect_again() -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(client, "_connect_again", connect_again)
    monkeypatch.setattr(client, "_stub", head)
    try:
        async with asyncio.timeout(10):
            await client.heartbeats(JOINED, stage_worker_pb2.StatusResponse, lambda epoch: None)
    finally:
        await client.close()


@pytest.mark.parametrize("stops", [{2}, {2, 3}])
async def test_it_asks_once_more(stops: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is stopped: a head that is cut off is given up."""
    head = Head("+---", stops)
    with pytest.raises(HeadLost, match=r"has not answered for [12] s"):
        await beat(head, monkeypatch)
    assert head.asked == 3


async def test_an_answer_makes_that_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it asks once more also after the next stop."""
    head = Head("+-+-.", {2, 4})
    await beat(head, monkeypatch)
    assert head.asked == 5
