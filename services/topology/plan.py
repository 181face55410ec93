"""What a layout will need, before anything is loaded: the content of `stagemesh plan`. Pure.

    make_plan(model, settings) -> Plan

Weight and KV bytes follow from the config; activations are an estimate, and so
is every sum with them. Nothing here was measured.
"""

from __future__ import annotations

from services.topology.compatibility import check_compatibility, request_of
from services.topology.facts import MeshShape, ModelFacts
from services.topology.families import resolve_dtype, resolve_max_model_len
from services.topology.layouts import (
    Demand,
    Layout,
    fitting_partition,
    predict,
    step_partition,
)
from services.topology.memory import StageMemory
from services.topology.partition import check_stage_count, resolve_partition
from services.topology.placement import NodeDevices, place, ranks_per_node
from services.topology.plan_result import (
    Balance,
    Bubble,
    Plan,
    PlanKv,
    PlanLayout,
    PlanModel,
    PlanSettings,
    PlanStage,
)
from services.topology.planfacts import PlannedModel
from services.topology.recommend import (
    DeviceCount,
    parallelism_advice,
    recommend,
    smallest_fit,
)

SCHEMA_VERSION = 1
# Where nobody said how many devices a node has: what most servers for this work have.
ASSUMED_NODE_SIZE = 8
# A stage counts as heavier only where another cut takes this much off it.
_WORTHWHILE_SHARE = 0.01


def make_plan(model: PlannedModel, settings: PlanSettings) -> Plan:
    """Plans the layout. Raises `ConfigError` or `PartitionError` for one that cannot exist or
    that a rule of `services.topology.compatibility` refuses."""
    facts = model.facts
    tp_size, pp_size = settings.tensor_parallel_size, settings.pipeline_parallel_size
    check_stage_count(facts.num_hidden_layers, pp_size)
    check_compatibility(request_of(settings, facts=facts))
    partition = resolve_partition(
        facts.num_hidden_layers,
        pp_size,
        settings.pp_layer_partition,
        settings.pp_layer_partition_source,
    )
    shape = MeshShape(settings.data_parallel_size, tp_size, pp_size, partition)
    layout = _layout(facts, settings, shape)
    demand = Demand(
        dtype=layout.dtype,
        block_size=layout.block_size,
        max_model_len=layout.max_model_len,
        max_num_seqs=layout.max_num_seqs,
        max_num_batched_tokens=layout.max_num_batched_tokens,
        available_bytes=layout.available_bytes,
        kv_cache_bytes=settings.kv_cache_memory_bytes,
    )
    memories = predict(facts, shape, demand)
    kv_cache = _kv_cache(memories, demand)
    nodes = _nodes_by_stage(shape, layout, pp_size)
    stages = tuple(
        _stage(memory, demand, kv_cache, layout, nodes[memory.pp_rank]) for memory in memories
    )
    rooms = [stage.fits for stage in stages]
    memory_fits = False if False in rooms else None if None in rooms else True
    fits = memory_fits if layout.enough_devices else False
    devices = DeviceCount(layout.nnodes, layout.devices_per_node)
    node_size = settings.devices_per_node or max(layout.devices_per_node, ASSUMED_NODE_SIZE)
    chosen = Layout(tp_size, pp_size, partition)
    return Plan(
        schema_version=SCHEMA_VERSION,
        model=_model(model),
        layout=layout,
        stages=stages,
        kv_cache=kv_cache,
        fits=fits,
        bubble=_bubbles(pp_size, settings),
        balance=_balance(facts, chosen, memories, layout.dtype),
        fitting_partition=_fitting(facts, chosen, demand) if memory_fits is False else None,
        parallelism=parallelism_advice(facts, chosen, demand, devices, settings.concurrency),
        recommendation=recommend(facts, demand, devices),
        smallest_fit=None if fits is not False else smallest_fit(facts, demand, node_size),
    )


def idle_share(pp_size: int, concurrency: float) -> float:
    """(P - 1) / (M + P - 1): the pipeline's bubble for M independent batches."""
    return (pp_size - 1) / (concurrency + pp_size - 1)


def _model(model: PlannedModel) -> PlanModel:
    facts = model.facts
    heads, kv_heads = facts.num_attention_heads, facts.num_key_value_heads
    attention = "multi-head" if kv_heads == heads else "grouped-query"
    if kv_heads == 1 and heads > 1:
        attention = "multi-query"
    if facts.mla is not None:
        attention = "latent"
    return PlanModel(
        architecture=facts.architecture,
        served=model.serve_obstacle is None,
        not_served_reason=model.serve_obstacle,
        num_hidden_layers=facts.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attention=attention,
        num_experts=0 if facts.moe is None else facts.moe.num_experts,
        num_experts_per_token=0 if facts.moe is None else facts.moe.num_experts_per_token,
        quantization=None if facts.fp8 is None else "fp8",
        checkpoint_dtype=facts.dtype,
        tie_word_embeddings=facts.tie_word_embeddings,
        sliding_window=model.sliding_window,
    )


