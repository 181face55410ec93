"""The formula that benchmarks are held against."""

from __future__ import annotations

import pytest

from benchmarks.machine_limit import MachineRates, ModelWeights, limit_tokens_per_second

SMOLLM2 = ModelWeights(layers=106_168_320, head=28_311_552)
RATES = MachineRates(flops_per_second=100e9, bytes_per_second=17e9)


@pytest.mark.parametrize(
    ("num_requests", "seconds"),
    [
        # Weights by hand: 212 MFLOP a prompt token, 269 MFLOP and 538 MB a step.
        (1, 128 * 0.21234 / 100 + 64 * 0.53792 / 17),
        (32, 32 * 128 * 0.21234 / 100 + 64 * 32 * 0.26896 / 100),
    ],
)
def test_few_requests_are_held_by_memory_and_many_by_arithmetic(
    num_requests: int, seconds: float
) -> None:
    limit = limit_tokens_per_second(SMOLLM2, RATES, num_requests, 128, 64)
    assert limit == pytest.approx(num_requests * 64 / seconds, rel=1e-3)


def test_twice_the_machine_is_twice_the_limit() -> None:
    twice = MachineRates(200e9, 34e9)
    for num_requests in (1, 4, 8, 32):
        one = limit_tokens_per_second(SMOLLM2, RATES, num_requests, 128, 64)
        two = limit_tokens_per_second(SMOLLM2, twice, num_requests, 128, 64)
        assert two == pytest.approx(2 * one)
