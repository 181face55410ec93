"""A run for people: a table, and what one should know of it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from services.bench.mesh import PipelineReport
from services.bench.report import BenchResult

WIDTH = 100
_LABEL_WIDTH = 22
_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def render(result: BenchResult) -> str:
    """The whole text, with a newline at its end."""
    sections = (_head(result), _throughput(result), _latencies(result), _notes(result))
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _head(result: BenchResult) -> Iterator[str]:
    settings = result.settings
    yield from _labelled("endpoint", f"{result.address}, model {result.model}")
    if math.isinf(settings.request_rate):
        arrivals = "all at once"
        if settings.max_concurrency is not None:
            arrivals = f"{settings.max_concurrency} at a time"
    else:
        arrivals = f"{settings.request_rate:g} a second, burstiness {settings.burstiness:g}"
        if settings.max_concurrency is not None:
            arrivals += f", at most {settings.max_concurrency} at a time"
    yield from _labelled(
        "load",
        f"{settings.num_prompts} requests, {arrivals}; {_lengths(result)}; seed {settings.seed}",
    )


def _lengths(result: BenchResult) -> str:
    settings = result.settings
    if settings.dataset_name != "random":
        return f"{settings.dataset_name} lengths"
    text = f"{settings.random_input_len} tokens in, {settings.random_output_len} out"
    if settings.random_range_ratio:
        text += f" (+-{settings.random_range_ratio:.0%})"
    if settings.random_prefix_len:
        text += f", after a common {settings.random_prefix_len}"
    return text


def _throughput(result: BenchResult) -> Iterator[str]:
    yield from _labelled(
        "requests",
        f"{result.completed} completed, {result.failed} failed in "
        f"{result.duration:.2f} s: {result.request_throughput:.2f} requests/s",
    )
    if result.request_goodput is not None:
        objectives = " ".join(f"{name}:{most:g}" for name, most in result.settings.goodput)
        yield from _labelled(
            "goodput", f"{result.request_goodput:.2f} requests/s within {objectives} ms"
        )
    yield from _labelled(
        "output tokens",
        f"{result.total_output_tokens}: {result.output_throughput:.1f} tokens/s",
    )
    yield from _labelled(
        "all tokens",
        f"{result.total_input_tokens} in and {result.total_output_tokens} out: "
        f"{result.total_token_throughput:.1f} tokens/s",
    )
    yield from _labelled(
        "at a time",
        f"{result.mean_concurrency:.1f} requests on average, at most "
        f"{result.max_concurrent_requests}",
    )


def _latencies(result: BenchResult) -> Iterator[str]:
    if not result.latencies:
        return
    percents = result.settings.metric_percentiles
    header = ["mean", "median", "std", *(f"p{percent:g}" for percent in percents)]
    yield f"{'milliseconds':<{_LABEL_WIDTH}}" + "".join(f"{name:>11}" for name in header)
    for name, value in result.latencies.items():
        cells = [value.mean_ms, value.median_ms, value.std_ms]
        cells += [value.percentiles_ms[percent] for percent in percents]
        yield f"{_NAMES[name]:<{_LABEL_WIDTH}}" + "".join(f"{cell:>11.2f}" for cell in cells)


def _notes(result: BenchResult) -> Iterator[str]:
    for kind, count in result.errors.items():
        yield from _labelled("failed", f"{count} x {kind}: {result.first_errors[kind]}")
    if result.ended_early:
        hint = "" if result.settings.ignore_eos else "; --ignore-eos makes lengths exact"
        yield from _labelled(
            "short answers", f"{result.ended_early} gave fewer tokens than asked for{hint}"
        )
    if not result.exact_prompts:
        yield from _labelled(
            "prompts", "texts of about the wanted length: chat, or an endpoint without /tokenize"
        )
    if not result.has_usage:
        yield from _labelled(
            "tokens", "the endpoint sends no usage; one is counted for each event with text"
        )
    yield from _labelled("client", _client(result))
    if result.pipeline is not None:
        yield from _pipeline(result.pipeline)


def _client(result: BenchResult) -> str:
    text = f"{result.client_cpu_seconds:.2f} s of CPU time"
    if result.duration > 0:
        text += f" ({result.client_cpu_seconds / result.duration:.1%} of a core)"
    if result.client_cpu_us_per_token is not None:
        text += f", {result.client_cpu_us_per_token:.0f} us per output token"
    if result.max_send_delay_ms is not None:
        text += f"; at most {result.max_send_delay_ms:.1f} ms late with a request"
    return text


def _pipeline(pipeline: PipelineReport) -> Iterator[str]:
    size = pipeline.size
    yield from _labelled(
        "mesh",
        f"TP {size.tp_size} x PP {size.pp_size} x DP {size.dp_size}; expected bubble "
        f"(P-1)/(M+P-1) = {pipeline.expected_bubble:.0%} with M = {pipeline.concurrency:.3g} "
        "requests at a time and replica",
    )
    if pipeline.advice is not None:
        yield from _labelled("TP or PP", pipeline.advice)
    for stage, phases in sorted(pipeline.phase_shares.items()):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in phases.items())
        yield from _labelled(f"stage {stage}", shares)


def _labelled(label: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, WIDTH - _LABEL_WIDTH, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        yield f"{label if number == 0 else '':<{_LABEL_WIDTH}}{line}".rstrip()