def _layout(facts: ModelFacts, settings: PlanSettings, shape: MeshShape) -> PlanLayout:
    needed = shape.world_size * shape.dp_size
    share = ranks_per_node(shape, settings.nnodes)
    # Where nothing was said, as many devices as the layout takes.
    per_node = settings.devices_per_node or share
    memory = settings.device_memory_bytes
    available = None if memory is None else int(memory * settings.gpu_memory_utilization)
    return PlanLayout(
        tensor_parallel_size=shape.tp_size,
        pipeline_parallel_size=shape.pp_size,
        data_parallel_size=shape.dp_size,
        pp_layer_partition=shape.pp_layer_partition,
        dtype=_dtype(facts, settings),
        block_size=settings.block_size,
        max_model_len=resolve_max_model_len(settings.max_model_len, facts),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        devices_needed=needed,
        nnodes=settings.nnodes,
        devices_per_node=per_node,
        enough_devices=per_node >= share,
        device_memory_bytes=memory,
        available_bytes=available,
        reserve_bytes=None if memory is None or available is None else memory - available,
    )


def _dtype(facts: ModelFacts, settings: PlanSettings) -> str:
    """As `serve` decides; a plan without a device keeps the checkpoint's own type."""
    if settings.dtype == "auto" and settings.device == "auto":
        return facts.dtype
    return resolve_dtype(settings.dtype, facts, settings.device)


def _kv_cache(memories: tuple[StageMemory, ...], demand: Demand) -> PlanKv:
    possible = [demand.possible_blocks(memory) for memory in memories]
    known = [blocks for blocks in possible if blocks is not None]
    usable = min(known) if len(known) == len(memories) else None
    return PlanKv(
        usable_blocks=usable,
        usable_tokens=None if usable is None else usable * demand.block_size,
        needed_blocks=demand.needed_blocks,
        weakest_stage=None if usable is None else possible.index(usable),
    )


def _stage(
    memory: StageMemory,
    demand: Demand,
    kv_cache: PlanKv,
    layout: PlanLayout,
    nodes: tuple[int, ...],
) -> PlanStage:
    usable = kv_cache.usable_blocks
    blocks = demand.needed_blocks if usable is None else max(usable, demand.needed_blocks)
    kv_bytes = blocks * memory.kv_block_bytes
    required = demand.required_bytes(memory)
    missing = 0
    if demand.available_bytes is not None:
        missing = max(0, required - demand.available_bytes)
    return PlanStage(
        pp_rank=memory.pp_rank,
        layer_start=memory.layer_start,
        layer_end=memory.layer_end,
        nodes=nodes,
        weight_bytes=memory.weight_bytes,
        embedding_bytes=memory.embedding_bytes,
        head_bytes=memory.head_bytes,
        activation_bytes=memory.activation_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        kv_block_bytes=memory.kv_block_bytes,
        possible_blocks=demand.possible_blocks(memory),
        usable_blocks=usable,
        kv_cache_bytes=kv_bytes,
        predicted_peak_bytes=memory.fixed_bytes + kv_bytes + (layout.reserve_bytes or 0),
        required_bytes=required,
        fits=demand.has_room(memory),
        missing_bytes=missing,
    )


def _nodes_by_stage(shape: MeshShape, layout: PlanLayout, pp_size: int) -> list[tuple[int, ...]]:
    """Node ranks of each stage of the first replica."""
    if not layout.enough_devices:
        return [()] * pp_size
    share = ranks_per_node(shape, layout.nnodes)
    placements = place(
        shape,
        # What kind of device it is makes no difference to its place.
        [NodeDevices(rank, f"node {rank}", "cpu", share) for rank in range(layout.nnodes)],
    )
    return [
        tuple(p.node_rank for p in placements if p.dp_rank == 0 and p.pp_rank == stage)
        for stage in range(pp_size)
    ]


def _bubbles(pp_size: int, settings: PlanSettings) -> tuple[Bubble, ...]:
    asked = settings.concurrency
    points = {1, pp_size, 4 * pp_size, settings.max_num_seqs} if asked is None else {asked}
    return tuple(Bubble(point, idle_share(pp_size, point)) for point in sorted(points))


def _balance(
    facts: ModelFacts, layout: Layout, memories: tuple[StageMemory, ...], dtype: str
) -> Balance | None:
    if layout.pp_size == 1:
        return None
    partition = step_partition(facts, layout.tp_size, layout.pp_size, dtype)
    demand = Demand(dtype, 1, 1, 1, 1, None, None)
    other = MeshShape(1, layout.tp_size, layout.pp_size, partition)
    largest = max(_step_bytes(stage) for stage in predict(facts, other, demand))
    sizes = [_step_bytes(memory) for memory in memories]
    if max(sizes) - largest < max(sizes) * _WORTHWHILE_SHARE:
        return None
    return Balance(partition, largest, max(sizes), sizes.index(max(sizes)))


def _step_bytes(memory: StageMemory) -> int:
    return memory.weight_bytes - memory.embedding_bytes


def _fitting(facts: ModelFacts, layout: Layout, demand: Demand) -> tuple[int, ...] | None:
    found = fitting_partition(facts, layout.tp_size, layout.pp_size, demand)
    return None if found is None else found.partition
