"""What the gateway does with spares when a stage is lost, over workers that are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway import standby as standby_module
from gateway.replica import ReplicaState
from gateway.standby import Standby
from services.control.member import MEMBER_TIMEOUT_SECONDS, Member
from services.errors import ModelError, StageFailed
from services.topology.wire import placement_to_proto
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2
from tests.unit.gateway_engine.test_replica_recovery import FINGERPRINT, WAIT_SECONDS, Rig, rig

STANDBY = stage_worker_pb2.COMPONENT_STATE_STANDBY
DIED = StageFailed("stage 1: a rank died")


class Told:
    """A worker's client as `Standby` uses it."""

    def __init__(self, spares: Spares, address: str) -> None:
        self._spares, self._address = spares, address
        self._held: stage_worker_pb2.StatusResponse | None = None

    async def stand_by(self, epoch: int, *, replace: bool) -> None:
        self._spares.orders.append((self._address, epoch, replace))

    async def load(
        self, plan: stage_worker_pb2.StagePlan, on_progress: object, *, in_advance: bool
    ) -> None:
        assert in_advance
        self._spares.loads.append((self._address, plan.placement.pp_rank))
        self._spares.has_been_told.set()
        await self._spares.on_load(self._address)
        self._held = ready(plan.placement)

    async def status(self) -> stage_worker_pb2.StatusResponse:
        assert self._held is not None
        return self._held

    async def close(self) -> None:
        """Nothing to close."""


async def at_once(address: str) -> None:
    """A load takes no time."""


def ready(
    holds: topology_pb2.Placement | None = None,
) -> stage_worker_pb2.StatusResponse:
    """What a spare says of itself."""
    ranks = [stage_worker_pb2.RankStatus(started=True)]
    return stage_worker_pb2.StatusResponse(state=STANDBY, ranks=ranks, holds=holds)


