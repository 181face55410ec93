"""Blocks in one call give what they give one by one, bit by bit, and are left to that where they
are not all kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stage_worker.kernels.native import NativeOperators
from stage_worker.kernels.native_blocks import NativeBlocks
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata, RowSpan, build_metadata
from stage_worker.layers.block import PreNormBlock
from stage_worker.layers.operators import Operators, TorchOperators
from stage_worker.layers.rotary import RotaryRows, RotaryTable
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.models.llama import RowParallelLinear
from stage_worker.stage_model import StageModel
from tests.stage_chain import make_runner, stage_plan
from tests.tiny_models import make_tiny_llama, make_tiny_mistral

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_LENGTH = 4, 400, 200
NATIVE = NativeOperators(1, TorchOperators())


def halves(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


def codes(weight: Tensor) -> Tensor:
    """Where whole blocks of inputs are there; else it stays as it is."""
    if weight.shape[1] % 32:
        return weight
    form = Quantization.Q4_0
    return torch.from_numpy(dequantize(quantize(weight.numpy(), form), form))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "floats": lambda weight: weight,
    "halves": halves,
    "codes": codes,
}


def make_block(
    operators: Operators,
    *,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    mlp_width: int = 96,
    bias: bool = False,
    form: str = "floats",
) -> PreNormBlock:
    def linear(num_outputs: int, num_inputs: int) -> Callable[[Tensor], Tensor]:
        weight = FORMS[form](torch.randn(num_outputs, num_inputs) * num_inputs**-0.5)
        return operators.linear(weight, torch.randn(num_outputs) if bias else None)

    return PreNormBlock(
        input_norm=operators.rms_norm(torch.rand(hidden), 1e-5),
        qkv=linear((heads + 2 * kv_heads) * head_dim, hidden),
        attend=operators.attention(heads, kv_heads, head_dim, torch.float32),
        head_dim=head_dim,
        output=linear(hidden, heads * head_dim),
        mlp_norm=operators.rms_norm(torch.rand(hidden), 1e-6),
        gate_up=linear(2 * mlp_width, hidden),
        silu_mul=operators.silu_mul,
        down=linear(hidden, mlp_width),
    )


def make_caches(count: int, kv_heads: int, head_dim: int) -> list[LayerKVCache]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim)
    return [LayerKVCache(*torch.randn(shape, generator=generator)) for _ in range(count)]


def make_step(
    rows: Sequence[tuple[int, int]], head_dim: int
) -> tuple[RotaryRows, AttentionMetadata]:
    """Rows are (tokens in the cache, query tokens)."""
    spans = [RowSpan(slot, position, count) for slot, (position, count) in enumerate(rows)]
    tables = np.random.default_rng(0).permutation(NUM_BLOCKS)[: len(rows) * (MAX_LENGTH // 4)]
    positions = np.concatenate([np.arange(span.position, span.length) for span in spans])
    metadata = build_metadata(
        spans, positions, tables.reshape(len(rows), -1).astype(np.int32), BLOCK_SIZE, CPU
    )
    table = RotaryTable(head_dim, 100.0, None, MAX_LENGTH, torch.float32, CPU)
    return table.rows(torch.from_numpy(positions)), metadata


def check_same(
    operators: Operators,
    blocks: Sequence[PreNormBlock],
    steps: Sequence[Sequence[tuple[int, int]]],
    sizes: tuple[int, int, int],
) -> None:
    """Outputs and caches, over several steps, so that memory is used again."""
    hidden, kv_heads, head_dim = sizes
    ours, theirs = (make_caches(len(blocks), kv_heads, head_dim) for _ in range(2))
    fused = operators.fuse(blocks, ours)
    assert isinstance(fused, NativeBlocks)
    for rows in steps:
        rotary, metadata = make_step(rows, head_dim)
        x = torch.randn(metadata.num_tokens, hidden)
        before, expected = x.clone(), x
        for block, cache in zip(blocks, theirs, strict=True):
            expected = block(expected, rotary, cache, metadata)
        assert torch.equal(fused(x, rotary, metadata), expected)
        assert torch.equal(x, before)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


ROWS = st.lists(
    st.tuples(st.sampled_from([0, 1, 3, 63, 64, 150]), st.sampled_from([1, 1, 1, 2, 5, 49])),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("num_threads", [1, 2])
@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(ROWS, min_size=1, max_size=3),
    hidden=st.sampled_from([16, 64, 72, 96]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([16, 64]),
    mlp_width=st.sampled_from([8, 64, 96]),
    bias=st.booleans(),
    forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=3),
)
def test_one_call_gives_what_the_kernels_give_one_by_one(
    num_threads: int,
    steps: list[list[tuple[int, int]]],
    hidden: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    mlp_width: int,
    bias: bool,
    forms: list[str],
) -> None:
    operators = NativeOperators(num_threads, TorchOperators())
    blocks = [
        make_block(
            operators,
            hidden=hidden,
            heads=group * kv_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_width=mlp_width,
            bias=bias,
            form=form,
        )
        for form in forms
    ]
    check_same(operators, blocks, steps, (hidden, kv_heads, head_dim))


def test_what_is_not_all_kernels_is_called_one_by_one() -> None:
    caches = make_caches(2, 2, 16)
    first, second = make_block(NATIVE), make_block(NATIVE)
    assert NATIVE.fuse([first, second], caches) is not None
    assert TorchOperators().fuse([first, second], caches) is None
    theirs = make_block(TorchOperators())
    for field in ("input_norm", "qkv", "attend", "output", "mlp_norm", "gate_up", "down"):
        mixed = replace(second, **{field: getattr(theirs, field)})
        assert NATIVE.fuse([first, mixed], caches) is None, field
    # SiLU of a width that is no whole number of vectors goes to torch.
    assert NATIVE.fuse([make_block(NATIVE, mlp_width=20)], caches[:1]) is None
    assert NATIVE.fuse([first, make_block(NATIVE, mlp_width=64)], caches) is None
    assert NATIVE.fuse([], []) is None


def fused_of(model: object) -> object:
    assert isinstance(model, StageModel)
    return model._fused


def test_a_stage_calls_its_layers_at_once_where_it_can(tmp_path: Path) -> None:
    path = make_tiny_mistral(tmp_path / "mistral")
    plan = stage_plan(path, [2, 3], 1)
    runner = make_runner(plan)
    first = fused_of(runner._model)
    assert isinstance(first, NativeBlocks)
    runner.apply_plan(stage_plan(path, [3, 2], 1), lambda *_: None)
    assert isinstance(fused_of(runner._model), NativeBlocks)
    assert fused_of(runner._model) is not first
    plan.enforce_eager = True
    assert fused_of(make_runner(plan)._model) is None
    # Heads of 8 are torch's.
    tiny = make_tiny_llama(tmp_path / "llama")
    assert fused_of(make_runner(stage_plan(tiny, [5], 0))._model) is None


def test_ranks_that_share_a_layer_add_up_between_its_products(tmp_path: Path) -> None:
    plan = stage_plan(make_tiny_mistral(tmp_path / "mistral"), [5], 0, tp_size=2)
    model = make_runner(plan, TensorParallel(rank=0, size=2))._model
    assert fused_of(model) is None
    assert isinstance(model, StageModel)
    block = model._layers[0].block
    assert block is not None
    assert isinstance(block.output, RowParallelLinear)
    assert isinstance(block.down, RowParallelLinear)
