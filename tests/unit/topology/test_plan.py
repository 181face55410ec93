"""The plan of a layout: partitions, memory, what fits, what to do instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError, PartitionError
from services.topology.layouts import balanced_partition
from services.topology.plan import idle_share, make_plan
from services.topology.plan_result import Plan, PlanSettings
from services.topology.planfacts import PlannedModel, read_planned_model
from tests.unit.topology.published_configs import DEEPSEEK_V3, write_config
from tests.unit.topology.test_families import SMOLLM2

GIB = 1 << 30
MIB = 1 << 20
SMALL = PlannedModel(SMOLLM2, None, None)
TWO_NODES = PlanSettings(
    tensor_parallel_size=8,
    pipeline_parallel_size=2,
    nnodes=2,
    devices_per_node=8,
    device_memory_bytes=64 * GIB,
    max_model_len=32_768,
)


@pytest.fixture
def large(tmp_path: Path) -> PlannedModel:
    return read_planned_model(write_config(tmp_path, DEEPSEEK_V3))


def ranges(plan: Plan) -> list[tuple[int, int]]:
    return [(stage.layer_start, stage.layer_end) for stage in plan.stages]


def test_partitions_of_61_layers(large: PlannedModel) -> None:
    two = make_plan(large, PlanSettings(pipeline_parallel_size=2))
    assert ranges(two) == [(0, 31), (31, 61)]
    four = make_plan(large, PlanSettings(pipeline_parallel_size=4))
    assert four.layout.pp_layer_partition == (15, 15, 16, 15)
    own = make_plan(large, PlanSettings(pipeline_parallel_size=2, pp_layer_partition=(32, 29)))
    assert ranges(own) == [(0, 32), (32, 61)]


@pytest.mark.parametrize(
    ("pp_size", "partition", "rule"),
    [
        (2, (32, 28), "sums to 60 layers"),
        (2, (30, 31, 0), "has 3 entries for 2 stages"),
        (2, (0, 61), "gives stage 0 0 layers"),
        (2, (-1, 62), "gives stage 0 -1 layers"),
        (62, None, "is above the model's 61 hidden layers"),
        (0, None, "must be at least 1"),
    ],
)
def test_bad_partitions_break_a_rule(
    large: PlannedModel, pp_size: int, partition: tuple[int, ...] | None, rule: str
) -> None:
    with pytest.raises(PartitionError, match=rule):
        make_plan(large, PlanSettings(pipeline_parallel_size=pp_size, pp_layer_partition=partition))


def test_tp_sizes_and_lengths_that_cannot_be(large: PlannedModel) -> None:
    with pytest.raises(ConfigError, match="does not divide the 128 attention heads"):
        make_plan(large, PlanSettings(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match="inside an FP8 block of 128"):
        make_plan(large, PlanSettings(tensor_parallel_size=32))
    with pytest.raises(ConfigError, match="above the model's 163840 positions"):
        make_plan(large, PlanSettings(max_model_len=200_000))


def test_two_nodes_hold_deepseek_v3(large: PlannedModel) -> None:
    plan = make_plan(large, TWO_NODES)
    assert plan.fits is True
    assert not plan.model.served
    assert [stage.nodes for stage in plan.stages] == [(0,), (1,)]
    assert plan.layout.devices_needed == 16
    first, last = plan.stages
    # One latent of 576 elements for each token and layer, whole on every rank.
    assert first.kv_bytes_per_token == 31 * 576 * 2
    assert first.embedding_bytes == last.head_bytes == 129_280 // 8 * 7168 * 2
    assert (first.head_bytes, last.embedding_bytes) == (0, 0)
    for stage in plan.stages:
        assert stage.required_bytes <= 57.6 * GIB
        assert stage.predicted_peak_bytes <= 64 * GIB


def test_the_weakest_stage_decides_about_the_kv_cache(large: PlannedModel) -> None:
    plan = make_plan(large, TWO_NODES)
    possible = [stage.possible_blocks for stage in plan.stages]
    assert possible[0] is not None and possible[1] is not None and possible[0] > possible[1]
    assert [stage.usable_blocks for stage in plan.stages] == [possible[1]] * 2
    assert plan.kv_cache.weakest_stage == 1
    assert plan.kv_cache.usable_tokens == possible[1] * 16
    for stage in plan.stages:
        assert stage.kv_cache_bytes == possible[1] * stage.kv_block_bytes


def test_what_does_not_fit_comes_with_numbers_and_a_way_out(large: PlannedModel) -> None:
    plan = make_plan(large, replace(TWO_NODES, pipeline_parallel_size=1, nnodes=1))
    assert plan.fits is False
    (stage,) = plan.stages
    assert stage.fits is False
    assert stage.missing_bytes == stage.required_bytes - plan.layout.available_bytes  # type: ignore[operator]
    found = plan.smallest_fit
    assert found is not None
    again = make_plan(
        large,
        replace(
            TWO_NODES,
            tensor_parallel_size=found.tensor_parallel_size,
            pipeline_parallel_size=found.pipeline_parallel_size,
            pp_layer_partition=found.pp_layer_partition,
            nnodes=found.nnodes,
        ),
    )
    assert again.fits is True
    assert plan.recommendation is None


def test_the_smallest_fit_is_the_smallest(large: PlannedModel) -> None:
    found = make_plan(large, replace(TWO_NODES, pipeline_parallel_size=1, nnodes=1)).smallest_fit
    assert found is not None and found.devices == 12
    for tp_size in (1, 2, 4, 8):
        for pp_size in range(1, -(-found.devices // tp_size)):
            smaller = replace(
                TWO_NODES,
                tensor_parallel_size=tp_size,
                pipeline_parallel_size=pp_size,
                nnodes=1,
                devices_per_node=None,
            )
            plan = make_plan(large, smaller)
            assert plan.fits is False and plan.fitting_partition is None


def test_nodes_of_eight_are_assumed_where_nobody_said(large: PlannedModel) -> None:
    found = make_plan(large, PlanSettings(device_memory_bytes=64 * GIB)).smallest_fit
    assert found is not None and found.tensor_parallel_size > 1
    assert "up to 8 in a node" in found.reason
    alone = make_plan(
        large, PlanSettings(device_memory_bytes=64 * GIB, devices_per_node=1)
    ).smallest_fit
    assert alone is not None and alone.tensor_parallel_size == 1


def test_the_same_sizes_may_fit_with_another_partition(large: PlannedModel) -> None:
    plan = make_plan(large, replace(TWO_NODES, pp_layer_partition=(15, 46)))
    assert plan.fits is False
    assert plan.fitting_partition == (31, 30)
    fitting = make_plan(large, replace(TWO_NODES, pp_layer_partition=plan.fitting_partition))
    assert fitting.fits is True and fitting.fitting_partition is None


def test_too_few_devices_do_not_fit(large: PlannedModel) -> None:
    plan = make_plan(large, replace(TWO_NODES, data_parallel_size=2))
    assert plan.layout.devices_needed == 32
    assert not plan.layout.enough_devices
    assert plan.fits is False
    assert all(stage.fits for stage in plan.stages)


def test_nodes_share_the_ranks_evenly_as_serve_shares_them(large: PlannedModel) -> None:
    uneven = replace(TWO_NODES, tensor_parallel_size=1, pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match="--nnodes 2 cannot share 3 ranks"):
        make_plan(large, uneven)
    four = make_plan(large, replace(TWO_NODES, tensor_parallel_size=4, pipeline_parallel_size=4))
    assert [stage.nodes for stage in four.stages] == [(0,), (0,), (1,), (1,)]
    # Three stages of four ranks: two nodes would cut a TP group in half.
    found = make_plan(large, replace(TWO_NODES, pipeline_parallel_size=1, nnodes=1)).smallest_fit
    assert found is not None
    assert (found.tensor_parallel_size, found.pipeline_parallel_size, found.nnodes) == (4, 3, 3)


@pytest.mark.parametrize(("nnodes", "replicas"), [(2, 1), (3, 1), (4, 2), (6, 3)])
def test_replicas_that_nodes_can_share(large: PlannedModel, nnodes: int, replicas: int) -> None:
    layout = replace(TWO_NODES, nnodes=nnodes, pipeline_parallel_size=nnodes)
    found = make_plan(large, layout).recommendation
    assert found is not None
    assert (found.flags, found.data_parallel_size) == ("-tp 8 -pp 2", replicas)


def test_without_memory_nothing_is_said_about_fit(large: PlannedModel) -> None:
    plan = make_plan(large, PlanSettings(tensor_parallel_size=8))
    assert plan.fits is None
    assert plan.recommendation is None and plan.smallest_fit is None
    assert plan.stages[0].possible_blocks is None
    assert plan.layout.reserve_bytes is None


def test_a_fixed_kv_cache() -> None:
    block = 30 * 2 * 3 * 64 * 4 * 16
    settings = PlanSettings(kv_cache_memory_bytes=600 * block, device_memory_bytes=4 * GIB)
    plan = make_plan(SMALL, settings)
    assert plan.kv_cache.usable_blocks == 600
    assert plan.fits is True
    small = make_plan(SMALL, replace(settings, kv_cache_memory_bytes=511 * block))
    assert small.fits is False
    assert small.stages[0].missing_bytes == 0


@pytest.mark.parametrize(
    ("pp_size", "concurrency", "share"), [(4, 1, 3 / 4), (4, 16, 3 / 19), (1, 5, 0.0), (2, 1, 0.5)]
)
def test_the_bubble(pp_size: int, concurrency: int, share: float) -> None:
    assert idle_share(pp_size, concurrency) == share
    settings = PlanSettings(pipeline_parallel_size=pp_size, concurrency=concurrency)
    (point,) = make_plan(SMALL, settings).bubble
    assert (point.concurrency, point.idle_share) == (concurrency, share)


def test_tp_is_better_while_few_requests_run() -> None:
    settings = PlanSettings(pipeline_parallel_size=3, concurrency=2, devices_per_node=4)
    few = make_plan(SMALL, settings).parallelism
    assert few is not None and few.better == "tp" and few.tensor_parallel_size == 3
    many = make_plan(SMALL, replace(settings, concurrency=8)).parallelism
    assert many is not None and many.better == "pp"
    assert many.concurrency_for_tolerated_idle == 8
    assert idle_share(3, 8) == 0.2
    heads = make_plan(SMALL, replace(settings, pipeline_parallel_size=2)).parallelism
    assert heads is not None and heads.better == "pp"
    assert "cannot split this model, which allows 1, 3" in heads.reason
    nodes = make_plan(SMALL, replace(settings, devices_per_node=1, nnodes=3)).parallelism
    assert nodes is not None and "would cross nodes of 1 devices" in nodes.reason
    assert make_plan(SMALL, PlanSettings()).parallelism is None


def test_where_to_start() -> None:
    one = make_plan(SMALL, PlanSettings(device_memory_bytes=8 * GIB, devices_per_node=4))
    assert one.recommendation is not None
    assert one.recommendation.flags == ""
    assert one.recommendation.data_parallel_size == 4
    tight = make_plan(SMALL, PlanSettings(device_memory_bytes=500 * MIB, devices_per_node=6))
    assert tight.recommendation is not None
    assert tight.recommendation.flags == "-tp 3"
    assert tight.recommendation.data_parallel_size == 2


def test_tp_inside_nodes_and_pp_across(large: PlannedModel) -> None:
    plan = make_plan(large, TWO_NODES)
    found = plan.recommendation
    assert found is not None
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (8, 2)
    assert found.nnodes == 2
    assert "TP 8 inside each node" in found.reason
    one_node = make_plan(large, replace(TWO_NODES, device_memory_bytes=128 * GIB)).recommendation
    assert one_node is not None
    assert (one_node.flags, one_node.data_parallel_size) == ("-tp 8", 2)


def test_the_lm_head_makes_the_last_stage_heavier() -> None:
    plan = make_plan(SMALL, PlanSettings(pipeline_parallel_size=2))
    balance = plan.balance
    assert balance is not None
    assert balance.heaviest_stage == 1
    # The head weighs as much as 8 layers: 19 and 11 + 8.
    assert balance.pp_layer_partition == (19, 11)
    layer = (plan.stages[0].weight_bytes - plan.stages[0].embedding_bytes) // 15
    assert balance.largest_step_bytes == pytest.approx(19 * layer, rel=0.001)
    even = make_plan(SMALL, PlanSettings(pipeline_parallel_size=2, pp_layer_partition=(19, 11)))
    assert even.balance is None
    assert make_plan(SMALL, PlanSettings()).balance is None


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=9).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_no_cut_has_a_smaller_largest_stage(case: tuple[list[int], int]) -> None:
    costs, stages = case
    found = balanced_partition(costs, stages)
    assert len(found) == stages and sum(found) == len(costs) and min(found) >= 1
    assert largest(costs, found) == min(
        largest(costs, cut) for cut in every_partition(len(costs), stages)
    )


def largest(costs: list[int], partition: tuple[int, ...]) -> int:
    start, sizes = 0, []
    for layers in partition:
        sizes.append(sum(costs[start : start + layers]))
        start += layers
    return max(sizes)


def every_partition(num_layers: int, stages: int) -> list[tuple[int, ...]]:
    if stages == 1:
        return [(num_layers,)]
    return [
        (first, *rest)
        for first in range(1, num_layers - stages + 2)
        for rest in every_partition(num_layers - first, stages - 1)
    ]
