"""What Ray is asked for, what its answer means, and what to say where it has none. Pure.

Ray alone decides which node holds what. All bundles are alike, so which of them holds
which stage is only a matter of numbering: ranks are numbered node by node, that
pipeline neighbours lie next to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.topology.facts import MeshShape
from services.topology.placement import StagePlacement

RESOURCES = {"npu": "NPU", "cuda": "GPU"}
"""Ray's name for a kind of device, in the order in which "auto" prefers them."""
CPU_RESOURCE = "CPU"
HEAD_NODE_RANK = 0
"""Of the node that runs the gateway, whether or not it holds ranks."""
_SHOWN_NODES = 16
_SHOWN_BUNDLES = 16


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node of the cluster that is alive."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    """All that the node has, also what others use."""
    free: Mapping[str, float]
    """What nobody uses; a resource of which all is used may be absent."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs."""

    placement: StagePlacement
    bundle: int
    """Index in the placement group."""
    address: str
    """Of its node."""


def resource_of(device: str) -> str:
    """Ray's name for a kind of device; every other kind is a process, and takes a CPU."""
    return RESOURCES.get(device, CPU_RESOURCE)


def choose_device(asked: str, nodes: Sequence[RayNode]) -> str:
    """The device kind of the mesh: "auto" takes an accelerator that any node has."""
    if asked != "auto":
        return asked
    for device, resource in RESOURCES.items():
        if any(node.resources.get(resource, 0) > 0 for node in nodes):
            return device
    return "cpu"


def bundle_sizes(tp_size: int) -> tuple[int, ...]:
    """Ranks in each bundle, the better way first: a bundle is never split over nodes, so one
    for each TP group keeps TP inside a node; else every rank is placed by itself."""
    return (tp_size, 1) if tp_size > 1 else (1,)


