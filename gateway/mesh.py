"""The mesh as the gateway sees it: from the first join to the last step.

Front doors hold a `Mesh` from the start and can ask it anything at any time:
until the pipeline is complete, and after it has failed, requests are refused
with the reason. It makes one engine for each epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from gateway.engine.engine import MeshEngine
from gateway.engine.types import ChoiceDelta, EngineStats, GenerationRequest
from gateway.mesh_plan import MeshPlan
from gateway.mesh_view import MeshView, mesh_view
from gateway.pipeline.bring_up import LoadedMesh, Stage, form_groups, load
from gateway.pipeline.mesh_pipeline import MeshPipeline
from gateway.pipeline.stage_client import StageClient
from services.control.service import ControlService
from services.errors import PipelineUnavailable, StageFailed
from services.rpc.channel import create_channel
from stagemesh.v1 import stage_worker_pb2, step_pb2

log = logging.getLogger("stagemesh.gateway")

FIRST_EPOCH = 1
JOIN_TIMEOUT_SECONDS = 60.0
PROGRESS_STEP_PERCENT = 25
NOTHING_YET = EngineStats(0, 0, 0, 0, 0, 0)


class Mesh:
    """All stages of one model, and the engine that drives them.

    Implements `gateway.engine.types.Engine` for the front doors.
    """

    def __init__(
        self,
        plan: MeshPlan,
        control: ControlService,
        make_engine: Callable[[MeshPipeline, int], MeshEngine],
        on_clock: Callable[[int, step_pb2.StageClock], None],
    ) -> None:
        self._plan = plan
        self._control = control
        self._make_engine = make_engine
        self._on_clock = on_clock
        self._engine: MeshEngine | None = None
        self._pipeline: MeshPipeline | None = None
        self._stages: list[Stage] = []
        self._epoch = 0
        self._why_not_ready = "stage workers are starting"
        self._percent: dict[tuple[int, int], int] = {}
        self._failed: asyncio.Future[StageFailed] = asyncio.get_running_loop().create_future()
        self.loaded: LoadedMesh | None = None
        self.ready_event = asyncio.Event()
        """Set when the first pipeline is complete."""

    @property
    def ready(self) -> bool:
        """Whether a complete pipeline takes requests."""
        return self._engine is not None and self._engine.ready

    @property
    def why_not_ready(self) -> str:
        """What is missing, for `/ready`."""
        return self._why_not_ready

    def stats(self) -> EngineStats:
        """The engine's, or nothing while there is none."""
        return self._engine.stats() if self._engine is not None else NOTHING_YET

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """See `Engine.generate`. Raises `PipelineUnavailable` with what is missing."""
        if self._engine is None:
            raise PipelineUnavailable(
                f"the mesh is not ready: {self._why_not_ready}", retry_after_seconds=5.0
            )
        async with contextlib.aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def run(self) -> None:
        """Brings the mesh up and drives it until cancelled or failed (`StageFailed`)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._fail_before_pipeline())
                await self._control.complete(JOIN_TIMEOUT_SECONDS)
                self._connect()
                tasks.create_task(self._watch_members())
                await self._bring_up()
                await self._drive(tasks)
        finally:
            self._why_not_ready = self._why_not_ready or "the mesh is going down"

    async def close(self) -> None:
        """Closes the channels to the workers. No call may follow."""
        for stage in self._stages:
            await stage.client.close()

    def _connect(self) -> None:
        for member in self._control.membership.members:
            client = StageClient(
                create_channel(member.address), member.address, member.placement.pp_rank
            )
            self._stages.append(Stage(client, member.placement))

    async def _bring_up(self) -> None:
        self._epoch = FIRST_EPOCH
        self._why_not_ready = "stages are forming their groups"
        await form_groups(self._stages, self._plan.shape, self._epoch)
        self._why_not_ready = "stages are loading weights"
        needed = self._plan.blocks_per_sequence
        self.loaded = await load(
            self._stages,
            self._plan.stage_plan,
            needed_blocks=needed,
            wanted_blocks=needed * self._plan.stage_plan.max_num_seqs,
            on_progress=self._report_progress,
        )
        log.info(
            "mesh loaded: %d stages, %.1f MB of weights, %d KV blocks of %d tokens",
            self._plan.shape.pp_size,
            self.loaded.weight_bytes / 1e6,
            self.loaded.num_blocks,
            self._plan.stage_plan.block_size,
        )

    async def _drive(self, tasks: asyncio.TaskGroup) -> None:
        if self.loaded is None:
            raise StageFailed("the mesh was driven before it was loaded")
        self._pipeline = MeshPipeline(self._stages, self._epoch, self._on_clock)
        self._engine = self._make_engine(self._pipeline, self.loaded.num_blocks)
        tasks.create_task(self._pipeline.run())
        tasks.create_task(self._run_engine(self._engine))
        await self._refresh_members()
        self._why_not_ready = ""
        self.ready_event.set()

    async def _refresh_members(self) -> None:
        """Asks every worker what it is now: the last heartbeat may be from before the load."""
        members = {member.address: member for member in self._control.membership.members}
        for stage in self._stages:
            members[stage.client.address].status.CopyFrom(await stage.client.status())

    async def _run_engine(self, engine: MeshEngine) -> None:
        """The engine ends its requests with the pipeline's failure; here it ends the mesh."""
        await engine.run()
        if engine.error is not None:
            self._why_not_ready = engine.error.message
            raise engine.error

    async def _watch_members(self) -> None:
        """A silent member ends the pipeline, whose failure ends the engine."""
        try:
            await self._control.watch()
        except StageFailed as failure:
            if self._pipeline is None:
                raise
            self._pipeline.fail(failure)

    def _report_progress(self, pp_rank: int, progress: stage_worker_pb2.LoadProgress) -> None:
        percent = 100 * progress.loaded_bytes // max(1, progress.total_bytes)
        known = self._percent.get((pp_rank, progress.tp_rank), -PROGRESS_STEP_PERCENT)
        if percent - known >= PROGRESS_STEP_PERCENT:
            self._percent[pp_rank, progress.tp_rank] = percent
            self._why_not_ready = f"stage {pp_rank} has loaded {percent} % of its weights"
            log.info("stage %d rank %d: %d %% loaded", pp_rank, progress.tp_rank, percent)

    def fail(self, message: str) -> None:
        """Ends the mesh for a reason seen from outside: a worker process that is gone."""
        failure = StageFailed(message)
        self._why_not_ready = message
        if self._pipeline is not None:
            self._pipeline.fail(failure)
        elif not self._failed.done():
            self._failed.set_result(failure)

    async def _fail_before_pipeline(self) -> None:
        raise await self._failed

    async def drain(self, timeout_seconds: float) -> None:
        """Stops admission and lets what runs finish, up to a deadline."""
        self._why_not_ready = "the mesh is draining"
        if self._engine is not None:
            await self._engine.drain(asyncio.get_running_loop().time() + timeout_seconds)

    async def dismiss_workers(self) -> None:
        """Tells every worker to leave."""
        async with asyncio.TaskGroup() as tasks:
            for stage in self._stages:
                tasks.create_task(stage.client.drain())

    def view(self) -> MeshView:
        """What `/v1/mesh` shows."""
        return mesh_view(self._epoch, self._plan, self._control.membership.members)
