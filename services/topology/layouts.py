"""Which cuts of a model fit which devices, and which cut is even. Pure search over numbers.

    Demand                what one rank has, and what a service must be able to hold
    fits(...)             whether every stage of a layout has room
    balanced_partition    the cut whose largest stage is smallest, by bytes
    smallest_layout       the fewest devices that hold the model

A layout is TP x PP of one replica; replicas (DP) need the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.topology.facts import DTYPE_BYTES, MeshShape, ModelFacts
from services.topology.families import valid_tp_sizes
from services.topology.memory import (
    StageMemory,
    end_bytes,
    kv_elements_per_token,
    logit_bytes,
    predict_mesh,
)
from services.topology.partition import even_partition
from services.topology.weights import layer_bytes

# The search for an even cut is quadratic in the layers; models of this size do not exist.
MAX_BALANCED_LAYERS = 512
# Stages beyond the least number that holds the weights which are tried for activations and KV.
_MORE_STAGES = 64


@dataclass(frozen=True, slots=True)
class Demand:
    """What a layout is measured against."""

    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    available_bytes: int | None
    """Memory of one rank that may be used; None where it is not known."""
    kv_cache_bytes: int | None
    """KV cache of one rank where the user fixed it."""

    @property
    def needed_blocks(self) -> int:
        """KV blocks of the longest sequence: with fewer it could start and never end."""
        return -(-self.max_model_len // self.block_size)

    def possible_blocks(self, stage: StageMemory) -> int | None:
        """KV blocks that a stage has room for; None where that is not known."""
        if self.kv_cache_bytes is not None:
            return stage.blocks_in(self.kv_cache_bytes)
        if self.available_bytes is not None:
            return stage.usable_blocks(self.available_bytes)
        return None

    def required_bytes(self, stage: StageMemory) -> int:
        """The least that a rank of the stage needs: weights, activations, and the KV cache that
        was asked for or that one sequence of the greatest length takes."""
        kv_bytes = self.needed_blocks * stage.kv_block_bytes
        if self.kv_cache_bytes is not None:
            kv_bytes = max(kv_bytes, self.kv_cache_bytes)
        return stage.fixed_bytes + kv_bytes

    def has_room(self, stage: StageMemory) -> bool | None:
        """Whether the stage fits; None where the memory is not known."""
        blocks = self.possible_blocks(stage)
        if blocks is not None and blocks < self.needed_blocks:
            return False
        if self.available_bytes is None:
            return None
        return self.required_bytes(stage) <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """One replica's cut."""

    tp_size: int
    pp_size: int
    partition: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def shape(self) -> MeshShape:
        return MeshShape(1, self.tp_size, self.pp_size, self.partition)


def predict(facts: ModelFacts, shape: MeshShape, demand: Demand) -> tuple[StageMemory, ...]:
    """Memory of every stage, in stage order."""
    return predict_mesh(
        facts,
        shape,
        dtype=demand.dtype,
        block_size=demand.block_size,
        max_num_batched_tokens=demand.max_num_batched_tokens,
        max_num_seqs=demand.max_num_seqs,
    )


def fits(facts: ModelFacts, layout: Layout, demand: Demand) -> bool:
    """Whether every stage is known to have room."""
    return all(demand.has_room(stage) for stage in predict(facts, layout.shape, demand))


def fitting_partition(
    facts: ModelFacts, tp_size: int, pp_size: int, demand: Demand
) -> Layout | None:
    """The even cut where it fits, else the one that is even by memory where that fits."""
    if demand.available_bytes is not None and not _may_fit(facts, tp_size, pp_size, demand):
        return None
    even = Layout(tp_size, pp_size, even_partition(facts.num_hidden_layers, pp_size))
    if fits(facts, even, demand):
        return even
    balanced = Layout(tp_size, pp_size, memory_partition(facts, tp_size, pp_size, demand))
    return balanced if balanced != even and fits(facts, balanced, demand) else None


