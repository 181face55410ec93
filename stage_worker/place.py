"""A worker's place in a mesh: from the join until the head sends it away or is gone.

    join ─> ranks start ─> heartbeats ─> the head is gone ─┐
                               ^                           │ where the worker waits for it
                               └──── let in again ─────────┘

A head that is back, or another one in its place, finds ranks that hold their weights. It
is told what they are: place, devices, plan and last epoch. Where a spare has taken over the
place meanwhile, the worker is a spare itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.control.client import ControlClient
from services.errors import HeadLost, JoinRefused
from stage_worker.service import StageWorker
from stagemesh.v1 import control_pb2, topology_pb2

log = logging.getLogger("stagemesh.stage_worker")


async def hold_place(
    control: ControlClient,
    request: control_pb2.JoinRequest,
    worker: StageWorker,
    on_joined: Callable[[control_pb2.JoinResponse], None],
    on_place_lost: Callable[[], None],
    join_timeout_seconds: float | None,
) -> None:
    """Joins and stays until the head sends the worker away, which returns.

    `on_joined` hears of the first join, `on_place_lost` when another has taken over the place.
    Without `join_timeout_seconds` the worker waits for its head: at first, and again when it is
    gone. Raises `JoinRefused`, and `HeadLost` where it does not wait.
    """

    def on_lost(epoch: int) -> None:
        if worker.standing.lose(epoch):
            on_place_lost()

    joined = await control.join(request, join_timeout_seconds)
    worker.standing.joined(joined.placement, standby=joined.standby)
    on_joined(joined)
    while True:
        try:
            await control.heartbeats(joined, worker.status, on_lost)
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
    own, devices = worker.standing.placement, held.placement.device_indices
    fits = joined.placement == own
    if joined.standby:
        fits = joined.placement.device_indices == devices
    if not fits or joined.topology != held.topology:
        raise JoinRefused(
            f"the head has another place for this worker ({_words(joined.placement)}) than the "
            f"one whose weights it holds ({_words(own or held.placement)}); restart the worker"
        )
    if joined.standby:
        # Its ranks have left their groups already.
        worker.standing.joined(joined.placement, standby=True)
        log.info("joined again as a spare")
    else:
        log.info("joined again as stage %d, with its weights", joined.placement.pp_rank)
    return joined


def _request_again(
    request: control_pb2.JoinRequest, worker: StageWorker, held: control_pb2.JoinResponse
) -> control_pb2.JoinRequest:
    again = control_pb2.JoinRequest()
    again.CopyFrom(request)
    place = worker.standing.placement
    again.standby = place is None
    again.wanted.CopyFrom(held.placement if place is None else place)
    again.took_over = worker.standing.took_over
    again.last_epoch = max(worker.epoch, worker.standing.last_epoch)
    if worker.plan_fingerprint is not None:
        # More than the worker knew at first: all of the plan.
        again.fingerprint.CopyFrom(worker.plan_fingerprint)
    return again


def _words(place: topology_pb2.Placement) -> str:
    tp_ranks = ", ".join(map(str, place.tp_ranks))
    devices = ", ".join(map(str, place.device_indices))
    return (
        f"replica {place.dp_rank}, stage {place.pp_rank}, layers {place.layer_start} to "
        f"{place.layer_end - 1}, TP ranks {tp_ranks} on devices {devices}"
    )
