"""From joined workers to a pipeline that can run steps.

Ranks are brought to where they are in no group, groups are formed, weights are loaded on
all stages at once, the number of KV blocks is the least that any rank has room for, and
that number is allocated. After a failure the same calls bring back what is lost: a stage
that has its weights keeps them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.pipeline.stage_client import StageClient
from services.errors import ConfigError, StageFailed, StagemeshError
from services.topology.facts import MeshShape
from services.topology.placement import StagePlacement
from services.topology.wire import placement_to_proto, shape_to_proto
from stagemesh.v1 import stage_worker_pb2

log = logging.getLogger("stagemesh.gateway")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage worker and its place."""

    client: StageClient
    placement: StagePlacement


@dataclass(frozen=True, slots=True)
class LoadedMesh:
    """What all ranks have reported."""

    num_blocks: int
    """KV blocks on every rank: the least of what each has room for."""
    possible_blocks: tuple[tuple[int, int, int], ...]
    """(stage, TP rank, blocks that would fit there)."""
    weight_bytes: int
    """Over all ranks."""


OnFailed = Callable[[Stage], None]
"""Hears which stage it was that could not be brought up."""


def _nobody_asks(stage: Stage) -> None:
    """At first a failure ends the mesh, whoever it was."""


OnReset = Callable[[Stage, Coroutine[None, None, None]], Coroutine[None, None, None]]
"""Waits for what brings a stage's ranks out of their groups; raises `StageFailed` where that takes
too long."""


async def reset_ranks(
    stages: Sequence[Stage],
    epoch: int,
    stuck: Sequence[Stage],
    on_failed: OnFailed,
    on_reset: OnReset,
) -> None:
    """Waits until every rank is started, in no group, and knows its place; those of `stuck` are
    replaced. Raises `StageFailed`."""
    async with asyncio.TaskGroup() as tasks:
        for stage in stages:
            placement = placement_to_proto(stage.placement)
            reset = stage.client.reset_ranks(epoch, placement, replace=stage in stuck)
            tasks.create_task(on_reset(stage, _telling(stage, reset, on_failed)))


async def form_groups(stages: Sequence[Stage], shape: MeshShape, epoch: int) -> None:
    """Forms the collective groups of an epoch. Raises `StageFailed`."""
    first = next(s for s in stages if s.placement.pp_rank == 0 and 0 in s.placement.tp_ranks)
    store_address = await first.client.open_store(epoch)
    topology = shape_to_proto(shape)
    async with asyncio.TaskGroup() as tasks:
        for stage in stages:
            tasks.create_task(stage.client.form_group(epoch, store_address, topology))


async def load(
    stages: Sequence[Stage],
    plan: stage_worker_pb2.StagePlan,
    needed_blocks: int,
    wanted_blocks: int,
    on_progress: Callable[[int, stage_worker_pb2.LoadProgress], None],
) -> LoadedMesh:
    """Loads weights, agrees on the number of blocks, and allocates the cache.

    `needed_blocks` is what one sequence of full length takes; `wanted_blocks` the
    most that is allocated, see `MeshPlan.wanted_blocks`.
    Raises `StageFailed`, or `ConfigError` when a full sequence does not fit.
    """
    reports = await _load_all(stages, plan, 0, on_progress)
    possible = tuple(
        (pp_rank, report.tp_rank, int(report.possible_blocks)) for pp_rank, report in reports
    )
    pp_rank, tp_rank, least = min(possible, key=lambda entry: entry[2])
    if least < needed_blocks:
        raise ConfigError(
            f"the KV cache of stage {pp_rank} (TP rank {tp_rank}) has room for {least} blocks of "
            f"{plan.block_size} tokens, and one sequence of max_model_len {plan.max_model_len} "
            f"takes {needed_blocks}. {_remedy(reports, plan, least, needed_blocks)}",
            param="--max-model-len",
        )
    num_blocks = min(least, wanted_blocks)
    allocated = await load_again(stages, plan, num_blocks, on_progress)
    weight_bytes = sum(report.weight_bytes for _, report in allocated)
    return LoadedMesh(num_blocks, possible, weight_bytes)


