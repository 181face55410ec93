"""Load with cancels leaves nothing. `make soak` does the same for an hour."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.soak import Footprint, Report, Sample, soak

SECONDS = 180.0
STEP_SECONDS = 0.02
"""Leaves room for the tests beside it."""
SERVED = ("rest_stream 200", "rest_whole 200", "grpc_stream done")
CUT_SHORT = ("rest_left 200", "rest_late 504", "grpc_left left", "grpc_late late")


@pytest.mark.timeout(420)
def test_load_with_cancels_leaves_nothing(tmp_path: Path) -> None:
    """Memory of no process grows by 1 MB per 1,000 requests; tasks, blocks, descriptors, threads
    and series are what they were."""
    report = soak(tmp_path / "mesh", SECONDS, step_seconds=STEP_SECONDS)
    assert report.num_requests > 2000, report.outcomes
    for outcome in (*SERVED, *CUT_SHORT, "rest_whole 429", "rest_wrong 404"):
        assert report.outcomes[outcome] > 10, report.outcomes
    assert not report.problems(), report


def test_what_grows_is_named() -> None:
    rest = Footprint({"a": 9, "b": 9}, {"a": 3, "b": 3}, 50, 8.0, 100.0)
    left = Footprint({"a": 10, "b": 9}, {"a": 3, "b": 9}, 51, 8.0, 99.0)
    samples = [
        Sample(1000 * i, {"a": 50_000_000 + 2_000_000 * i, "b": 50_000_000}) for i in range(40)
    ]
    report = Report(1.0, Counter({"done": 40_000}), rest, left, samples)
    assert report.growth_bytes() == pytest.approx({"a": 2e6, "b": 0.0})
    problems = " | ".join(report.problems())
    said = (
        "a grows by 2.00 MB",
        "a had 9 descriptors and has 10",
        "b had 3 threads and has 9",
        "99.0",
    )
    for words in (*said, "series were 50 and are 51"):
        assert words in problems
