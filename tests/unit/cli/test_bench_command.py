"""The flags of `bench serve`, and what it refuses."""

from __future__ import annotations

import math

import pytest

from services.bench.settings import BenchSettings
from services.cli import main
from services.cli.arguments import parse_arguments
from services.cli.bench_flags import BENCH_GROUPS
from services.cli.settings import bench_settings


def settings(*argv: str, environment: dict[str, str] | None = None) -> BenchSettings:
    arguments = parse_arguments("bench serve", "", BENCH_GROUPS, None, argv)
    return bench_settings(arguments, BENCH_GROUPS, environment or {})


def test_without_flags_the_defaults() -> None:
    assert settings() == BenchSettings()


def test_the_flags_of_vllms_bench() -> None:
    found = settings(
        *("--base-url", "http://h:1", "--endpoint", "/v1/chat/completions", "--model", "m"),
        *("--num-prompts", "32", "--request-rate", "2.5", "--burstiness", "0.5"),
        *("--max-concurrency", "8", "--dataset-name", "random", "--random-input-len", "128"),
        *("--random-output-len", "64", "--random-range-ratio", "0.2", "--seed", "7"),
        *("--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99.9"),
        *("--goodput", "ttft:200", "e2el:3000", "--ignore-eos", "--save-result"),
        *("--result-dir", "/tmp", "--extra-body", '{"top_p": 0.5}'),
    )
    assert found == BenchSettings(
        base_url="http://h:1",
        endpoint="/v1/chat/completions",
        model="m",
        num_prompts=32,
        request_rate=2.5,
        burstiness=0.5,
        max_concurrency=8,
        random_input_len=128,
        random_output_len=64,
        random_range_ratio=0.2,
        seed=7,
        percentile_metrics=("ttft", "itl"),
        metric_percentiles=(50.0, 99.9),
        goodput=(("ttft", 200.0), ("e2el", 3000.0)),
        ignore_eos=True,
        save_result=True,
        result_dir="/tmp",
        extra_body={"top_p": 0.5},
    )
    assert found.is_chat


def test_an_infinite_rate_and_a_key_from_the_environment() -> None:
    found = settings("--request-rate", "inf", environment={"OPENAI_API_KEY": "secret"})
    assert math.isinf(found.request_rate)
    assert found.api_key == "secret"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--request-rate", "0"), "must be a number above 0, or inf"),
        (("--request-rate", "nan"), "must be a number above 0, or inf"),
        (("--random-range-ratio", "1"), "at least 0 and below 1"),
        (("--temperature", "-1"), "at least 0"),
        (("--percentile-metrics", "ttft,tbt"), "must be of ttft,tpot,itl,e2el"),
        (("--metric-percentiles", "101"), "from 0 to 100"),
        (("--goodput", "itl:5"), "like ttft:200"),
        (("--goodput", "ttft"), "like ttft:200"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--dataset-name", "sharegpt"), "needs --dataset-path"),
        (("--base-url", "127.0.0.1:8000"), "must be an address like http://"),
        (("--base-url", "ftp://x"), "must be an address like http://"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_2(
    argv: tuple[str, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(("bench", "serve", *argv)) == 2
    error = capfd.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", [("bench",), ("bench", "sevre"), ("bench", "latency")])
def test_a_subcommand_is_needed(argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "serve" in capfd.readouterr().err


def test_no_server_is_exit_code_1_and_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(("bench", "serve", "--base-url", "http://127.0.0.1:9")) == 1
    error = capfd.readouterr().err
    assert "no answer from http://127.0.0.1:9 (connect: " in error
    assert error.count("\n") == 1
