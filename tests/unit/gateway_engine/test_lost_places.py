"""What the gateway does with spares when a stage is lost, over workers that are scripted."""

from __future__ import annotations

import asyncio

import pytest

from gateway import standby as standby_module
from gateway.replica import ReplicaState
from services.control.member import MEMBER_TIMEOUT_SECONDS, Member
from services.errors import StageFailed
from services.topology.wire import placement_to_proto
from stagemesh.v1 import control_pb2, stage_worker_pb2
from tests.unit.gateway_engine.test_replica_recovery import FINGERPRINT, WAIT_SECONDS, Rig, rig

STANDBY = stage_worker_pb2.COMPONENT_STATE_STANDBY
DIED = StageFailed("stage 1: a rank died")


class Told:
    """A worker's client as `Standby` uses it."""

    def __init__(self, orders: list[tuple[str, int, bool]], address: str) -> None:
        self._orders, self._address = orders, address

    async def stand_by(self, epoch: int, *, replace: bool) -> None:
        self._orders.append((self._address, epoch, replace))

    async def close(self) -> None:
        """Nothing to close."""


class Spares:
    """A rig with one spare."""

    def __init__(self, made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = made
        self.orders: list[tuple[str, int, bool]] = []
        self.answers: dict[str, stage_worker_pb2.StatusResponse | None] = {}
        monkeypatch.setattr(made.control, "status", self._status)
        monkeypatch.setattr(
            standby_module, "StageClient", lambda channel, address, _: Told(self.orders, address)
        )
        self.name = self.join(port=9)

    def join(self, port: int) -> str:
        request = control_pb2.JoinRequest(
            address=f"127.0.0.1:{port}",
            pid=port,
            device="cpu",
            num_devices=9,
            fingerprint=FINGERPRINT,
            standby=True,
        )
        loop = asyncio.get_running_loop()
        return self.made.membership.join(request, loop.time()).worker_id

    async def beat(self, worker_id: str) -> control_pb2.HeartbeatResponse:
        """It is ready."""
        status = stage_worker_pb2.StatusResponse(
            state=STANDBY, ranks=[stage_worker_pb2.RankStatus(started=True)]
        )
        request = control_pb2.HeartbeatRequest(worker_id=worker_id, status=status)
        return await self.made.control.Heartbeat(request, None)  # type: ignore[arg-type]

    async def _status(self, member: Member) -> stage_worker_pb2.StatusResponse | None:
        holding = stage_worker_pb2.StatusResponse(
            ranks=[stage_worker_pb2.RankStatus(started=True)],
            holds=placement_to_proto(member.placement),
        )
        return self.answers.get(member.worker_id, holding)

    @property
    def holders(self) -> list[str]:
        return [member.worker_id for member in self.made.membership.members]


RESTARTING = stage_worker_pb2.StatusResponse(ranks=[stage_worker_pb2.RankStatus(pid=1)])


async def test_the_spare_takes_over_from_a_worker_that_has_to_start_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other stage, whose ranks hold their weights, keeps its place; the old worker is told."""
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        await spares.beat(spares.name)
        first, second = spares.holders
        spares.answers[second] = RESTARTING
        telling = asyncio.create_task(made.standby.run())
        made.engine.failures.put_nowait(DIED)
        await made.until_up()
        await asyncio.sleep(0)
        assert spares.holders == [first, spares.name]
        assert made.taken_over == [0]
        assert spares.orders == [("127.0.0.1:2", 1, False)]
        assert (await spares.beat(second)).place_lost_epoch == 1
        assert made.replica.epoch == 2
        # It is the spare now, and takes the place back when that is lost again.
        spares.answers[spares.name] = RESTARTING
        made.engine.resumed.clear()
        made.engine.failures.put_nowait(DIED)
        await made.until_up()
        assert spares.holders == [first, second]
        telling.cancel()
        await asyncio.wait([telling])


async def test_the_spare_takes_over_a_step_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old worker replaces its ranks; those of the spare are new and are not replaced."""
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        await spares.beat(spares.name)
        telling = asyncio.create_task(made.standby.run())
        made.get_stuck()
        await made.until_up()
        await asyncio.sleep(0)
        assert spares.holders[1] == spares.name
        assert spares.orders == [("127.0.0.1:2", 1, True)]
        assert made.script.replaced(2) == set()
        telling.cancel()
        await asyncio.wait([telling])


async def test_a_stage_that_does_not_answer_is_left_alone_until_it_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be cut off for a moment, with its weights."""
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        await spares.beat(spares.name)
        holders = spares.holders
        spares.answers[holders[1]] = None
        made.engine.failures.put_nowait(DIED)
        await made.until_up()
        assert spares.holders == holders
        made.membership.members[1].heard_at -= 2 * MEMBER_TIMEOUT_SECONDS
        made.engine.resumed.clear()
        made.engine.failures.put_nowait(DIED)
        await made.until_up()
        assert spares.holders == [holders[0], spares.name]


async def test_a_place_that_is_waited_for_goes_to_a_spare_as_soon_as_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        made.membership.forget(spares.holders[1])
        made.engine.failures.put_nowait(DIED)
        async with asyncio.timeout(WAIT_SECONDS):
            while "waiting for the worker of stage 1" not in made.replica.doing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert made.replica.state is ReplicaState.RECOVERING
        await spares.beat(spares.name)
        await made.until_up()
        assert spares.holders[1] == spares.name


async def test_spares_are_counted_by_state(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        spares.join(port=10)
        await spares.beat(spares.name)
        assert dict(made.standby.states()) == {
            "ready": 1,
            "loading": 0,
            "starting": 1,
            "silent": 0,
        }
        made.membership.spares[0].heard_at -= 2 * MEMBER_TIMEOUT_SECONDS
        assert dict(made.standby.states())["silent"] == 1
