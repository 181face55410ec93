"""Does every stage on this node have room? Predicted against free, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.doctor.findings import Check, Finding, failed, ok, warning
from services.topology.facts import MeshShape, ModelFacts
from services.topology.layouts import Demand, fitting_partition, predict
from services.topology.memory import StageMemory
from services.topology.partition import format_partition
from services.topology.placement import StagePlacement
from services.units import human_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device."""

    total_bytes: int
    free_bytes: int

    def available_bytes(self, utilization: float) -> int:
        """What a rank may take: the free part, less what `--gpu-memory-utilization` keeps free."""
        return max(0, self.free_bytes - int(self.total_bytes * (1.0 - utilization)))


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
) -> Iterator[Finding]:
    """`placements` are this node's; `memory` is None where nobody can tell it."""
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
    if isinstance(memory, SharedByRanks):
        complaints = list(_shared(facts, shape, demand, stages, placements, memory.free_bytes))
    else:
        complaints = list(_own_devices(facts, shape, demand, stages, placements, memory))
    yield from complaints
    if not complaints:
        yield ok(Check.MEMORY, f"each rank needs at least: {needed}; {_free_words(memory)}")


def _free_words(memory: OneDevicePerRank | SharedByRanks) -> str:
    if isinstance(memory, SharedByRanks):
        return f"{human_bytes(memory.free_bytes)} are free on this node"
    least = min(memory.devices, key=lambda device: device.free_bytes)
    return f"at least {human_bytes(least.free_bytes)} are free on each device"


def _shared(
    facts: ModelFacts,
    shape: MeshShape,
    demand: Demand,
    stages: Sequence[StageMemory],
    placements: Sequence[StagePlacement],
    free_bytes: int,
) -> Iterator[Finding]:
    num_ranks = sum(len(place.tp_ranks) for place in placements)
    total = sum(
        demand.required_bytes(stages[place.pp_rank]) * len(place.tp_ranks) for place in placements
    )
    if num_ranks == 0 or total <= free_bytes:
        return
    largest = max((stages[place.pp_rank] for place in placements), key=demand.required_bytes)
    yield failed(
        Check.MEMORY,
        f"{_needs(largest, demand)}; the {num_ranks} ranks of this node need {human_bytes(total)} "
        f"together, and {human_bytes(free_bytes)} are free",
        _remedy(facts, shape, demand, free_bytes // num_ranks),
    )


def _own_devices(
    facts: ModelFacts,
    shape: MeshShape,
    demand: Demand,
    stages: Sequence[StageMemory],
    placements: Sequence[StagePlacement],
    memory: OneDevicePerRank,
) -> Iterator[Finding]:
    usable = [device.available_bytes(memory.utilization) for device in memory.devices]
    for place in placements:
        stage = stages[place.pp_rank]
        for tp_rank, index in zip(place.tp_ranks, place.device_indices, strict=True):
            if index >= len(usable) or demand.required_bytes(stage) <= usable[index]:
                continue
            yield failed(
                Check.MEMORY,
                f"{_needs(stage, demand)}; device {index} (TP rank {tp_rank}) has "
                f"{human_bytes(memory.devices[index].free_bytes)} free, of which "
                f"--gpu-memory-utilization {memory.utilization:g} leaves "
                f"{human_bytes(usable[index])}",
                _remedy(facts, shape, demand, min(usable)),
            )
            break  # One rank says it for its TP group.


def _needs(stage: StageMemory, demand: Demand) -> str:
    kv_bytes = demand.required_bytes(stage) - stage.fixed_bytes
    return (
        f"stage {stage.pp_rank} (layers {stage.layer_start} to {stage.layer_end - 1}) needs "
        f"{human_bytes(demand.required_bytes(stage))} on each rank: weights "
        f"{human_bytes(stage.weight_bytes)}, activations {human_bytes(stage.activation_bytes)}, "
        f"KV cache {human_bytes(kv_bytes)}"
    )


def _remedy(facts: ModelFacts, shape: MeshShape, demand: Demand, available: int) -> str:
    limited = replace(demand, available_bytes=available)
    found = fitting_partition(facts, shape.tp_size, shape.pp_size, limited)
    if found is not None and found.partition != shape.pp_layer_partition:
        return f"--pp-layer-partition {format_partition(found.partition)} would fit"
    return (
        f"no partition of TP {shape.tp_size} x PP {shape.pp_size} fits: use more stages or ranks, "
        "a shorter --max-model-len, or end what else uses the memory"
    )


def _one_for_each_stage(placements: Sequence[StagePlacement]) -> list[StagePlacement]:
    return list({place.pp_rank: place for place in placements}.values())
