"""A step is stuck where it takes far longer than steps do; a long or an unknown one is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pipeline.stuck_step import (
    LEAST_KNOWN_STEPS,
    LEAST_SECONDS,
    TIMES_PREDICTED,
    UNKNOWN_SECONDS,
    StepTimes,
)


def times_of(*steps: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for num_tokens, seconds in steps:
        times.observe(num_tokens, seconds)
    return times


def test_first_steps_may_take_as_long_as_ranks_wait() -> None:
    """They compile, allocate, and nothing is known of them."""
    assert StepTimes().stuck_after(1) == UNKNOWN_SECONDS
    few = times_of(*[(1, 0.01)] * (LEAST_KNOWN_STEPS - 1))
    assert few.stuck_after(1) == UNKNOWN_SECONDS


def test_short_steps_have_three_seconds() -> None:
    assert times_of(*[(8, 0.02)] * 10).stuck_after(8) == LEAST_SECONDS


def test_long_steps_have_five_times_theirs() -> None:
    assert times_of(*[(8, 2.0)] * 10).stuck_after(8) == pytest.approx(10.0)


def test_a_prompt_larger_than_all_before_has_more_in_proportion() -> None:
    times = times_of(*[(8, 0.2)] * 10)
    assert times.predict(512) == pytest.approx(0.2 * 64)
    assert times.predict(4) == pytest.approx(0.2)


@given(
    st.lists(st.integers(1, 4096), min_size=LEAST_KNOWN_STEPS, max_size=80),
    st.integers(1, 8192),
    st.floats(0, 0.1),
    st.floats(1e-6, 0.01),
)
def test_no_step_of_linear_cost_is_taken_for_stuck(
    seen: list[int], next_tokens: int, fixed: float, per_token: float
) -> None:
    """Nor one that takes four times as long on a busy machine."""
    times = times_of(*((n, fixed + per_token * n) for n in seen))
    seconds = fixed + per_token * next_tokens
    limit = times.stuck_after(next_tokens)
    assert min(4 * seconds, UNKNOWN_SECONDS - 1) < limit <= UNKNOWN_SECONDS
    assert limit >= min(LEAST_SECONDS, TIMES_PREDICTED * seconds)
