"""One replica of the model: its stages, its pipeline and the engine that drives them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from gateway.engine.engine import MeshEngine
from gateway.observer import StageObserver, StepObserver
from gateway.pipeline.bring_up import LoadedMesh, Stage, form_groups, load
from gateway.pipeline.mesh_pipeline import MeshPipeline
from gateway.pipeline.stage_client import StageClient
from services.control.membership import Member
from services.errors import StageFailed
from services.mesh_plan import MeshPlan
from stagemesh.v1 import stage_worker_pb2

log = logging.getLogger("stagemesh.gateway")

PROGRESS_STEP_PERCENT = 25


class Replica:
    """Comes up once all its workers have joined; makes one engine for each epoch."""

    def __init__(
        self,
        plan: MeshPlan,
        members: Sequence[Member],
        make_engine: Callable[[MeshPipeline, int], MeshEngine],
        on_stage_step: StageObserver,
        on_step: StepObserver,
        on_doing: Callable[[str], None],
        connect: Callable[[str], grpc.aio.Channel],
    ) -> None:
        """`connect` opens a channel to a worker's address; `on_doing` hears in words what the
        replica waits for, for `/ready`."""
        self._plan = plan
        self._members = tuple(members)
        self._make_engine = make_engine
        self._on_stage_step = on_stage_step
        self._on_step = on_step
        self._on_doing = on_doing
        self._stages = [
            Stage(StageClient(connect(m.address), m.address, m.placement.pp_rank), m.placement)
            for m in members
        ]
        self._percent: dict[tuple[int, int], int] = {}
        self.pipeline: MeshPipeline | None = None
        self.engine: MeshEngine | None = None

    async def form_groups(self, epoch: int) -> None:
        """Forms the groups of all ranks and hears what they have. Raises `StageFailed`."""
        self._on_doing("stages are forming their groups")
        await form_groups(self._stages, self._plan.shape, epoch)
        await self._hear_status()

    async def load(self, epoch: int) -> LoadedMesh:
        """Weights and KV cache. Raises `StageFailed` or `ConfigError`."""
        self._on_doing("stages are loading weights")
        loaded = await load(
            self._stages,
            self._plan.stage_plan,
            needed_blocks=self._plan.blocks_per_sequence,
            wanted_blocks=self._plan.wanted_blocks,
            on_progress=self._report_progress,
        )
        self.pipeline = MeshPipeline(self._stages, epoch, self._on_stage_step, self._on_step)
        self.engine = self._make_engine(self.pipeline, loaded.num_blocks)
        await self._hear_status()
        return loaded

    async def _hear_status(self) -> None:
        """The last heartbeat may be older than what was just done."""
        for member, stage in zip(self._members, self._stages, strict=True):
            member.status.CopyFrom(await stage.client.status())

    async def run(self) -> None:
        """Drives the replica until it fails, which raises; cancel it to stop."""
        if self.pipeline is None or self.engine is None:
            raise StageFailed("a replica was driven before it was brought up")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pipeline.run())
            # The engine ends its requests with the pipeline's failure; here it ends the replica.
            await self.engine.run()
            raise self.engine.error or StageFailed("the engine has stopped")

    async def dismiss_workers(self) -> None:
        """Tells every worker to leave."""
        async with asyncio.TaskGroup() as tasks:
            for stage in self._stages:
                tasks.create_task(stage.client.drain())

    async def close(self) -> None:
        """Closes the channels to the workers. No call may follow."""
        for stage in self._stages:
            await stage.client.close()

    def _report_progress(self, pp_rank: int, progress: stage_worker_pb2.LoadProgress) -> None:
        percent = 100 * progress.loaded_bytes // max(1, progress.total_bytes)
        known = self._percent.get((pp_rank, progress.tp_rank), -PROGRESS_STEP_PERCENT)
        if percent - known >= PROGRESS_STEP_PERCENT:
            self._percent[pp_rank, progress.tp_rank] = percent
            self._on_doing(f"stage {pp_rank} has loaded {percent} % of its weights")
            log.info("stage %d rank %d: %d %% loaded", pp_rank, progress.tp_rank, percent)
