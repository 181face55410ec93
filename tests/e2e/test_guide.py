"""Every command of docs/pipeline-parallelism.md, run as it is written.

Only what no test can have is put in its place: the path of a model, addresses of
other machines, ports, and the devices that the reader would have.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tests.mesh_process import CPU_DEVICES, MeshProcess
from tests.ray_cluster import own_cluster
from tests.tiny_models import TinyShape, make_tiny_llama

GUIDE = Path(__file__).parents[2] / "docs" / "pipeline-parallelism.md"
DEMO_MODEL = "smollm2-135m-instruct"


def commands() -> list[str]:
    """Every line of every `bash` block, continuation lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


ALL = commands()
NODES = [command for command in ALL if "--node-rank" in command]
SERVED = [c for c in ALL if c.startswith("stagemesh serve ") and c not in NODES]
ASKED = [c for c in ALL if c.startswith(("stagemesh plan ", "stagemesh doctor "))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, which the guide's own partition cuts."""
    path = tmp_path_factory.mktemp("guide") / "model"
    return make_tiny_llama(path, tied=True, shape=TinyShape(num_layers=5))


def here(command: str, model: Path, *flags: str) -> list[str]:
    """The command's words with this test's model and devices."""
    words = shlex.split(command)
    assert words[0] == "stagemesh"
    words = [str(model) if word == "/path/to/model" else word for word in words[1:]]
    if "--cpu-devices" not in words and words[0] != "plan":
        words += ["--cpu-devices", str(CPU_DEVICES)]
    return [sys.executable, "-m", "services.cli", *words, *flags]


def wanted(command: str) -> tuple[int, int, int]:
    """(DP, PP, TP) that the command's flags ask for."""
    words = shlex.split(command)
    sizes = (
        words[words.index(flag) + 1] if flag in words else "1" for flag in ("-dp", "-pp", "-tp")
    )
    return tuple(map(int, sizes))  # type: ignore[return-value]


def assert_serves(mesh: MeshProcess, command: str) -> None:
    """The mesh has the shape that the command asks for, and answers."""
    stages = httpx.get(f"{mesh.url}/v1/mesh").json()["stages"]
    replicas = {stage["dp_rank"] for stage in stages}
    shape = (len(replicas), len(stages) // len(replicas), stages[0]["tp_size"])
    assert shape == wanted(command)
    if (found := re.search(r"--pp-layer-partition (\S+)", command)) is not None:
        layers = [stage["layer_end"] - stage["layer_start"] for stage in stages]
        assert layers == [int(part) for part in found.group(1).split(",")]
    body = {"model": mesh.model_name, "prompt": "a", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text


@pytest.mark.parametrize("command", SERVED)
def test_serve(command: str, model: Path) -> None:
    words = here(command, model, "--port", "0", "--grpc-port", "0")
    with own_cluster() as alone, MeshProcess(model, command=words, environment=alone) as mesh:
        assert (DEMO_MODEL in command) == (mesh.model_name == DEMO_MODEL)
        assert_serves(mesh, command)


def without_address(words: Sequence[str]) -> list[str]:
    """The words less the head's address, which the test gives itself."""
    at = words.index("--master-addr")
    return [*words[:at], *words[at + 2 :]]


def test_two_nodes(model: Path) -> None:
    """Both commands, as two process trees on this machine (tests/system has two hosts)."""
    head, other = NODES
    # After `stagemesh serve MODEL`; MeshProcess gives --headless with the head's address.
    other_flags = without_address(shlex.split(other)[3:])
    other_flags.remove("--headless")
    head_words = [*without_address(here(head, model)), "--port", "0", "--grpc-port", "0"]
    with MeshProcess(
        model, command=[*head_words, "--master-port", "0"], nodes=[other_flags]
    ) as mesh:
        assert_serves(mesh, head)
        stages = httpx.get(f"{mesh.url}/v1/mesh").json()["stages"]
        of_nodes = [psutil.Process(p.pid) for p in (mesh.process, *mesh.node_processes)]
        for stage, node in zip(stages, of_nodes, strict=True):
            below = {process.pid for process in node.children(recursive=True)}
            assert {rank["pid"] for rank in stage["ranks"]} <= below
    assert mesh.node_processes[0].returncode == 0


@pytest.mark.parametrize("command", ASKED)
def test_plan_and_doctor(command: str, model: Path) -> None:
    done = subprocess.run(here(command, model), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_command_is_left_out() -> None:
    assert sorted([*NODES, *SERVED, *ASKED]) == sorted(ALL)
    assert len(NODES) == 2
