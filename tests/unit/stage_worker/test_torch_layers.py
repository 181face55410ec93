"""Layers against their definitions, and attention against a loop over tokens."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from services.errors import StageFailed
from services.topology.facts import RotaryScaling
from stage_worker.kernels.native import NativeOperators
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import (
    SHORT_LENGTH,
    RowSpan,
    build_metadata,
    group_by_length,
)
from stage_worker.layers.linear import PackedLinear, PlainLinear, make_linear, packing_works
from stage_worker.layers.norm import RMSNorm
from stage_worker.layers.operators import Operators, TorchOperators
from stage_worker.layers.rotary import RotaryRows, RotaryTable, inverse_frequencies
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.pending_receive import PeerLost

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 4, 1000, 4, 2, 16
NATIVE = NativeOperators(1, TorchOperators())


@pytest.mark.parametrize("batch", [1, 3, 8, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_and_plain_linear_agree(batch: int, with_bias: bool) -> None:
    assert packing_works()
    weight, x = torch.randn(70, 33), torch.randn(batch, 33)
    bias = torch.randn(70) if with_bias else None
    with torch.inference_mode():
        packed, plain = PackedLinear(weight, bias), PlainLinear(weight, bias)
        torch.testing.assert_close(packed(x), plain(x), atol=1e-4, rtol=1e-4)
    assert packed.num_bytes == plain.num_bytes == (70 * 33 + 70 * with_bias) * 4


def test_only_wide_float32_weights_are_packed() -> None:
    wide, tall = torch.randn(8, 4), torch.randn(4, 8)
    assert isinstance(make_linear(wide, None, allow_packed=True), PackedLinear)
    assert isinstance(make_linear(tall, None, allow_packed=True), PlainLinear)
    assert isinstance(make_linear(wide, None, allow_packed=False), PlainLinear)
    assert isinstance(make_linear(wide.bfloat16(), None, allow_packed=True), PlainLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_divides_by_the_root_mean_square(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 16, dtype=dtype), torch.rand(16, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x).double(), expected, atol=2e-2, rtol=1e-2)
    if dtype == torch.float32:
        torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), expected.float())


def test_rotary_turns_pairs_of_halves_by_position_times_frequency() -> None:
    table = RotaryTable(HEAD_DIM, 100.0, None, 16, torch.float32, CPU)
    x = torch.randn(2, 3, HEAD_DIM)
    rotated = table.rows(torch.tensor([0, 11])).apply(x)
    torch.testing.assert_close(rotated[0], x[0])
    half = HEAD_DIM // 2
    for i in range(half):
        turn = complex(math.cos(angle := 11 * 100.0 ** (-2 * i / HEAD_DIM)), math.sin(angle))
        for head in range(3):
            pair = complex(x[1, head, i], x[1, head, i + half]) * turn
            assert float(rotated[1, head, i]) == pytest.approx(pair.real, abs=1e-5)
            assert float(rotated[1, head, i + half]) == pytest.approx(pair.imag, abs=1e-5)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RotaryScaling(8.0, 1.0, 4.0, 8192)
    plain = inverse_frequencies(128, 500_000.0, None)
    scaled = inverse_frequencies(128, 500_000.0, scaling)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_groups_differ_in_length_by_at_most_two() -> None:
    lengths = [1, SHORT_LENGTH, SHORT_LENGTH + 1, 511, 512, 513, 9000]
    groups = group_by_length(list(enumerate(lengths)))
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    for group in groups:
        longest, shortest = max(lengths[i] for i in group), min(lengths[i] for i in group)
        assert longest <= SHORT_LENGTH or longest <= 2 * shortest


@pytest.mark.parametrize("operators", [TorchOperators(), NATIVE], ids=["torch", "native"])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 4, 9, 300, 700]), st.sampled_from([1, 1, 2, 5])),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 100),
)
def test_attention_equals_a_loop_over_tokens(
    operators: Operators, rows: list[tuple[int, int]], seed: int
) -> None:
    """Rows are (tokens in the cache, query tokens): decodes and chunks, mixed."""
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    spans = [RowSpan(slot, cached, count) for slot, (cached, count) in enumerate(rows)]
    tables = np.zeros((len(rows), 200), np.int32)
    # Blocks of nobody hold NaN: they must not be read.
    free = list(generator.permutation(np.arange(1, NUM_BLOCKS)))
    shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    cache = LayerKVCache(torch.full(shape, math.nan), torch.full(shape, math.nan))
    history = []
    for span in spans:
        blocks = [free.pop() for _ in range(-(-span.length // BLOCK_SIZE))]
        tables[span.slot, : len(blocks)] = blocks
        cache.keys[blocks], cache.values[blocks] = 0.0, 0.0
        keys, values = torch.randn(2, span.position, KV_HEADS, HEAD_DIM)
        places = [
            blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(span.position)
        ]
        cache.write(torch.tensor(places, dtype=torch.int64), keys, values)
        history.append((keys, values))
    positions = np.concatenate([np.arange(s.position, s.length) for s in spans])
    queries = torch.randn(len(positions), HEADS, HEAD_DIM)
    keys, values = torch.randn(2, len(positions), KV_HEADS, HEAD_DIM)
    metadata = build_metadata(spans, positions, tables, BLOCK_SIZE, CPU)
    one = torch.ones(len(positions), 1, HEAD_DIM)
    attend = operators.attention(HEADS, KV_HEADS, HEAD_DIM, torch.float32)
    qkv = torch.cat((queries, keys, values), 1)
    output = attend(qkv, RotaryRows(one, 0 * one), cache, metadata)

    token = 0
    for span, (past_keys, past_values) in zip(spans, history, strict=True):
        mine = slice(token, token + span.num_tokens)
        all_keys, all_values = (
            torch.cat((past_keys, keys[mine])),
            torch.cat((past_values, values[mine])),
        )
        for i in range(span.num_tokens):
            seen = span.position + i + 1
            for head in range(HEADS):
                kv_head = head * KV_HEADS // HEADS
                scores = all_keys[:seen, kv_head] @ queries[token + i, head] / HEAD_DIM**0.5
                expected = F.softmax(scores, 0) @ all_values[:seen, kv_head]
                got = output[token + i, head * HEAD_DIM : (head + 1) * HEAD_DIM]
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        token += span.num_tokens


class BrokenWork:
    """A collective whose peer has gone."""

    def wait(self, timeout: timedelta) -> None:
        assert timeout == timedelta(seconds=2.5)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234\nmore")


def test_a_lost_peer_is_told_from_a_fault_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: BrokenWork())
    monkeypatch.setattr("torch.distributed.all_gather_into_tensor", lambda *_, **__: BrokenWork())
    group = TensorParallel(1, 2, cast(ProcessGroup, object()), timeout_seconds=2.5)
    for collective in (group.all_reduce, group.all_gather_last_dim):
        with pytest.raises(PeerLost, match=r"rank 1 of 2 failed: Connection closed by peer"):
            collective(torch.ones(2))


def test_a_step_before_the_group_is_refused() -> None:
    with pytest.raises(StageFailed, match="rank 0 of 2 has no group"):
        TensorParallel(0, 2).all_reduce(torch.ones(2))


def test_collectives_of_one_rank_do_nothing() -> None:
    group, t = TensorParallel(), torch.randn(2, 3)
    assert group.all_reduce(t) is t
    assert group.all_gather_last_dim(t) is t
