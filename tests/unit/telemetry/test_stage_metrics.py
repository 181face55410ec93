"""Clocks, latency, bubble and memory of stages as metrics, and the step trace."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.observer import MeasuringObserver
from services.control.progress import ProgressTable
from services.errors import ConfigError
from services.telemetry import step_trace
from services.telemetry.metrics import Metrics
from services.telemetry.stage_metrics import BUBBLE_WINDOW_SECONDS, BusyWindow, StageMetrics
from services.telemetry.step_trace import BLOCK_BYTES, StepTrace
from stagemesh.v1 import step_pb2

SECOND_NS = 1_000_000_000


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def samples(registry: CollectorRegistry) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_a_stage_that_does_not_move_is_seen() -> None:
    registry = CollectorRegistry()
    metrics = StageMetrics(registry)
    table = ProgressTable(0, (0, 1))
    metrics.watch_progress(
        lambda: ((p.dp_rank, p.pp_rank, p.stalled_seconds) for p in table.stages(20.0))
    )
    for pp_rank in (0, 1):
        table.given(pp_rank, 1, 10.0)
    table.answered(0, 1, 11.0)
    found = samples(registry)
    name = "stagemesh_progress_stalled_seconds"
    assert found[f"{name}{{replica=0,stage=0}}"] == 0.0
    assert found[f"{name}{{replica=0,stage=1}}"] == 10.0


def test_a_clock_becomes_seconds_by_phase_of_its_replica() -> None:
    registry = CollectorRegistry()
    metrics = StageMetrics(registry)
    clock = step_pb2.StageClock(
        control_wait_ns=SECOND_NS, receive_ns=SECOND_NS // 2, compute_ns=2 * SECOND_NS, send_ns=1
    )
    for replica in (0, 1, 1):
        metrics.observe_stage(replica, 3, clock)
    found = samples(registry)
    total = "stagemesh_stage_seconds_total"
    assert found[f"{total}{{phase=control_wait,replica=1,stage=3}}"] == 2.0
    assert found[f"{total}{{phase=receive,replica=1,stage=3}}"] == 1.0
    assert found[f"{total}{{phase=compute,replica=1,stage=3}}"] == 4.0
    assert found[f"{total}{{phase=compute,replica=0,stage=3}}"] == 2.0
    assert found["stagemesh_stage_steps_total{replica=1,stage=3}"] == 2.0


def test_steps_have_a_latency() -> None:
    registry = CollectorRegistry()
    metrics = StageMetrics(registry)
    metrics.observe_step(0, 0.03)
    found = samples(registry)
    assert found["stagemesh_step_seconds_count{replica=0}"] == 1
    assert found["stagemesh_step_seconds_bucket{le=0.02,replica=0}"] == 0
    assert found["stagemesh_step_seconds_bucket{le=0.05,replica=0}"] == 1


def test_memory_is_read_at_the_scrape() -> None:
    registry = CollectorRegistry()
    metrics = StageMetrics(registry)
    assert not any("memory" in name for name in samples(registry))
    metrics.watch_memory(lambda: [(0, 1, 5_000)])
    assert samples(registry)["stagemesh_stage_memory_peak_bytes{replica=0,stage=1}"] == 5_000


def test_the_bubble_is_what_a_stage_did_not_compute_of_the_last_seconds() -> None:
    registry, clock = CollectorRegistry(), Clock()
    metrics = StageMetrics(registry, clock)
    busy = step_pb2.StageClock(compute_ns=SECOND_NS // 4)
    for _ in range(100):
        clock.now += 1.0
        metrics.observe_stage(0, 0, busy)
    bubble = "stagemesh_stage_bubble_ratio{replica=0,stage=0}"
    assert samples(registry)[bubble] == pytest.approx(0.75, abs=0.03)
    clock.now += 2 * BUBBLE_WINDOW_SECONDS
    assert samples(registry)[bubble] == 1.0


def test_a_bubble_begins_with_the_first_step() -> None:
    clock = Clock()
    window = BusyWindow(clock)
    assert window.bubble_ratio() == 1.0
    window.add(0.5)
    clock.now += 0.5
    assert window.bubble_ratio() == pytest.approx(0.5)


def test_a_step_longer_than_the_window_leaves_no_bubble() -> None:
    clock = Clock()
    window = BusyWindow(clock)
    window.add(60.0)
    assert window.bubble_ratio() == 0.0


def test_a_trace_is_a_json_array_of_complete_events(tmp_path: Path) -> None:
    clock = step_pb2.StageClock(
        control_wait_ns=1_000,
        receive_ns=2_000,
        compute_ns=3_000,
        send_ns=4_500,
        compute_start_ns=5_000_000_000_001,
        compute_end_ns=5_000_000_020_001,
        end_ns=5_000_000_030_000,
    )
    trace = StepTrace(tmp_path / "trace.json")
    for step_id in (1, 2):
        rows = [step_pb2.ResultRow(), step_pb2.ResultRow()]
        trace.write(1, 2, step_pb2.StepResult(epoch=7, step_id=step_id, rows=rows, clock=clock))
    trace.close()
    # The closing bracket may be left out.
    events = json.loads((tmp_path / "trace.json").read_text().rstrip(",\n") + "]")
    assert [event["name"] for event in events] == ["step 1", "step 2"]
    event = events[0]
    assert (event["ph"], event["pid"], event["tid"]) == ("X", 1, 2)
    assert (event["ts"], event["dur"]) == (5_000_000_000.001, 20.0)
    assert event["args"] == {
        "epoch": 7,
        "step_id": 1,
        "sampled_rows": 2,
        "control_wait_us": 1.0,
        "receive_us": 2.0,
        "compute_us": 3.0,
        "send_us": 4.5,
        "end_us": 5_000_000_030.0,
    }


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step-trace .* cannot be written: No such file"):
        StepTrace(tmp_path / "none" / "trace.json")


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The system takes no more bytes into any file of this process: as a full disk does it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def trace_steps(trace: StepTrace, count: int) -> None:
    """As a mesh does it: what is raised here ends serving."""
    observer = MeasuringObserver(Metrics(), trace)
    for step_id in range(1, count + 1):
        observer.on_stage_step(0, 0, step_pb2.StepResult(epoch=1, step_id=step_id))


def traced_names(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text().rstrip(",\n") + "]")]


def test_a_disk_that_fills_up_ends_the_trace_and_not_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    with file_size_limit(BLOCK_BYTES + BLOCK_BYTES // 2):
        trace_steps(trace, 1000)
        trace.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot be written: File too large; no more steps are traced" in caplog.text
    names = traced_names(path)
    # Whole lines only, and no hole.
    assert names == [f"step {n}" for n in range(1, len(names) + 1)]
    assert BLOCK_BYTES <= path.stat().st_size < BLOCK_BYTES + 1000


def test_a_disk_that_is_full_at_the_end_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(Path("/dev/full"))
    trace_steps(trace, 1)
    trace.close()
    trace.close()
    assert caplog.text.count("--step-trace /dev/full cannot be written: No space left") == 1


def test_a_trace_has_a_greatest_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_trace, "MAX_TRACE_BYTES", 3000)
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    trace_steps(trace, 100)
    trace.close()
    assert 2000 < path.stat().st_size <= 3000
    names = traced_names(path)
    assert names == [f"step {n}" for n in range(1, len(names) + 1)]
    assert caplog.text.count("has its full length of 3000 bytes") == 1
