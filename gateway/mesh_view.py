"""What `/v1/mesh` shows: the stages, where they run and what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from gateway.replica import Replica
from gateway.standby import state_of
from services.control.member import Member, Spare
from services.control.progress import StageProgress
from services.mesh_plan import MeshPlan
from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2

_STATE_NAMES = {
    stage_worker_pb2.COMPONENT_STATE_STARTING: "starting",
    stage_worker_pb2.COMPONENT_STATE_LOADING: "loading",
    stage_worker_pb2.COMPONENT_STATE_READY: "ready",
    stage_worker_pb2.COMPONENT_STATE_DRAINING: "draining",
    stage_worker_pb2.COMPONENT_STATE_FAILED: "failed",
    # Of a spare that has just taken over, until it is heard of again.
    stage_worker_pb2.COMPONENT_STATE_STANDBY: "starting",
}
MISSING = "missing"
_SEVERITY = ("ready", "loading", "starting", MISSING, "draining", "failed")
"""From best to worst: a stage is in the state of its worst part."""


class RankView(TypedDict):
    """One rank process."""

    tp_rank: int
    device: str
    pid: int
    state: str


class StageView(TypedDict):
    """One stage of one replica; `state` is "missing" while a worker of it has not joined."""

    dp_rank: int
    pp_rank: int
    layer_start: int
    layer_end: int
    tp_size: int
    node: str
    """Host names, separated by commas where the stage spans nodes."""
    state: str
    last_step_id: int
    """Last step of the epoch that the stage has answered; 0 before the first."""
    stalled_seconds: float
    """For how long it has had work and answered nothing; 0 while it has none."""
    ranks: list[RankView]


class ReplicaView(TypedDict):
    """One replica of the whole pipeline."""

    dp_rank: int
    epoch: int
    """Of its present groups; 0 before the first."""
    state: str
    """"starting", "serving", "recovering" or "failed"."""
    doing: str
    """What it waits for; empty while it serves."""


class SpareView(TypedDict):
    """One spare worker."""

    node: str
    state: str
    """"ready", "loading", "starting" or "silent"."""
    holds_stage: int | None
    """The stage whose weights it holds."""
    ranks: list[RankView]


class StagesView(TypedDict):
    """The planned mesh."""

    epoch: int
    """The latest of any replica."""
    replicas: list[ReplicaView]
    stages: list[StageView]


class MeshView(StagesView):
    """The whole mesh."""

    standby: list[SpareView]


def standby_view(spares: Sequence[Spare], now: float) -> list[SpareView]:
    """Every spare, with what it last said of its ranks."""
    return [
        {
            "node": spare.node,
            "state": state_of(spare, now),
            "holds_stage": spare.status.holds.pp_rank if spare.status.HasField("holds") else None,
            "ranks": _ranks(spare.status),
        }
        for spare in spares
    ]


def mesh_view(
    plan: MeshPlan,
    members: Sequence[Member],
    replicas: Sequence[Replica],
    progress: Sequence[StageProgress],
) -> StagesView:
    """Every planned stage, joined or not, with what its workers last said of their ranks."""
    moved = {(stage.dp_rank, stage.pp_rank): stage for stage in progress}
    joined = {_place(member.placement): member for member in members}
    stages: dict[tuple[int, int], StageView] = {}
    for placement in plan.placements:
        member = joined.get(_place(placement))
        state = _state_name(member.status.state) if member else MISSING
        steps = moved.get((placement.dp_rank, placement.pp_rank))
        stage = stages.setdefault(
            (placement.dp_rank, placement.pp_rank),
            {
                "dp_rank": placement.dp_rank,
                "pp_rank": placement.pp_rank,
                "layer_start": placement.layer_start,
                "layer_end": placement.layer_end,
                "tp_size": plan.shape.tp_size,
                "node": "",
                "state": state,
                "last_step_id": steps.done_step_id if steps else 0,
                "stalled_seconds": round(steps.stalled_seconds, 3) if steps else 0.0,
                "ranks": [],
            },
        )
        stage["state"] = max(stage["state"], state, key=_SEVERITY.index)
        if member is not None:
            if member.node not in stage["node"].split(","):
                stage["node"] = ",".join(filter(None, (stage["node"], member.node)))
            stage["ranks"].extend(_ranks(member.status))
    return {
        "epoch": max((replica.epoch for replica in replicas), default=0),
        "replicas": [
            {
                "dp_rank": replica.dp_rank,
                "epoch": replica.epoch,
                "state": replica.state.value,
                "doing": replica.doing,
            }
            for replica in replicas
        ],
        "stages": list(stages.values()),
    }


def _place(placement: StagePlacement) -> tuple[int, int, int]:
    return placement.dp_rank, placement.pp_rank, placement.tp_ranks[0]


def _ranks(status: stage_worker_pb2.StatusResponse) -> list[RankView]:
    return [
        {
            "tp_rank": rank.tp_rank,
            "device": rank.device,
            "pid": rank.pid,
            "state": _state_name(rank.state),
        }
        for rank in status.ranks
    ]


def _state_name(state: stage_worker_pb2.ComponentState) -> str:
    return _STATE_NAMES.get(state, "starting")
