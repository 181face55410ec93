"""Where to start: TP, PP and DP sizes for given devices, and why. Pure.

The rule: TP alone if one node holds the model; else TP inside the nodes and PP
across them; DP only once one replica works. A pipeline pays with idle stages
while few requests run, TP with two all-reduces in each layer, which only the
fast links inside a node carry well.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.topology.facts import ModelFacts
from services.topology.families import valid_tp_sizes
from services.topology.layouts import (
    Demand,
    Layout,
    fewest_stages,
    fits,
    fitting_partition,
    nodes_of,
    smallest_layout,
    tp_sizes_inside,
)
from services.topology.partition import even_partition, format_partition

# Above this share of idle stage time the pipeline is the wrong tool, if there is another.
TOLERATED_IDLE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """What is there: nodes, and devices in each."""

    nnodes: int
    devices_per_node: int

    @property
    def total(self) -> int:
        return self.nnodes * self.devices_per_node


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A layout, and why."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    """Replicas that the devices allow, once one works."""
    pp_layer_partition: tuple[int, ...]
    devices: int
    """Of one replica."""
    nnodes: int
    """That one replica lies on."""
    flags: str
    """What to write behind `stagemesh plan MODEL` or `stagemesh serve MODEL`."""
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """TP against PP on the same devices."""

    better: str
    """"tp" or "pp"."""
    tensor_parallel_size: int | None
    """TP size that would take the pipeline's place; None if there is none."""
    concurrency_for_tolerated_idle: int
    """Independent batches from which on at most a fifth of stage time is idle."""
    reason: str


def recommend(facts: ModelFacts, demand: Demand, devices: DeviceCount) -> Recommendation | None:
    """The starting point for these devices; None where nothing fits or memory is not known."""
    if demand.available_bytes is None:
        return None
    per_node = devices.devices_per_node
    inside = tp_sizes_inside(facts, per_node)
    for tp_size in inside:
        alone = fitting_partition(facts, tp_size, 1, demand)
        if alone is not None:
            reason = f"one node holds the model with TP {tp_size}, so no pipeline is needed"
            if tp_size == 1:
                reason = "one device holds the model, so neither TP nor PP is needed"
            return _recommendation(facts, alone, devices, reason)
    for tp_size in reversed(inside):
        layout = fewest_stages(facts, tp_size, demand)
        if layout is None or (nodes := nodes_of(layout, per_node)) > devices.nnodes:
            continue
        reason = f"TP {tp_size} inside each node, a pipeline of {layout.pp_size} stages across"
        if nodes == 1:
            reason = (
                f"no TP size that the model allows fits one node by itself; TP {tp_size} and "
                f"{layout.pp_size} stages do"
            )
        return _recommendation(facts, layout, devices, reason)
    return None


def smallest_fit(facts: ModelFacts, demand: Demand, node_size: int) -> Recommendation | None:
    """The fewest devices like these that hold the model, in as many nodes as that takes."""
    layout = smallest_layout(facts, demand, node_size)
    if layout is None:
        return None
    nodes = nodes_of(layout, node_size)
    reason = f"the fewest devices that hold the model, with up to {node_size} in a node"
    return _recommendation(facts, layout, DeviceCount(nodes, node_size), reason)


def parallelism_advice(
    facts: ModelFacts,
    layout: Layout,
    demand: Demand,
    devices: DeviceCount,
    concurrency: int | None,
) -> Advice | None:
    """Whether TP would use the same devices better; None without a pipeline."""
    if layout.pp_size == 1:
        return None
    stages = layout.pp_size
    # (P - 1) / (M + P - 1) <= share, solved for M; whole numbers, or rounding could add one.
    enough = round((stages - 1) * (1 - TOLERATED_IDLE_SHARE) / TOLERATED_IDLE_SHARE)
    tp_size = layout.num_devices
    obstacle = _tp_obstacle(facts, tp_size, demand, devices)
    if obstacle is not None:
        return Advice("pp", None, enough, f"PP: TP {tp_size} {obstacle}")
    if concurrency is not None and concurrency >= enough:
        reason = (
            f"PP: with {concurrency} requests at a time the stages are busy, and a pipeline sends "
            f"less between devices than TP {tp_size}"
        )
        return Advice("pp", tp_size, enough, reason)
    few = f"below {enough} requests at a time" if concurrency is None else f"with {concurrency}"
    reason = (
        f"TP {tp_size} is the better choice {few}: a pipeline makes no single request faster, and "
        "its stages wait for each other, where TP uses the same devices for every token"
    )
    return Advice("tp", tp_size, enough, reason)


def _tp_obstacle(
    facts: ModelFacts, tp_size: int, demand: Demand, devices: DeviceCount
) -> str | None:
    """What speaks against TP alone, as the rest of a sentence."""
    if tp_size > devices.devices_per_node:
        return (
            f"would cross nodes of {devices.devices_per_node} devices, and the all-reduces of "
            "every layer need the links inside a node"
        )
    sizes = valid_tp_sizes(facts)
    if tp_size not in sizes:
        return f"cannot split this model, which allows {', '.join(map(str, sizes))}"
    whole = Layout(tp_size, 1, even_partition(facts.num_hidden_layers, 1))
    if demand.available_bytes is not None and not fits(facts, whole, demand):
        return "alone does not fit"
    return None


def _replicas(layout: Layout, devices: DeviceCount) -> int:
    """The most replicas that some of the nodes can share evenly, TP groups undivided."""
    per_node = devices.devices_per_node
    for replicas in range(devices.total // layout.num_devices, 1, -1):
        stages = replicas * layout.pp_size
        for nodes in range(1, devices.nnodes + 1):
            if stages % nodes == 0 and stages // nodes * layout.tp_size <= per_node:
                return replicas
    return 1


def _recommendation(
    facts: ModelFacts, layout: Layout, devices: DeviceCount, reason: str
) -> Recommendation:
    flags = []
    if layout.tp_size > 1:
        flags.append(f"-tp {layout.tp_size}")
    if layout.pp_size > 1:
        flags.append(f"-pp {layout.pp_size}")
        even = even_partition(facts.num_hidden_layers, layout.pp_size)
        if layout.partition != even:
            flags.append(f"--pp-layer-partition {format_partition(layout.partition)}")
    return Recommendation(
        tensor_parallel_size=layout.tp_size,
        pipeline_parallel_size=layout.pp_size,
        data_parallel_size=_replicas(layout, devices),
        pp_layer_partition=layout.partition,
        devices=layout.num_devices,
        nnodes=nodes_of(layout, devices.devices_per_node),
        flags=" ".join(flags),
        reason=reason,
    )
