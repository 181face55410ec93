"""What is asked of Ray, how its answer is numbered, and what is said where there is none."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launch.ray_bundles import (
    RayNode,
    bundle_sizes,
    choose_device,
    number_ranks,
    resource_of,
    unmet_message,
)
from services.topology.facts import MeshShape


def shape(dp: int = 1, tp: int = 2, pp: int = 2) -> MeshShape:
    return MeshShape(dp_size=dp, tp_size=tp, pp_size=pp, pp_layer_partition=(3,) * pp)


def node(number: int, **resources: float) -> RayNode:
    return RayNode(f"id-{number}", f"10.0.0.{number}", resources)


A, B, C = (node(number, CPU=8) for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("asked", "nodes", "expected"),
    [
        ("auto", (node(1, CPU=8), node(2, CPU=8, NPU=2)), "npu"),
        ("auto", (node(1, CPU=8, GPU=1),), "cuda"),
        ("auto", (node(1, CPU=8),), "cpu"),
        ("auto", (node(1, CPU=8, NPU=0),), "cpu"),
        ("cpu", (node(1, CPU=8, NPU=8),), "cpu"),
    ],
)
def test_auto_takes_an_accelerator_of_any_node(
    asked: str, nodes: tuple[RayNode, ...], expected: str
) -> None:
    assert choose_device(asked, nodes) == expected


def test_each_kind_has_rays_name() -> None:
    assert [resource_of(kind) for kind in ("npu", "cuda", "cpu")] == ["NPU", "GPU", "CPU"]


def test_a_bundle_is_a_tp_group_where_that_can_be() -> None:
    assert bundle_sizes(1) == (1,)
    assert bundle_sizes(4) == (4, 1)


def test_stages_are_numbered_node_by_node_from_the_head() -> None:
    places = number_ranks(shape(), [B, A], head_node_id=A.node_id)
    found = [
        (p.placement.pp_rank, p.placement.tp_ranks, p.placement.node_rank, p.address, p.bundle)
        for p in places
    ]
    assert found == [
        (0, (0,), 0, "10.0.0.1", 1),
        (0, (1,), 0, "10.0.0.1", 1),
        (1, (0,), 1, "10.0.0.2", 0),
        (1, (1,), 1, "10.0.0.2", 0),
    ]
    assert [p.placement.layer_start for p in places] == [0, 0, 3, 3]
    assert {p.placement.device_indices for p in places} == {(0,)}


def test_a_head_that_holds_no_rank_is_still_node_0() -> None:
    places = number_ranks(shape(tp=1), [B, C], head_node_id=A.node_id)
    assert [p.placement.node_rank for p in places] == [1, 2]


@given(st.data())
def test_every_rank_has_one_place_and_groups_stay_together(data: st.DataObject) -> None:
    dp, tp, pp = (data.draw(st.integers(1, 4)) for _ in range(3))
    size = data.draw(st.sampled_from(bundle_sizes(tp)))
    count = dp * tp * pp // size
    nodes = data.draw(st.lists(st.sampled_from([A, B, C]), min_size=count, max_size=count))
    places = number_ranks(shape(dp, tp, pp), nodes, head_node_id=A.node_id)
    ranks = [(p.placement.dp_rank, p.placement.pp_rank, p.placement.tp_ranks[0]) for p in places]
    assert ranks == [(d, s, t) for d in range(dp) for s in range(pp) for t in range(tp)]
    for index, where in enumerate(nodes):
        held = [p for p in places if p.bundle == index]
        assert len(held) == size
        assert {p.address for p in held} == {where.address}
        if size == tp:
            assert len({(p.placement.dp_rank, p.placement.pp_rank) for p in held}) == 1
    # In order of world rank no node comes twice: neighbours share one where they can.
    numbers = [p.placement.node_rank for p in places]
    assert all(left <= right for left, right in pairwise(numbers))


def test_unmet_bundles_are_named_with_what_is_needed_and_seen() -> None:
    nodes = [node(1, CPU=64, NPU=2), node(2, CPU=64, NPU=1), node(3, CPU=64)]
    message = unmet_message(shape(), "NPU", [None, None], nodes, 2.0, 30.0)
    assert message == (
        "insufficient resources: 2 of 2 bundles of Ray's placement group are unmet after 30 s "
        "(bundles 0, 1: 2 NPU each, one for each TP group); TP 2 x PP 2 x DP 1 needs 4 NPU, and "
        "Ray sees 3 NPU, 2 of them free (2 on 10.0.0.1, 1 on 10.0.0.2, 0 on 10.0.0.3)"
    )


def test_only_unmet_bundles_are_named() -> None:
    message = unmet_message(shape(), "CPU", ["id-1", None, None, None], [A], 0.0, 15.0)
    assert "3 of 4 bundles" in message
    assert "(bundles 1, 2, 3: 1 CPU each, one for each rank)" in message


def test_a_large_cluster_makes_no_endless_message() -> None:
    nodes = [node(number, NPU=1) for number in range(100)]
    message = unmet_message(shape(dp=50), "NPU", [None] * 100, nodes, 0.0, 30.0)
    assert "15, ...:" in message
    assert "and 84 nodes more" in message
