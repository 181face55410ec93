"""The mesh as the gateway sees it: from the first join to the last step.

Front doors hold a `Mesh` from the start and can ask it anything at any time:
until every replica is complete, requests are refused with the reason. From then on
they go to a replica that serves, and into the queue of one that recovers where there
is no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

from gateway.engine.engine import MeshEngine
from gateway.engine.router import ReplicaRouter
from gateway.engine.types import ChoiceDelta, EngineStats, GenerationRequest
from gateway.fit import check_reported_memory
from gateway.mesh_view import MeshView, mesh_view, standby_view
from gateway.observer import MeshObserver
from gateway.pipeline.bring_up import LoadedMesh
from gateway.pipeline.mesh_pipeline import WORKER_LOST, MeshPipeline
from gateway.recovery import RecoveryLimits, epochs_above
from gateway.replica import Replica, ReplicaHooks, ReplicaState
from gateway.standby import Standby
from services.control.membership import Member
from services.control.progress import StageProgress
from services.control.service import ControlService
from services.errors import ECHO_REASON, PipelineUnavailable, StageFailed
from services.mesh_plan import MeshPlan
from services.topology.placement import StagePlacement
from stagemesh.v1 import step_pb2

log = logging.getLogger("stagemesh.gateway")

RETRY_AFTER_SECONDS = 5.0
WAITING = "waiting for stage workers"


class Mesh:
    """All replicas of one model. Implements `gateway.engine.types.Engine`."""

    def __init__(
        self,
        plan: MeshPlan,
        control: ControlService,
        make_engine: Callable[[MeshPipeline, int], MeshEngine],
        observer: MeshObserver,
        join_timeout_seconds: float,
        recovery: RecoveryLimits,
        replica_sequences: int,
        standby_stages: tuple[int, ...] = (),
    ) -> None:
        """`replica_sequences` may run and wait in each replica. `standby_stages` are those
        whose weights spares hold in advance."""
        self._plan = plan
        self._control = control
        self._make_engine = make_engine
        self._observer = observer
        self._join_timeout_seconds = join_timeout_seconds
        self._recovery = recovery
        self._standby = Standby(
            control,
            plan.stage_plan,
            plan.placements_of_stages(standby_stages),
            observer.on_taken_over,
            lambda: all(replica.state is ReplicaState.SERVING for replica in self._replicas),
        )
        epochs = epochs_above(lambda: control.membership.last_epoch)
        self._replicas = [
            self._new_replica(dp_rank, epochs) for dp_rank in range(plan.shape.dp_size)
        ]
        self._router = ReplicaRouter(plan.shape.dp_size, replica_sequences)
        self._why_not_ready = ""
        self._failed: asyncio.Future[StageFailed] = asyncio.get_running_loop().create_future()
        self.ready_event = asyncio.Event()
        """Set when every replica is complete for the first time."""

    def _new_replica(self, dp_rank: int, epochs: Iterator[int]) -> Replica:
        hooks = ReplicaHooks(
            self._make_engine,
            epochs,
            partial(self._observer.on_stage_step, dp_rank),
            partial(self._observer.on_step, dp_rank),
            partial(self._observer.on_recovered, dp_rank),
            self._standby,
        )
        return Replica(self._plan, dp_rank, self._control, hooks, self._recovery)

    @property
    def ready(self) -> bool:
        """Whether a replica takes requests and has stages to run them."""
        return self.ready_event.is_set() and any(engine.ready for engine in self._engines)

    @property
    def why_not_ready(self) -> str:
        """What is missing, for `/ready`."""
        if self._why_not_ready:
            return self._why_not_ready
        if not self.ready_event.is_set():
            missing = self._control.membership.missing()
            if missing:
                return f"waiting for {', '.join(missing)} to join"
            return next((r.doing for r in self._replicas if r.doing), WAITING)
        return "; ".join(f"{r.state.value}: {r.doing}" for r in self._replicas if r.doing)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Sequences that each replica has taken and not finished."""
        return self._router.outstanding

    @property
    def _engines(self) -> list[MeshEngine]:
        return [r.engine for r in self._replicas if r.engine is not None]

    def stats(self) -> EngineStats:
        """Summed over all replicas; zeros while there is none."""
        stats = [engine.stats() for engine in self._engines]
        return EngineStats(
            num_blocks=sum(s.num_blocks for s in stats),
            free_blocks=sum(s.free_blocks for s in stats),
            waiting_requests=sum(s.waiting_requests for s in stats),
            running_requests=sum(s.running_requests for s in stats),
            steps_in_flight=sum(s.steps_in_flight for s in stats),
            preemptions=sum(s.preemptions for s in stats),
            prefix_cache_queries=sum(s.prefix_cache_queries for s in stats),
            prefix_cache_hits=sum(s.prefix_cache_hits for s in stats),
        )

    def stage_memory(self) -> Iterator[tuple[int, int, int]]:
        """(replica, stage, most bytes that one of its ranks has held), as last heard."""
        peaks: dict[tuple[int, int], int] = {}
        for member in self._control.membership.members:
            place = (member.placement.dp_rank, member.placement.pp_rank)
            ranks = (rank.memory_peak_bytes for rank in member.status.ranks)
            peaks[place] = max(peaks.get(place, 0), *ranks, 0)
        return ((replica, stage, peak) for (replica, stage), peak in peaks.items() if peak)

    def epochs(self) -> Iterator[tuple[int, int]]:
        """(replica, present epoch)."""
        return ((replica.dp_rank, replica.epoch) for replica in self._replicas)

    def spares(self) -> Iterator[tuple[str, int]]:
        """(state, spares in it)."""
        return self._standby.states()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """See `Engine.generate`. Raises `PipelineUnavailable` with what is missing."""
        if not self.ready_event.is_set():
            raise PipelineUnavailable(
                f"the mesh is not ready: {self.why_not_ready}",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        serving = [r.dp_rank for r in self._replicas if r.state is ReplicaState.SERVING]
        chosen = self._router.take(request.prompt_token_ids, request.n, serving)
        self._observer.on_routed(chosen)
        try:
            async with contextlib.aclosing(self._engines[chosen].generate(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._router.give_back(chosen, request.n)

    async def run(self) -> None:
        """Brings the mesh up and drives it until cancelled or failed (`StageFailed`)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._fail_on_request())
                await self._control.complete(self._join_timeout_seconds)
                tasks.create_task(self._control.watch(self))
                await self._bring_up()
                for replica in self._replicas:
                    tasks.create_task(replica.run())
                tasks.create_task(self._standby.run())
                self.ready_event.set()
        finally:
            self._why_not_ready = self._why_not_ready or "the mesh is going down"

    async def _bring_up(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.form_groups())
        check_reported_memory(self._plan, self._control.membership.members)
        async with asyncio.TaskGroup() as tasks:
            loads = [tasks.create_task(replica.load()) for replica in self._replicas]
        self._report_loaded([load.result() for load in loads])

    def _report_loaded(self, loaded: list[LoadedMesh]) -> None:
        shape = self._plan.shape
        log.info(
            "mesh loaded: DP %d x PP %d x TP %d, %.1f MB of weights, %d KV blocks of %d tokens",
            shape.dp_size,
            shape.pp_size,
            shape.tp_size,
            sum(one.weight_bytes for one in loaded) / 1e6,
            sum(one.num_blocks for one in loaded),
            self._plan.stage_plan.block_size,
        )

    def on_member_lost(self, member: Member, why: str) -> None:
        """See `MemberListener`: ends the mesh while it comes up; later its replica recovers."""
        if not self.ready_event.is_set():
            self.fail(why)
        else:
            self._replicas[member.placement.dp_rank].stage_failed(StageFailed(why), WORKER_LOST)

    def worker_ended(self, node_rank: int, pid: int, how: str) -> bool:
        """The launcher says that a worker has ended. Returns whether another takes its place."""
        for spare in self._control.membership.spares:
            if (spare.node_rank, spare.pid) == (node_rank, pid):
                self._control.membership.forget(spare.worker_id)
                return True
        if not self._recovery.recovers or not self.ready_event.is_set():
            return False
        for member in self._control.membership.members:
            if (member.node_rank, member.pid) == (node_rank, pid):
                self._control.lost(member, how)
        return True

    def goes_on_without(self, placement: StagePlacement) -> bool:
        """Whether the worker that was started for a place is not missed, although no other is
        started: a former spare holds the place, or one may take it over. Where that comes to
        nothing the time limit of the recovery ends the mesh."""
        if not self._recovery.recovers or not self.ready_event.is_set():
            return False
        membership = self._control.membership
        spares = membership.ready_spares(asyncio.get_running_loop().time())
        return membership.is_held(placement) or bool(spares)

    def on_stage_error(self, member: Member, error: step_pb2.StageError) -> None:
        """See `MemberListener`. A lost neighbour is an echo: who has failed says so itself."""
        replica = self._replicas[member.placement.dp_rank]
        if error.epoch == replica.epoch and error.reason != ECHO_REASON:
            failure = StageFailed(f"stage {error.pp_rank} failed ({error.reason}): {error.message}")
            if replica.state is ReplicaState.SERVING:
                replica.stage_failed(failure, error.reason)

    def fail(self, message: str) -> None:
        """Ends the mesh for good, for a reason seen from outside."""
        failure = StageFailed(message)
        self._why_not_ready = message
        for engine in self._engines:
            # Requests end with the reason before the mesh does.
            engine.fail(failure)
        if not self._failed.done():
            self._failed.set_result(failure)

    async def _fail_on_request(self) -> None:
        raise await self._failed

    async def drain(self, timeout_seconds: float) -> None:
        """Stops admission and lets what runs finish, up to a deadline."""
        self._why_not_ready = "the mesh is draining"
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.drain(deadline))

    async def dismiss_workers(self) -> None:
        """Tells every worker to leave."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.dismiss_workers())
            tasks.create_task(self._standby.dismiss())

    async def close(self) -> None:
        """Closes the channels to the workers. No call may follow."""
        for replica in self._replicas:
            await replica.close()

    def progress(self) -> tuple[StageProgress, ...]:
        """How far every stage of every replica that serves is; empty before the mesh is up."""
        serving = (r for r in self._replicas if r.state is ReplicaState.SERVING)
        pipelines = (r.pipeline for r in serving if r.pipeline is not None)
        return tuple(stage for pipeline in pipelines for stage in pipeline.progress())

    def not_ready_reason(self) -> str:
        """Why no request is taken now, in words; empty while requests are."""
        return "" if self.ready else self.why_not_ready or "the mesh is going down"

    def view(self) -> MeshView:
        """What `/v1/mesh` shows."""
        membership = self._control.membership
        return {
            **mesh_view(self._plan, membership.members, self._replicas, self.progress()),
            "standby": standby_view(membership.spares, asyncio.get_running_loop().time()),
        }
