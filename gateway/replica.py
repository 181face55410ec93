"""One replica of the model: its stages, its pipeline and the engine that drives them.

    start ─> drive ─> a stage fails ─> recover ─┐
               ^                                │
               └────────── a new epoch ─────────┘

A recovery waits until every place is held again, by a spare where there is one, and every
rank is started, forms the groups of a new epoch, and loads what is lost. The engine has kept
every request meanwhile, and computes them again from its token logs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count, pairwise

from gateway.engine.engine import MeshEngine
from gateway.observer import RecoveryObserver, StageObserver, StepObserver
from gateway.pipeline.bring_up import (
    LoadedMesh,
    Stage,
    form_groups,
    load,
    load_again,
    reset_ranks,
)
from gateway.pipeline.mesh_pipeline import OTHER, MeshPipeline
from gateway.pipeline.stage_client import StageClient
from gateway.recovery import RecoveryLimits, Tripwire, pause_seconds
from gateway.standby import Standby
from gateway.stuck_ranks import StuckRanks
from services.control.membership import Member
from services.control.service import ControlService
from services.errors import (
    PipelineUnavailable,
    StageFailed,
    StagemeshError,
    failure_of,
)
from services.mesh_plan import MeshPlan
from stagemesh.v1 import stage_worker_pb2

log = logging.getLogger("stagemesh.gateway")

PROGRESS_STEP_PERCENT = 25


class ReplicaState(str, Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    RECOVERING = "recovering"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReplicaHooks:
    """What a replica needs of the mesh that it is part of."""

    make_engine: Callable[[MeshPipeline, int], MeshEngine]
    """From the first pipeline and the number of KV blocks."""
    epochs: Iterator[int]
    """One counter for the whole mesh."""
    on_stage_step: StageObserver
    on_step: StepObserver
    on_recovered: RecoveryObserver
    standby: Standby


class Replica:
    """Comes up once all its workers have joined; has one engine for its life, and one pipeline
    for each epoch."""

    def __init__(
        self,
        plan: MeshPlan,
        dp_rank: int,
        control: ControlService,
        hooks: ReplicaHooks,
        limits: RecoveryLimits,
    ) -> None:
        self.dp_rank = dp_rank
        self.state = ReplicaState.STARTING
        self.doing = "waiting for stage workers"
        """What it waits for, in words, for `/ready`."""
        self.epoch = 0
        self.pipeline: MeshPipeline | None = None
        self.engine: MeshEngine | None = None
        self._plan = plan
        self._control = control
        self._hooks = hooks
        self._limits = limits
        self._stages: dict[str, Stage] = {}
        """By the name of their worker."""
        self._percent: dict[tuple[int, int], int] = {}
        self._num_blocks = 0
        self._tripwire = Tripwire()
        self._stuck = StuckRanks(control.membership)
        self._failed_workers: set[str] = set()
        """Who could not be brought up, in this recovery: others may have their places."""
        self._last_attempt: StagemeshError | None = None
        """Why it has failed, in this recovery."""
        self._retired = False

    # Coming up.

    async def form_groups(self) -> None:
        """Starts a new epoch: every rank is started, and in its groups. Raises `StageFailed`."""
        await self._renew_stages()
        self.epoch = next(self._hooks.epochs)
        self._control.membership.begin(self.dp_rank, self.epoch)
        stages = tuple(self._stages.values())
        self.doing = "ranks are starting"
        self._stuck.doubt_unless(self._stages.keys())
        stuck = tuple(self._stages[worker_id] for worker_id in self._stuck.known)
        await reset_ranks(stages, self.epoch, stuck, self._has_failed, self._until_freed)
        # Kept over an attempt that fails before: they may still hold the step.
        self._stuck.clear()
        self.doing = "stages are forming their groups"
        await form_groups(stages, self._plan.shape, self.epoch)
        await self._hear_status()

    async def load(self) -> LoadedMesh:
        """Weights and KV cache, for the first time. Raises `StageFailed` or `ConfigError`."""
        self.doing = "stages are loading weights"
        loaded = await load(
            tuple(self._stages.values()),
            self._plan.stage_plan,
            needed_blocks=self._plan.blocks_per_sequence,
            wanted_blocks=self._plan.wanted_blocks,
            on_progress=self._report_progress,
        )
        self._num_blocks = loaded.num_blocks
        self.pipeline = self._new_pipeline()
        self.engine = self._hooks.make_engine(self.pipeline, loaded.num_blocks)
        await self._hear_status()
        self.doing = "the engine is starting"
        return loaded

    async def _load_again(self) -> None:
        self._percent.clear()
        self.doing = "stages are loading weights"
        await load_again(
            tuple(self._stages.values()),
            self._plan.stage_plan,
            self._num_blocks,
            self._report_progress,
            self._has_failed,
        )
        await self._hear_status()

    def _new_pipeline(self) -> MeshPipeline:
        return MeshPipeline(
            tuple(self._stages.values()),
            self.epoch,
            self._hooks.on_stage_step,
            self._hooks.on_step,
        )

    @property
    def _members(self) -> list[Member]:
        members = self._control.membership.members
        return [member for member in members if member.placement.dp_rank == self.dp_rank]

    async def _renew_stages(self) -> None:
        """New channels, also to workers that are still there: over a cut the old connection may be
        dead for as long again."""
        old = self._stages.values()
        self._stages = {member.worker_id: self._stage_of(member) for member in self._members}
        for stage in old:
            await stage.client.close()

    def _stage_of(self, member: Member) -> Stage:
        channel = self._control.connect(member.address)
        pp_rank = member.placement.pp_rank
        return Stage(StageClient(channel, member.address, pp_rank), member.placement)

    async def _hear_status(self) -> None:
        """The last heartbeat may be older than what was just done."""
        for member in self._members:
            if (stage := self._stages.get(member.worker_id)) is not None:
                member.status.CopyFrom(await stage.client.status())

    # Serving.

    async def run(self) -> None:
        """Drives the replica, over failures, until one is for good: that is raised. Cancel it to
        stop."""
        if self.engine is None:
            raise StageFailed("a replica was driven before it was brought up")
        failure: StagemeshError = PipelineUnavailable("the engine has stopped")
        try:
            while True:
                failure = await self._drive(self.engine)
                if self._retired:
                    return
                if self.engine.error is not None or not self._limits.recovers:
                    raise failure
                failure = await self._recover(self.engine, failure)
        except StagemeshError as error:
            failure = error
            raise
        finally:
            self.state = ReplicaState.FAILED
            self.engine.fail(failure)

    async def _drive(self, engine: MeshEngine) -> StagemeshError:
        if self.pipeline is None:
            raise StageFailed("a replica was driven without a pipeline")
        self.state, self.doing = ReplicaState.SERVING, ""
        async with asyncio.TaskGroup() as tasks:
            streams = tasks.create_task(self.pipeline.run())
            failure = await engine.run()
            streams.cancel()
        return failure

    # Recovering.

    async def _recover(self, engine: MeshEngine, failure: StagemeshError) -> StagemeshError:
        """Brings the replica up again in a new epoch. Raises `StageFailed` where it cannot: with
        the first cause, and why the last attempt has failed."""
        self.state, self.doing = ReplicaState.RECOVERING, "the stages are being looked at"
        started_at = time.monotonic()
        reason = OTHER
        if self.pipeline is not None:
            reason = self.pipeline.failed_by or OTHER
            self._stuck.begin(
                self.pipeline.stuck_step, self.pipeline.held_step(), self._of_this_epoch()
            )
        log.error("replica %d failed in epoch %d: %s", self.dp_rank, self.epoch, failure.message)
        engine.suspend(failure, self._limits.max_attempts)
        self._last_attempt = None
        self._failed_workers.clear()
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                await self._attempt_until_up()
        except TimeoutError:
            raise StageFailed(
                f"{failure.message}; the replica could not be brought up again within "
                f"--recovery-timeout-seconds {self._limits.timeout_seconds:.0f}: {self.doing}"
                f"{self._why_not()}"
            ) from None
        self.pipeline = self._new_pipeline()
        replayed = engine.resume(self.pipeline)
        seconds = time.monotonic() - started_at
        self._hooks.on_recovered(reason, seconds, replayed)
        log.info(
            "replica %d goes on in epoch %d after %.1f s; %d tokens are computed again",
            self.dp_rank,
            self.epoch,
            seconds,
            replayed,
        )
        return PipelineUnavailable("the engine has stopped")

    def _of_this_epoch(self) -> list[Member]:
        return [member for member in self._members if member.worker_id in self._stages]

    async def _until_freed(self, stage: Stage, reset: Coroutine[None, None, None]) -> None:
        worker_id = next(name for name, own in self._stages.items() if own is stage)
        await self._stuck.until_freed(worker_id, reset)

    def _why_not(self) -> str:
        last = self._last_attempt
        return "" if last is None else f"; the last attempt failed: {last.message}"

    async def _attempt_until_up(self) -> None:
        """A `ConfigError` ends it no more than others: this plan has been served, so what is wrong
        may pass, such as a mount that is not there yet."""
        for attempt in count(1):
            # In a task of its own: a task group that fails while it is waited for leaves its task
            # counted as being cancelled (Python 3.11), and the time limit would not be one.
            async with asyncio.TaskGroup() as tasks:
                attempted = tasks.create_task(self._attempt())
            failure = attempted.result()
            if failure is None:
                return
            self._last_attempt = failure
            pause = pause_seconds(attempt)
            log.warning(
                "replica %d, attempt %d: %s; again in %.1f s",
                self.dp_rank,
                attempt,
                failure.message,
                pause,
            )
            await asyncio.sleep(pause)

    async def _attempt(self) -> StagemeshError | None:
        """Returns why it has not succeeded; None where it has."""
        failure: StagemeshError | None = None
        try:
            await self._tripwire.run(self._bring_up_again())
        except* StagemeshError as errors:
            failure = failure_of(errors)
        return failure

    async def _bring_up_again(self) -> None:
        times = [time.monotonic()]
        await self._hooks.standby.present(
            self.dp_rank, self.epoch, self._stuck.known, self._failed_workers, self._is_waiting
        )
        # Whoever has lost its place is another's to look after.
        self._stuck.have_lost_places({s.worker_id for s in self._control.membership.spares})
        times.append(time.monotonic())
        await self.form_groups()
        times.append(time.monotonic())
        await self._load_again()
        times.append(time.monotonic())
        waited, formed, loaded = (b - a for a, b in pairwise(times))
        log.info(
            "replica %d is up in epoch %d: workers present after %.1f s, ranks started and groups "
            "formed after %.1f s, weights loaded after %.1f s",
            self.dp_rank,
            self.epoch,
            waited,
            formed,
            loaded,
        )

    def _is_waiting(self, what: str) -> None:
        """For workers that are not heard of."""
        self.doing = what
        membership = self._control.membership
        silent = membership.silent(asyncio.get_running_loop().time())
        self._stuck.doubt_unless({m.worker_id for m in membership.members if m not in silent})

    def _has_failed(self, stage: Stage) -> None:
        """A stage's ranks could not be started, or it could not load. What its ranks say of
        themselves does not tell: those of its neighbours have failed with it, and are well."""
        self._failed_workers |= {name for name, own in self._stages.items() if own is stage}

    def stage_failed(self, failure: StageFailed, reason: str) -> None:
        """A failure that is seen from outside: of a worker, or in a heartbeat."""
        if self.state is ReplicaState.SERVING and self.pipeline is not None:
            self.pipeline.fail(failure, reason)
        else:
            self._tripwire.trip(failure)

    # Going down.

    async def dismiss_workers(self) -> None:
        """Tells every worker to leave; their end is no failure. Also those that hold a place since
        the groups were last formed: the stages of that time are not the members of now."""
        self._retired = True
        async with asyncio.TaskGroup() as tasks:
            for member in self._members:
                tasks.create_task(self._dismiss(member))

    async def _dismiss(self, member: Member) -> None:
        # Over a channel of its own: a recovery that still runs closes those of its stages.
        client = self._stage_of(member).client
        try:
            await client.drain()
        finally:
            await client.close()

    async def close(self) -> None:
        """Closes the channels to the workers. No call may follow."""
        for stage in self._stages.values():
            await stage.client.close()

    def _report_progress(self, pp_rank: int, progress: stage_worker_pb2.LoadProgress) -> None:
        percent = 100 * progress.loaded_bytes // max(1, progress.total_bytes)
        known = self._percent.get((pp_rank, progress.tp_rank), -PROGRESS_STEP_PERCENT)
        if percent - known >= PROGRESS_STEP_PERCENT:
            self._percent[pp_rank, progress.tp_rank] = percent
            self.doing = f"stage {pp_rank} has loaded {percent} % of its weights"
            log.info("stage %d rank %d: %d %% loaded", pp_rank, progress.tp_rank, percent)
