"""`stagemesh serve` refuses what cannot be served: one line, exit code 2, nothing started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import TinyShape, make_tiny_llama

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "tiny"
    return make_tiny_llama(path, shape=TinyShape(num_layers=4), max_shard_bytes=40_000)


def copy_of(model: Path, target: Path) -> Path:
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def edit_config(model: Path, **changes: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def a_shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[0]


def truncate(model: Path) -> None:
    shard = a_shard(model)
    shard.write_bytes(shard.read_bytes()[:-100])


DAMAGES: list[tuple[str, Damage, str]] = [
    ("no config", lambda m: (m / "config.json").unlink(), "config.json"),
    ("config is no JSON", lambda m: (m / "config.json").write_text("{"), "config.json"),
    (
        "another architecture",
        lambda m: edit_config(m, architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel",
    ),
    ("a shard is missing", lambda m: a_shard(m).unlink(), "model-00001-of"),
    ("a shard is truncated", truncate, "model-00001-of"),
    ("more layers than weights", lambda m: edit_config(m, num_hidden_layers=5), "layers.4"),
    ("no tokenizer", lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json"),
]


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "serve", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *expected: str, code: int = 2) -> None:
    """2 says that starting again would not help; what may pass by itself is 1."""
    assert done.returncode == code, done.stderr
    # A warning may be said first: of what would be open, had it come to that.
    lines = [line for line in done.stderr.splitlines() if line and " WARNING " not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("stagemesh: error: ")
    for text in expected:
        assert text in lines[0]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("damage", "expected"),
    [pytest.param(damage, expected, id=name) for name, damage, expected in DAMAGES],
)
def test_a_damaged_model(healthy: Path, tmp_path: Path, damage: Damage, expected: str) -> None:
    model = copy_of(healthy, tmp_path / "model")
    damage(model)
    assert_refused(serve(str(model)), expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("-tp", "3"), ("does not divide the 4 attention heads", "1, 2, 4")),
        (("-pp", "5"), ("5", "4 hidden layers")),
        (("-pp", "2", "--pp-layer-partition", "0,4"), ("--pp-layer-partition", "at least 1")),
        (("-pp", "2", "--pp-layer-partition", "3,2"), ("sums to 5", "4")),
        (("-pp", "2", "--pp-layer-partition", "4"), ("--pp-layer-partition",)),
        (("--max-model-len", "100000"), ("--max-model-len", "512")),
        (("--dtype", "int4"), ("--dtype", "int4")),
        (("--device", "npu"), ("--device npu", "no npu device")),
        (("--max-num-seqs", "0"), ("--max-num-seqs",)),
        (("--enable-lora",), ("vLLM has --enable-lora",)),
    ],
)
def test_flags_that_do_not_fit(
    healthy: Path, flags: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert_refused(serve(str(healthy), *flags), *expected)


def test_an_address_that_is_not_here_may_come_later(healthy: Path) -> None:
    assert_refused(serve(str(healthy), "--host", "203.0.113.77"), "203.0.113.77", code=1)


def test_a_cache_too_small_for_one_sequence(healthy: Path) -> None:
    """Known from config.json alone: the numbers and the way out are named."""
    done = serve(str(healthy), "--kv-cache-memory-bytes", "4096", "--max-model-len", "512")
    assert_refused(
        done,
        "--kv-cache-memory-bytes 4096 gives stage",
        "one sequence of 512 tokens takes 32",
        "raise it to at least",
    )
