"""`stagemesh plan` as its users call it: text, JSON, exit codes, speed, and docs/plan.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from services.cli import main
from services.cli.plan_text import WIDTH
from services.config import ServeConfig
from services.topology.plan_result import Plan, PlanSettings
from services.units import human_bytes
from tests.unit.topology.model_directory import ModelDirectory
from tests.unit.topology.published_configs import DEEPSEEK_V3, write_config

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "plan.md"
DEVICES = ("--nnodes", "2", "--devices-per-node", "8", "--device-memory-bytes", "64G")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_config(tmp_path / "deepseek-v3", DEEPSEEK_V3)


@pytest.fixture
def small(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(tmp_path / "tiny")


def run(capfd: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["plan", *map(str, argv)])
    out, err = capfd.readouterr()
    return code, out, err


def test_a_layout_that_fits(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, large, "-tp", 8, "-pp", 2, *DEVICES, "--max-model-len", "32k")
    assert (code, err) == (0, "")
    assert "CAN BE PLANNED, NOT SERVED YET" in out
    assert "Predicted for one rank of each stage" in out
    assert "fits on every stage" in out
    assert "50% at 1" in out
    assert max(map(len, out.splitlines())) <= WIDTH
    bars = re.findall(r"\|(.*?)\|", out)
    assert len(bars) == 2 and {len(bar) for bar in bars} == {56}
    assert {"W", "a", "=", "r"} == set(bars[1])


def test_a_layout_that_does_not_fit_is_exit_code_1(
    large: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capfd, large.parent, "-tp", 8, "--device-memory-bytes", "64G")
    assert code == 1
    assert "DOES NOT FIT: stage 0 needs 79.3 GiB for weights" in out
    assert "of 57.6 GiB" in out
    assert re.search(r"^smallest +-tp 4 -pp 3 .*\(12 devices on 3 nodes\)", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= WIDTH


def test_every_text_stays_inside_the_width(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for stages in (1, 2, 16, 61):
        _, out, _ = run(capfd, large, "-pp", stages, "--device-memory-bytes", "9999G", "-dp", 1000)
        for line in out.splitlines():
            # A path or a partition has no place to break.
            assert len(line) <= WIDTH or " " not in line.strip()[12:], line


def test_json_holds_exact_numbers(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, large, "-tp", 8, "-pp", 2, *DEVICES, "--json", "--concurrency", 14)
    plan = json.loads(out)
    assert code == 0
    assert plan["schema_version"] == 1
    assert plan["weights"]["computed_bytes"] == 673_150_611_808
    assert plan["layout"]["pp_layer_partition"] == [31, 30]
    assert plan["bubble"] == [{"concurrency": 14, "idle_share": 1 / 15}]
    assert plan["fits"] is True
    assert plan["config_file"] == str(large)
    assert {field.name for field in fields(Plan)} < set(plan)


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "--help")
    assert code == 0
    for flag in ("--device-memory-bytes", "--devices-per-node", "--concurrency", "--json", "-dp"):
        assert flag in out


def test_weights_that_are_there_are_compared(
    small: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capfd, small.path)
    assert "no weights are there to compare" in out
    small.write_sharded()
    _, out, _ = run(capfd, small.path)
    assert "equal to the safetensors headers" in out
    small.write_config(num_hidden_layers=4)
    _, out, _ = run(capfd, small.path)
    assert "NOT equal to the safetensors headers" in out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--pp-layer-partition", "0,61", "-pp", "2"), 2, "whole number of at least 1 per stage"),
        (("--pp-layer-partition", "-1,62", "-pp", "2"), 2, "whole number of at least 1 per stage"),
        (("--pp-layer-partition", "61,,0", "-pp", "2"), 2, "(stage 1 has nothing)"),
        (("--pp-layer-partition", "61,0", "-pp", "2"), 2, "(stage 1 has 0)"),
        (("--pp-layer-partition", "32,28", "-pp", "2"), 1, "sums to 60 layers"),
        (("--pp-layer-partition", "32,29"), 1, "has 2 entries for 1 stages"),
        (("-pp", "62"), 1, "above the model's 61 hidden layers"),
        (("-tp", "3"), 1, "does not divide the 128 attention heads"),
        (("--device-memory-bytes", "lots"), 2, "--device-memory-bytes must be"),
        (("--nodes", "2"), 2, "did you mean --nnodes?"),
    ],
)
def test_what_is_wrong_is_one_line(
    large: Path,
    capfd: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    got, out, err = run(capfd, large, *argv)
    assert (got, out) == (code, "")
    assert message in err and err.count("\n") == 1


def test_models_that_are_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capfd)
    assert code == 2 and "MODEL is missing" in err
    code, _, err = run(capfd, tmp_path)
    assert code == 1 and "holds no config.json" in err
    code, _, err = run(capfd, "some-owner/some-model-that-nobody-cached")
    assert code == 1 and "a plan downloads nothing" in err


def test_a_repository_in_the_hubs_cache(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    commit = "0" * 40
    repository = tmp_path / "models--owner--large"
    write_config(repository / "snapshots" / commit, DEEPSEEK_V3)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    code, out, err = run(capfd, "owner/large", "-tp", 8)
    assert (code, err) == (0, "")
    assert "owner/large: DeepseekV3ForCausalLM" in out


def test_61_layers_in_under_a_second_without_torch(large: Path) -> None:
    code = (
        "import sys, time\n"
        "begin = time.perf_counter()\n"
        "from services.cli import main\n"
        f"code = main(['plan', {str(large)!r}, '-tp', '8', '-pp', '4', '--nnodes', '4', "
        "'--devices-per-node', '8', '--device-memory-bytes', '32G'])\n"
        "seconds = time.perf_counter() - begin\n"
        "heavy = {'torch', 'numpy', 'transformers', 'grpc', 'huggingface_hub', 'fastapi'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
        "print('SECONDS', seconds)\n"
    )
    # The least of three: other work on the machine makes one slow, never fast.
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        heavy, seconds = done.stdout.splitlines()[-2:]
        assert heavy == "HEAVY []"
        times.append(float(seconds.split()[1]))
    assert min(times) < 1.0


def test_defaults_are_those_of_serve() -> None:
    serve = {field.name: field.default for field in fields(ServeConfig)}
    plan = {field.name: field.default for field in fields(PlanSettings)}
    common = set(serve) & set(plan)
    assert {"block_size", "max_num_seqs", "gpu_memory_utilization", "dtype"} < common
    assert {name: plan[name] for name in common} == {name: serve[name] for name in common}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1 << 30, "1.0 GiB"),
        (int(39.86 * (1 << 30)), "39.9 GiB"),
        (311 << 20, "311 MiB"),
        (1023 << 20, "1.0 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_human_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_every_command_of_the_document_works(
    large: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    commands = [
        line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()
    ]
    assert commands
    for command in commands:
        name, subcommand, model, *flags = shlex.split(command)
        assert (name, subcommand, model) == ("stagemesh", "plan", "deepseek-v3/config.json")
        code, out, err = run(capfd, large, *flags)
        assert code in (0, 1) and out and not err, command


def test_the_document_names_every_key(large: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capfd, large, "-tp", 1, "-pp", 4, *DEVICES, "--json", "--pp-layer-partition", "1,1,1,58"
    )
    document = DOCUMENT.read_text("utf-8")
    missing = sorted(key for key in keys(json.loads(out)) if f"`{key}`" not in document)
    assert not missing


def keys(value: object) -> set[str]:
    """Every key of a JSON document, at any depth."""
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in keys(inner)}
    if isinstance(value, list):
        return {key for inner in value for key in keys(inner)}
    return set()