async def load_again(
    stages: Sequence[Stage],
    plan: stage_worker_pb2.StagePlan,
    num_blocks: int,
    on_progress: Callable[[int, stage_worker_pb2.LoadProgress], None],
    on_failed: OnFailed = _nobody_asks,
) -> list[tuple[int, stage_worker_pb2.RankReport]]:
    """Loads what is missing of a plan whose number of blocks is known, and checks that all ranks
    agree. Raises `StageFailed` or `ConfigError`."""
    allocated = await _load_all(stages, plan, num_blocks, on_progress, on_failed)
    _check_agreement(plan, allocated)
    for pp_rank, report in allocated:
        if report.num_blocks != num_blocks:
            raise StageFailed(
                f"stage {pp_rank} TP rank {report.tp_rank} allocated {report.num_blocks} KV blocks "
                f"where {num_blocks} were planned"
            )
    return allocated


def _remedy(
    reports: Sequence[tuple[int, stage_worker_pb2.RankReport]],
    plan: stage_worker_pb2.StagePlan,
    least: int,
    needed_blocks: int,
) -> str:
    needed_bytes = needed_blocks * max(int(report.kv_block_bytes) for _, report in reports)
    raise_it = f"raise --kv-cache-memory-bytes to at least {needed_bytes}"
    if least == 0:
        return f"To serve at all, {raise_it}"
    return f"Lower --max-model-len to at most {least * plan.block_size}, or {raise_it}"


def _check_agreement(
    plan: stage_worker_pb2.StagePlan,
    reports: Sequence[tuple[int, stage_worker_pb2.RankReport]],
) -> None:
    """Every rank has acknowledged this plan, and all boundaries carry the same tensors."""
    boundaries = []
    for pp_rank, report in reports:
        if report.fingerprint_digest != plan.fingerprint.digest:
            raise StageFailed(
                f"stage {pp_rank} TP rank {report.tp_rank} acknowledged plan "
                f"{report.fingerprint_digest or 'none'} where {plan.fingerprint.digest} was sent"
            )
        if report.boundary.tensors:
            boundaries.append((pp_rank, report))
    for pp_rank, report in boundaries:
        if report.boundary != boundaries[0][1].boundary:
            raise StageFailed(
                f"stage {pp_rank} TP rank {report.tp_rank} sends other tensors on than stage "
                f"{boundaries[0][0]}: {report.boundary} against {boundaries[0][1].boundary}"
            )


def stage_plan(
    plan: stage_worker_pb2.StagePlan, placement: StagePlacement, num_blocks: int
) -> stage_worker_pb2.StagePlan:
    """The plan of one stage; without blocks its KV cache is left out."""
    own = stage_worker_pb2.StagePlan()
    own.CopyFrom(plan)
    own.placement.CopyFrom(placement_to_proto(placement))
    own.num_blocks = num_blocks
    return own


async def _load_all(
    stages: Sequence[Stage],
    plan: stage_worker_pb2.StagePlan,
    num_blocks: int,
    on_progress: Callable[[int, stage_worker_pb2.LoadProgress], None],
    on_failed: OnFailed = _nobody_asks,
) -> list[tuple[int, stage_worker_pb2.RankReport]]:
    async with asyncio.TaskGroup() as tasks:
        loads = []
        for stage in stages:
            own = stage_plan(plan, stage.placement, num_blocks)
            load = stage.client.load(own, on_progress)
            loads.append(tasks.create_task(_telling(stage, load, on_failed)))
    return [
        (stage.placement.pp_rank, report)
        for stage, done in zip(stages, loads, strict=True)
        for report in done.result()
    ]


async def _telling(stage: Stage, call: Coroutine[None, None, _T], on_failed: OnFailed) -> _T:
    """A call to a stage; one that is cancelled since another has failed is no failure."""
    try:
        return await call
    except StagemeshError:
        on_failed(stage)
        raise
