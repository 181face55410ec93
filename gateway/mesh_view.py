"""What `/v1/mesh` shows: the stages, where they run and what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from gateway.mesh_plan import MeshPlan
from services.control.membership import Member
from stagemesh.v1 import stage_worker_pb2

_STATE_NAMES = {
    stage_worker_pb2.COMPONENT_STATE_STARTING: "starting",
    stage_worker_pb2.COMPONENT_STATE_LOADING: "loading",
    stage_worker_pb2.COMPONENT_STATE_READY: "ready",
    stage_worker_pb2.COMPONENT_STATE_DRAINING: "draining",
    stage_worker_pb2.COMPONENT_STATE_FAILED: "failed",
}


class RankView(TypedDict):
    """One rank process."""

    tp_rank: int
    device: str
    pid: int
    state: str


class StageView(TypedDict):
    """One stage; `state` is "missing" while no worker has joined for it."""

    pp_rank: int
    layer_start: int
    layer_end: int
    tp_size: int
    node: str
    state: str
    ranks: list[RankView]


class MeshView(TypedDict):
    """The whole mesh."""

    epoch: int
    stages: list[StageView]


def mesh_view(epoch: int, plan: MeshPlan, members: Sequence[Member]) -> MeshView:
    """Every planned stage, joined or not, with what its worker last said of its ranks."""
    by_stage = {member.placement.pp_rank: member for member in members}
    stages: list[StageView] = []
    for placement in plan.placements:
        member = by_stage.get(placement.pp_rank)
        stages.append(
            {
                "pp_rank": placement.pp_rank,
                "layer_start": placement.layer_start,
                "layer_end": placement.layer_end,
                "tp_size": plan.shape.tp_size,
                "node": member.node if member else "",
                "state": _state_name(member.status.state) if member else "missing",
                "ranks": _ranks(member.status) if member else [],
            }
        )
    return {"epoch": epoch, "stages": stages}


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
