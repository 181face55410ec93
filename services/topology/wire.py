"""Topology and placement between their messages and plain facts.

Whatever comes in is checked before anything is allocated or indexed by it: a
message is as hostile as its sender. Errors are `InvalidRequest`, `param` is the
message's field.
"""

from __future__ import annotations

from itertools import pairwise

from services.errors import InvalidRequest
from services.topology.facts import MeshShape
from services.topology.placement import StagePlacement
from stagemesh.v1 import topology_pb2

# Far above any mesh; a bound that keeps products and loops small.
MAX_SIZE = 65_536
MAX_WORLD_SIZE = 1 << 20
MAX_LAYERS = 10_000


def shape_to_proto(shape: MeshShape) -> topology_pb2.Topology:
    """The message that every side gets."""
    return topology_pb2.Topology(
        dp_size=shape.dp_size,
        tp_size=shape.tp_size,
        pp_size=shape.pp_size,
        pp_layer_partition=shape.pp_layer_partition,
    )


def shape_from_proto(
    message: topology_pb2.Topology, *, num_hidden_layers: int | None = None
) -> MeshShape:
    """Reads and validates a topology; `num_hidden_layers` is checked where it is known.

    Raises `InvalidRequest` where a size is 0 or beyond belief, where the
    partition does not have one positive entry per stage, or where its sum is
    not the model's number of layers.
    """
    for field, size in (
        ("dp_size", message.dp_size),
        ("tp_size", message.tp_size),
        ("pp_size", message.pp_size),
    ):
        if not 1 <= size <= MAX_SIZE:
            raise _invalid(f"topology.{field}", f"is {size}; it must be between 1 and {MAX_SIZE}")
    world_size = message.dp_size * message.tp_size * message.pp_size
    if world_size > MAX_WORLD_SIZE:
        raise _invalid(
            "topology", f"describes {world_size} ranks; more than {MAX_WORLD_SIZE} is not believed"
        )
    field = "topology.pp_layer_partition"
    if len(message.pp_layer_partition) != message.pp_size:
        raise _invalid(
            field,
            f"has {len(message.pp_layer_partition)} entries for {message.pp_size} stages; "
            "it must have one per stage",
        )
    for stage, layers in enumerate(message.pp_layer_partition):
        if not 1 <= layers <= MAX_LAYERS:
            raise _invalid(
                field, f"gives stage {stage} {layers} layers; it must be 1 to {MAX_LAYERS}"
            )
    total = sum(message.pp_layer_partition)
    if total > MAX_LAYERS:
        raise _invalid(field, f"sums to {total} layers; more than {MAX_LAYERS} is not believed")
    if num_hidden_layers is not None and total != num_hidden_layers:
        raise _invalid(
            field,
            f"sums to {total} layers, but the model has {num_hidden_layers} hidden layers",
        )
    return MeshShape(
        dp_size=message.dp_size,
        tp_size=message.tp_size,
        pp_size=message.pp_size,
        pp_layer_partition=tuple(message.pp_layer_partition),
    )


def placement_to_proto(placement: StagePlacement) -> topology_pb2.Placement:
    """The message for one worker's place. The node is not in it: the worker knows its own."""
    return topology_pb2.Placement(
        dp_rank=placement.dp_rank,
        pp_rank=placement.pp_rank,
        tp_ranks=placement.tp_ranks,
        device_indices=placement.device_indices,
        layer_start=placement.layer_start,
        layer_end=placement.layer_end,
    )


def placement_from_proto(
    message: topology_pb2.Placement, shape: MeshShape, *, node_rank: int = 0
) -> StagePlacement:
    """Reads a placement and checks it against a (validated) mesh shape.

    Raises `InvalidRequest` for a rank outside the mesh, TP ranks that are not
    ascending or without a device each, a device given twice, or a layer range
    other than the partition's.
    """
    if message.dp_rank >= shape.dp_size:
        raise _invalid(
            "placement.dp_rank", f"is {message.dp_rank} in a mesh of {shape.dp_size} replicas"
        )
    if message.pp_rank >= shape.pp_size:
        raise _invalid(
            "placement.pp_rank", f"is {message.pp_rank} in a mesh of {shape.pp_size} stages"
        )
    if not 1 <= len(message.tp_ranks) <= shape.tp_size:
        raise _invalid(
            "placement.tp_ranks",
            f"has {len(message.tp_ranks)} entries; it must have 1 to {shape.tp_size}",
        )
    tp_ranks = tuple(message.tp_ranks)
    if any(low >= high for low, high in pairwise(tp_ranks)):
        raise _invalid("placement.tp_ranks", "must be ascending, each rank once")
    if tp_ranks[-1] >= shape.tp_size:
        raise _invalid(
            "placement.tp_ranks", f"names rank {tp_ranks[-1]} in a TP group of {shape.tp_size}"
        )
    device_indices = tuple(message.device_indices)
    if len(device_indices) != len(tp_ranks):
        raise _invalid(
            "placement.device_indices",
            f"has {len(device_indices)} entries for {len(tp_ranks)} ranks; one each is needed",
        )
    if len(set(device_indices)) != len(device_indices) or max(device_indices) > MAX_SIZE:
        raise _invalid("placement.device_indices", "must name a different device for each rank")
    layer_start, layer_end = shape.layer_range(message.pp_rank)
    if (message.layer_start, message.layer_end) != (layer_start, layer_end):
        raise _invalid(
            "placement.layer_start",
            f"and layer_end are {message.layer_start} and {message.layer_end}, but the partition "
            f"gives stage {message.pp_rank} layers {layer_start} to {layer_end}",
        )
    return StagePlacement(
        node_rank=node_rank,
        dp_rank=message.dp_rank,
        pp_rank=message.pp_rank,
        tp_ranks=tp_ranks,
        device_indices=device_indices,
        layer_start=layer_start,
        layer_end=layer_end,
    )


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", param=field)
