"""What is asked of Ray, how its answer is numbered, and what is said where there is none."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launch.ray_bundles import (
    RayNode,
    Room,
    bundle_sizes,
    choose_device,
    in_use,
    number_ranks,
    resource_of,
    rooms,
    too_small_message,
    unmet_message,
)
from services.topology.facts import MeshShape


def shape(dp: int = 1, tp: int = 2, pp: int = 2) -> MeshShape:
    return MeshShape(dp_size=dp, tp_size=tp, pp_size=pp, pp_layer_partition=(3,) * pp)


def node(number: int, **resources: float) -> RayNode:
    return RayNode(f"id-{number}", f"10.0.0.{number}", resources, resources)


def used(number: int, total: float, free: float) -> RayNode:
    """A node with NPUs, some of them in use."""
    # Ray leaves out what is used up.
    left = {"NPU": free} if free else {}
    return RayNode(f"id-{number}", f"10.0.0.{number}", {"NPU": total}, left)


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
    nodes = [used(1, 2, 1), used(2, 1, 1), node(3, CPU=64)]
    message = unmet_message(shape(), "NPU", [None, None], nodes, 30.0)
    assert message == (
        "insufficient resources: 2 of 2 bundles of Ray's placement group are unmet after 30 s "
        "(bundles 0, 1: 2 NPU each, one for each TP group); TP 2 x PP 2 x DP 1 needs 4 NPU, and "
        "Ray sees 3 NPU, 2 of them free (2 on 10.0.0.1, 1 on 10.0.0.2, 0 on 10.0.0.3)"
    )


def test_only_unmet_bundles_are_named() -> None:
    message = unmet_message(shape(), "CPU", ["id-1", None, None, None], [A], 15.0)
    assert "3 of 4 bundles" in message
    assert "(bundles 1, 2, 3: 1 CPU each, one for each rank)" in message


def test_a_large_cluster_makes_no_endless_message() -> None:
    nodes = [node(number, NPU=1) for number in range(100)]
    message = unmet_message(shape(dp=50), "NPU", [None] * 100, nodes, 30.0)
    assert "15, ...:" in message
    assert "and 84 nodes more" in message


def test_room_is_counted_by_whole_bundles_on_each_node() -> None:
    nodes = [used(1, 3, 3), used(2, 3, 1)]
    assert rooms(shape(tp=2, pp=2), "NPU", nodes) == (
        Room(ranks_per_bundle=2, needed=2, free=1, total=2),
        Room(ranks_per_bundle=1, needed=4, free=4, total=6),
    )
    assert rooms(shape(tp=1, pp=2), "GPU", nodes) == (Room(1, 2, 0, 0),)


@given(st.data())
def test_as_many_bundles_find_room_as_can_be_put_into_nodes(data: st.DataObject) -> None:
    tp = data.draw(st.integers(1, 4))
    free = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    nodes = [used(number, 6, each) for number, each in enumerate(free)]
    for room in rooms(shape(dp=2, tp=tp, pp=3), "NPU", nodes):
        left, put = list(free), 0
        while max(left) >= room.ranks_per_bundle:
            left[left.index(max(left))] -= room.ranks_per_bundle
            put += 1
        assert room.free == put
        assert room.total == len(free) * (6 // room.ranks_per_bundle)
        assert room.needed * room.ranks_per_bundle == 6 * tp


def test_what_is_in_use_is_told_by_node() -> None:
    nodes = [used(1, 8, 0), used(2, 8, 6)]
    assert in_use("NPU", nodes) == "10 of 16 NPU in use (8 of 8 on 10.0.0.1, 2 of 8 on 10.0.0.2)"


def test_a_cluster_that_is_too_small_names_the_bundles_that_nothing_helps() -> None:
    nodes = [used(1, 2, 0), used(2, 1, 1)]
    (_, each_rank) = rooms(shape(), "NPU", nodes)
    assert too_small_message(shape(), "NPU", each_rank, nodes) == (
        "insufficient resources: 1 of 4 bundles would be unmet even if nobody used the cluster "
        "(bundles 3: 1 NPU each, one for each rank); TP 2 x PP 2 x DP 1 needs 4 NPU, and Ray sees "
        "3 NPU, 1 of them free (2 on 10.0.0.1, 1 on 10.0.0.2)"
    )
