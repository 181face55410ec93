"""A connection that a cut has left dead: the worker makes another before it gives its head up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from services.control import client as control_client
from services.control import membership
from services.control.service import ControlService
from services.rpc.channel import create_channel
from stagemesh.v1 import control_pb2, control_pb2_grpc
from tests.service.test_head_lost import head, worker
from tests.service.worker_stage import TIMEOUT_SECONDS, until

READ_BYTES = 1 << 16


class Relay:
    """Passes bytes on between a worker and its head."""

    def __init__(self, head_port: int) -> None:
        self._head_port = head_port
        self._cut = [False]
        """Whether the connections that were made since the last cut carry nothing more."""
        self.connections = 0

    def cut(self) -> None:
        """Connections stay and carry nothing more; what is connected later works."""
        self._cut[0] = True
        self._cut = [False]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        cut = self._cut
        from_head, to_head = await asyncio.open_connection("127.0.0.1", self._head_port)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(READ_BYTES):
                    if not cut[0]:
                        sink.write(data)
            sink.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pass_on(reader, to_head))
            tasks.create_task(pass_on(from_head, writer))


@contextlib.asynccontextmanager
async def relay(head_port: int) -> AsyncIterator[tuple[Relay, int]]:
    made = Relay(head_port)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    async with server:
        yield made, server.sockets[0].getsockname()[1]


async def test_a_dead_connection_is_no_lost_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(membership, "HEAD_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(control_client, "CALL_TIMEOUT_SECONDS", 0.3)
    async with (
        head() as (table, head_port),
        relay(head_port) as (between, port),
        worker(port, waits=False) as (_, holding),
    ):
        (member,) = table.members
        await until(lambda: member.has_beaten, "a heartbeat")
        between.cut()
        cut_at = asyncio.get_running_loop().time()
        await until(lambda: member.heard_at > cut_at or holding.done(), "another heartbeat")
        assert not holding.done()
        assert between.connections == 2
        assert table.members == (member,)


async def test_a_worker_that_was_stopped_asks_again_before_it_gives_its_head_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline of its heartbeat, and the head's time-out, have passed while it did not run."""
    monkeypatch.setattr(membership, "HEARTBEAT_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(membership, "HEAD_TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(control_client, "CALL_TIMEOUT_SECONDS", 0.5)
    answer, stops = ControlService.Heartbeat, [3.0]

    async def heartbeat(
        service: ControlService, request: control_pb2.HeartbeatRequest, context: object
    ) -> control_pb2.HeartbeatResponse:
        if stops:
            time.sleep(stops.pop())  # noqa: ASYNC251 - of the head too, in one process with it
        return await answer(service, request, context)  # type: ignore[arg-type]

    monkeypatch.setattr(ControlService, "Heartbeat", heartbeat)
    async with head() as (table, port), worker(port, waits=False) as (_, holding):
        (member,) = table.members
        await until(lambda: not stops, "the stop")
        woke_at = asyncio.get_running_loop().time()
        await until(lambda: member.heard_at > woke_at + 0.5 or holding.done(), "heartbeats")
        assert not holding.done()
        assert table.members == (member,)


async def test_no_channel_has_the_connection_of_another() -> None:
    """What replaces one whose connection is dead would be dead too."""
    async with (
        head() as (_, head_port),
        relay(head_port) as (between, port),
        create_channel(f"127.0.0.1:{port}") as one,
        create_channel(f"127.0.0.1:{port}") as other,
    ):
        for channel in (one, other):
            stub = control_pb2_grpc.ControlServiceStub(channel)
            await stub.Echo(control_pb2.EchoRequest(), timeout=TIMEOUT_SECONDS)
        assert between.connections == 2