def fewest_stages(facts: ModelFacts, tp_size: int, demand: Demand) -> Layout | None:
    """The layout of `tp_size` with the fewest stages that fits; None if there is none."""
    if demand.available_bytes is None:
        return None
    weights = sum(layer_bytes(facts, tp_size, demand.dtype))
    first = max(1, -(-weights // max(1, demand.available_bytes)))
    last = min(facts.num_hidden_layers, first + _MORE_STAGES)
    for pp_size in range(first, last + 1):
        layout = fitting_partition(facts, tp_size, pp_size, demand)
        if layout is not None:
            return layout
    return None


def smallest_layout(facts: ModelFacts, demand: Demand, devices_per_node: int) -> Layout | None:
    """The layout on the fewest devices, TP inside a node; among equals the fewest stages."""
    best: Layout | None = None
    for tp_size in tp_sizes_inside(facts, devices_per_node):
        layout = fewest_stages(facts, tp_size, demand)
        if layout is not None and (best is None or _cost(layout) < _cost(best)):
            best = layout
    return best


def tp_sizes_inside(facts: ModelFacts, devices_per_node: int) -> tuple[int, ...]:
    """TP sizes that the model allows and that one node holds, ascending."""
    return tuple(size for size in valid_tp_sizes(facts) if size <= devices_per_node)


def nodes_of(layout: Layout, devices_per_node: int) -> int:
    """The fewest nodes that hold the layout when all get the same number of ranks (as
    `placement.ranks_per_node` shares them) and no TP group lies on two. TP must fit a node."""
    for nodes in range(1, layout.pp_size):
        if layout.pp_size % nodes == 0 and layout.num_devices // nodes <= devices_per_node:
            return nodes
    return layout.pp_size


def memory_partition(
    facts: ModelFacts, tp_size: int, pp_size: int, demand: Demand
) -> tuple[int, ...]:
    """The cut that is most even by what a rank has to hold: weights, the KV cache of one
    sequence of the greatest length, and the last stage's logits."""
    return _balanced(memory_costs(facts, tp_size, pp_size, demand), pp_size)


def memory_costs(facts: ModelFacts, tp_size: int, pp_size: int, demand: Demand) -> list[int]:
    """By layer, what a rank that has it holds: weights and the KV cache of one sequence of the
    greatest length (none where its size is fixed); the first and last also their stage's ends."""
    kv_bytes = 0
    if demand.kv_cache_bytes is None:
        elements = kv_elements_per_token(facts, tp_size) * DTYPE_BYTES[demand.dtype]
        kv_bytes = demand.needed_blocks * demand.block_size * elements
    costs = [size + kv_bytes for size in layer_bytes(facts, tp_size, demand.dtype)]
    first, last = _end_costs(facts, tp_size, pp_size, demand.dtype)
    costs[0] += first
    costs[-1] += last + logit_bytes(facts, demand.max_num_seqs)
    return costs


def _may_fit(facts: ModelFacts, tp_size: int, pp_size: int, demand: Demand) -> bool:
    """False where no cut can fit: a bound that is cheap, so that the search passes quickly
    over everything that is far too large."""
    limit = (demand.available_bytes or 0) - (demand.kv_cache_bytes or 0)
    costs = memory_costs(facts, tp_size, pp_size, demand)
    return max(costs) <= limit and _stages_under(costs, limit) <= pp_size


def step_partition(facts: ModelFacts, tp_size: int, pp_size: int, dtype: str) -> tuple[int, ...]:
    """The cut that is most even by the weights that a step reads: layers and LM head. Of the
    embedding only a few rows are looked up."""
    costs = list(layer_bytes(facts, tp_size, dtype))
    costs[-1] += _end_costs(facts, tp_size, pp_size, dtype)[1]
    return _balanced(costs, pp_size)


def default_partition(
    facts: ModelFacts, tp_size: int, pp_size: int, device: str
) -> tuple[int, ...]:
    """The cut of whoever gives none: `even_partition`, as vLLM cuts, except on CPUs.

    There a token costs what its weights do, so a small model's LM head is worth many layers (eight
    of SmolLM2-135M's thirty). It counts a third: decoding needs it for every token, a prompt
    hardly, and most requests have more tokens in their prompt than they get.
    """
    if device != "cpu":
        return even_partition(facts.num_hidden_layers, pp_size)
    costs = [3 * size for size in layer_bytes(facts, tp_size, "float32")]
    costs[-1] += _end_costs(facts, tp_size, pp_size, "float32")[1]
    return _balanced(costs, pp_size)


def _end_costs(facts: ModelFacts, tp_size: int, pp_size: int, dtype: str) -> tuple[int, int]:
    """Bytes that the first and the last stage hold beside their layers; a single stage's are
    all the first one's."""
    even = even_partition(facts.num_hidden_layers, pp_size)
    shape = MeshShape(1, tp_size, pp_size, even)
    first = sum(end_bytes(facts, shape, 0, dtype))
    return first, 0 if pp_size == 1 else sum(end_bytes(facts, shape, pp_size - 1, dtype))


def _balanced(costs: Sequence[int], pp_size: int) -> tuple[int, ...]:
    if pp_size == 1 or len(costs) > MAX_BALANCED_LAYERS:
        return even_partition(len(costs), pp_size)
    return balanced_partition(costs, pp_size)


def balanced_partition(costs: Sequence[int], pp_size: int) -> tuple[int, ...]:
    """Cuts the layers so that the largest stage is as small as it can be; among all such cuts
    the one whose stages differ least (least sum of squares).

    `costs` has one entry for each layer; there must be at least `pp_size` of them.
    """
    limit = _least_maximum(costs, pp_size)
    sums = [0, *accumulate(costs)]
    num_layers = len(costs)
    # squares[end] is the least sum of squares of the first `end` layers in the stages placed
    # so far; starts[stage][end] is where the last of those stages begins.
    squares: list[int | None] = [0, *[None] * num_layers]
    starts: list[list[int]] = []
    for _ in range(pp_size):
        placed: list[int | None] = [None] * (num_layers + 1)
        begins = [0] * (num_layers + 1)
        for end in range(1, num_layers + 1):
            for start in range(end - 1, -1, -1):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                before = squares[start]
                if before is None:
                    continue
                known = placed[end]
                if known is None or before + cost * cost < known:
                    placed[end], begins[end] = before + cost * cost, start
        squares = placed
        starts.append(begins)
    partition = []
    end = num_layers
    for begins in reversed(starts):
        partition.append(end - begins[end])
        end = begins[end]
    return tuple(reversed(partition))


def _least_maximum(costs: Sequence[int], pp_size: int) -> int:
    """The least limit under which the layers go into `pp_size` stages."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _stages_under(costs, middle) <= pp_size:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_under(costs: Sequence[int], limit: int) -> int:
    stages, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            stages, filled = stages + 1, 0
        filled += cost
    return stages


def _cost(layout: Layout) -> tuple[int, int]:
    return layout.num_devices, layout.pp_size
