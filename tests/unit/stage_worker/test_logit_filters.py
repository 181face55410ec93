"""Filters against a sort of the whole vocabulary, over sizes where the quick path fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_worker.filters import NUCLEUS_GUESSES, filter_logits


def reference(row: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens stay, by the definitions."""
    kept = np.ones(len(row), bool)
    if min_p > 0:
        kept &= np.exp(row - row.max()) >= min_p
    if top_k > 0:
        values = np.sort(row[kept])[::-1]
        kept &= row >= values[min(top_k, len(values)) - 1]
    if top_p < 1:
        weights = np.where(kept, np.exp(row - row.max()), 0)
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        count = min(int(np.searchsorted(mass, top_p)) + 1, int(kept.sum()))
        kept &= row >= row[order[count - 1]]
    return kept


@settings(max_examples=60, deadline=None)
@given(
    vocab_size=st.sampled_from([3, 50, NUCLEUS_GUESSES[0] + 300, NUCLEUS_GUESSES[1] + 300]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    seed=st.integers(0, 1000),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 4, 10_000]),
    top_p=st.sampled_from([1.0, 0.97, 0.503, 0.0001]),
)
def test_filters_equal_their_definitions(
    vocab_size: int, spread: float, seed: int, min_p: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab_size, generator=generator) * spread
    # The neutral row shows that a filter touches only the row that asked for it.
    filtered = filter_logits(logits, min_p=[min_p, 0.0], top_k=[top_k, 0], top_p=[top_p, 1.0])
    assert filtered[1].equal(logits[1])
    kept = torch.isfinite(filtered[0]).numpy()
    expected = reference(logits[0].double().numpy(), min_p, top_k, top_p)
    # Sums of float32 and float64 may differ by one token exactly at the edge.
    assert abs(int(kept.sum()) - int(expected.sum())) <= 1
    assert (kept <= expected).all() or (kept >= expected).all()
    assert filtered[0][kept].equal(logits[0][kept])
    assert kept.sum() >= 1


def test_equal_tokens_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0]])
    for filters in ({"top_k": [2], "top_p": [1.0]}, {"top_k": [0], "top_p": [0.85]}):
        filtered = filter_logits(logits, min_p=[0.0], **filters)
        assert torch.isfinite(filtered).tolist() == [[True, True, True, False]]


def test_neutral_filters_return_the_logits_themselves() -> None:
    logits = torch.randn(2, 9)
    assert filter_logits(logits, min_p=[0.0] * 2, top_k=[0] * 2, top_p=[1.0] * 2) is logits


@pytest.mark.parametrize("top_k", [1, 5])
def test_top_k_of_a_flat_distribution_keeps_all(top_k: int) -> None:
    logits = torch.zeros(1, 8)
    assert filter_logits(logits, min_p=[0.0], top_k=[top_k], top_p=[1.0]).equal(logits)
