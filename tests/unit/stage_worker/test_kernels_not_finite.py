"""The compiled attention where keys are NaN or infinite, and where scores are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from stage_worker.kernels.native import NativeOperators
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import RowSpan, build_metadata
from stage_worker.layers.operators import Operators, TorchOperators
from stage_worker.layers.rotary import RotaryTable

CPU = torch.device("cpu")
TORCH = TorchOperators()
HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 32, 120
SEEN_BY_ALL, SEEN_BY_SOME = 50, 110
"""Positions, as the rows of the last prompt see them."""
ROWS = [
    *(RowSpan(0, LENGTH - 1, 1), RowSpan(1, LENGTH - 1, 1)),
    *(RowSpan(2, LENGTH - 20, 20), RowSpan(3, LENGTH - 20, 20)),
]
TOKENS_OF_ROW = (slice(0, 1), slice(1, 2), slice(2, 22), slice(22, 42))


def attended(
    operators: Operators, queries: Tensor, past: Tensor, rows: Sequence[RowSpan]
) -> Tensor:
    """Queries [tokens, HEADS, DIM] over keys and values [2, rows, LENGTH, KV_HEADS, DIM], without
    rotation -> [tokens, HEADS * DIM]."""
    new = torch.cat([past[:, row.slot, row.position : row.length] for row in rows], 1)
    positions = torch.cat([torch.arange(row.position, row.length) for row in rows])
    tables = torch.arange(len(rows), dtype=torch.int32).numpy()[:, None]
    metadata = build_metadata(rows, positions.numpy(), tables, LENGTH, CPU)
    rotary = RotaryTable(DIM, 100.0, None, LENGTH, torch.float32, CPU)
    attend = operators.attention(HEADS, KV_HEADS, DIM, torch.float32)
    qkv = torch.cat((queries, *new), 1)
    cache = LayerKVCache(*past.clone())
    return attend(qkv, rotary.rows(torch.zeros_like(positions)), cache, metadata)


def drawn() -> tuple[Tensor, Tensor]:
    """Queries, and keys and values."""
    tokens = sum(row.num_tokens for row in ROWS)
    return torch.randn(tokens, HEADS, DIM), torch.randn(2, len(ROWS), LENGTH, KV_HEADS, DIM)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_a_broken_key_breaks_all_rows_that_see_it_and_no_others(row: int, broken: float) -> None:
    operators = NativeOperators(1, TORCH)
    queries, past = drawn()
    whole = attended(operators, queries, past, ROWS)
    past[0, row, SEEN_BY_ALL] = broken
    outputs = attended(operators, queries, past, ROWS)
    for other, tokens in enumerate(TOKENS_OF_ROW):
        if other == row:
            assert outputs[tokens].isnan().all()
        else:
            assert torch.equal(outputs[tokens], whole[tokens])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_key_breaks_nothing_before_it(broken: float) -> None:
    operators = NativeOperators(1, TORCH)
    queries, past = drawn()
    (*_, tokens) = TOKENS_OF_ROW
    whole = attended(operators, queries, past, ROWS)[tokens]
    past[0, -1, SEEN_BY_SOME] = broken
    outputs = attended(operators, queries, past, ROWS)[tokens]
    seen = SEEN_BY_SOME - ROWS[-1].position
    assert torch.equal(outputs[:seen], whole[:seen])
    assert outputs[seen:].isnan().all()


def test_scores_of_minus_infinity_have_no_weight() -> None:
    """Also where the first positions have no others, which are attended together."""
    queries, past = drawn()
    queries[:, :, 0] = 1e30
    past[0, ..., 0] = 0.0
    past[0, :, :64, :, 0] = -1e30
    got = attended(NativeOperators(1, TORCH), queries, past, ROWS)
    assert got.isfinite().all()
    torch.testing.assert_close(got, attended(TORCH, queries, past, ROWS), atol=2e-5, rtol=2e-5)
