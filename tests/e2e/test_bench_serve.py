"""Every command of docs/bench.md, run against a launched mesh of a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.mesh_process import MeshProcess
from tests.tiny_models import TinyShape, make_tiny_llama

DOCUMENT = Path(__file__).parents[2] / "docs" / "bench.md"
TINY = {
    "--num-prompts": "6",
    "--random-input-len": "24",
    "--random-output-len": "8",
    "--request-rate": "40",
}
"""What makes a command of the document quick."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    path = tmp_path_factory.mktemp("bench") / "model"
    shape = TinyShape(max_position_embeddings=4096)
    with MeshProcess(make_tiny_llama(path, shape=shape), "-pp", "2") as running:
        yield running


def bench(mesh: MeshProcess, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "bench", "serve", *flags]
    return subprocess.run(
        [*command, "--base-url", mesh.url],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def commands() -> list[list[str]]:
    blocks = re.findall(
        r"^```bash\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[3:] for line in lines if line.startswith("stagemesh bench serve")]


def quick(words: list[str], directory: Path) -> list[str]:
    """The command's flags with smaller numbers and this test's file."""
    flags = [TINY.get(words[i - 1], word) if i else word for i, word in enumerate(words)]
    if "sharegpt" in flags:
        turns = [{"from": "human", "value": "Why is the sky blue?"}, {"value": "It is not."}]
        (directory / "sharegpt.json").write_text(json.dumps([{"conversations": turns}] * 3))
    return flags if "--num-prompts" in flags else [*flags, "--num-prompts", "6"]


def test_the_document_has_commands() -> None:
    assert len(commands()) >= 4


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_document(mesh: MeshProcess, words: list[str], tmp_path: Path) -> None:
    done = bench(mesh, *quick(words, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["completed"] == 6
    else:
        assert "6 completed, 0 failed" in done.stdout
        assert "expected bubble (P-1)/(M+P-1)" in done.stdout
    if "--save-result" in words:
        (file,) = tmp_path.rglob("stagemesh-*.json")
        assert json.loads(file.read_text())["failed"] == 0


def counters(mesh: MeshProcess) -> dict[str, float]:
    text = httpx.get(f"{mesh.url}/metrics").text
    found = re.findall(r"^(stagemesh_\w+_tokens_total) (\S+)", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_figures_are_those_of_the_mesh_itself(mesh: MeshProcess, tmp_path: Path) -> None:
    """Tokens by the mesh's counters, phases by its clocks, the bubble by the formula."""
    before = counters(mesh)
    flags = ["--num-prompts", "12", "--max-concurrency", "4", "--random-input-len", "30"]
    flags += ["--random-output-len", "10", "--random-range-ratio", "0.5", "--ignore-eos"]
    done = bench(mesh, *flags, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    after = counters(mesh)
    assert result["completed"] == 12
    assert result["exact_prompts"]
    assert result["has_usage"]
    assert result["ended_early"] == 0
    prompt, generated = "stagemesh_prompt_tokens_total", "stagemesh_generation_tokens_total"
    assert result["total_input_tokens"] == after[prompt] - before[prompt]
    assert result["total_output_tokens"] == after[generated] - before[generated]
    assert result["max_concurrent_requests"] == 4
    seen = result["mesh"]
    assert (seen["pipeline_parallel_size"], seen["tensor_parallel_size"]) == (2, 1)
    assert seen["expected_bubble"] == pytest.approx(1 / (seen["concurrency"] + 1))
    assert set(seen["stage_phase_shares"]) == {"0", "1"}
    for phases in seen["stage_phase_shares"].values():
        assert phases["compute"] > 0
        assert sum(phases.values()) == pytest.approx(1.0)
    assert 0 < result["client_cpu_seconds"] < result["duration"]


def test_requests_that_are_all_refused_are_exit_code_1(mesh: MeshProcess, tmp_path: Path) -> None:
    done = bench(mesh, "--num-prompts", "3", "--random-input-len", "5000", cwd=tmp_path)
    assert done.returncode == 1
    assert "0 completed, 3 failed" in done.stdout
    assert "3 x http_400: " in done.stdout
