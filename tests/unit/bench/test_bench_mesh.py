"""What is read of a Stagemesh, and nothing of others."""

from __future__ import annotations

import pytest

from services.bench.mesh import (
    MeshSize,
    phase_shares,
    pipeline_report,
    read_mesh,
    read_stage_seconds,
)

VIEW = {
    "epoch": 1,
    "stages": [
        {"dp_rank": dp, "pp_rank": pp, "tp_size": 2, "layer_start": 0}
        for dp in range(2)
        for pp in range(3)
    ],
}
METRICS = """# TYPE stagemesh_stage_seconds_total counter
stagemesh_stage_seconds_total{stage="0",phase="compute"} 1.5
stagemesh_stage_seconds_total{phase="receive",stage="0"} 2e-1
stagemesh_stage_seconds_total{stage="1",phase="compute",replica="0"} 2.0
stagemesh_stage_seconds_total{stage="1",phase="compute",replica="1"} 3.0
stagemesh_stage_steps_total{stage="0"} 7
"""


def test_sizes_of_a_mesh() -> None:
    assert read_mesh(VIEW) == MeshSize(pp_size=3, tp_size=2, dp_size=2)


@pytest.mark.parametrize("view", [None, {}, [], {"stages": None}, {"stages": []}, {"stages": [1]}])
def test_what_is_no_mesh(view: object) -> None:
    assert read_mesh(view) is None


def test_clocks_of_the_stages_whatever_the_order_of_labels() -> None:
    assert read_stage_seconds(METRICS) == {
        ("0", "compute"): 1.5,
        ("0", "receive"): 0.2,
        ("1", "compute"): 5.0,
    }
    assert read_stage_seconds(None) == {}


def test_only_the_run_itself_counts() -> None:
    before = {("0", "compute"): 1.0, ("0", "send"): 5.0}
    after = {("0", "compute"): 4.0, ("0", "send"): 6.0, ("1", "compute"): 0.0}
    assert phase_shares(before, after) == {
        "0": {"compute": 0.75, "send": 0.25},
        "1": {"compute": 0.0},
    }


@pytest.mark.parametrize(
    ("pp_size", "concurrency", "bubble", "advice"),
    [
        (1, 8.0, 0.0, None),
        (2, 1.0, 0.5, "TP 2 on the same devices is the better choice"),
        (2, 8.0, 1 / 9, "well filled"),
        (4, 8.0, 3 / 11, "TP 4 on the same devices is the better choice"),
    ],
)
def test_the_bubble_and_what_would_be_better(
    pp_size: int, concurrency: float, bubble: float, advice: str | None
) -> None:
    report = pipeline_report(MeshSize(pp_size, 1, 1), concurrency, {}, {})
    assert report.expected_bubble == pytest.approx(bubble)
    if advice is None:
        assert report.advice is None
    else:
        assert advice in str(report.advice)


def test_replicas_share_the_requests() -> None:
    report = pipeline_report(MeshSize(2, 1, 4), 8.0, {}, {})
    assert report.concurrency == 2.0
    assert report.expected_bubble == pytest.approx(1 / 3)
