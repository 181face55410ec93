"""A worker's place in a mesh: from the join until the head sends it away or is gone.

    join ─> ranks start ─> heartbeats ─> the head is gone ─┐
                               ^                           │ where the worker waits for it
                               └──── let in again ─────────┘

A head that is back, or another one in its place, finds ranks that hold their weights. It
is told what they are: place, devices, plan and last epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.control.client import ControlClient
from services.errors import HeadLost, JoinRefused
from stage_worker.service import StageWorker
from stagemesh.v1 import control_pb2

log = logging.getLogger("stagemesh.stage_worker")


async def hold_place(
    control: ControlClient,
    request: control_pb2.JoinRequest,
    worker: StageWorker,
    on_joined: Callable[[control_pb2.JoinResponse], None],
    join_timeout_seconds: float | None,
) -> None:
    """Joins and stays until the head sends the worker away, which returns.

    `on_joined` hears of the first join. Without `join_timeout_seconds` the worker waits for its
    head: at first, and again when it is gone. Raises `JoinRefused`, and `HeadLost` where it
    does not wait.
    """
    joined = await control.join(request, join_timeout_seconds)
    on_joined(joined)
    while True:
        try:
            await control.heartbeats(joined, worker.status)
        except HeadLost as lost:
            if join_timeout_seconds is not None:
                raise
            log.warning("%s; this worker keeps its weights and waits for a head", lost.message)
        else:
            return
        joined = await _join_again(control, request, worker, joined)


async def _join_again(
    control: ControlClient,
    request: control_pb2.JoinRequest,
    worker: StageWorker,
    held: control_pb2.JoinResponse,
) -> control_pb2.JoinResponse:
    """Raises `JoinRefused` where the head has another use for this worker's place."""
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(worker.leave_epoch())
        joined = await control.join_again(_request_again(request, worker, held))
        # The head does the same, and must hear of this worker meanwhile.
        leaving.cancel()
    if (joined.placement, joined.topology) != (held.placement, held.topology):
        raise JoinRefused(
            f"the head has another place for this worker ({_words(joined)}) than the one whose "
            f"weights it holds ({_words(held)}); restart the worker"
        )
    log.info("joined again as stage %d, with its weights", joined.placement.pp_rank)
    return joined


def _request_again(
    request: control_pb2.JoinRequest, worker: StageWorker, held: control_pb2.JoinResponse
) -> control_pb2.JoinRequest:
    again = control_pb2.JoinRequest()
    again.CopyFrom(request)
    again.wanted.CopyFrom(held.placement)
    again.last_epoch = worker.epoch
    if worker.plan_fingerprint is not None:
        # More than the worker knew at first: all of the plan.
        again.fingerprint.CopyFrom(worker.plan_fingerprint)
    return again


def _words(joined: control_pb2.JoinResponse) -> str:
    place = joined.placement
    tp_ranks = ", ".join(map(str, place.tp_ranks))
    devices = ", ".join(map(str, place.device_indices))
    return (
        f"replica {place.dp_rank}, stage {place.pp_rank}, layers {place.layer_start} to "
        f"{place.layer_end - 1}, TP ranks {tp_ranks} on devices {devices}"
    )
