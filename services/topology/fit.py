"""Does every stage fit where it is placed? Predicted against free memory, before any load.

    shortages(facts, shape, demand, pools)    every pool of memory that is too small, in words
    check_fit(...)                            raises with the first one
    check_kv_cache(...)                       raises where a fixed KV cache is below one sequence

Memory comes in pools: a device of its own for each rank, or on the CPU one for all ranks of a node.
Pure: who knows the free memory (a node at launch, a rank that has its device) passes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.errors import ConfigError
from services.topology.facts import MeshShape, ModelFacts
from services.topology.layouts import Demand, memory_costs, predict
from services.topology.memory import StageMemory, logit_bytes
from services.topology.partition import even_partition, format_partition
from services.topology.placement import StagePlacement
from services.units import human_bytes

KV_CACHE_FLAG = "--kv-cache-memory-bytes"
MAX_MODEL_LEN_FLAG = "--max-model-len"
# Halvings of the search for the least full stages: finer than any layer.
_SEARCH_STEPS = 40


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory that some ranks take from."""

    where: str
    """For people: "device 3 of node 1 (host)", or "node 1 (host)"."""
    free_bytes: int
    available_bytes: int
    """What ranks may take of it."""
    pp_ranks: tuple[int, ...]
    """The stage of each rank that takes from it."""
    utilization: float | None = None
    """Share of a device that may be used; None for the main memory of a node, which has no such
    limit, and which more stages on the same node do not widen."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device."""

    total_bytes: int
    free_bytes: int

    def available_bytes(self, utilization: float) -> int:
        """What a rank may take: the free part, less what `--gpu-memory-utilization` keeps free."""
        return max(0, self.free_bytes - int(self.total_bytes * (1.0 - utilization)))


def host_pool(where: str, free_bytes: int, placements: Sequence[StagePlacement]) -> MemoryPool:
    """Main memory, from which all ranks of a node's placements take."""
    pp_ranks = tuple(place.pp_rank for place in placements for _ in place.tp_ranks)
    return MemoryPool(where, free_bytes, free_bytes, pp_ranks)


