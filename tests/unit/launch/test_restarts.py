"""How often and how soon a process is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.launch.restarts import (
    MOST_DELAY_SECONDS,
    SETTLED_SECONDS,
    RestartBudget,
    RestartLimits,
)


def test_one_that_had_settled_comes_back_at_once() -> None:
    budget = RestartBudget(RestartLimits(most=100))
    for now in (20.0, 40.0, 60.0):
        assert budget.next_delay(SETTLED_SECONDS, now) == 0


def test_false_starts_wait_longer_and_longer() -> None:
    budget = RestartBudget(RestartLimits(most=100))
    delays = [budget.next_delay(1.0, float(now)) for now in range(8)]
    assert delays == [0, 0.5, 1, 2, 4, 8, 8, 8]
    assert budget.next_delay(SETTLED_SECONDS, 9.0) == 0
    assert budget.next_delay(1.0, 9.0) == 0


@given(st.lists(st.floats(0.1, 100), max_size=60), st.integers(0, 5))
def test_a_window_never_has_more_than_its_restarts(gaps: list[float], most: int) -> None:
    budget = RestartBudget(RestartLimits(most, window_seconds=60))
    now, restarts = 0.0, list[float]()
    for gap in gaps:
        now += gap
        delay = budget.next_delay(gap, now)
        recent = [at for at in restarts if now - at <= 60]
        assert (delay is None) == (len(recent) >= most)
        if delay is not None:
            assert 0 <= delay <= MOST_DELAY_SECONDS
            restarts.append(now)
