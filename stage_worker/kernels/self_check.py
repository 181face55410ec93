"""Every kernel against torch, once, on small inputs: a compiler may be wrong, and a CPU may lie
about its features. What differs must not be served.

Takes some 25 ms. Shapes are chosen so that each of a kernel's ways is gone: every number of rows
that share a weight, every number of heads that share a KV head at a time, sequences that
end inside a block and behind the first span of positions, prompts of more rows than a tile has,
KV heads that are attended together and apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stage_worker.kernels.build import KernelsUnavailable
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata, RowSpan, build_metadata
from stage_worker.layers.block import PreNormBlock
from stage_worker.layers.linear import Linear
from stage_worker.layers.operators import Operators
from stage_worker.layers.rotary import RotaryRows, RotaryTable

TOLERANCE = 1e-4
"""Absolute and relative; inputs are about 1. Rounding gives 1e-6, a wrong term far more."""
_MOST_ROWS = 25
"""One more than share a weight, at most."""
_MANY_ROWS = 70
"""So many that a short weight is made float32 for all of them at once."""
_GROUPS = (1, 2, 3, 4, 32)
"""Query heads of one KV head; more than four are taken in parts of four. With 32 six tokens of a
prompt fill a tile, and a decode attends two of three KV heads, then the last."""
_DIM = 80
"""Four registers of 16 numbers, which are mixed at a time, and one."""
_KV_HEADS = 3
"""On one thread a full tile has room for two."""
_BLOCK_SIZE = 16
_ROWS = (RowSpan(0, 2, 1), RowSpan(1, 69, 1), RowSpan(2, 0, 9), RowSpan(3, 61, 8))
_NUM_DECODES = 2
_BLOCKS_PER_ROW = 5
_HIDDEN = 48
_MLP_WIDTH = 72


def check_kernels(kernels: Operators, alone: Operators, reference: Operators) -> None:
    """Raises `KernelsUnavailable` that names the first kernel which gives something else.

    `alone` are the same kernels on one thread: many threads share few KV heads out, and a small
    input then says nothing about heads that are attended together.
    """
    draw = torch.Generator().manual_seed(1)  # torch's own generator is left as it is
    with _new_memory_is_nan():
        checks = (
            *_matrix_products(kernels, reference, draw),
            *_elementwise(kernels, reference, draw),
            *_attention((kernels, alone), reference, draw),
            *_blocks(kernels, reference, draw),
        )
    for name, given, expected in checks:
        if not torch.allclose(given, expected, atol=TOLERANCE, rtol=TOLERANCE):
            raise KernelsUnavailable(f"the compiled kernels give wrong results ({name})")


@contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """What a kernel does not write is then not by chance what another wrote there rightly."""
    # `torch.use_deterministic_algorithms` does the same, and imports Inductor for it: 0.9 s.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


Check = tuple[str, Tensor, Tensor]
"""What, the kernel's result, torch's."""


def _matrix_products(
    kernels: Operators, reference: Operators, draw: torch.Generator
) -> Iterator[Check]:
    weight, bias = torch.randn(40, 24, generator=draw), torch.randn(40, generator=draw)
    x = torch.randn(_MOST_ROWS, 24, generator=draw)
    for offset in (bias, None):
        given, expected = (one.linear(weight, offset) for one in (kernels, reference))
        for rows in range(1, _MOST_ROWS + 1):
            yield f"matrix product, {rows} rows", given(x[:rows]), expected(x[:rows])
    for form, short in _short_weights(draw).items():
        given, expected = (one.linear(short, None) for one in (kernels, reference))
        for rows in (*range(1, _MOST_ROWS + 1), _MANY_ROWS):
            x = torch.randn(rows, short.shape[1], generator=draw)
            yield f"matrix product with {form}, {rows} rows", given(x), expected(x)


def _short_weights(draw: torch.Generator) -> dict[str, Tensor]:
    """Weights that are kept as something shorter than float32."""
    codes = torch.randint(0, 16, (40, 2, 32), generator=draw).float()
    scales = torch.randint(1, 64, (2, 40, 2, 1), generator=draw) * 2.0**-8
    return {
        "codes": (codes * scales[0] - scales[1]).view(40, 64),
        "halves": torch.randn(40, 24, generator=draw).bfloat16().float(),
    }


def _elementwise(
    kernels: Operators, reference: Operators, draw: torch.Generator
) -> Iterator[Check]:
    weight, x = torch.randn(48, generator=draw), torch.randn(3, 48, generator=draw)
    given, expected = (one.rms_norm(weight, 1e-5)(x) for one in (kernels, reference))
    yield "RMS norm", given, expected
    gate_up = torch.randn(2, 2 * 48, generator=draw)
    gate_up[0, :48] = torch.linspace(-100.0, 100.0, 48)
    given, expected = (one.silu_mul(gate_up.clone()) for one in (kernels, reference))
    yield "SiLU", given, expected


@dataclass(frozen=True, slots=True)
class _Step:
    """Decodes and prompts, and random blocks that hold what came before."""

    metadata: AttentionMetadata
    rotary: RotaryRows
    past: Tensor

    @classmethod
    def draw(cls, draw: torch.Generator) -> _Step:
        num_slots, cpu = len(_ROWS), torch.device("cpu")
        tables = torch.randperm(num_slots * _BLOCKS_PER_ROW, generator=draw).view(num_slots, -1)
        positions = torch.cat([torch.arange(row.position, row.length) for row in _ROWS])
        metadata = build_metadata(_ROWS, positions.numpy(), tables.int().numpy(), _BLOCK_SIZE, cpu)
        longest = max(row.length for row in _ROWS)
        rotary = RotaryTable(_DIM, 100.0, None, longest, torch.float32, cpu).rows(positions)
        past = torch.randn((2, tables.numel(), _BLOCK_SIZE, _KV_HEADS, _DIM), generator=draw)
        return cls(metadata, rotary, past)


def _attention(
    kernels: Sequence[Operators], reference: Operators, draw: torch.Generator
) -> Iterator[Check]:
    step = _Step.draw(draw)
    for group in _GROUPS:
        heads = (group + 2) * _KV_HEADS
        qkv = torch.randn(step.metadata.num_tokens, heads, _DIM, generator=draw)
        expected, torchs = _attended(reference, qkv, step)
        for one in kernels:
            given, ours = _attended(one, qkv, step)
            yield "rotation, keys in the cache", ours.keys, torchs.keys
            yield "values in the cache", ours.values, torchs.values
            yield "decode attention", given[:_NUM_DECODES], expected[:_NUM_DECODES]
            yield "prompt attention", given[_NUM_DECODES:], expected[_NUM_DECODES:]


def _attended(operators: Operators, qkv: Tensor, step: _Step) -> tuple[Tensor, LayerKVCache]:
    cache = LayerKVCache(*step.past.clone())
    heads = qkv.shape[1] - 2 * _KV_HEADS
    attend = operators.attention(heads, _KV_HEADS, _DIM, torch.float32)
    return attend(qkv.clone(), step.rotary, cache, step.metadata), cache


def _blocks(kernels: Operators, reference: Operators, draw: torch.Generator) -> Iterator[Check]:
    """Two in one call, where the kernels can; torch's one by one."""
    step = _Step.draw(draw)
    x = torch.randn(step.metadata.num_tokens, _HIDDEN, generator=draw)
    seed = int(torch.randint(1 << 30, (), generator=draw))
    ours, theirs = (
        _two_blocks(one, torch.Generator().manual_seed(seed)) for one in (kernels, reference)
    )
    caches = [LayerKVCache(*step.past.clone()) for _ in ours]
    fused = kernels.fuse(ours, caches)
    if fused is None:
        return
    expected = x
    for block in theirs:
        cache = LayerKVCache(*step.past.clone())
        expected = block(expected, step.rotary, cache, step.metadata)
    yield "blocks in one call", fused(x, step.rotary, step.metadata), expected


def _two_blocks(operators: Operators, draw: torch.Generator) -> list[PreNormBlock]:
    heads = 2 * _KV_HEADS

    def linear(num_outputs: int, num_inputs: int, *, bias: bool) -> Linear:
        weight = torch.randn(num_outputs, num_inputs, generator=draw) * num_inputs**-0.5
        return operators.linear(weight, torch.randn(num_outputs, generator=draw) if bias else None)

    return [
        PreNormBlock(
            input_norm=operators.rms_norm(torch.rand(_HIDDEN, generator=draw), 1e-5),
            qkv=linear((heads + 2 * _KV_HEADS) * _DIM, _HIDDEN, bias=bias),
            attend=operators.attention(heads, _KV_HEADS, _DIM, torch.float32),
            head_dim=_DIM,
            output=linear(_HIDDEN, heads * _DIM, bias=bias),
            mlp_norm=operators.rms_norm(torch.rand(_HIDDEN, generator=draw), 1e-3),
            gate_up=linear(2 * _MLP_WIDTH, _HIDDEN, bias=bias),
            silu_mul=operators.silu_mul,
            down=linear(_HIDDEN, _MLP_WIDTH, bias=bias),
        )
        for bias in (False, True)
    ]
