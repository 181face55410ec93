"""A plan for people: a table and a bar for each stage, in 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from services.topology.partition import format_partition
from services.topology.plan_result import Balance, Plan, PlanStage
from services.topology.recommend import Recommendation
from services.topology.weightcheck import WeightCheck
from services.units import human_bytes

WIDTH = 100
_BAR_WIDTH = 56
_LABEL_WIDTH = 10


def render(name: str, plan: Plan, weights: WeightCheck) -> str:
    """The whole text, with a newline at its end."""
    sections = (
        _head(name, plan, weights),
        _stage_table(plan),
        _bars(plan),
        _findings(plan),
        _advice(plan),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _head(name: str, plan: Plan, weights: WeightCheck) -> Iterator[str]:
    model, layout = plan.model, plan.layout
    shape = [
        model.architecture,
        f"{model.num_hidden_layers} layers",
        f"{model.attention} attention",
    ]
    if model.num_experts:
        shape.append(f"{model.num_experts} experts, {model.num_experts_per_token} for each token")
    if model.quantization:
        shape.append(f"{model.quantization} weights")
    yield from _labelled("model", f"{name}: {', '.join(shape)}")
    if not model.served:
        yield from _labelled("", "CAN BE PLANNED, NOT SERVED YET. serve says:")
        yield from _labelled("", str(model.not_served_reason))
    yield from _labelled("weights", _weights(plan, weights))
    devices = (
        f"TP {layout.tensor_parallel_size} x PP {layout.pipeline_parallel_size} x "
        f"DP {layout.data_parallel_size} = {layout.devices_needed} devices, of "
        f"{layout.nnodes * layout.devices_per_node} ({_count(layout.nnodes, 'node')} of "
        f"{layout.devices_per_node}); layers {format_partition(layout.pp_layer_partition)}"
    )
    yield from _labelled("layout", devices)
    yield from _labelled(
        "settings",
        f"{layout.dtype}, sequences of {layout.max_model_len} tokens, {layout.max_num_seqs} at a "
        f"time, {layout.max_num_batched_tokens} tokens in a step, blocks of {layout.block_size}",
    )
    if layout.device_memory_bytes is not None and layout.available_bytes is not None:
        yield from _labelled(
            "device",
            f"{human_bytes(layout.device_memory_bytes)} of memory, "
            f"{human_bytes(layout.available_bytes)} of it may be used",
        )


def _weights(plan: Plan, weights: WeightCheck) -> str:
    text = f"{human_bytes(weights.computed_bytes)} in {plan.model.checkpoint_dtype}"
    if plan.model.quantization:
        text += f" and {plan.model.quantization}"
    if weights.not_loaded_bytes:
        extra = human_bytes(weights.not_loaded_bytes)
        text += f", and {extra} for multi-token prediction, which are not loaded"
    if weights.source is None:
        return f"{text}; computed from the config, no weights are there to compare"
    where = "safetensors headers" if weights.source == "headers" else "index's total size"
    if weights.equal is None:
        return f"{text}; cannot be compared: {weights.problem}"
    if weights.equal:
        return f"{text}; computed, and equal to the {where}"
    return f"{text}; computed, and NOT equal to the {where}: {weights.problem}"


def _stage_table(plan: Plan) -> Iterator[str]:
    yield "Predicted for one rank of each stage (weights, KV by config; activations estimated)"
    header = (
        "stage", "layers", "nodes", "weights", "embedding", "head", "activ.", "KV/token",
        "possible", "usable", "peak",
    )  # fmt: skip
    rows = [header, *(_stage_row(stage) for stage in plan.stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    for row in rows:
        yield gap.join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def _stage_row(stage: PlanStage) -> tuple[str, ...]:
    return (
        str(stage.pp_rank),
        f"[{stage.layer_start},{stage.layer_end})",
        ",".join(map(str, stage.nodes)) or "-",
        human_bytes(stage.weight_bytes),
        human_bytes(stage.embedding_bytes) if stage.embedding_bytes else "-",
        human_bytes(stage.head_bytes) if stage.head_bytes else "-",
        human_bytes(stage.activation_bytes),
        human_bytes(stage.kv_bytes_per_token),
        "?" if stage.possible_blocks is None else str(stage.possible_blocks),
        "?" if stage.usable_blocks is None else str(stage.usable_blocks),
        human_bytes(stage.predicted_peak_bytes),
    )


def _bars(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    reserve = layout.reserve_bytes or 0
    scale = max(
        layout.device_memory_bytes or 0, *(stage.predicted_peak_bytes for stage in plan.stages)
    )
    yield "Memory of one rank  (W weights, a activations, = KV cache, r reserve, . unused)"
    for stage in plan.stages:
        parts = (
            ("W", stage.weight_bytes),
            ("a", stage.activation_bytes),
            ("=", stage.kv_cache_bytes),
            ("r", reserve),
        )
        bar = _bar(parts, scale)
        yield f"{stage.pp_rank:>5}  |{bar}|  {_verdict(stage, layout.available_bytes)}"


def _bar(parts: Sequence[tuple[str, int]], scale: int) -> str:
    """Every part that is there gets at least one character, at the cost of the largest."""
    shares = [(mark, max(1, round(size * _BAR_WIDTH / scale))) for mark, size in parts if size]
    excess = sum(width for _, width in shares) - _BAR_WIDTH
    if excess > 0:
        largest = max(range(len(shares)), key=lambda index: shares[index][1])
        mark, width = shares[largest]
        shares[largest] = (mark, max(1, width - excess))
    return "".join(mark * width for mark, width in shares)[:_BAR_WIDTH].ljust(_BAR_WIDTH, ".")


def _verdict(stage: PlanStage, available: int | None) -> str:
    if stage.fits is None:
        return f"needs {human_bytes(stage.required_bytes)}"
    if stage.fits:
        return "fits"
    if available is None or not stage.missing_bytes:
        return "KV cache too small"
    return f"{human_bytes(stage.missing_bytes)} SHORT"


def _findings(plan: Plan) -> Iterator[str]:
    layout, kv = plan.layout, plan.kv_cache
    if not layout.enough_devices:
        given = layout.nnodes * layout.devices_per_node
        yield from _labelled(
            "devices", f"DOES NOT FIT: {layout.devices_needed} devices are needed, {given} given"
        )
    short = [stage for stage in plan.stages if stage.fits is False]
    for stage in short:
        yield from _labelled("memory", _shortage(plan, stage))
    if plan.fits:
        yield from _labelled("memory", "fits on every stage")
    elif plan.fits is None:
        yield from _labelled(
            "memory", "whether it fits is not known: give --device-memory-bytes, for example 64G"
        )
    if kv.usable_blocks is not None and kv.weakest_stage is not None and not short:
        tokens = kv.usable_blocks * layout.block_size
        text = (
            f"{kv.usable_blocks} blocks, {tokens} tokens: "
            f"{tokens / layout.max_model_len:.1f} sequences of {layout.max_model_len}"
        )
        if len(plan.stages) > 1:
            most = max(stage.possible_blocks or 0 for stage in plan.stages)
            text += f"; stage {kv.weakest_stage} has least room and decides"
            text += f", another could hold {most}" if most > kv.usable_blocks else ""
        yield from _labelled("KV cache", text)
    if plan.model.sliding_window is not None:
        yield from _labelled(
            "KV cache",
            f"counted in full, though attention sees {plan.model.sliding_window} positions at most",
        )
    if plan.fitting_partition is not None:
        partition = format_partition(plan.fitting_partition)
        yield from _labelled("same sizes", f"would fit with --pp-layer-partition {partition}")
    if plan.smallest_fit is not None:
        yield from _labelled("smallest", _recommended(plan.smallest_fit))
    elif plan.fits is False:
        yield from _labelled("smallest", "no layout that the model allows fits devices like these")


def _shortage(plan: Plan, stage: PlanStage) -> str:
    layout = plan.layout
    needed = plan.kv_cache.needed_blocks
    if not stage.missing_bytes:
        return (
            f"DOES NOT FIT: stage {stage.pp_rank} has room for {stage.possible_blocks} KV blocks, "
            f"and one sequence of {layout.max_model_len} tokens takes {needed}"
        )
    kv_bytes = stage.required_bytes - stage.weight_bytes - stage.activation_bytes
    return (
        f"DOES NOT FIT: stage {stage.pp_rank} needs {human_bytes(stage.weight_bytes)} for weights, "
        f"{human_bytes(stage.activation_bytes)} for activations and {human_bytes(kv_bytes)} for "
        f"the KV cache, together {human_bytes(stage.required_bytes)}, of "
        f"{human_bytes(layout.available_bytes or 0)}"
    )


def _advice(plan: Plan) -> Iterator[str]:
    if len(plan.stages) > 1:
        points = (f"{bubble.idle_share:.0%} at {bubble.concurrency}" for bubble in plan.bubble)
        yield from _labelled(
            "bubble", f"idle stage time (P-1)/(M+P-1), M requests at a time: {', '.join(points)}"
        )
    if plan.parallelism is not None:
        yield from _labelled("TP or PP", plan.parallelism.reason)
    if plan.balance is not None:
        yield from _labelled("balance", _balance(plan, plan.balance))
    yield from _labelled("start with", _start(plan))


def _balance(plan: Plan, balance: Balance) -> str:
    heaviest = plan.stages[balance.heaviest_stage]
    head = ""
    if heaviest.head_bytes:
        head = f", of it the LM head {human_bytes(heaviest.head_bytes)}"
    return (
        f"stage {balance.heaviest_stage} reads most weights in a step, "
        f"{human_bytes(balance.current_largest_step_bytes)}{head}; more even by weight bytes: "
        f"--pp-layer-partition {format_partition(balance.pp_layer_partition)}, at most "
        f"{human_bytes(balance.largest_step_bytes)}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _start(plan: Plan) -> str:
    if plan.recommendation is not None:
        text = _recommended(plan.recommendation)
        if plan.recommendation.data_parallel_size > 1:
            text += f"; once one replica works, -dp {plan.recommendation.data_parallel_size}"
        return text
    if plan.layout.device_memory_bytes is None:
        return (
            "TP alone if one node holds the model; else TP inside the nodes and PP across them; "
            "DP once one replica works. With --device-memory-bytes the sizes are worked out"
        )
    return "more or larger devices: nothing fits the ones given"


def _recommended(found: Recommendation) -> str:
    flags = found.flags or "no flags"
    nodes = f" on {found.nnodes} nodes" if found.nnodes > 1 else ""
    return f"{flags} ({_count(found.devices, 'device')}{nodes}): {found.reason}"


def _labelled(label: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, WIDTH - _LABEL_WIDTH - 2, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        yield f"{label if number == 0 else '':<{_LABEL_WIDTH}}  {line}".rstrip()
