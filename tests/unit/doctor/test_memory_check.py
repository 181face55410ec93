"""Predicted against free memory: which stage, both numbers, and the partition that would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.doctor.findings import Outcome
from services.doctor.memory_check import (
    OneDevicePerRank,
    SharedByRanks,
    check_memory,
)
from services.topology.facts import MeshShape, ModelFacts
from services.topology.fit import DeviceMemory
from services.topology.layouts import Demand, predict
from services.topology.placement import NodeDevices, place
from tests.unit.topology.model_directory import ModelDirectory

DEMAND = Demand(
    dtype="float32",
    block_size=16,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    available_bytes=None,
    kv_cache_bytes=None,
)
LOPSIDED = MeshShape(1, 1, 2, (1, 9))


@pytest.fixture
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    directory = ModelDirectory(tmp_path_factory.mktemp("model") / "tiny")
    directory.write_config(num_hidden_layers=10, hidden_size=240, intermediate_size=960)
    return directory.facts()


def required(facts: ModelFacts, shape: MeshShape) -> list[int]:
    return [DEMAND.required_bytes(stage) for stage in predict(facts, shape, DEMAND)]


def test_a_stage_that_does_not_fit_its_device(facts: ModelFacts) -> None:
    even = max(required(facts, MeshShape(1, 1, 2, (5, 5))))
    memory = OneDevicePerRank((DeviceMemory(even * 2, even + 4096),) * 2, utilization=1.0)
    placements = place(LOPSIDED, [NodeDevices(0, "a", "npu", 2)])
    (finding,) = check_memory(facts, LOPSIDED, DEMAND, placements, memory)
    assert finding.outcome is Outcome.FAILED
    assert finding.what.startswith("stage 1 (layers 1 to 9) does not fit")
    assert "device 1 has" in finding.what
    assert finding.remedy == "--pp-layer-partition 5,5 would fit"


def test_the_part_that_utilization_keeps_free_does_not_count(facts: ModelFacts) -> None:
    need = required(facts, LOPSIDED)[1]
    device = DeviceMemory(total_bytes=10 * need, free_bytes=need + need // 2)
    assert device.available_bytes(0.9) == pytest.approx(need // 2, abs=2)
    placements = place(LOPSIDED, [NodeDevices(0, "a", "npu", 2)])
    (finding,) = check_memory(
        facts, LOPSIDED, DEMAND, placements, OneDevicePerRank((device, device), 0.9)
    )
    assert finding.outcome is Outcome.FAILED
    assert "--gpu-memory-utilization 0.9 leaves" in finding.what


def test_a_node_whose_ranks_share_memory(facts: ModelFacts) -> None:
    placements = place(LOPSIDED, [NodeDevices(0, "a", "cpu", None)])
    total = sum(required(facts, LOPSIDED))
    (finding,) = check_memory(facts, LOPSIDED, DEMAND, placements, SharedByRanks(total))
    assert finding.outcome is Outcome.OK
    assert "stage 0 " in finding.what and "stage 1 " in finding.what
    (finding,) = check_memory(facts, LOPSIDED, DEMAND, placements, SharedByRanks(total // 3))
    assert finding.outcome is Outcome.FAILED
    assert finding.what.startswith("stage 1 ")
    assert "this node has" in finding.what and "its 2 ranks, which need" in finding.what
    assert "no partition of TP 1 x PP 2 fits" in finding.remedy


def test_only_this_nodes_stages_count(facts: ModelFacts) -> None:
    nodes = [NodeDevices(0, "a", "cpu", 1), NodeDevices(1, "b", "cpu", 1)]
    on_first = [p for p in place(LOPSIDED, nodes) if p.node_rank == 0]
    small = required(facts, LOPSIDED)[0]
    (finding,) = check_memory(facts, LOPSIDED, DEMAND, on_first, SharedByRanks(small))
    assert finding.outcome is Outcome.OK
    assert "stage 1" not in finding.what


def test_the_other_nodes_count_for_the_partition(facts: ModelFacts) -> None:
    nodes = [NodeDevices(0, "a", "cpu", 1), NodeDevices(1, "b", "cpu", 1)]
    first, second = place(LOPSIDED, nodes)
    memory = SharedByRanks(max(required(facts, MeshShape(1, 1, 2, (5, 5)))))
    (finding,) = check_memory(facts, LOPSIDED, DEMAND, [second], memory, [first])
    assert finding.remedy == (
        "--pp-layer-partition 5,5 would fit if the other nodes have as much memory"
    )


def test_unknown_memory_is_said_to_be_unknown(facts: ModelFacts) -> None:
    placements = place(LOPSIDED, [NodeDevices(0, "a", "npu", 2)])
    (finding,) = check_memory(facts, LOPSIDED, DEMAND, placements, None)
    assert finding.outcome is Outcome.WARNING
    assert "is not known" in finding.what


def test_a_fixed_cache_is_counted(facts: ModelFacts) -> None:
    placements = place(LOPSIDED, [NodeDevices(0, "a", "cpu", None)])
    memory = SharedByRanks(sum(required(facts, LOPSIDED)))
    large = replace(DEMAND, kv_cache_bytes=1 << 40)
    (finding,) = check_memory(facts, LOPSIDED, large, placements, memory)
    assert finding.outcome is Outcome.FAILED
    assert "KV cache 1.0 TiB" in finding.what


def test_a_fixed_cache_below_one_sequence_is_said_as_serve_says_it(facts: ModelFacts) -> None:
    placements = place(LOPSIDED, [NodeDevices(0, "a", "npu", 2)])
    small = replace(DEMAND, kv_cache_bytes=4096)
    (finding,) = check_memory(facts, LOPSIDED, small, placements, None)
    assert finding.outcome is Outcome.FAILED
    assert finding.what.startswith("--kv-cache-memory-bytes 4096 gives stage 1 room for 0 blocks")
