"""Does every stage on this node have room? Predicted against free, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.doctor.findings import Check, Finding, failed, ok, refused, warning
from services.errors import ConfigError
from services.topology.facts import MeshShape, ModelFacts
from services.topology.fit import (
    DeviceMemory,
    MemoryPool,
    check_kv_cache,
    device_pool,
    host_pool,
    shortages,
)
from services.topology.layouts import Demand, predict
from services.topology.placement import StagePlacement
from services.units import human_bytes


@dataclass(frozen=True, slots=True)
class OneDevicePerRank:
    """Accelerators: by device index of this node."""

    devices: tuple[DeviceMemory, ...]
    utilization: float


@dataclass(frozen=True, slots=True)
class SharedByRanks:
    """The CPU: all ranks of the node take from the machine's memory."""

    free_bytes: int


def check_memory(
    facts: ModelFacts,
    shape: MeshShape,
    demand: Demand,
    placements: Sequence[StagePlacement],
    memory: OneDevicePerRank | SharedByRanks | None,
    others: Sequence[StagePlacement] = (),
) -> Iterator[Finding]:
    """`placements` are this node's and `others` those of the other nodes, whose memory is taken
    as equal where it counts for a partition; `memory` is None where nobody can tell it."""
    try:
        check_kv_cache(facts, shape, demand)
    except ConfigError as error:
        yield refused(Check.MEMORY, error)
        return
    stages = predict(facts, shape, demand)
    needed = "; ".join(
        f"stage {place.pp_rank} {human_bytes(demand.required_bytes(stages[place.pp_rank]))}"
        for place in _one_for_each_stage(placements)
    )
    if memory is None:
        yield warning(
            Check.MEMORY,
            f"free memory of the devices is not known; each rank needs at least: {needed}",
            "compare with what nvidia-smi or npu-smi shows, or ask stagemesh plan "
            "--device-memory-bytes",
        )
        return
    by_node: dict[int, list[StagePlacement]] = {}
    for place in others:
        by_node.setdefault(place.node_rank, []).append(place)
    alike = [pool for node in by_node.values() for pool in _pools(node, memory)]
    pools = _pools(placements, memory)
    short = list(shortages(facts, shape, demand, pools, if_alike=alike))
    for shortage in short:
        yield failed(Check.MEMORY, shortage.what, shortage.remedy)
    if not short:
        yield ok(Check.MEMORY, f"each rank needs at least: {needed}; {_free_words(memory)}")


def _pools(
    placements: Sequence[StagePlacement], memory: OneDevicePerRank | SharedByRanks
) -> list[MemoryPool]:
    if isinstance(memory, SharedByRanks):
        return [host_pool("this node", memory.free_bytes, placements)]
    return [
        device_pool(f"device {index}", memory.devices[index], memory.utilization, place.pp_rank)
        for place in placements
        for index in place.device_indices
        if index < len(memory.devices)
    ]


def _free_words(memory: OneDevicePerRank | SharedByRanks) -> str:
    if isinstance(memory, SharedByRanks):
        return f"{human_bytes(memory.free_bytes)} are free on this node"
    least = min(memory.devices, key=lambda device: device.free_bytes)
    return f"at least {human_bytes(least.free_bytes)} are free on each device"


def _one_for_each_stage(placements: Sequence[StagePlacement]) -> list[StagePlacement]:
    return list({place.pp_rank: place for place in placements}.values())
