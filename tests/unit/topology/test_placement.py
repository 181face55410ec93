"""Ranks to devices: every rank once, node by node, and clear words where it cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError
from services.topology.facts import MeshShape
from services.topology.placement import NodeDevices, StagePlacement, check_spares, place


def npu(node_rank: int, num_devices: int | None) -> NodeDevices:
    return NodeDevices(node_rank, f"node{node_rank}", "npu", num_devices)


def test_one_node_holds_all_stages() -> None:
    assert place(MeshShape(1, 2, 2, (2, 1)), [npu(0, 8)]) == (
        StagePlacement(0, 0, 0, (0, 1), (0, 1), 0, 2),
        StagePlacement(0, 0, 1, (0, 1), (2, 3), 2, 3),
    )


def test_any_number_of_ranks_fits_where_a_device_is_a_process() -> None:
    placements = place(MeshShape(1, 1, 3, (1, 1, 1)), [NodeDevices(0, "laptop", "cpu", None)])
    assert [placement.device_indices for placement in placements] == [(0,), (1,), (2,)]


def test_stages_on_nodes_of_their_own() -> None:
    assert place(MeshShape(1, 2, 2, (2, 1)), [npu(1, 2), npu(0, 2)]) == (
        StagePlacement(0, 0, 0, (0, 1), (0, 1), 0, 2),
        StagePlacement(1, 0, 1, (0, 1), (0, 1), 2, 3),
    )


def test_a_stage_over_two_nodes_has_a_placement_on_each() -> None:
    assert place(MeshShape(1, 2, 2, (2, 1)), [npu(0, 3), npu(1, 4)]) == (
        StagePlacement(0, 0, 0, (0, 1), (0, 1), 0, 2),
        StagePlacement(0, 0, 1, (0,), (2,), 2, 3),
        StagePlacement(1, 0, 1, (1,), (0,), 2, 3),
    )


def test_replicas_follow_each_other() -> None:
    placements = place(MeshShape(2, 1, 2, (2, 1)), [npu(0, 4)])
    assert [(p.dp_rank, p.pp_rank, p.device_indices) for p in placements] == [
        (0, 0, (0,)),
        (0, 1, (1,)),
        (1, 0, (2,)),
        (1, 1, (3,)),
    ]


def test_too_few_devices_gives_needed_against_visible() -> None:
    with pytest.raises(ConfigError) as caught:
        place(MeshShape(2, 2, 3, (1, 1, 1)), [npu(0, 8), npu(1, 3)])
    assert (
        "needs 12 devices (TP 2 x PP 3 x DP 2), but 11 npu devices are visible "
        "(8 on node0, 3 on node1)" in caught.value.message
    )


def test_nodes_that_cannot_be_one_mesh() -> None:
    shape = MeshShape(1, 1, 1, (1,))
    with pytest.raises(ConfigError, match="no node"):
        place(shape, [])
    with pytest.raises(ConfigError, match="both have node rank 0"):
        place(shape, [npu(0, 1), npu(0, 1)])
    with pytest.raises(ConfigError, match="one mesh uses one kind"):
        place(shape, [npu(0, 1), NodeDevices(1, "other", "cpu", None)])


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_every_rank_has_one_device_of_its_own(
    dp_size: int, tp_size: int, pp_size: int, counts: list[int]
) -> None:
    shape = MeshShape(dp_size, tp_size, pp_size, (2,) * pp_size)
    needed = dp_size * tp_size * pp_size
    nodes = [npu(rank, count) for rank, count in enumerate(counts)]
    if sum(counts) < needed:
        with pytest.raises(ConfigError, match=f"needs {needed} devices"):
            place(shape, nodes)
        return
    placements = place(shape, nodes)
    ranks = [(p.dp_rank, p.pp_rank, tp_rank) for p in placements for tp_rank in p.tp_ranks]
    assert ranks == [
        (dp, pp, tp) for dp in range(dp_size) for pp in range(pp_size) for tp in range(tp_size)
    ]
    devices = [(p.node_rank, index) for p in placements for index in p.device_indices]
    assert len(devices) == len(set(devices)) == needed
    assert all(index < counts[node] for node, index in devices)
    workers = [(p.node_rank, p.dp_rank, p.pp_rank) for p in placements]
    assert len(workers) == len(set(workers)), "one stage worker per stage and node"


@pytest.mark.parametrize(
    ("tp_size", "nnodes", "num_spares", "num_devices", "fits"),
    [
        (1, 1, 0, 4, True),
        (1, 1, 1, 4, False),
        (1, 1, 1, 5, True),
        (2, 1, 1, 9, False),
        (2, 1, 1, 10, True),
        # A stage spans two nodes, and so does what a spare takes over.
        (4, 8, 1, 4, True),
    ],
)
def test_spares_have_devices_of_their_own(
    tp_size: int, nnodes: int, num_spares: int, num_devices: int, fits: bool
) -> None:
    shape = MeshShape(1, tp_size, 4, (1, 1, 1, 1))
    if fits:
        check_spares(shape, nnodes, num_spares, "cpu", num_devices, "node 0")
        return
    with pytest.raises(ConfigError, match=r"--standby 1 needs . devices .* --cpu-devices (5|10) "):
        check_spares(shape, nnodes, num_spares, "cpu", num_devices, "node 0")
