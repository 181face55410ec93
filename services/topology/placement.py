"""Which rank runs on which device. Pure: nodes' devices in, placements out.

World ranks are handed out node by node, device by device: rank r of replica d
is number d * world_size + r. So a TP group (consecutive ranks) stays on one
node wherever its devices suffice, and pipeline neighbours lie next to each
other. A node may hold several stages; a stage may span nodes, and then it has
one placement, and one stage worker, on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.errors import ConfigError
from services.topology.facts import MeshShape


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """What one node brings."""

    node_rank: int
    node: str
    """Host name, for messages."""
    device: str
    """Device kind: "cpu", "npu", "cuda", "sim"."""
    num_devices: int | None
    """Visible devices; None where a device is only a process (CPU), so that any number fits."""


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """One stage worker's part of the mesh: a stage's ranks on one node."""

    node_rank: int
    dp_rank: int
    pp_rank: int
    tp_ranks: tuple[int, ...]
    """Ascending."""
    device_indices: tuple[int, ...]
    """Device on this node for each of `tp_ranks`."""
    layer_start: int
    layer_end: int
    """Half open, as in `MeshShape.layer_range`."""


def place(shape: MeshShape, nodes: Sequence[NodeDevices]) -> tuple[StagePlacement, ...]:
    """Places every rank of every replica, in order of world rank.

    Nodes are filled in order of node rank; devices that are left over stay
    idle. Raises `ConfigError` where two nodes have the same rank, where kinds
    of devices differ, or where there are too few devices, with the needed
    number (TP x PP x DP) against the visible one.
    """
    ordered = sorted(nodes, key=lambda node: node.node_rank)
    _check_nodes(ordered)
    needed = shape.world_size * shape.dp_size
    _check_enough(shape, ordered, needed)

    placements: list[StagePlacement] = []
    world_rank = 0
    for node in ordered:
        wanted = needed - world_rank
        taken = wanted if node.num_devices is None else min(node.num_devices, wanted)
        placements.extend(_place_on_node(shape, node.node_rank, world_rank, taken))
        world_rank += taken
    return tuple(placements)


def ranks_per_node(shape: MeshShape, nnodes: int) -> int:
    """World ranks of each node: all nodes hold the same number, as with vLLM's mp backend.

    Raises `ConfigError` where the ranks cannot be shared evenly.
    """
    needed = shape.world_size * shape.dp_size
    if needed % nnodes:
        raise ConfigError(
            f"--nnodes {nnodes} cannot share {needed} ranks ({_product(shape)}) evenly; use a "
            f"number of nodes that divides {needed}",
            param="--nnodes",
        )
    return needed // nnodes


def check_devices(shape: MeshShape, share: int, device: str, num_devices: int, node: str) -> None:
    """Raises `ConfigError` where a node sees fewer devices than its share of the ranks."""
    if num_devices >= share:
        return
    remedy = (
        f"--cpu-devices {share} runs them on fewer cores"
        if device == "cpu"
        else "use fewer ranks, or more nodes (--nnodes)"
    )
    raise ConfigError(
        f"insufficient resources: {_product(shape)} needs {shape.world_size * shape.dp_size} "
        f"devices, {share} of them on {node}, which has {num_devices} ({device}); {remedy}",
        param="--cpu-devices" if device == "cpu" else "--tensor-parallel-size",
    )


def ranks_of_a_spare(shape: MeshShape, nnodes: int) -> int:
    """Ranks of a spare worker: as many as the places of the mesh have on one node."""
    return min(shape.tp_size, ranks_per_node(shape, nnodes))


def check_spares(
    shape: MeshShape, nnodes: int, num_spares: int, device: str, num_devices: int, node: str
) -> None:
    """Raises `ConfigError` where a node has too few devices for its share of the ranks and for
    its spares."""
    share, each = ranks_per_node(shape, nnodes), ranks_of_a_spare(shape, nnodes)
    needed = share + num_spares * each
    if num_spares == 0 or num_devices >= needed:
        return
    remedy = f"--cpu-devices {needed} runs them on fewer cores" if device == "cpu" else "use fewer"
    raise ConfigError(
        f"insufficient resources: --standby {num_spares} needs {each} devices for each spare, "
        f"besides {share} for the stages on {node}, which has {num_devices} ({device}); {remedy}",
        param="--standby",
    )


def _product(shape: MeshShape) -> str:
    return f"TP {shape.tp_size} x PP {shape.pp_size} x DP {shape.dp_size}"


def _place_on_node(
    shape: MeshShape, node_rank: int, first_rank: int, num_ranks: int
) -> list[StagePlacement]:
    """Placements of `num_ranks` consecutive world ranks, on devices 0 to num_ranks - 1."""
    placements = []
    world_rank = first_rank
    end = first_rank + num_ranks
    while world_rank < end:
        dp_rank, rank = divmod(world_rank, shape.world_size)
        pp_rank, tp_start = divmod(rank, shape.tp_size)
        count = min(shape.tp_size - tp_start, end - world_rank)
        first_device = world_rank - first_rank
        layer_start, layer_end = shape.layer_range(pp_rank)
        placements.append(
            StagePlacement(
                node_rank=node_rank,
                dp_rank=dp_rank,
                pp_rank=pp_rank,
                tp_ranks=tuple(range(tp_start, tp_start + count)),
                device_indices=tuple(range(first_device, first_device + count)),
                layer_start=layer_start,
                layer_end=layer_end,
            )
        )
        world_rank += count
    return placements


def _check_nodes(ordered: Sequence[NodeDevices]) -> None:
    if not ordered:
        raise ConfigError("there is no node to place the mesh on")
    for left, right in pairwise(ordered):
        if left.node_rank == right.node_rank:
            raise ConfigError(
                f"nodes {left.node} and {right.node} both have node rank {left.node_rank}; "
                "give each its own",
                param="--node-rank",
            )
        if left.device != right.device:
            raise ConfigError(
                f"node {left.node} has {left.device} devices and node {right.node} has "
                f"{right.device} devices; one mesh uses one kind",
                param="--device",
            )


def _check_enough(shape: MeshShape, ordered: Sequence[NodeDevices], needed: int) -> None:
    counts = [node.num_devices for node in ordered if node.num_devices is not None]
    if len(counts) < len(ordered):
        return
    visible = sum(counts)
    if visible < needed:
        where = ", ".join(f"{node.num_devices} on {node.node}" for node in ordered)
        raise ConfigError(
            f"the mesh needs {needed} devices (TP {shape.tp_size} x PP {shape.pp_size} x "
            f"DP {shape.dp_size}), but {visible} {ordered[0].device} devices are visible "
            f"({where}); use smaller sizes, or make more devices visible",
            param="--tensor-parallel-size",
        )
