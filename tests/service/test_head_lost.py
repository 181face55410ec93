"""A worker whose head is gone, and the one that comes in its place, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from services.control import client as control_client
from services.control import membership
from services.control.client import ControlClient
from services.control.membership import Member, Membership
from services.control.server import control_server
from services.control.service import ControlService
from services.control.takeover import Readiness
from services.errors import (
    FingerprintMismatch,
    HeadLost,
    NotAuthenticated,
    NotPermitted,
    StageFailed,
    failure_of,
)
from services.rpc.channel import create_channel
from services.rpc.roles import Role
from services.rpc.tls_files import TlsFiles
from services.topology.facts import MeshShape
from services.topology.fingerprint import stated_fingerprint
from services.topology.placement import NodeDevices, place
from stage_worker import place as worker_place
from stage_worker.service import StageWorker
from stagemesh.v1 import (
    control_pb2,
    control_pb2_grpc,
    stage_worker_pb2,
    step_pb2,
    topology_pb2,
)
from tests.certificates import Pki
from tests.service.worker_stage import TIMEOUT_SECONDS, until

SHAPE = MeshShape(dp_size=1, tp_size=1, pp_size=2, pp_layer_partition=(3, 2))
PLAN = stated_fingerprint(SHAPE.pp_layer_partition, tp_size=1, pp_size=2, dtype="float32")


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEAD_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(membership, "HEARTBEAT_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(control_client, "CALL_TIMEOUT_SECONDS", 0.3)


@contextlib.asynccontextmanager
async def head(
    port: int = 0,
    *,
    plan: topology_pb2.Fingerprint = PLAN,
    num_devices: int | None = None,
    tls: TlsFiles | None = None,
) -> AsyncIterator[tuple[Membership, int]]:
    placements = place(SHAPE, [NodeDevices(0, "head", "cpu", num_devices)])
    table = Membership(SHAPE, placements, plan, "cpu", nodes_planned=num_devices is not None)
    server = control_server(ControlService(table, tls=tls))
    bound = server.bind("127.0.0.1", port, tls=tls)
    await server.start()
    try:
        yield table, bound
    finally:
        await server.stop(grace_seconds=0.0)


@contextlib.asynccontextmanager
async def worker(
    port: int,
    *,
    waits: bool = True,
    tls: TlsFiles | None = None,
    standby: bool = False,
    losses: list[str] | None = None,
) -> AsyncIterator[tuple[StageWorker, asyncio.Task[None]]]:
    """A worker without ranks that has joined: as if they had run in epoch 5 of `PLAN`. `losses`
    gets an entry each time that its place is lost."""
    serving = StageWorker(waits_for_head=waits)
    serving._epoch, serving._plan_fingerprint = 5, PLAN
    request = control_pb2.JoinRequest(
        node="n", address="127.0.0.1:9", pid=1, device="cpu", fingerprint=stated_fingerprint()
    )
    request.standby = standby
    joined: list[control_pb2.JoinResponse] = []
    control = ControlClient("127.0.0.1", port, tls)
    timeout_seconds = None if waits else TIMEOUT_SECONDS
    holding = asyncio.create_task(
        worker_place.hold_place(
            *(control, request, serving, joined.append),
            lambda: None if losses is None else losses.append("lost"),
            timeout_seconds,
        )
    )
    await until(lambda: bool(joined) or holding.done(), "the join")
    try:
        yield serving, holding
    finally:
        holding.cancel()
        await asyncio.wait((holding,))
        await control.close()
    assert len(joined) == 1


async def test_another_head_takes_over_who_waits() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (table, port):
            _, holding = await stack.enter_async_context(worker(port))
            assert table.last_epoch == 0
        # Longer than the worker's patience with a head.
        await asyncio.sleep(1.0)
        assert not holding.done()
        async with head(port) as (table, _):
            await until(lambda: bool(table.members), "the worker")
            assert table.last_epoch == 5
            (member,) = table.members
            # It stays, under its new name.
            heard_at = member.heard_at
            await until(lambda: member.heard_at > heard_at, "a heartbeat")


async def test_another_head_is_known_at_once() -> None:
    """It is there before the worker has missed the old one."""
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (_, port):
            _, holding = await stack.enter_async_context(worker(port))
        async with head(port) as (table, _):
            await until(lambda: bool(table.members), "the worker")
            assert not holding.done()


async def test_without_waiting_a_head_that_is_gone_ends_the_worker() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (_, port):
            _, holding = await stack.enter_async_context(worker(port, waits=False))
        with pytest.raises(HeadLost, match="has not answered"):
            await asyncio.wait_for(holding, TIMEOUT_SECONDS)


async def test_without_waiting_another_head_ends_the_worker() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (_, port):
            _, holding = await stack.enter_async_context(worker(port, waits=False))
        async with head(port) as (table, _):
            with pytest.raises(HeadLost, match="another head answers"):
                await asyncio.wait_for(holding, TIMEOUT_SECONDS)
            assert not table.members


async def test_a_head_with_another_plan_refuses_the_worker() -> None:
    """By what its ranks hold: its own versions would do."""
    other = stated_fingerprint((2, 3), tp_size=1, pp_size=2, dtype="float32")
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (_, port):
            _, holding = await stack.enter_async_context(worker(port))
        async with head(port, plan=other) as (table, _):
            await asyncio.wait((holding,), timeout=TIMEOUT_SECONDS)
            error = holding.exception()
            assert error is not None
            refusal = failure_of(error)
            assert isinstance(refusal, FingerprintMismatch)
            assert "pp_layer_partition differs: the head has" in refusal.message
            assert not table.members


async def test_ranks_keep_their_devices_where_the_next_head_plans_others() -> None:
    """A device follows its process: who is started anew gets what is left."""
    async with contextlib.AsyncExitStack() as stack:
        request = control_pb2.JoinRequest(
            node="n",
            address="127.0.0.1:8",
            pid=2,
            device="cpu",
            fingerprint=stated_fingerprint(),
            wanted=topology_pb2.Placement(pp_rank=1),
        )
        async with head() as (table, port):
            table.join(request, asyncio.get_running_loop().time())
            _, holding = await stack.enter_async_context(worker(port))
        # Stage 0 is planned on device 0, and the worker's rank runs on 1.
        async with head(port, num_devices=2) as (table, _):
            await until(lambda: bool(table.members) or holding.done(), "the worker")
            table.join(request, asyncio.get_running_loop().time())
            assert [member.device_indices for member in table.members] == [(1,), (0,)]
            assert not holding.done()


async def test_what_is_in_the_way_for_a_while_ends_nobody() -> None:
    """Something that is no head answers at the address."""
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (_, port):
            _, holding = await stack.enter_async_context(worker(port))
        other = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        other.add_insecure_port(f"127.0.0.1:{port}")
        await other.start()
        await asyncio.sleep(1.0)
        assert not holding.done()
        await other.stop(grace=0)
        async with head(port) as (table, _):
            await until(lambda: bool(table.members), "the worker")


@pytest.mark.parametrize("renewed_early", [True, False])
async def test_a_worker_joins_again_with_a_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renewed_early: bool
) -> None:
    """What it started with is no longer taken: the next head is of a new CA."""
    monkeypatch.setattr(control_client, "RECONNECT_SECONDS", 0.3)
    old, new = Pki(tmp_path / "old"), Pki(tmp_path / "new")
    files = old.files(Role.STAGE_WORKER)

    def renew() -> None:
        for path in (files.ca, files.certificate, files.private_key):
            shutil.copy(new.tls_dir / path.name, path)

    head_files = new.files(Role.GATEWAY)
    async with contextlib.AsyncExitStack() as stack:
        async with head(tls=old.files(Role.GATEWAY)) as (_, port):
            _, holding = await stack.enter_async_context(worker(port, tls=files))
            if renewed_early:
                renew()
        if not renewed_early:
            await asyncio.sleep(1.0)  # It asks in vain already.
            renew()
        async with head(port, tls=head_files) as (table, _):
            await until(lambda: bool(table.members), "the worker")
            assert not holding.done()


@contextlib.asynccontextmanager
async def asking(port: int) -> AsyncIterator[ControlClient]:
    control = ControlClient("127.0.0.1", port)
    try:
        yield control
    finally:
        await control.close()


async def test_where_nobody_answers_at_first_the_head_is_lost() -> None:
    """Of a worker that is started again after its head has gone, too: its node ends with it."""
    async with head() as (_, port):
        pass
    async with asking(port) as control:
        with pytest.raises(HeadLost, match=f"no head answers at 127.0.0.1:{port}"):
            await control.join(control_pb2.JoinRequest(), timeout_seconds=0.1)


class GoingDown(control_pb2_grpc.ControlServiceServicer):
    """A head whose calls end as a server's do that is on its way out."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code
        self.asked = 0

    async def Join(
        self, request: control_pb2.JoinRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.JoinResponse:
        self.asked += 1
        await context.abort(self.code, "over")
        raise AssertionError("abort raises")


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        (grpc.StatusCode.CANCELLED, False),
        (grpc.StatusCode.UNKNOWN, False),
        (grpc.StatusCode.INTERNAL, False),
        (grpc.StatusCode.PERMISSION_DENIED, True),
        (grpc.StatusCode.UNAUTHENTICATED, True),
    ],
)
async def test_only_a_refusal_ends_the_waiting(code: grpc.StatusCode, ends: bool) -> None:
    going = GoingDown(code)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_ControlServiceServicer_to_server(going, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asking(port) as control:
        waiting = asyncio.create_task(control.join_again(control_pb2.JoinRequest()))
        await until(lambda: going.asked > 1 or waiting.done(), "another try")
        assert waiting.done() is ends
        waiting.cancel()
        await asyncio.wait((waiting,))
        if ends:
            assert isinstance(waiting.exception(), NotAuthenticated | NotPermitted)
    await server.stop(grace=0)


class Listener:
    """Hears who is lost."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []

    def on_member_lost(self, member: Member, why: str) -> None:
        self.lost.append((member.pid, why))

    def on_stage_error(self, member: Member, error: step_pb2.StageError) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("has_beaten", [True, False])
async def test_who_makes_way_is_told_as_lost(has_beaten: bool) -> None:
    """A worker that joins anew has left its epoch; one that has not heard of its join has none."""
    placements = place(SHAPE, [NodeDevices(0, "head", "cpu", None)])
    table = Membership(SHAPE, placements, PLAN, "cpu", nodes_planned=False)
    service = ControlService(table)
    server = control_server(service)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    listener = Listener()
    watching = asyncio.create_task(service.watch(listener))
    request = control_pb2.JoinRequest(
        node="n", address="127.0.0.1:9", pid=1, device="cpu", fingerprint=stated_fingerprint()
    )
    async with create_channel(f"127.0.0.1:{port}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        joined = await stub.Join(request, timeout=TIMEOUT_SECONDS)
        if has_beaten:
            beat = control_pb2.HeartbeatRequest(worker_id=joined.worker_id)
            await stub.Heartbeat(beat, timeout=TIMEOUT_SECONDS)
        await stub.Join(request, timeout=TIMEOUT_SECONDS)
        assert [pid for pid, _ in listener.lost] == [1] * has_beaten
        # Silent, and another wants its place.
        table.members[0].heard_at -= membership.MEMBER_TIMEOUT_SECONDS + 1
        listener.lost.clear()
        request.pid, request.address = 2, "127.0.0.1:8"
        request.wanted.CopyFrom(topology_pb2.Placement(pp_rank=0))
        await stub.Join(request, timeout=TIMEOUT_SECONDS)
        assert (1, True) in [(pid, "taken by 127.0.0.1:8" in why) for pid, why in listener.lost]
    watching.cancel()
    await server.stop(grace_seconds=0.0)


async def test_a_mesh_does_not_start_with_a_worker_that_is_silent() -> None:
    placements = place(SHAPE, [NodeDevices(0, "head", "cpu", None)])
    table = Membership(SHAPE, placements, PLAN, "cpu", nodes_planned=False)
    service = ControlService(table)
    now = asyncio.get_running_loop().time()
    for pid, joined_at in ((1, now - membership.MEMBER_TIMEOUT_SECONDS - 1), (2, now)):
        request = control_pb2.JoinRequest(
            address=f"127.0.0.1:{pid}", pid=pid, device="cpu", fingerprint=stated_fingerprint()
        )
        table.join(request, joined_at)
    with pytest.raises(StageFailed, match="missing stage 0; joined"):
        await service.complete(0.05)
    table.forgive(now)
    await service.complete(0.05)


async def test_a_spare_is_a_spare_of_the_next_head() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (table, port):
            serving, _ = await stack.enter_async_context(worker(port, standby=True))
            assert (len(table.members), len(table.spares)) == (0, 1)
        async with head(port) as (table, _):
            await until(lambda: bool(table.spares), "the spare")
            assert not table.members
            assert serving.standing.is_spare


async def test_a_spare_that_has_taken_a_place_over_holds_it_under_the_next_head() -> None:
    """And whoever had it before is a spare there."""
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (_, port):
            serving, _ = await stack.enter_async_context(worker(port, standby=True))
            own = topology_pb2.Placement(
                pp_rank=1, tp_ranks=[0], device_indices=[0], layer_start=3, layer_end=5
            )
            serving.standing.take(5, own, 1)
        async with head(port) as (table, _):
            await until(lambda: bool(table.members), "the worker")
            (member,) = table.members
            assert (member.placement.pp_rank, member.device_indices) == (1, (0,))
            again = control_pb2.JoinRequest(
                address="127.0.0.1:8", pid=2, device="cpu", fingerprint=stated_fingerprint()
            )
            again.wanted.pp_rank = 1
            now = asyncio.get_running_loop().time()
            assert table.join(again, now).standby


async def test_whoever_hears_that_its_place_is_taken_over_is_told_once() -> None:
    losses: list[str] = []
    async with head() as (table, port), worker(port, losses=losses) as (serving, _):
        now = asyncio.get_running_loop().time()
        # One for the stage that nobody holds, too.
        for pid in (2, 3):
            request = control_pb2.JoinRequest(
                address=f"127.0.0.1:{pid}",
                pid=pid,
                device="cpu",
                fingerprint=stated_fingerprint(),
                standby=True,
            )
            beat = control_pb2.HeartbeatRequest(worker_id=table.join(request, now).worker_id)
            beat.status.state = stage_worker_pb2.COMPONENT_STATE_STANDBY
            beat.status.ranks.add(started=True)
            table.heartbeat(beat, now)
        old = table.members[0].worker_id
        table.take_over(0, 7, now, {old: Readiness.STARTING})
        await until(lambda: serving.standing.is_spare, "the loss")
        heard_at = table.spares[0].heard_at
        await until(lambda: table.spares[0].heard_at > heard_at + 0.1, "more heartbeats")
        assert losses == ["lost"]
        assert [spare.worker_id for spare in table.spares] == [old]
