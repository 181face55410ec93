"""Predicted against free memory: which stage, the numbers, and the partition that would fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError
from services.topology.facts import MeshShape, ModelFacts
from services.topology.fit import (
    DeviceMemory,
    MemoryPool,
    check_fit,
    check_kv_cache,
    device_pool,
    host_pool,
    partition_within,
    shortages,
)
from services.topology.layouts import Demand, predict
from services.topology.placement import NodeDevices, place
from services.units import human_bytes
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
LAYERS = 10
LOPSIDED = MeshShape(1, 1, 2, (2, 8))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    directory = ModelDirectory(tmp_path_factory.mktemp("model") / "tiny")
    directory.write_config(num_hidden_layers=LAYERS, hidden_size=240, intermediate_size=960)
    return directory.facts()


def required(facts: ModelFacts, shape: MeshShape, demand: Demand = DEMAND) -> list[int]:
    return [demand.required_bytes(stage) for stage in predict(facts, shape, demand)]


def devices(*free_bytes: int, utilization: float = 1.0) -> list[MemoryPool]:
    """One device for each stage."""
    return [
        device_pool(f"npu:{stage} of node 0 (a)", DeviceMemory(free, free), utilization, stage)
        for stage, free in enumerate(free_bytes)
    ]


def refusal(
    facts: ModelFacts, shape: MeshShape, pools: Sequence[MemoryPool], demand: Demand = DEMAND
) -> str:
    with pytest.raises(ConfigError) as caught:
        check_fit(facts, shape, demand, pools)
    return caught.value.message


def test_what_fits_passes(facts: ModelFacts) -> None:
    check_fit(facts, LOPSIDED, DEMAND, devices(*required(facts, LOPSIDED)))


def test_the_message_has_stage_numbers_and_the_partition(facts: ModelFacts) -> None:
    even = max(required(facts, MeshShape(1, 1, 2, (5, 5))))
    last = predict(facts, LOPSIDED, DEMAND)[1]
    message = refusal(facts, LOPSIDED, devices(even, even))
    assert message == (
        f"stage 1 (layers 2 to 9) does not fit: each of its ranks needs "
        f"{human_bytes(required(facts, LOPSIDED)[1])} (weights {human_bytes(last.weight_bytes)}, "
        f"of them the LM head {human_bytes(last.head_bytes)}, activations "
        f"{human_bytes(last.activation_bytes)}, KV cache {human_bytes(8 * last.kv_block_bytes)} "
        f"for one sequence of 128 tokens), and npu:1 of node 0 (a) has {human_bytes(even)} free, "
        f"of which --gpu-memory-utilization 1 leaves {human_bytes(even)}; "
        "--pp-layer-partition 5,5 would fit"
    )


def test_the_partition_follows_the_memory_of_each_device(facts: ModelFacts) -> None:
    """A device that other work has filled gets fewer layers, whatever the even cut is."""
    three_to_seven = required(facts, MeshShape(1, 1, 2, (3, 7)))
    message = refusal(facts, MeshShape(1, 1, 2, (5, 5)), devices(*three_to_seven))
    assert message.startswith("stage 0 (layers 0 to 4) does not fit")
    assert message.endswith("; --pp-layer-partition 3,7 would fit")


def test_what_utilization_keeps_free_does_not_count(facts: ModelFacts) -> None:
    need = max(required(facts, LOPSIDED))
    memory = DeviceMemory(total_bytes=10 * need, free_bytes=need + need // 2)
    pools = [device_pool("npu:1 of node 0 (a)", memory, 0.9, 1)]
    assert f"--gpu-memory-utilization 0.9 leaves {human_bytes(need // 2)}" in refusal(
        facts, LOPSIDED, pools
    )
    check_fit(facts, LOPSIDED, DEMAND, [replace(pools[0], available_bytes=need)])


def test_ranks_on_a_cpu_share_their_node(facts: ModelFacts) -> None:
    shape = MeshShape(1, 2, 2, (2, 8))
    placements = place(shape, [NodeDevices(0, "a", "cpu", None)])
    total = 2 * sum(required(facts, shape))
    check_fit(facts, shape, DEMAND, [host_pool("node 0 (a)", total, placements)])
    message = refusal(facts, shape, [host_pool("node 0 (a)", total - 1, placements)])
    assert message.startswith("stage 1 (layers 2 to 9) does not fit")
    assert (
        f"and node 0 (a) has {human_bytes(total - 1)} free for its 4 ranks, which need "
        f"{human_bytes(total)} together" in message
    )
    assert "no partition of TP 2 x PP 2 fits there" in message
    assert "--dtype bfloat16, which halves it, or more nodes (--nnodes)" in message
    assert "gpu-memory-utilization" not in message


def test_nodes_whose_memory_is_not_known_are_taken_as_alike(facts: ModelFacts) -> None:
    placements = place(LOPSIDED, [NodeDevices(r, f"n{r}", "cpu", 1) for r in range(2)])
    free = max(required(facts, MeshShape(1, 1, 2, (5, 5))))
    first, second = (host_pool(f"node {p.node_rank}", free, [p]) for p in placements)
    check_fit(facts, LOPSIDED, DEMAND, [first], if_alike=[second])
    with pytest.raises(ConfigError) as caught:
        check_fit(facts, LOPSIDED, DEMAND, [second], if_alike=[first])
    assert caught.value.message.endswith(
        "; --pp-layer-partition 5,5 would fit if the other nodes have as much memory"
    )


def test_a_shorter_sequence_is_named_where_one_fits(facts: ModelFacts) -> None:
    whole = MeshShape(1, 1, 1, (LAYERS,))
    long = replace(DEMAND, max_model_len=4096)
    stage = predict(facts, whole, long)[0]
    room = stage.fixed_bytes + 100 * stage.kv_block_bytes
    message = refusal(facts, whole, devices(room), long)
    assert "no partition of TP 1 x PP 1 fits there; use --max-model-len of at most 1600" in message
    assert message.endswith(
        "more stages (--pipeline-parallel-size) or ranks (--tensor-parallel-size)"
    )
    check_fit(facts, whole, replace(long, max_model_len=1600), devices(room))
    nothing = refusal(facts, whole, devices(1), replace(long, dtype="bfloat16"))
    assert "--max-model-len" not in nothing and "--dtype" not in nothing


def test_a_cache_that_was_asked_for_counts_as_it_was_asked(facts: ModelFacts) -> None:
    whole = MeshShape(1, 1, 1, (LAYERS,))
    asked = replace(DEMAND, kv_cache_bytes=1 << 40)
    room = predict(facts, whole, DEMAND)[0].fixed_bytes + (1 << 30)
    message = refusal(facts, whole, devices(room), asked)
    assert "KV cache 1.0 TiB for --kv-cache-memory-bytes)" in message
    most = re.search(r"use --kv-cache-memory-bytes of at most (\d+)", message)
    assert most is not None and int(most[1]) == 1 << 30
    check_fit(facts, whole, replace(asked, kv_cache_bytes=1 << 30), devices(room))


def test_a_cache_below_one_sequence_is_refused_before_anything_else(facts: ModelFacts) -> None:
    block = predict(facts, LOPSIDED, DEMAND)[1].kv_block_bytes
    check_kv_cache(facts, LOPSIDED, DEMAND)
    check_kv_cache(facts, LOPSIDED, replace(DEMAND, kv_cache_bytes=8 * block))
    with pytest.raises(ConfigError) as caught:
        check_kv_cache(facts, LOPSIDED, replace(DEMAND, kv_cache_bytes=8 * block - 1))
    assert caught.value.message == (
        f"--kv-cache-memory-bytes {8 * block - 1} gives stage 1 room for 7 blocks of 16 tokens, "
        f"and one sequence of 128 tokens takes 8; raise it to at least {8 * block}, or lower "
        "--max-model-len to at most 112"
    )
    with pytest.raises(ConfigError, match=r"room for 0 blocks .* raise it to at least \d+$"):
        check_kv_cache(facts, LOPSIDED, replace(DEMAND, kv_cache_bytes=1))


def test_each_stage_is_said_once(facts: ModelFacts) -> None:
    shape = MeshShape(2, 2, 2, (2, 8))
    pools = [
        device_pool(f"npu:{index}", DeviceMemory(1, 1), 1.0, place.pp_rank)
        for place in place(shape, [NodeDevices(0, "a", "npu", 8)])
        for index in place.device_indices
    ]
    found = list(shortages(facts, shape, DEMAND, pools))
    assert [shortage.what.split(" (")[0] for shortage in found] == ["stage 0", "stage 1"]


@given(data=st.data())
def test_a_partition_is_found_where_there_is_one_and_it_fits(
    facts: ModelFacts, data: st.DataObject
) -> None:
    """With a device for each rank the search is complete: whatever memory a partition needs,
    one that fits that memory is found."""
    stages = data.draw(st.integers(1, 4))
    cuts = sorted(
        data.draw(
            st.lists(
                st.integers(1, LAYERS - 1), min_size=stages - 1, max_size=stages - 1, unique=True
            )
        )
    )
    edges = [0, *cuts, LAYERS]
    partition = tuple(end - start for start, end in pairwise(edges))
    shape = MeshShape(1, 1, stages, partition)
    needs = required(facts, shape)
    pools = devices(*needs)
    found = partition_within(facts, shape, DEMAND, pools)
    assert found is not None and sum(found) == LAYERS
    check_fit(facts, replace(shape, pp_layer_partition=found), DEMAND, pools)
    # Less than the smallest thing that any stage could be: nothing fits.
    assert partition_within(facts, shape, DEMAND, devices(*[min(needs) // 100] * stages)) is None
