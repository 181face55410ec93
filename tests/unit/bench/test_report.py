"""Figures of a run, against NumPy and by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.load import LoadRun
from services.bench.mesh import MeshSize, pipeline_report
from services.bench.outcome import Outcome
from services.bench.report import (
    BenchResult,
    as_json,
    details_json,
    latency,
    percentile,
    summarize,
)
from services.bench.settings import BenchSettings
from services.bench.text import WIDTH, render


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), percent=st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    values.sort()
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_a_latency_in_milliseconds() -> None:
    value = latency([0.3, 0.1, 0.2], (0.0, 90.0))
    assert value is not None
    assert (value.mean_ms, value.median_ms) == (pytest.approx(200.0), pytest.approx(200.0))
    assert value.std_ms == pytest.approx(float(np.std([100, 200, 300])))
    assert value.percentiles_ms == {0.0: pytest.approx(100.0), 90.0: pytest.approx(280.0)}
    assert latency([], (50.0,)) is None


def answered(sent_at: float, times: list[float], tokens: int, requested: int = 4) -> Outcome:
    return Outcome(
        planned_at=sent_at - 0.001,
        sent_at=sent_at,
        ended_at=times[-1],
        delivered_at=array("d", times),
        requested_output_tokens=requested,
        prompt_tokens=10,
        completion_tokens=tokens,
        finish_reason="length",
    )


def failed(kind: str, error: str) -> Outcome:
    return Outcome(planned_at=100.0, sent_at=100.0, ended_at=100.5, error_kind=kind, error=error)


RUN = LoadRun(
    total=5,
    outcomes=[
        answered(100.0, [100.1, 100.2, 100.4, 101.0], 4),
        answered(100.0, [100.5, 102.0], 2),
        failed("http_429", "busy"),
        failed("http_429", "busier"),
        failed("timeout", "late"),
    ],
    most_running=5,
    started_at=100.0,
    ended_at=102.0,
)


def summary(run: LoadRun = RUN, **settings: object) -> BenchResult:
    return summarize(
        BenchSettings(num_prompts=5, **settings),  # type: ignore[arg-type]
        "http://x/v1/completions",
        "m",
        run,
        exact_prompts=True,
        client_cpu_seconds=0.006,
        pipeline=None,
    )


def test_throughputs_and_counts() -> None:
    result = summary(goodput=(("ttft", 200.0), ("e2el", 1100.0)))
    assert (result.completed, result.failed) == (2, 3)
    assert result.errors == {"http_429": 2, "timeout": 1}
    assert result.first_errors == {"http_429": "busy", "timeout": "late"}
    assert (result.total_input_tokens, result.total_output_tokens) == (20, 6)
    assert result.ended_early == 1
    assert result.request_throughput == pytest.approx(1.0)
    assert result.output_throughput == pytest.approx(3.0)
    assert result.total_token_throughput == pytest.approx(13.0)
    assert result.request_goodput == pytest.approx(0.5)
    assert result.mean_concurrency == pytest.approx((1.0 + 2.0 + 1.5) / 2.0)
    assert result.client_cpu_us_per_token == pytest.approx(1000.0)
    assert result.max_send_delay_ms is None
    assert summary(request_rate=2.0).max_send_delay_ms == pytest.approx(1.0)


def test_latencies_by_hand() -> None:
    latencies = summary().latencies
    assert latencies["ttft"].mean_ms == pytest.approx(300.0)
    assert latencies["e2el"].mean_ms == pytest.approx(1500.0)
    assert latencies["tpot"].mean_ms == pytest.approx((300.0 + 1500.0) / 2)
    assert latencies["itl"].median_ms == pytest.approx(400.0)  # of 100, 200, 600 and 1500


def test_the_json_has_the_names_of_vllms_result_file() -> None:
    document = as_json(summary(metric_percentiles=(50.0, 99.9)), date="20260102-030405")
    expected = {"date", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"}
    expected |= {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
    expected |= {"request_throughput", "request_goodput", "output_throughput"}
    expected |= {"total_token_throughput", "max_concurrent_requests"}
    for metric in ("ttft", "tpot", "itl", "e2el"):
        expected |= {f"{word}_{metric}_ms" for word in ("mean", "median", "std", "p50", "p99.9")}
    assert expected <= set(document)
    assert document["request_rate"] == "inf"
    details = details_json(RUN.outcomes)
    assert set(details) >= {"input_lens", "output_lens", "ttfts", "itls", "latencies", "errors"}
    assert details["output_lens"] == [4, 2, 0, 0, 0]


def test_only_the_metrics_asked_for() -> None:
    document = as_json(summary(percentile_metrics=("ttft",)), date="d")
    assert "mean_ttft_ms" in document
    assert "mean_itl_ms" not in document


def test_the_table_says_what_matters() -> None:
    size = MeshSize(pp_size=4, tp_size=1, dp_size=1)
    clocks = {("0", "compute"): 3.0, ("0", "receive"): 1.0}
    result = replace(summary(), pipeline=pipeline_report(size, 2.0, {}, clocks))
    text = render(result)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    words = " ".join(text.split())
    for part in (
        "2 completed, 3 failed in 2.00 s: 1.00 requests/s",
        "6: 3.0 tokens/s",
        "2 x http_429: busy",
        "1 gave fewer tokens than asked for; --ignore-eos makes lengths exact",
        "0.01 s of CPU time (0.3% of a core), 1000 us per output token",
        "(P-1)/(M+P-1) = 60% with M = 2",
        "TP 4 on the same devices is the better choice",
        "stage 0 compute 75%, receive 25%",
        "time to first token 300.00 300.00",
    ):
        assert part in words, part


def test_a_run_in_which_everything_failed_is_still_told() -> None:
    run = LoadRun(total=1, outcomes=[failed("connect", "refused")], started_at=1, ended_at=1.5)
    text = render(summary(run))
    assert "0 completed, 1 failed" in text
    assert "1 x connect: refused" in text
