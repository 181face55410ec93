"""From outcomes to figures. Pure. Latencies are of requests that succeeded."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.bench.load import LoadRun
from services.bench.mesh import PipelineReport
from services.bench.outcome import Outcome
from services.bench.settings import BenchSettings

MILLISECONDS = 1e3
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Latency:
    """One metric over all requests (over all gaps, of the inter-token latency)."""

    mean_ms: float
    median_ms: float
    std_ms: float
    percentiles_ms: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run. Throughputs are per second of `duration`."""

    settings: BenchSettings
    address: str
    model: str
    duration: float
    """Seconds from the first request's time to the end of the last answer."""
    completed: int
    failed: int
    errors: Mapping[str, int]
    """Kind of error to how many requests ended with it."""
    first_errors: Mapping[str, str]
    """The first message of each kind."""
    total_input_tokens: int
    total_output_tokens: int
    has_usage: bool
    """Whether the endpoint counted the tokens; else there is one for each event."""
    exact_prompts: bool
    ended_early: int
    """Requests that gave fewer tokens than were asked for."""
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    mean_concurrency: float
    """Requests at a time: the sum of their latencies over the duration (Little's law)."""
    max_concurrent_requests: int
    max_send_delay_ms: float | None
    """The longest that a request was sent after its time; None where it had none."""
    latencies: Mapping[str, Latency]
    client_cpu_seconds: float
    client_cpu_us_per_token: float | None
    """This process's CPU time during the run by output tokens."""
    pipeline: PipelineReport | None


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as NumPy's default."""
    place = (len(ascending) - 1) * percent / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def latency(seconds: Sequence[float], percents: Sequence[float]) -> Latency | None:
    """None where nothing was measured."""
    if not seconds:
        return None
    ascending = sorted(value * MILLISECONDS for value in seconds)
    return Latency(
        mean_ms=statistics.fmean(ascending),
        median_ms=percentile(ascending, 50.0),
        std_ms=statistics.pstdev(ascending),
        percentiles_ms={percent: percentile(ascending, percent) for percent in percents},
    )


def summarize(
    settings: BenchSettings,
    address: str,
    model: str,
    run: LoadRun,
    *,
    exact_prompts: bool,
    client_cpu_seconds: float,
    pipeline: PipelineReport | None,
) -> BenchResult:
    """All figures of a run."""
    good = [outcome for outcome in run.outcomes if outcome.error_kind is None]
    bad = [outcome for outcome in run.outcomes if outcome.error_kind is not None]
    seconds = run.seconds
    rate = 1.0 / seconds if seconds > 0 else 0.0
    input_tokens = sum(outcome.prompt_tokens or 0 for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    goodput = None
    if settings.goodput:
        goodput = rate * sum(_keeps(outcome, settings.goodput) for outcome in good)
    return BenchResult(
        settings=settings,
        address=address,
        model=model,
        duration=seconds,
        completed=len(good),
        failed=len(bad),
        errors=dict(Counter(str(outcome.error_kind) for outcome in bad).most_common()),
        first_errors={str(outcome.error_kind): outcome.error for outcome in reversed(bad)},
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        has_usage=all(outcome.completion_tokens is not None for outcome in good),
        exact_prompts=exact_prompts,
        ended_early=sum(
            outcome.output_tokens < outcome.requested_output_tokens for outcome in good
        ),
        request_throughput=rate * len(good),
        request_goodput=goodput,
        output_throughput=rate * output_tokens,
        total_token_throughput=rate * (input_tokens + output_tokens),
        mean_concurrency=mean_concurrency(run),
        max_concurrent_requests=run.most_running,
        max_send_delay_ms=None if math.isinf(settings.request_rate) else _send_delay_ms(run),
        latencies=_latencies(good, settings),
        client_cpu_seconds=client_cpu_seconds,
        client_cpu_us_per_token=(
            MICROSECONDS * client_cpu_seconds / output_tokens if output_tokens else None
        ),
        pipeline=pipeline,
    )


def mean_concurrency(run: LoadRun) -> float:
    """Requests at a time, on average over the run."""
    if run.seconds <= 0:
        return 0.0
    return sum(outcome.e2el_seconds for outcome in run.outcomes) / run.seconds


def _send_delay_ms(run: LoadRun) -> float:
    delays = [outcome.sent_at - outcome.planned_at for outcome in run.outcomes]
    return MILLISECONDS * max(delays, default=0.0)


def _latencies(good: Sequence[Outcome], settings: BenchSettings) -> dict[str, Latency]:
    values = {
        "ttft": [outcome.ttft_seconds for outcome in good],
        "tpot": [tpot for outcome in good if (tpot := outcome.tpot_seconds) is not None],
        "itl": [gap for outcome in good for gap in outcome.itl_seconds],
        "e2el": [outcome.e2el_seconds for outcome in good],
    }
    found = {
        name: latency(values[name], settings.metric_percentiles)
        for name in settings.percentile_metrics
    }
    return {name: value for name, value in found.items() if value is not None}


def _keeps(outcome: Outcome, objectives: Sequence[tuple[str, float]]) -> bool:
    """Whether a request kept every objective; one without a tpot keeps any."""
    measured = {
        "ttft": outcome.ttft_seconds,
        "tpot": outcome.tpot_seconds or 0.0,
        "e2el": outcome.e2el_seconds,
    }
    return all(measured[name] * MILLISECONDS <= most for name, most in objectives)


def as_json(result: BenchResult, *, date: str) -> dict[str, Any]:
    """Keys as in the result file of `vllm bench serve`, and our own."""
    settings = result.settings
    document: dict[str, Any] = {
        "date": date,
        "model_id": result.model,
        "endpoint": result.address,
        "dataset_name": settings.dataset_name,
        "num_prompts": settings.num_prompts,
        "request_rate": ("inf" if math.isinf(settings.request_rate) else settings.request_rate),
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "seed": settings.seed,
    }
    for name in (
        "duration",
        "completed",
        "failed",
        "errors",
        "total_input_tokens",
        "total_output_tokens",
        "has_usage",
        "exact_prompts",
        "ended_early",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "mean_concurrency",
        "max_concurrent_requests",
        "max_send_delay_ms",
        "client_cpu_seconds",
        "client_cpu_us_per_token",
    ):
        document[name] = getattr(result, name)
    for name, value in result.latencies.items():
        document[f"mean_{name}_ms"] = value.mean_ms
        document[f"median_{name}_ms"] = value.median_ms
        document[f"std_{name}_ms"] = value.std_ms
        for percent, measured in value.percentiles_ms.items():
            document[f"p{percent:g}_{name}_ms"] = measured
    document["mesh"] = None if result.pipeline is None else _mesh_json(result.pipeline)
    return document


def _mesh_json(pipeline: PipelineReport) -> dict[str, Any]:
    return {
        "pipeline_parallel_size": pipeline.size.pp_size,
        "tensor_parallel_size": pipeline.size.tp_size,
        "data_parallel_size": pipeline.size.dp_size,
        "concurrency": pipeline.concurrency,
        "expected_bubble": pipeline.expected_bubble,
        "advice": pipeline.advice,
        "stage_phase_shares": pipeline.phase_shares,
    }


def details_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Every request's figures, in seconds, in the order in which they were sent."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft_seconds for outcome in outcomes],
        "itls": [outcome.itl_seconds for outcome in outcomes],
        "latencies": [outcome.e2el_seconds for outcome in outcomes],
        "start_times": [outcome.sent_at for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