def number_ranks(
    shape: MeshShape, bundle_nodes: Sequence[RayNode], head_node_id: str
) -> tuple[RankPlace, ...]:
    """Gives every rank a place in the bundles that Ray has placed, in order of world rank.

    `bundle_nodes` is the node of each bundle; all bundles have the same size. The head's node is
    `HEAD_NODE_RANK`, the others are numbered in order of their first bundle. Every rank has a
    placement of its own, on device 0: it sees only the device that Ray gives it.
    """
    ranks_per_bundle = shape.world_size * shape.dp_size // len(bundle_nodes)
    node_ranks = {head_node_id: HEAD_NODE_RANK}
    for node in bundle_nodes:
        node_ranks.setdefault(node.node_id, len(node_ranks))
    by_node = sorted(range(len(bundle_nodes)), key=lambda i: node_ranks[bundle_nodes[i].node_id])
    places = []
    for number in range(shape.world_size * shape.dp_size):
        bundle = by_node[number // ranks_per_bundle]
        dp_rank, rank = divmod(number, shape.world_size)
        pp_rank, tp_rank = divmod(rank, shape.tp_size)
        layer_start, layer_end = shape.layer_range(pp_rank)
        placement = StagePlacement(
            node_rank=node_ranks[bundle_nodes[bundle].node_id],
            dp_rank=dp_rank,
            pp_rank=pp_rank,
            tp_ranks=(tp_rank,),
            device_indices=(0,),
            layer_start=layer_start,
            layer_end=layer_end,
        )
        places.append(RankPlace(placement, bundle, bundle_nodes[bundle].address))
    return tuple(places)


@dataclass(frozen=True, slots=True)
class Room:
    """How many bundles of one size the nodes hold."""

    ranks_per_bundle: int
    needed: int
    free: int
    """Bundles that find room in what nobody uses."""
    total: int
    """Bundles that would find room if nobody used anything."""


def rooms(shape: MeshShape, resource: str, nodes: Sequence[RayNode]) -> tuple[Room, ...]:
    """Room for the bundles of each way to ask for them, the better way first. All bundles are
    alike, so a node holds as many of them as go into what it has."""

    def held(size: int, resources: Iterable[Mapping[str, float]]) -> int:
        return sum(int(each.get(resource, 0) // size) for each in resources)

    return tuple(
        Room(
            ranks_per_bundle=size,
            needed=shape.world_size * shape.dp_size // size,
            free=held(size, (node.free for node in nodes)),
            total=held(size, (node.resources for node in nodes)),
        )
        for size in bundle_sizes(shape.tp_size)
    )


def whose_bundle(ranks_per_bundle: int) -> str:
    """What one bundle is for."""
    return "TP group" if ranks_per_bundle > 1 else "rank"


def in_use(resource: str, nodes: Sequence[RayNode]) -> str:
    """What somebody uses, over the cluster and by node."""
    used = [n.resources.get(resource, 0) - n.free.get(resource, 0) for n in nodes]
    total = sum(n.resources.get(resource, 0) for n in nodes)
    by_node = _by_node(
        nodes,
        [f"{u:g} of {n.resources.get(resource, 0):g}" for u, n in zip(used, nodes, strict=True)],
    )
    return f"{sum(used):g} of {total:g} {resource} in use ({by_node})"


def _by_node(nodes: Sequence[RayNode], amounts: Sequence[str]) -> str:
    shown = [
        f"{amount} on {node.address}"
        for amount, node in zip(amounts[:_SHOWN_NODES], nodes, strict=False)
    ]
    if len(nodes) > _SHOWN_NODES:
        shown.append(f"and {len(nodes) - _SHOWN_NODES} nodes more")
    return ", ".join(shown)


def seen(resource: str, nodes: Sequence[RayNode]) -> str:
    """What each node has."""
    return _by_node(nodes, [f"{n.resources.get(resource, 0):g} {resource}" for n in nodes])


def unmet_message(
    shape: MeshShape,
    resource: str,
    bundle_node_ids: Sequence[str | None],
    nodes: Sequence[RayNode],
    waited_seconds: float,
) -> str:
    """Why the mesh is not there: which bundles are unmet, what is needed, what Ray sees.

    `bundle_node_ids` has None for a bundle without a node.
    """
    unmet = [index for index, node_id in enumerate(bundle_node_ids) if node_id is None]
    count = len(bundle_node_ids)
    how = f"bundles of Ray's placement group are unmet after {waited_seconds:.0f} s"
    return _insufficient(shape, resource, unmet, count, how, nodes)


def too_small_message(shape: MeshShape, resource: str, room: Room, nodes: Sequence[RayNode]) -> str:
    """Why the mesh can never be there, in the same words."""
    unmet = range(room.total, room.needed)
    how = "bundles would be unmet even if nobody used the cluster"
    return _insufficient(shape, resource, unmet, room.needed, how, nodes)


def _insufficient(
    shape: MeshShape,
    resource: str,
    unmet: Sequence[int],
    count: int,
    how: str,
    nodes: Sequence[RayNode],
) -> str:
    """`unmet` are some of `count` bundles."""
    needed = shape.world_size * shape.dp_size
    ranks_per_bundle = needed // count
    listed = ", ".join(map(str, unmet[:_SHOWN_BUNDLES]))
    if len(unmet) > _SHOWN_BUNDLES:
        listed += ", ..."
    total = sum(node.resources.get(resource, 0) for node in nodes)
    free = sum(node.free.get(resource, 0) for node in nodes)
    by_node = _by_node(nodes, [f"{n.resources.get(resource, 0):g}" for n in nodes])
    return (
        f"insufficient resources: {len(unmet)} of {count} {how} (bundles {listed}: "
        f"{ranks_per_bundle} {resource} each, one for each {whose_bundle(ranks_per_bundle)}); TP "
        f"{shape.tp_size} x PP {shape.pp_size} x DP {shape.dp_size} needs {needed} {resource}, "
        f"and Ray sees {total:g} {resource}, {free:g} of them free ({by_node})"
    )
