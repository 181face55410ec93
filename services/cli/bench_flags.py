"""The flags of `bench serve`, as data: those of `vllm bench serve` where it has them."""

from __future__ import annotations

import json
import math

from services.bench.settings import GOODPUT_METRICS, METRICS
from services.cli import values
from services.cli.flag import Arity, Flag, FlagGroup
from services.cli.values import Raw


def rate(raw: Raw) -> float:
    """A number above 0, or `inf`."""
    rule = "must be a number above 0, or inf"
    try:
        value = float(values.text(raw))
    except ValueError:
        raise ValueError(rule) from None
    if not value > 0:
        raise ValueError(rule)
    return value


def ratio(raw: Raw) -> float:
    """At least 0 and below 1."""
    return _number(raw, 0.0, 1.0, "must be at least 0 and below 1")


def temperature(raw: Raw) -> float:
    """At least 0."""
    return _number(raw, 0.0, math.inf, "must be a number of at least 0")


def metric_names(raw: Raw) -> tuple[str, ...]:
    """Names of METRICS, separated by commas."""
    names = tuple(dict.fromkeys(_items(raw)))
    if not names or not set(names) <= set(METRICS):
        raise ValueError(f"must be of {','.join(METRICS)}, separated by commas")
    return names


def percents(raw: Raw) -> tuple[float, ...]:
    """Numbers from 0 to 100, separated by commas."""
    rule = "must be percentiles from 0 to 100, separated by commas, like 90,99"
    try:
        found = tuple(float(item) for item in _items(raw))
    except ValueError:
        raise ValueError(rule) from None
    if not found or not all(0 <= percent <= 100 for percent in found):
        raise ValueError(rule)
    return found


def objectives(raw: Raw) -> tuple[tuple[str, float], ...]:
    """`ttft:200 e2el:3000`, in milliseconds."""
    rule = f"must be like ttft:200, in milliseconds, with a name of {', '.join(GOODPUT_METRICS)}"
    found = []
    for item in values.texts(raw):
        name, _, written = item.partition(":")
        try:
            most = float(written)
        except ValueError:
            raise ValueError(rule) from None
        if name not in GOODPUT_METRICS or not most >= 0:
            raise ValueError(rule)
        found.append((name, most))
    return tuple(found)


def json_object(raw: Raw) -> dict[str, object]:
    """A JSON object."""
    rule = 'must be a JSON object, like {"top_p": 0.9}'
    try:
        found = json.loads(values.text(raw))
    except ValueError:
        raise ValueError(rule) from None
    if not isinstance(found, dict):
        raise ValueError(rule)
    return found


def _number(raw: Raw, least: float, below: float, rule: str) -> float:
    try:
        value = float(values.text(raw))
    except ValueError:
        raise ValueError(rule) from None
    if not least <= value < below:
        raise ValueError(rule)
    return value


def _items(raw: Raw) -> list[str]:
    """What stands between commas, or in a list."""
    parts = values.texts(raw)
    return [item.strip() for part in parts for item in part.split(",")]


BENCH_GROUPS = (
    FlagGroup(
        "endpoint",
        (
            Flag(
                ("--base-url",),
                values.text,
                "address of the server",
                metavar="URL",
            ),
            Flag(
                ("--endpoint",),
                values.text,
                "path: completions, or a path that ends with /chat/completions",
                metavar="PATH",
            ),
            Flag(
                ("--model", "-m"),
                values.text,
                "name of the model; default: the first of /v1/models",
                metavar="NAME",
            ),
            Flag(
                ("--api-key",),
                values.text,
                "key of the endpoint (also OPENAI_API_KEY, which others cannot read)",
                metavar="KEY",
                environment="OPENAI_API_KEY",
            ),
            Flag(
                ("--request-timeout-seconds",),
                values.positive_seconds,
                "a request without its whole answer by then has failed",
                metavar="SECONDS",
            ),
        ),
    ),
    FlagGroup(
        "load",
        (
            Flag(("--num-prompts",), values.positive_integer, "requests to measure"),
            Flag(
                ("--num-warmups",),
                values.natural_integer,
                "requests to send first, not measured (default: 0)",
            ),
            Flag(
                ("--request-rate",),
                rate,
                "requests per second, sent at their times whatever has been answered; "
                "inf sends all at once, or --max-concurrency at a time (default: inf)",
                metavar="RATE",
            ),
            Flag(
                ("--burstiness",),
                rate,
                "shape of the gamma distribution of the gaps: 1 is a Poisson process, less "
                "comes in bursts, more evens out, inf is a metronome",
                metavar="SHAPE",
            ),
            Flag(("--max-concurrency",), values.positive_integer, "most requests at a time"),
            Flag(("--seed",), values.seed, "of prompts, lengths and times (default: 0)"),
        ),
    ),
    FlagGroup(
        "prompts and answers",
        (
            Flag(
                ("--dataset-name",),
                values.one_of("random", "sharegpt", "sharegpt-like"),
                "random: lengths as below; sharegpt: conversations of --dataset-path; "
                "sharegpt-like: random text with lengths like those",
                metavar="{random,sharegpt,sharegpt-like}",
            ),
            Flag(
                ("--dataset-path",),
                values.text,
                "a ShareGPT JSON file",
                metavar="FILE",
            ),
            Flag(
                ("--sharegpt-output-len",),
                values.positive_integer,
                "tokens of every answer; default: those of the file",
            ),
            Flag(("--random-input-len",), values.positive_integer, "tokens of a prompt"),
            Flag(("--random-output-len",), values.positive_integer, "tokens of an answer"),
            Flag(
                ("--random-range-ratio",),
                ratio,
                "lengths are uniform within this share around those (default: 0)",
                metavar="RATIO",
            ),
            Flag(
                ("--random-prefix-len",),
                values.natural_integer,
                "tokens that all prompts begin with, before their own (default: 0)",
            ),
            Flag(
                ("--temperature",),
                temperature,
                "0 is greedy (default: 0)",
                metavar="T",
            ),
            Flag(
                ("--ignore-eos",),
                values.switch,
                "ask for answers that go on past the end-of-sequence token, so that their "
                "lengths are exact (vLLM and Stagemesh)",
                arity=Arity.SWITCH,
            ),
            Flag(
                ("--extra-body",),
                json_object,
                "fields that are added to every request",
                metavar="JSON",
            ),
        ),
    ),
    FlagGroup(
        "result",
        (
            Flag(
                ("--percentile-metrics",),
                metric_names,
                f"what to print (default: {','.join(METRICS)})",
                metavar="NAMES",
            ),
            Flag(
                ("--metric-percentiles",),
                percents,
                "percentiles to print (default: 90,99)",
                metavar="PERCENTS",
            ),
            Flag(
                ("--goodput",),
                objectives,
                "also count the requests per second that keep these: ttft:MS tpot:MS e2el:MS",
                metavar="NAME:MS",
                arity=Arity.MANY,
            ),
            Flag(("--json",), values.switch, "print JSON instead of the table", arity=Arity.SWITCH),
            Flag(
                ("--save-result",),
                values.switch,
                "also write the JSON to a file",
                arity=Arity.SWITCH,
            ),
            Flag(
                ("--save-detailed",),
                values.switch,
                "with every request's times in that file",
                arity=Arity.SWITCH,
            ),
            Flag(
                ("--result-dir",),
                values.text,
                "where the file goes (default: here)",
                metavar="DIR",
            ),
            Flag(
                ("--result-filename",),
                values.text,
                "its name; default: made of rate, model and time",
                metavar="FILE",
            ),
        ),
    ),
)