def device_pool(where: str, memory: DeviceMemory, utilization: float, pp_rank: int) -> MemoryPool:
    """An accelerator's memory, which one rank of stage `pp_rank` has to itself."""
    available_bytes = memory.available_bytes(utilization)
    return MemoryPool(where, memory.free_bytes, available_bytes, (pp_rank,), utilization)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A pool that is too small."""

    what: str
    remedy: str

    @property
    def message(self) -> str:
        """One line."""
        return f"{self.what}; {self.remedy}"


def check_fit(
    facts: ModelFacts,
    shape: MeshShape,
    demand: Demand,
    pools: Sequence[MemoryPool],
    *,
    if_alike: Sequence[MemoryPool] = (),
) -> None:
    """Raises `ConfigError` with the numbers of the first pool that is too small.

    `if_alike` are the pools of nodes whose memory is not known here, taken as equal to this
    node's: they count for the partition that would fit, and are not judged.
    """
    for shortage in shortages(facts, shape, demand, pools, if_alike=if_alike):
        raise ConfigError(shortage.message, param=MAX_MODEL_LEN_FLAG)


def check_kv_cache(facts: ModelFacts, shape: MeshShape, demand: Demand) -> None:
    """Raises `ConfigError` where the KV cache that the user fixed cannot hold one sequence of the
    greatest length: such a sequence could be admitted and never end."""
    fixed = demand.kv_cache_bytes
    if fixed is None:
        return
    stage = max(predict(facts, shape, demand), key=lambda stage: stage.kv_block_bytes)
    blocks = stage.blocks_in(fixed)
    if blocks >= demand.needed_blocks:
        return
    remedy = f"raise it to at least {demand.needed_blocks * stage.kv_block_bytes}"
    if blocks:
        remedy += f", or lower {MAX_MODEL_LEN_FLAG} to at most {blocks * demand.block_size}"
    raise ConfigError(
        f"{KV_CACHE_FLAG} {fixed} gives stage {stage.pp_rank} room for {blocks} blocks of "
        f"{demand.block_size} tokens, and one sequence of {demand.max_model_len} tokens takes "
        f"{demand.needed_blocks}; {remedy}",
        param=KV_CACHE_FLAG,
    )


def shortages(
    facts: ModelFacts,
    shape: MeshShape,
    demand: Demand,
    pools: Sequence[MemoryPool],
    *,
    if_alike: Sequence[MemoryPool] = (),
) -> Iterator[Shortage]:
    """Pools that are too small, in the order given, once for each stage. See `check_fit`."""
    stages = predict(facts, shape, demand)
    said: set[int] = set()
    for pool in pools:
        if _has_room(stages, demand, pool):
            continue
        stage = max((stages[pp_rank] for pp_rank in pool.pp_ranks), key=demand.required_bytes)
        if stage.pp_rank in said:
            continue
        said.add(stage.pp_rank)
        yield Shortage(
            _what(stage, stages, demand, pool),
            _remedy(facts, shape, demand, pool, (*pools, *if_alike), assumed=bool(if_alike)),
        )


def _has_room(stages: Sequence[StageMemory], demand: Demand, pool: MemoryPool) -> bool:
    return _required(stages, demand, pool) <= pool.available_bytes


def _required(stages: Sequence[StageMemory], demand: Demand, pool: MemoryPool) -> int:
    return sum(demand.required_bytes(stages[pp_rank]) for pp_rank in pool.pp_ranks)


def _what(
    stage: StageMemory, stages: Sequence[StageMemory], demand: Demand, pool: MemoryPool
) -> str:
    required = demand.required_bytes(stage)
    head = f", of them the LM head {human_bytes(stage.head_bytes)}" if stage.head_bytes else ""
    fixed_kv = demand.kv_cache_bytes is not None
    kv_cache = KV_CACHE_FLAG if fixed_kv else f"one sequence of {demand.max_model_len} tokens"
    text = (
        f"stage {stage.pp_rank} (layers {stage.layer_start} to {stage.layer_end - 1}) does not "
        f"fit: each of its ranks needs {human_bytes(required)} (weights "
        f"{human_bytes(stage.weight_bytes)}{head}, activations "
        f"{human_bytes(stage.activation_bytes)}, KV cache "
        f"{human_bytes(required - stage.fixed_bytes)} for {kv_cache}), and {pool.where} has "
        f"{human_bytes(pool.free_bytes)} free"
    )
    if pool.utilization is not None:
        text += (
            f", of which --gpu-memory-utilization {pool.utilization:g} leaves "
            f"{human_bytes(pool.available_bytes)}"
        )
    if len(pool.pp_ranks) > 1:
        total = human_bytes(_required(stages, demand, pool))
        text += f" for its {len(pool.pp_ranks)} ranks, which need {total} together"
    return text


def _remedy(
    facts: ModelFacts,
    shape: MeshShape,
    demand: Demand,
    short: MemoryPool,
    pools: Sequence[MemoryPool],
    *,
    assumed: bool,
) -> str:
    found = partition_within(facts, shape, demand, pools)
    if found is not None:
        condition = " if the other nodes have as much memory" if assumed else ""
        return f"--pp-layer-partition {format_partition(found)} would fit{condition}"
    ways = list(_smaller(predict(facts, shape, demand), demand, pools))
    if demand.dtype == "float32":
        ways.append("--dtype bfloat16, which halves it")
    ways.append(
        "more nodes (--nnodes), or end what else uses the memory"
        if short.utilization is None
        else "more stages (--pipeline-parallel-size) or ranks (--tensor-parallel-size)"
    )
    sizes = f"TP {shape.tp_size} x PP {shape.pp_size}"
    return f"no partition of {sizes} fits there; use {', or '.join(ways)}"


def _smaller(
    stages: Sequence[StageMemory], demand: Demand, pools: Sequence[MemoryPool]
) -> Iterator[str]:
    """Less KV cache that this partition would have room for, where there is any."""
    blocks = min(_blocks_left(stages, pool) for pool in pools)
    if demand.kv_cache_bytes is not None:
        left = min(_bytes_left(stages, pool) // len(pool.pp_ranks) for pool in pools)
        if blocks >= demand.needed_blocks and left > 0:
            yield f"{KV_CACHE_FLAG} of at most {left}"
    if 0 < blocks < demand.needed_blocks:
        yield f"{MAX_MODEL_LEN_FLAG} of at most {blocks * demand.block_size}"


def _bytes_left(stages: Sequence[StageMemory], pool: MemoryPool) -> int:
    return pool.available_bytes - sum(stages[pp_rank].fixed_bytes for pp_rank in pool.pp_ranks)


def _blocks_left(stages: Sequence[StageMemory], pool: MemoryPool) -> int:
    """KV blocks on every rank of the pool beside weights and activations."""
    block_bytes = sum(stages[pp_rank].kv_block_bytes for pp_rank in pool.pp_ranks)
    return max(0, _bytes_left(stages, pool)) // block_bytes


def partition_within(
    facts: ModelFacts, shape: MeshShape, demand: Demand, pools: Sequence[MemoryPool]
) -> tuple[int, ...] | None:
    """A partition of the same sizes with which every pool has room: the even one where it does,
    else the one that fills the fullest stage least. None where the search finds none.

    In the search each rank of a shared pool gets an equal part of it; the result is
    checked against the whole pools.
    """
    even = even_partition(facts.num_hidden_layers, shape.pp_size)
    filled = _least_full(facts, shape, demand, _limits(shape.pp_size, pools))
    for partition in (even, filled):
        if partition is None:
            continue
        other = MeshShape(shape.dp_size, shape.tp_size, shape.pp_size, partition)
        stages = predict(facts, other, demand)
        if all(_has_room(stages, demand, pool) for pool in pools):
            return partition
    return None


def _limits(pp_size: int, pools: Sequence[MemoryPool]) -> list[int]:
    """By stage: the least that one of its ranks may take; 0 where nobody has told."""
    limits: list[int | None] = [None] * pp_size
    for pool in pools:
        share = pool.available_bytes // len(pool.pp_ranks)
        for pp_rank in pool.pp_ranks:
            known = limits[pp_rank]
            limits[pp_rank] = share if known is None else min(known, share)
    return [0 if limit is None else limit for limit in limits]


def _least_full(
    facts: ModelFacts, shape: MeshShape, demand: Demand, limits: Sequence[int]
) -> tuple[int, ...] | None:
    """The partition whose fullest stage, against its limit, is least full. None if none fits."""
    costs = memory_costs(facts, shape.tp_size, shape.pp_size, demand)
    *others, last = (stage.activation_bytes for stage in predict(facts, shape, demand))
    activations = max(*others, last - logit_bytes(facts, demand.max_num_seqs), 0)
    constant = activations + (demand.kv_cache_bytes or 0)
    best = _fill(costs, [limit - constant for limit in limits])
    low, high = 0.0, 1.0
    for _ in range(_SEARCH_STEPS if best is not None else 0):
        middle = (low + high) / 2
        found = _fill(costs, [int(limit * middle) - constant for limit in limits])
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _fill(costs: Sequence[int], limits: Sequence[int]) -> tuple[int, ...] | None:
    """As many layers on each stage as its limit allows, from the first one on, and at least one
    on each; None where layers are left over."""
    partition, layer = [], 0
    for stage, limit in enumerate(limits):
        stages_after = len(limits) - stage - 1
        first, filled = layer, 0
        while layer < len(costs) - stages_after and filled + costs[layer] <= limit:
            filled += costs[layer]
            layer += 1
        if layer == first:
            return None
        partition.append(layer - first)
    return tuple(partition) if layer == len(costs) else None
