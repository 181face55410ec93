"""`stagemesh doctor` next to a mesh of two nodes: all well, wrong ports, another model, and the
commands of docs/doctor.md that ask a head."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.doctor.mesh_checks import STUCK_SECONDS
from tests.mesh_process import CPU_DEVICES, MeshProcess
from tests.simulated_mesh import make_model
from tests.tiny_models import TinyShape, make_tiny_llama

DOCUMENT = Path(__file__).parents[2] / "docs" / "doctor.md"
FLAGS = ("--nnodes", "2", "-tp", "2", "-pp", "2")
SECOND_NODE = (*FLAGS, "--node-rank", "1", "--headless")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "tiny"
    return make_tiny_llama(path, tied=True, shape=TinyShape(num_layers=5))


@pytest.fixture(scope="module")
def mesh(tiny: Path) -> Iterator[MeshProcess]:
    node = ["--nnodes", "2", "-tp", "2", "-pp", "2", "--node-rank", "1"]
    with MeshProcess(tiny, *FLAGS, "--master-port", "0", nodes=[node]) as mesh:
        yield mesh


def doctor(*arguments: object) -> tuple[int, dict[str, object]]:
    """Exit code and the JSON document."""
    command = [sys.executable, "-m", "services.cli", "doctor", *map(str, arguments), "--json"]
    command += ["--cpu-devices", str(CPU_DEVICES), "--port", "0", "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def failed(document: dict[str, object]) -> dict[str, str]:
    """The first failure of each check."""
    findings = reversed(document["findings"])  # type: ignore[call-overload]
    return {f["check"]: f["what"] for f in findings if f["outcome"] == "failed"}


def test_a_mesh_that_is_well(mesh: MeshProcess, tiny: Path) -> None:
    body = {"model": mesh.model_name, "prompt": "a", "max_tokens": 4, "ignore_eos": True}
    httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=30).raise_for_status()
    code, document = doctor(tiny, *SECOND_NODE, *mesh.join_flags)
    assert failed(document) == {}
    assert code == 0
    found = document["mesh"]
    assert isinstance(found, dict)
    assert [stage["pp_rank"] for stage in found["progress"]] == [0, 1]
    assert {stage["done_step_id"] for stage in found["progress"]} == {
        found["progress"][0]["sent_step_id"]
    }
    assert found["progress"][0]["sent_step_id"] >= 4
    assert len(found["peers"]) == 2
    assert all(0 < peer["round_trip_seconds"] < 5 for peer in found["peers"])
    assert found["link"]["bytes_per_second"] > 0


def test_the_head_s_own_ports_are_no_fault(mesh: MeshProcess, tiny: Path) -> None:
    code, document = doctor(tiny, *FLAGS, *mesh.join_flags)
    assert (code, failed(document)) == (0, {})


def test_wrong_ports_are_told_apart(mesh: MeshProcess) -> None:
    rest = mesh.url.rpartition(":")[2]
    grpc = mesh.grpc_address.rpartition(":")[2]
    for port, words in ((rest, "is no gRPC server"), (grpc, "has no control service")):
        code, document = doctor(*SECOND_NODE, "--master-addr", "127.0.0.1", "--master-port", port)
        assert code == 1
        assert words in failed(document)["head"]
    code, document = doctor(*SECOND_NODE, "--master-addr", "127.0.0.1", "--master-port", "9")
    assert code == 1
    assert failed(document)["head"] == "nothing listens at 127.0.0.1:9"


def test_another_model_and_another_size(mesh: MeshProcess, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", tied=True, shape=TinyShape(num_layers=6))
    flags = ("--nnodes", "2", "-pp", "4", "--node-rank", "1", "--headless")
    code, document = doctor(other, *flags, *mesh.join_flags)
    assert code == 1
    findings = document["findings"]
    assert isinstance(findings, list)
    differing = [f["what"].partition(" ")[0] for f in findings if f["outcome"] == "failed"]
    assert differing == ["config", "weights", "tp_size", "pp_size", "pp_layer_partition"]


def test_the_commands_of_the_document(mesh: MeshProcess, tiny: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if "--master-addr" in line]
    # --listen has a test of its own, without a mesh.
    commands = [command for command in commands if "--listen" not in command]
    assert len(commands) == 3
    for command in commands:
        words = [str(tiny) if word == "/path/to/model" else word for word in shlex.split(command)]
        # This head's address after that of the document; the last one counts.
        code, document = doctor(*words[2:], *mesh.join_flags)
        assert (code, failed(document)) == (0, {}), command


def test_a_request_that_hangs(tmp_path: Path) -> None:
    """Stage 1 takes 20 s for a step, as one that is stuck: the doctor names it, says what its rank
    does, and who waits on it."""
    cost = json.dumps({"stages": {"1": {"fixed_seconds": 20}}})
    (tmp_path / "cost.json").write_text(cost)
    model = make_model(tmp_path / "model")
    flags = ("--nnodes", "2", "-pp", "4", "--device", "sim")
    costs = ("--sim-cost", str(tmp_path / "cost.json"))
    node = [*flags, *costs, "--node-rank", "1"]
    with MeshProcess(model, *flags, *costs, "--master-port", "0", nodes=[node]) as mesh:
        body = {"model": mesh.model_name, "prompt": "a", "max_tokens": 1}

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(STUCK_SECONDS + 2)
        code, document = doctor(*mesh.join_flags)
        mesh.process.send_signal(signal.SIGINT)
        asking.join()
    assert code == 1
    assert list(failed(document)) == ["progress"]
    pattern = (
        r"stage 1 has been silent for [5-9]\.\d s: it has done no step yet and holds step 1, "
        r"whose activations stage 0 has sent: TP rank 0 has computed for [3-9]\.\d s; "
        r"stage 2 waits for activations of step 1 from stage 1; "
        r"stage 3 waits for activations of step 1 from stage 2"
    )
    words = failed(document)["progress"]
    assert re.fullmatch(pattern, words), words
