"""What a replica does between a failure and its next epoch, over stages that are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import pytest

from gateway import replica as replica_module
from gateway.pipeline.mesh_pipeline import STEP_STUCK, WORKER_LOST
from gateway.pipeline.stuck_step import HeldStep
from gateway.recovery import RecoveryLimits
from gateway.replica import Replica, ReplicaHooks, ReplicaState
from gateway.standby import Standby
from services.control.member import MISSED_SECONDS
from services.control.membership import MEMBER_TIMEOUT_SECONDS, Membership
from services.control.service import ControlService
from services.errors import ModelError, StageFailed, StagemeshError
from services.topology.facts import MeshShape
from services.topology.fingerprint import digest
from services.topology.placement import NodeDevices, place
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2

SHAPE = MeshShape(dp_size=1, tp_size=1, pp_size=2, pp_layer_partition=(2, 2))
FINGERPRINT = topology_pb2.Fingerprint(digest=digest(()))
NUM_BLOCKS = 4
STUCK = StageFailed("stage 1 holds step 7")
HELD_SECONDS = 3.2
LIMIT_SECONDS = 0.2
WAIT_SECONDS = 10.0


@dataclass
class Script:
    """What the stages answer, and what they were told."""

    resets: list[tuple[int, int, bool]] = field(default_factory=list)
    """(epoch, stage, whether its ranks are replaced)."""
    closed: list[int] = field(default_factory=list)
    """Stages whose channels were closed."""
    on_reset: Callable[[int, int], None] = lambda epoch, pp_rank: None
    """Hears (epoch, stage), and raises where that fails; so does `on_load`."""
    on_load: Callable[[int], None] = lambda pp_rank: None
    hanging: set[str] = field(default_factory=set)
    """Workers, by address, whose ranks leave their groups only by being replaced."""
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when they leave all the same."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when such ranks are told to leave."""

    def replaced(self, epoch: int) -> set[int]:
        """Stages whose ranks were replaced for an epoch."""
        return {pp_rank for at, pp_rank, replace in self.resets if at == epoch and replace}


class ScriptedClient:
    """A stage worker's client."""

    def __init__(self, script: Script, address: str, pp_rank: int) -> None:
        self.address = address
        self.pp_rank = pp_rank
        self._script = script

    async def reset_ranks(self, epoch: int, placement: object, *, replace: bool = False) -> None:
        self._script.resets.append((epoch, self.pp_rank, replace))
        self._script.on_reset(epoch, self.pp_rank)
        if self.address in self._script.hanging and not replace:
            self._script.told.set()
            await self._script.freed.wait()
        self._script.hanging.discard(self.address)

    async def open_store(self, epoch: int) -> str:
        return "127.0.0.1:9"

    async def form_group(self, epoch: int, store_address: str, topology: object) -> None:
        """Always succeeds."""

    async def load(
        self, plan: stage_worker_pb2.StagePlan, on_progress: object
    ) -> list[stage_worker_pb2.RankReport]:
        self._script.on_load(self.pp_rank)
        return [stage_worker_pb2.RankReport(num_blocks=NUM_BLOCKS, possible_blocks=NUM_BLOCKS)]

    async def status(self) -> stage_worker_pb2.StatusResponse:
        return stage_worker_pb2.StatusResponse()

    def execute(self, requests: AsyncIterator[bytes]) -> ScriptedClient:
        return self

    async def __aiter__(self) -> AsyncIterator[stage_worker_pb2.ExecuteResponse]:
        await asyncio.Event().wait()
        yield stage_worker_pb2.ExecuteResponse()

    def cancel(self) -> None:
        """Nothing to end."""

    async def close(self) -> None:
        self._script.closed.append(self.pp_rank)


class ScriptedEngine:
    """Runs until it is told that its pipeline has failed."""

    error: StagemeshError | None = None

    def __init__(self) -> None:
        self.failures = asyncio.Queue[StageFailed](1)
        self.resumed = asyncio.Event()

    async def run(self) -> StageFailed:
        return await self.failures.get()

    def suspend(self, failure: StagemeshError, max_attempts: int) -> None:
        self.resumed.clear()

    def resume(self, pipeline: object) -> int:
        self.resumed.set()
        return 0

    def fail(self, error: StagemeshError) -> None:
        """Nobody waits."""