class Spares:
    """A rig with one spare."""

    def __init__(self, made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = made
        self.orders: list[tuple[str, int, bool]] = []
        self.loads: list[tuple[str, int]] = []
        """(address, stage) of each load in advance."""
        self.has_been_told = asyncio.Event()
        self.on_load: Callable[[str], Awaitable[None]] = at_once
        """Hears the address of who loads in advance; it takes as long as this."""
        self.answers: dict[str, stage_worker_pb2.StatusResponse | None] = {}
        monkeypatch.setattr(made.control, "status", self._status)
        monkeypatch.setattr(
            standby_module, "StageClient", lambda channel, address, _: Told(self, address)
        )
        self.tasks: list[asyncio.Task[None]] = []
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
        request = control_pb2.HeartbeatRequest(worker_id=worker_id, status=ready())
        return await self.made.control.Heartbeat(request, None)  # type: ignore[arg-type]

    async def _status(self, member: Member) -> stage_worker_pb2.StatusResponse | None:
        holding = stage_worker_pb2.StatusResponse(
            ranks=[stage_worker_pb2.RankStatus(started=True)],
            holds=placement_to_proto(member.placement),
        )
        return self.answers.get(member.worker_id, holding)

    def hold(self, *stages: int) -> Callable[[bool], None]:
        """Weights of stages are held in advance. Returns what says whether all replicas serve."""
        serving = [True]
        self.tasks.append(
            asyncio.create_task(
                Standby(
                    self.made.control,
                    stage_worker_pb2.StagePlan(),
                    [self.made.membership.members[stage].placement for stage in stages],
                    self.made.taken_over.append,
                    lambda: serving[-1],
                ).run()
            )
        )
        return serving.append

    async def loads_of(self, count: int) -> list[tuple[str, int]]:
        """As soon as there are so many."""
        async with asyncio.timeout(WAIT_SECONDS / 2):
            while len(self.loads) < count:
                self.has_been_told.clear()
                await self.has_been_told.wait()
        return self.loads

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

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


async def test_nobody_says_of_a_silent_worker_that_its_ranks_hold_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped: its rank may have done the step, or was never given it. When it wakes up it
    keeps the rank."""
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        await spares.beat(spares.name)
        told = made.control.status

        async def status(member: Member) -> stage_worker_pb2.StatusResponse | None:
            if member.placement.pp_rank == 0:
                return await told(member)
            member.heard_at -= 2 * MEMBER_TIMEOUT_SECONDS
            return None

        monkeypatch.setattr(made.control, "status", status)
        telling = asyncio.create_task(made.standby.run())
        made.get_stuck()
        await made.until_up()
        await asyncio.sleep(0)
        assert spares.holders[1] == spares.name
        assert spares.orders == [("127.0.0.1:2", 1, False)]
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


async def test_a_spare_that_cannot_be_brought_up_loses_the_place_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is not on its node, or its rank does not start. The old worker is as far as that:
    started, and without weights."""
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        await spares.beat(spares.name)
        first, second = spares.holders
        spares.answers |= {second: RESTARTING, spares.name: ready()}

        def is_missing(pp_rank: int) -> None:
            if pp_rank == 1 and spares.holders[1] == spares.name:
                raise ModelError("stage 1: /models/demo is not there")

        made.script.on_load = is_missing
        made.engine.failures.put_nowait(DIED)
        async with asyncio.timeout(WAIT_SECONDS):
            while spares.holders != [first, spares.name]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        spares.answers[second] = ready()
        await spares.beat(second)
        await made.until_up()
        assert spares.holders == [first, second]
        assert made.taken_over == [0, 0]
        # In another recovery what was wrong then may have passed.
        spares.answers[second] = RESTARTING
        await spares.beat(spares.name)
        made.script.on_load = lambda pp_rank: None
        made.engine.resumed.clear()
        made.engine.failures.put_nowait(DIED)
        await made.until_up()
        assert spares.holders == [first, spares.name]
        await spares.beat(second)
        made.engine.resumed.clear()
        made.engine.failures.put_nowait(DIED)
        await made.until_up()
        assert spares.holders == [first, spares.name], "as far as the other: they do not swap"


async def test_a_spare_that_loads_in_advance_takes_nothing_over_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its heartbeats may still say that it is idle."""
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        loading = asyncio.Event()

        async def until_done(address: str) -> None:
            await loading.wait()

        spares.on_load = until_done
        spares.hold(0)
        await spares.beat(spares.name)
        assert await spares.loads_of(1) == [("127.0.0.1:9", 0)]
        await spares.beat(spares.name)
        assert dict(made.standby.states())["loading"] == 1
        first, second = spares.holders
        made.membership.forget(second)
        made.engine.failures.put_nowait(DIED)
        async with asyncio.timeout(WAIT_SECONDS):
            while "waiting for the worker of stage 1" not in made.replica.doing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await spares.beat(spares.name)
        await asyncio.sleep(0.05)
        assert spares.holders == [first]
        loading.set()
        await asyncio.sleep(0.05)
        await spares.beat(spares.name)
        await made.until_up()
        assert spares.holders == [first, spares.name]
        await spares.close()


async def test_nothing_is_loaded_in_advance_while_a_replica_needs_its_spares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        serve = spares.hold(0)
        serve(False)
        await spares.beat(spares.name)
        await asyncio.sleep(0.05)
        assert spares.loads == []
        serve(True)
        await spares.beat(spares.name)
        assert await spares.loads_of(1) == [("127.0.0.1:9", 0)]
        await spares.close()


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_spare_that_cannot_load_keeps_no_other_from_it(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "HOLD_STALL_SECONDS", 0.1)
    async with rig(monkeypatch) as (made, _):
        spares = Spares(made, monkeypatch)
        other = spares.join(port=10)

        async def not_there(address: str) -> None:
            if address == "127.0.0.1:9":
                if hangs:
                    await asyncio.Event().wait()
                raise ModelError("/models/demo is not there")

        spares.on_load = not_there
        for name in (spares.name, other):
            await spares.beat(name)
        spares.hold(0, 1)
        loads = await spares.loads_of(3)
        assert loads == [("127.0.0.1:9", 0), ("127.0.0.1:10", 0), ("127.0.0.1:9", 1)]
        await spares.close()
