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
from services.control.membership import Membership
from services.control.server import control_server
from services.control.service import ControlService
from services.errors import FingerprintMismatch, HeadLost, JoinRefused, failure_of
from services.rpc.roles import Role
from services.rpc.tls_files import TlsFiles
from services.topology.facts import MeshShape
from services.topology.fingerprint import stated_fingerprint
from services.topology.placement import NodeDevices, place
from stage_worker import place as worker_place
from stage_worker.service import StageWorker
from stagemesh.v1 import control_pb2, topology_pb2
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
    port: int, *, waits: bool = True, tls: TlsFiles | None = None
) -> AsyncIterator[tuple[StageWorker, asyncio.Task[None]]]:
    """A worker without ranks that has joined: as if they had run in epoch 5 of `PLAN`."""
    serving = StageWorker(waits_for_head=waits)
    serving._epoch, serving._plan_fingerprint = 5, PLAN
    request = control_pb2.JoinRequest(
        node="n", address="127.0.0.1:9", pid=1, device="cpu", fingerprint=stated_fingerprint()
    )
    joined: list[control_pb2.JoinResponse] = []
    control = ControlClient("127.0.0.1", port, tls)
    timeout_seconds = None if waits else TIMEOUT_SECONDS
    holding = asyncio.create_task(
        worker_place.hold_place(control, request, serving, joined.append, timeout_seconds)
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


async def test_a_place_on_other_devices_is_no_place() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with head() as (table, port):
            table.join(
                control_pb2.JoinRequest(
                    node="n",
                    address="127.0.0.1:8",
                    pid=2,
                    device="cpu",
                    fingerprint=stated_fingerprint(),
                    wanted=topology_pb2.Placement(pp_rank=1),
                ),
                asyncio.get_running_loop().time(),
            )
            _, holding = await stack.enter_async_context(worker(port))
        # Where the nodes are planned, stage 0 is on device 0, and the worker's rank runs on 1.
        async with head(port, num_devices=2):
            await asyncio.wait((holding,), timeout=TIMEOUT_SECONDS)
            refusal = failure_of(holding.exception() or AssertionError())
            assert isinstance(refusal, JoinRefused)
            assert "on devices 0) than the one whose weights it holds" in refusal.message
            assert "on devices 1); restart the worker" in refusal.message


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