class Rig:
    """A replica of two stages that serves in epoch 1."""

    def __init__(self, timeout_seconds: float) -> None:
        self.script = Script()
        self.engine = ScriptedEngine()
        placements = place(SHAPE, [NodeDevices(0, "head", "cpu", 2)])
        self.membership = Membership(SHAPE, placements, FINGERPRINT, "cpu", nodes_planned=True)
        self.control = ControlService(self.membership)
        plan = SimpleNamespace(
            shape=SHAPE,
            stage_plan=stage_worker_pb2.StagePlan(),
            blocks_per_sequence=1,
            wanted_blocks=NUM_BLOCKS,
        )
        self.taken_over: list[int] = []
        """Replicas, once for each takeover."""
        self.standby = Standby(
            self.control, plan.stage_plan, (), self.taken_over.append, lambda: True
        )
        hooks = ReplicaHooks(
            lambda pipeline, num_blocks: self.engine,  # type: ignore[arg-type, return-value]
            count(1),
            lambda pp_rank, result: None,
            lambda seconds: None,
            lambda reason, seconds, tokens: None,
            self.standby,
        )
        limits = RecoveryLimits(3, timeout_seconds)
        self.replica = Replica(plan, 0, self.control, hooks, limits)  # type: ignore[arg-type]

    def join(self, pp_rank: int, port: int) -> str:
        request = control_pb2.JoinRequest(
            address=f"127.0.0.1:{port}",
            pid=port,
            device="cpu",
            num_devices=2,
            fingerprint=FINGERPRINT,
        )
        request.wanted.pp_rank = pp_rank
        return self.membership.join(request, asyncio.get_running_loop().time()).worker_id

    def lose(self, pp_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The worker of a stage counts as lost while that stage holds a step."""
        assert self.replica.pipeline is not None
        held = HeldStep(pp_rank, asyncio.get_running_loop().time() - HELD_SECONDS, LIMIT_SECONDS)
        monkeypatch.setattr(self.replica.pipeline, "held_step", lambda: held)
        self.replica.pipeline.fail(STUCK, WORKER_LOST)
        self.engine.failures.put_nowait(STUCK)

    def get_stuck(self) -> None:
        """Stage 1 holds a step that does not end."""
        assert self.replica.pipeline is not None
        since = asyncio.get_running_loop().time() - HELD_SECONDS
        self.replica.pipeline.stuck_step = HeldStep(1, since, LIMIT_SECONDS)
        self.replica.pipeline.fail(STUCK, STEP_STUCK)
        self.engine.failures.put_nowait(STUCK)

    async def until_up(self) -> None:
        await asyncio.wait_for(self.engine.resumed.wait(), WAIT_SECONDS)


@asynccontextmanager
async def rig(
    monkeypatch: pytest.MonkeyPatch, timeout_seconds: float = WAIT_SECONDS
) -> AsyncIterator[tuple[Rig, asyncio.Task[None]]]:
    made = Rig(timeout_seconds)

    def client(channel: object, address: str, pp_rank: int) -> ScriptedClient:
        return ScriptedClient(made.script, address, pp_rank)

    monkeypatch.setattr(replica_module, "StageClient", client)
    monkeypatch.setattr(made.control, "connect", lambda address: None)
    for pp_rank in range(SHAPE.pp_size):
        made.join(pp_rank, pp_rank + 1)
    await made.replica.form_groups()
    await made.replica.load()
    running = asyncio.create_task(made.replica.run())
    try:
        yield made, running
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_stuck_stage_is_replaced_until_that_has_succeeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only in the first attempt, which may fail for another stage's reason."""
    async with rig(monkeypatch) as (made, _):

        def refuse(epoch: int, pp_rank: int) -> None:
            if (epoch, pp_rank) == (2, 0):
                raise StageFailed("stage 0 is busy")

        made.script.on_reset = refuse
        made.get_stuck()
        await made.until_up()
        assert [made.script.replaced(epoch) for epoch in (1, 2, 3)] == [set(), {1}, {1}]
        made.engine.resumed.clear()
        made.engine.failures.put_nowait(StageFailed("stage 0: a rank died"))
        await made.until_up()
        assert made.replica.epoch == 4
        assert made.script.replaced(4) == set()


async def test_a_stage_that_was_cut_off_keeps_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked stuck, and then nothing was heard of it: nothing is known of its ranks."""
    async with rig(monkeypatch) as (made, _):
        member = made.membership.members[1]
        member.heard_at -= 2 * MEMBER_TIMEOUT_SECONDS
        made.get_stuck()
        while "waiting for the worker of stage 1" not in made.replica.doing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        beat = control_pb2.HeartbeatRequest(worker_id=member.worker_id)
        await made.control.Heartbeat(beat, None)  # type: ignore[arg-type]
        await made.until_up()
        assert (made.replica.epoch, made.script.replaced(2)) == (2, set())


@pytest.mark.parametrize("missed_seconds", [1.5, 2.5])
async def test_a_stage_that_is_back_from_a_cut_keeps_its_ranks(
    missed_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is heard of again before the step counts as stuck, which TCP still holds."""
    async with rig(monkeypatch) as (made, _):
        member = made.membership.members[1]
        beat = control_pb2.HeartbeatRequest(worker_id=member.worker_id)
        await made.control.Heartbeat(beat, None)  # type: ignore[arg-type]
        member.heard_at -= missed_seconds
        await made.control.Heartbeat(beat, None)  # type: ignore[arg-type]
        made.get_stuck()
        await made.until_up()
        assert made.script.replaced(2) == ({1} if missed_seconds < MISSED_SECONDS else set())


@pytest.mark.parametrize("missed_seconds", [1.5, 2.5])
async def test_a_stage_whose_worker_does_not_run_keeps_its_ranks(
    missed_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step counts as stuck before the worker counts as silent: which of the two comes first is
    chance."""
    async with rig(monkeypatch) as (made, _):
        member = made.membership.members[1]
        beat = control_pb2.HeartbeatRequest(worker_id=member.worker_id)
        await made.control.Heartbeat(beat, None)  # type: ignore[arg-type]
        member.heard_at -= missed_seconds
        made.get_stuck()
        await made.until_up()
        assert made.script.replaced(2) == ({1} if missed_seconds < MISSED_SECONDS else set())


async def test_no_connection_is_taken_into_another_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a cut it may be dead for as long again as the cut was."""
    async with rig(monkeypatch) as (made, _):
        connected = list[str]()
        monkeypatch.setattr(made.control, "connect", connected.append)
        made.engine.failures.put_nowait(StageFailed("stage 1 is silent"))
        await made.until_up()
        assert connected == ["127.0.0.1:1", "127.0.0.1:2"]
        assert made.script.closed == [0, 1]


async def test_the_ranks_of_another_worker_are_not_those_that_are_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(monkeypatch) as (made, _):
        made.membership.forget(made.membership.members[1].worker_id)
        made.join(1, port=9)
        made.get_stuck()
        await made.until_up()
        assert (made.replica.epoch, made.script.replaced(2)) == (2, set())


async def test_what_a_stage_cannot_load_now_it_may_load_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan was served before: its directory is on a mount that is not back yet."""
    async with rig(monkeypatch) as (made, running):

        def is_missing(pp_rank: int) -> None:
            if made.replica.epoch < 4:
                raise ModelError("stage 1: /models/demo is not there")

        made.script.on_load = is_missing
        made.engine.failures.put_nowait(StageFailed("stage 1: a rank died"))
        await made.until_up()
        await asyncio.sleep(0)
        assert (made.replica.epoch, made.replica.state) == (4, ReplicaState.SERVING)
        assert not running.done()


async def test_after_the_time_limit_both_causes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failure, after which the gateway may be started again; not as a wrong configuration."""
    async with rig(monkeypatch, timeout_seconds=0.3) as (made, running):

        def is_missing(pp_rank: int) -> None:
            raise ModelError("/models/demo is not there")

        made.script.on_load = is_missing
        made.engine.failures.put_nowait(StageFailed("stage 1: a rank died"))
        with pytest.raises(StageFailed) as failure:
            await asyncio.wait_for(running, WAIT_SECONDS)
    message = failure.value.message
    assert message.startswith("stage 1: a rank died; the replica could not be brought up again")
    assert message.endswith("the last attempt failed: /models/demo is not there")
