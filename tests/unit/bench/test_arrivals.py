"""When requests are sent."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.arrivals import arrival_times


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


def test_an_infinite_burstiness_is_a_metronome() -> None:
    assert arrival_times(4, 2.0, math.inf, random.Random(0)) == [0.5, 1.0, 1.5, 2.0]


@given(
    count=st.integers(1, 200),
    request_rate=st.floats(0.01, 1000),
    burstiness=st.floats(0.1, 50),
    seed=st.integers(0, 1000),
)
def test_times_ascend_and_keep_the_rate(
    count: int, request_rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, request_rate, burstiness, random.Random(seed))
    assert len(times) == count
    assert times == sorted(times)
    assert times[-1] == pytest.approx(count / request_rate)
    assert times == arrival_times(count, request_rate, burstiness, random.Random(seed))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape(burstiness: float) -> None:
    """Its coefficient of variation is 1 / sqrt(shape); 1 is the Poisson process's."""
    times = arrival_times(20_000, 10.0, burstiness, random.Random(1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.01)
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
