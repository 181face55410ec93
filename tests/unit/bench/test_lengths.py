"""How long prompts and answers are."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.lengths import (
    SHAREGPT_PROMPT,
    RequestLengths,
    is_usable,
    random_lengths,
    sharegpt_like_lengths,
)


def test_without_a_range_lengths_are_exact() -> None:
    assert random_lengths(3, 128, 64, 0.0, random.Random(0)) == [RequestLengths(128, 64)] * 3


@given(
    input_len=st.integers(1, 5000),
    output_len=st.integers(1, 500),
    ratio=st.floats(0, 0.99),
    seed=st.integers(0, 100),
)
def test_lengths_stay_within_the_range(
    input_len: int, output_len: int, ratio: float, seed: int
) -> None:
    for one in random_lengths(20, input_len, output_len, ratio, random.Random(seed)):
        for length, middle in ((one.input_tokens, input_len), (one.output_tokens, output_len)):
            assert length >= 1
            assert middle * (1 - ratio) - 1 <= length <= middle * (1 + ratio) + 1


def test_both_ends_of_the_range_are_reached() -> None:
    found = {one.input_tokens for one in random_lengths(500, 10, 1, 0.5, random.Random(0))}
    assert found == set(range(5, 16))


def test_sharegpt_like_lengths_have_the_means_of_sharegpt() -> None:
    """229,711 and 203,068 tokens for 1,000 conversations (vLLM's pull request 18566)."""
    found = sharegpt_like_lengths(20_000, random.Random(0))
    assert all(is_usable(one) for one in found)
    assert statistics.fmean(one.input_tokens for one in found) == pytest.approx(229.7, rel=0.03)
    assert statistics.fmean(one.output_tokens for one in found) == pytest.approx(203.1, rel=0.03)


def test_the_log_normal_has_its_median() -> None:
    rng = random.Random(0)
    drawn = [SHAREGPT_PROMPT.draw(rng) for _ in range(20_000)]
    assert statistics.median(drawn) == pytest.approx(SHAREGPT_PROMPT.median, rel=0.03)


@pytest.mark.parametrize(
    ("lengths", "usable"),
    [
        (RequestLengths(4, 4), True),
        (RequestLengths(3, 100), False),
        (RequestLengths(100, 3), False),
        (RequestLengths(1024, 1024), True),
        (RequestLengths(1025, 10), False),
        (RequestLengths(1000, 1049), False),
    ],
)
def test_conversations_are_cut_to_vllms_limits(lengths: RequestLengths, usable: bool) -> None:
    assert is_usable(lengths) is usable
