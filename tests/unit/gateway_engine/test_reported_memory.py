"""What ranks have reported, against what their stages will need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.fit import check_reported_memory
from services.config import ServeConfig
from services.control.membership import Member
from services.errors import ConfigError
from services.mesh_plan import MeshPlan, make_plan
from services.topology.layouts import predict
from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2
from tests.unit.topology.model_directory import ModelDirectory


@pytest.fixture
def plan(tmp_path: Path) -> MeshPlan:
    """TP 2, two stages of 1 and 2 layers, one on each of two nodes."""
    directory = ModelDirectory(tmp_path / "tiny")
    directory.write_single()
    config = ServeConfig(
        model="m",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pp_layer_partition=(1, 2),
        nnodes=2,
        device="cpu",
        cpu_devices=2,
    )
    return make_plan(config, directory.path, "a")


def needs(plan: MeshPlan) -> list[int]:
    return [plan.demand.required_bytes(s) for s in predict(plan.facts, plan.shape, plan.demand)]


def member(placement: StagePlacement, device: str, *free_bytes: int | None) -> Member:
    status = stage_worker_pb2.StatusResponse()
    for tp_rank, free in enumerate(free_bytes):
        rank = status.ranks.add(tp_rank=tp_rank, device=f"{device}:{tp_rank}")
        if free is not None:
            rank.memory_at_start.free_bytes = free
            rank.memory_at_start.total_bytes = free
    host = f"host-{placement.node_rank}"
    return Member(
        *("w", host, placement.node_rank, "127.0.0.1:1", 1, 0.0), placement, status=status
    )


def test_ranks_of_a_cpu_node_share_what_the_last_one_saw(plan: MeshPlan) -> None:
    first, second = plan.placements
    one, two = (2 * need for need in needs(plan))
    check_reported_memory(
        plan, [member(first, "cpu", one + 5, one), member(second, "cpu", two, two)]
    )
    with pytest.raises(ConfigError) as caught:
        check_reported_memory(
            plan, [member(first, "cpu", one, one), member(second, "cpu", two, two - 1)]
        )
    assert caught.value.message.startswith("stage 1 (layers 1 to 2) does not fit")
    assert "and node 1 (host-1) has" in caught.value.message
    assert "for its 2 ranks" in caught.value.message


def test_every_accelerator_is_looked_at(plan: MeshPlan) -> None:
    npus = replace(plan, device="npu")
    first, second = plan.placements
    room = [10 * need for need in needs(plan)]
    check_reported_memory(
        npus, [member(first, "npu", *room[:1] * 2), member(second, "npu", *room[1:] * 2)]
    )
    with pytest.raises(ConfigError) as caught:
        check_reported_memory(
            npus, [member(first, "npu", *room[:1] * 2), member(second, "npu", room[1], 999)]
        )
    assert "and npu:1 of node 1 (host-1) has 999 B free, of which " in caught.value.message
    assert "--gpu-memory-utilization 0.9 leaves" in caught.value.message


def test_the_partition_that_would_fit_is_named(plan: MeshPlan) -> None:
    """Two layers need the room that the first node has and the second has not."""
    first, second = plan.placements
    shape = replace(plan.shape, pp_layer_partition=(2, 1))
    room = [2 * plan.demand.required_bytes(s) for s in predict(plan.facts, shape, plan.demand)]
    with pytest.raises(ConfigError) as caught:
        check_reported_memory(
            plan, [member(first, "cpu", *room[:1] * 2), member(second, "cpu", *room[1:] * 2)]
        )
    assert caught.value.message.endswith("; --pp-layer-partition 2,1 would fit")


def test_what_is_not_known_or_not_real_is_not_judged(plan: MeshPlan) -> None:
    first, second = plan.placements
    check_reported_memory(plan, [member(first, "cpu", None, None), member(second, "cpu")])
    simulated = replace(plan, device="sim")
    check_reported_memory(simulated, [member(first, "sim", 1, 1), member(second, "sim", 1, 1)])
