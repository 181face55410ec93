"""Ranks that hold a step while their worker was not heard of: they may be well, or really hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.control.member import MEMBER_TIMEOUT_SECONDS, MISSED_SECONDS, Member
from stagemesh.v1 import control_pb2
from tests.unit.gateway_engine.test_lost_places import Spares
from tests.unit.gateway_engine.test_replica_recovery import LIMIT_SECONDS, STUCK, Rig, rig

HOLDER = "127.0.0.1:2"
"""The worker of stage 1."""
MISSING_SECONDS = MISSED_SECONDS + 0.2
FREED_SECONDS = 3.0
"""Far below what a worker gives a rank that computes, also on a busy machine."""


async def beat(made: Rig, member: Member) -> None:
    request = control_pb2.HeartbeatRequest(worker_id=member.worker_id, status=member.status)
    await made.control.Heartbeat(request, None)  # type: ignore[arg-type]


async def late(made: Rig, member: Member) -> None:
    """Its worker misses heartbeats as the step counts as stuck."""
    await beat(made, member)
    member.heard_at -= MISSING_SECONDS
    made.get_stuck()


async def back(made: Rig, member: Member) -> None:
    """It has missed some, and is heard of again."""
    await beat(made, member)
    member.heard_at -= MISSING_SECONDS
    await beat(made, member)
    made.get_stuck()


async def silent_and_back(made: Rig, member: Member) -> None:
    """It counts as silent for a while after that."""
    await beat(made, member)
    member.heard_at -= 2 * MEMBER_TIMEOUT_SECONDS
    made.get_stuck()
    async with asyncio.timeout(FREED_SECONDS):
        while "waiting for the worker of stage 1" not in made.replica.doing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await beat(made, member)


Missing = Callable[[Rig, Member], Awaitable[None]]


@pytest.mark.parametrize("missing", [late, back, silent_and_back])
@pytest.mark.parametrize("hangs", [True, False])
async def test_ranks_are_replaced_only_where_they_still_hold_the_step(
    hangs: bool, missing: Missing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(monkeypatch) as (made, _):
        if hangs:
            made.script.hanging.add(HOLDER)
        (_, member) = made.membership.members
        await missing(made, member)
        async with asyncio.timeout(FREED_SECONDS):
            await made.until_up()
        assert made.script.replaced(2) == set()
        assert made.script.replaced(3) == ({1} if hangs else set())
        assert made.replica.epoch == (3 if hangs else 2)
        # It is over with that recovery.
        made.engine.resumed.clear()
        made.engine.failures.put_nowait(STUCK)
        await made.until_up()
        assert made.script.replaced(made.replica.epoch) == set()


@pytest.mark.parametrize("missing", [late, back])
async def test_a_spare_takes_over_from_ranks_that_still_hold_the_step(
    missing: Missing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        await spares.beat(spares.name)
        telling = asyncio.create_task(made.standby.run())
        made.script.hanging.add(HOLDER)
        (_, member) = made.membership.members
        await missing(made, member)
        async with asyncio.timeout(FREED_SECONDS):
            await made.until_up()
            await asyncio.sleep(0)
        assert spares.holders[1] == spares.name
        assert spares.orders == [(HOLDER, 2, True)]
        assert made.script.replaced(made.replica.epoch) == set()
        telling.cancel()
        await asyncio.wait([telling])


@pytest.mark.parametrize("hangs", [True, False])
async def test_ranks_have_the_limit_from_when_their_worker_is_heard_of(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not run for a part of the first look as well."""
    async with rig(monkeypatch) as (made, _):
        loop = asyncio.get_running_loop()
        (_, member) = made.membership.members
        made.script.hanging.add(HOLDER)
        await late(made, member)
        async with asyncio.timeout(FREED_SECONDS):
            await made.script.told.wait()
            await asyncio.sleep(0.75 * LIMIT_SECONDS)
            await beat(made, member)
            back_at = loop.time()
            if not hangs:
                await asyncio.sleep(0.5 * LIMIT_SECONDS)
                made.script.freed.set()
            await made.until_up()
        if hangs:
            assert loop.time() - back_at >= 0.9 * LIMIT_SECONDS
        assert made.script.replaced(3) == ({1} if hangs else set())


@pytest.mark.parametrize("pp_rank", [0, 1])
async def test_a_worker_may_count_as_lost_before_its_step_counts_as_stuck(
    pp_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chance which comes first. Of a stage whose worker was heard of that says nothing."""
    async with rig(monkeypatch) as (made, _):
        made.script.hanging.add(HOLDER)
        (_, member) = made.membership.members
        await beat(made, member)
        member.heard_at -= 2 * MEMBER_TIMEOUT_SECONDS
        made.lose(pp_rank, monkeypatch)
        async with asyncio.timeout(FREED_SECONDS):
            while "waiting for the worker of stage 1" not in made.replica.doing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await beat(made, member)
            await made.script.told.wait()
        if pp_rank == 0:
            await asyncio.sleep(3 * LIMIT_SECONDS)
            assert made.replica.epoch == 2
            made.script.freed.set()
        await made.until_up()
        assert made.script.replaced(3) == ({1} if pp_rank == 1 else set())
