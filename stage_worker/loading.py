"""Brings all ranks of a worker to a plan at a time, with their progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from stage_worker.rank_process import RankProcess
from stagemesh.v1 import stage_worker_pb2

Write = Callable[[stage_worker_pb2.LoadResponse], Awaitable[None]]


async def load_ranks(
    ranks: Sequence[RankProcess], plan: stage_worker_pb2.StagePlan, write: Write
) -> list[stage_worker_pb2.RankReport]:
    """Writes progress while ranks load, and returns a report of each. Raises `StageFailed`, or
    `ConfigError` for a plan that they will never reach."""
    # One entry for each rank is enough: newer progress makes older worthless.
    progress: dict[int, stage_worker_pb2.LoadProgress] = {}
    changed = asyncio.Event()

    def on_progress(event: stage_worker_pb2.LoadProgress) -> None:
        progress[event.tp_rank] = event
        changed.set()

    async with asyncio.TaskGroup() as tasks:
        loads = [tasks.create_task(rank.load(plan, on_progress)) for rank in ranks]
        for load in loads:
            load.add_done_callback(lambda _: changed.set())
        while not all(load.done() for load in loads):
            await changed.wait()
            changed.clear()
            while progress:
                _, event = progress.popitem()
                await write(stage_worker_pb2.LoadResponse(progress=event))
    return [load.result() for load in loads]
