"""Topology and placement messages: round trips, and hostile values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import InvalidRequest
from services.topology.facts import MeshShape
from services.topology.placement import NodeDevices, place
from services.topology.wire import (
    placement_from_proto,
    placement_to_proto,
    shape_from_proto,
    shape_to_proto,
)
from stagemesh.v1 import topology_pb2

shapes = st.builds(
    lambda dp, tp, partition: MeshShape(dp, tp, len(partition), tuple(partition)),
    st.integers(1, 4),
    st.integers(1, 8),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
uint32 = st.integers(0, 2**32 - 1)


@given(shapes)
def test_shape_round_trip(shape: MeshShape) -> None:
    message = topology_pb2.Topology.FromString(shape_to_proto(shape).SerializeToString())
    layers = sum(shape.pp_layer_partition)
    assert shape_from_proto(message, num_hidden_layers=layers) == shape


@given(shapes)
def test_placement_round_trip(shape: MeshShape) -> None:
    for placement in place(shape, [NodeDevices(0, "a", "cpu", None)]):
        assert placement_from_proto(placement_to_proto(placement), shape) == placement


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        ({}, "topology.dp_size", "is 0"),
        ({"dp_size": 1, "pp_size": 1, "pp_layer_partition": [3]}, "topology.tp_size", "is 0"),
        ({"dp_size": 1, "tp_size": 1}, "topology.pp_size", "is 0"),
        ({"dp_size": 1, "tp_size": 2**32 - 1, "pp_size": 1}, "topology.tp_size", "4294967295"),
        (
            {"dp_size": 65536, "tp_size": 65536, "pp_size": 1, "pp_layer_partition": [1]},
            "topology",
            "4294967296 ranks",
        ),
        (
            {"dp_size": 1, "tp_size": 1, "pp_size": 2, "pp_layer_partition": [3]},
            "topology.pp_layer_partition",
            "has 1 entries for 2 stages",
        ),
        (
            {"dp_size": 1, "tp_size": 1, "pp_size": 2, "pp_layer_partition": [0, 61]},
            "topology.pp_layer_partition",
            "gives stage 0 0 layers",
        ),
        (
            {"dp_size": 1, "tp_size": 1, "pp_size": 2, "pp_layer_partition": [61, 2**32 - 1]},
            "topology.pp_layer_partition",
            "gives stage 1 4294967295 layers",
        ),
        (
            {"dp_size": 1, "tp_size": 1, "pp_size": 2, "pp_layer_partition": [9999, 9999]},
            "topology.pp_layer_partition",
            "sums to 19998",
        ),
        (
            {"dp_size": 1, "tp_size": 1, "pp_size": 2, "pp_layer_partition": [31, 29]},
            "topology.pp_layer_partition",
            "sums to 60 layers, but the model has 61",
        ),
    ],
)
def test_hostile_topologies(message: dict[str, object], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shape_from_proto(topology_pb2.Topology(**message), num_hidden_layers=61)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert problem in caught.value.message


@given(uint32, uint32, uint32, st.lists(uint32, max_size=5))
def test_any_topology_gives_a_sound_shape_or_an_error(
    dp_size: int, tp_size: int, pp_size: int, partition: list[int]
) -> None:
    message = topology_pb2.Topology(
        dp_size=dp_size, tp_size=tp_size, pp_size=pp_size, pp_layer_partition=partition
    )
    try:
        shape = shape_from_proto(message)
    except InvalidRequest:
        return
    assert len(shape.pp_layer_partition) == shape.pp_size
    assert min(shape.pp_layer_partition) >= 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dp_rank": 1}, "placement.dp_rank"),
        ({"pp_rank": 2}, "placement.pp_rank"),
        ({"tp_ranks": []}, "placement.tp_ranks"),
        ({"tp_ranks": [1, 0]}, "placement.tp_ranks"),
        ({"tp_ranks": [0, 0]}, "placement.tp_ranks"),
        ({"tp_ranks": [0, 2]}, "placement.tp_ranks"),
        ({"tp_ranks": [0, 1, 2]}, "placement.tp_ranks"),
        ({"device_indices": [0]}, "placement.device_indices"),
        ({"device_indices": [3, 3]}, "placement.device_indices"),
        ({"device_indices": [0, 2**32 - 1]}, "placement.device_indices"),
        ({"layer_start": 0}, "placement.layer_start"),
        ({"layer_end": 4}, "placement.layer_start"),
    ],
)
def test_hostile_placements(change: dict[str, object], field: str) -> None:
    shape = MeshShape(1, 2, 2, (2, 1))
    fields: dict[str, object] = {
        "dp_rank": 0,
        "pp_rank": 1,
        "tp_ranks": [0, 1],
        "device_indices": [2, 3],
        "layer_start": 2,
        "layer_end": 3,
    }
    placement_from_proto(topology_pb2.Placement(**fields), shape)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        placement_from_proto(topology_pb2.Placement(**{**fields, **change}), shape)  # type: ignore[arg-type]
    assert caught.value.param == field
