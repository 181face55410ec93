"""`stagemesh doctor` as users call it: every refusal of `serve` at once, text, JSON, exit codes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import main
from services.config import ServeConfig
from services.control.client import ControlClient
from services.doctor import examine, gather
from services.doctor.report import WIDTH
from services.errors import HeadLost, StagemeshError
from services.mesh_plan import make_plan
from stagemesh.v1 import control_pb2
from tests.unit.topology.model_directory import ModelDirectory

ROOT = Path(__file__).resolve().parents[3]
FREE_PORTS = ("--port", "0", "--grpc-port", "0")


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    directory = ModelDirectory(tmp_path / "tiny")
    directory.write_single()
    (directory.path / "tokenizer.json").write_text("{}")
    return directory


def doctor(capfd: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, list[str]]]:
    """Exit code, and what was found by check, failures alone."""
    code = main(["doctor", *map(str, argv), *FREE_PORTS, "--json"])
    out, err = capfd.readouterr()
    assert err == ""
    failed: dict[str, list[str]] = {}
    document = json.loads(out)
    for finding in document["findings"]:
        if finding["outcome"] == "failed":
            failed.setdefault(finding["check"], []).append(finding["what"])
    assert document["healthy"] is (code == 0)
    return code, failed


def test_a_node_and_model_that_are_well(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", str(model.path), "-pp", "2", "--cpu-devices", "2", *FREE_PORTS])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert "0 failed" in out
    assert max(len(line) for line in out.splitlines() if str(model.path) not in line) <= WIDTH
    for words in (
        "TP 1 x PP 2 x DP 1 needs 2 devices",
        "2,1: 2 stages, 3 layers",
        "stage 1: layers 2 to 2 on 1 device",
    ):
        assert words in out


def test_without_a_model_the_node_is_looked_at(capfd: pytest.CaptureFixture[str]) -> None:
    code, failed = doctor(capfd, "-tp", 2, "--cpu-devices", 2)
    assert (code, failed) == (0, {})


def test_json_has_facts_and_findings(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", str(model.path), "--json", *FREE_PORTS])
    document = json.loads(capfd.readouterr().out)
    assert document["schema_version"] == 1
    assert document["facts"]["host"] == socket.gethostname()
    assert {v["name"] for v in document["facts"]["versions"]} > {"stagemesh", "torch"}
    assert {"check", "outcome", "what", "remedy"} == set(document["findings"][0])


def test_insufficient_resources_name_needed_and_visible_devices(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    code, failed = doctor(
        capfd, model.path, "-tp", 2, "-pp", 2, "-dp", 2, "--nnodes", 2, "--cpu-devices", 3
    )
    assert code == 1
    (what,) = failed["devices"]
    assert "insufficient resources: TP 2 x PP 2 x DP 2 needs 8 devices" in what
    assert "4 of them on node 0" in what and "which has 3 (cpu)" in what


@pytest.mark.parametrize(
    ("partition", "rule"),
    [
        ("1,1,1", "has 3 entries for 2 stages"),
        ("2,2", "sums to 4 layers, but the model has 3"),
        ("0,3", "at least 1 per stage"),
        ("-1,4", "at least 1 per stage"),
    ],
)
@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_partition_is_refused_by_its_rule(
    model: ModelDirectory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    partition: str,
    rule: str,
    way: str,
) -> None:
    flags: tuple[str, ...] = ("-pp", "2", "--cpu-devices", "2")
    if way == "flag":
        flags = (*flags, "--pp-layer-partition", partition)
    else:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    code, failed = doctor(capfd, model.path, *flags)
    assert code == 1
    assert list(failed) == ["partition"]
    assert rule in failed["partition"][0]
    name = "--pp-layer-partition" if way == "flag" else "VLLM_PP_LAYER_PARTITION"
    assert failed["partition"][0].startswith(name)


def test_everything_that_is_wrong_is_said_at_once(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--nnodes", 2, "--node-rank", 3, "-tp", 4, "-pp", 8, "--gpu-memory-utilization", 7)
    code, failed = doctor(capfd, model.path, *flags, "--max-model-len", 999)
    assert code == 1
    settings = "\n".join(failed["settings"])
    assert "--gpu-memory-utilization must be above 0" in settings
    assert "--node-rank 3 does not exist with --nnodes 2" in settings
    assert "needs --headless" in settings
    assert "needs 32 devices" in failed["devices"][0]
    assert "does not divide the 6 attention heads" in failed["compatibility"][0]
    assert "above the model's 128 positions" in failed["layout"][0]
    assert "above the model's 3 hidden layers" in failed["partition"][0]


@pytest.mark.parametrize(
    "flags",
    [
        ("-tp", "4", "--cpu-devices", "8"),
        ("-pp", "4", "--cpu-devices", "8"),
        ("-pp", "2", "--pp-layer-partition", "1,1", "--cpu-devices", "8"),
        ("-pp", "3", "--cpu-devices", "1"),
        ("-pp", "3", "--nnodes", "2", "--cpu-devices", "8"),
        ("--max-model-len", "129", "--cpu-devices", "8"),
        ("--device", "npu"),
    ],
)
def test_it_refuses_with_the_words_of_serve(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    from services.cli.arguments import Positional, parse_arguments
    from services.cli.flags import SERVE_GROUPS
    from services.cli.settings import serve_config

    positional = Positional("MODEL", "")
    arguments = parse_arguments("serve", "", SERVE_GROUPS, positional, [str(model.path), *flags])
    config: ServeConfig = serve_config("serve", arguments, SERVE_GROUPS, {})
    with pytest.raises(StagemeshError) as refusal:
        make_plan(config, model.path, socket.gethostname())
    _, failed = doctor(capfd, model.path, *flags)
    assert refusal.value.message in [what for found in failed.values() for what in found]


def test_every_rule_that_is_broken_is_named(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    options = '{"xlite_graph_config": {"enabled": true}}'
    flags = ("-pp", 2, "-tp", 4, "--additional-config", options, "--interconnect", "roce")
    code, failed = doctor(capfd, model.path, *flags, "--cpu-devices", 8)
    assert code == 1
    rules = [what.rpartition("(rule ")[2].rstrip(")") for what in failed["compatibility"]]
    assert rules == ["pp-with-xlite-graph", "tp-does-not-divide", "interconnect-without-npu"]


def test_models_that_cannot_be_read(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (model.path / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in doctor(capfd, model.path)[1]["model"][0]
    # Only the head needs a tokenizer.
    headless = ("--nnodes", 2, "--node-rank", 1, "--headless", "-pp", 2, "--cpu-devices", 2)
    assert "model" not in doctor(capfd, model.path, *headless)[1]
    weights = model.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "truncated" in doctor(capfd, model.path)[1]["model"][0]
    weights.unlink()
    assert "has neither model.safetensors" in doctor(capfd, model.path)[1]["model"][0]
    assert "holds no config.json" in doctor(capfd, tmp_path)[1]["model"][0]
    assert "there is no directory" in doctor(capfd, tmp_path / "none")[1]["model"][0]


def test_a_hub_repository_is_not_downloaded(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "some-owner/nobody-cached-this", *FREE_PORTS])
    out = capfd.readouterr().out
    assert code == 0
    assert "serve would download it" in " ".join(out.split())
    assert "hf download some-owner/nobody-cached-this" in " ".join(out.split())


def test_all_weights_are_read_where_asked(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", str(model.path), "--deep", "--json", *FREE_PORTS])
    document = json.loads(capfd.readouterr().out)
    (found,) = [f["what"] for f in document["findings"] if f["check"] == "weights"]
    sha256 = hashlib.sha256((model.path / "model.safetensors").read_bytes()).hexdigest()
    assert f"model.safetensors {sha256}" in found


@pytest.fixture
def listening(model: ModelDirectory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A doctor on the head's node that waits for others, and its port."""
    command = [sys.executable, "-m", "services.cli", "doctor", str(model.path), "--listen"]
    command += ["--nnodes", "2", "-pp", "2", "--master-port", "0", *FREE_PORTS]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    try:
        found = re.search(r"answering doctors at 127\.0\.0\.1:(\d+)", process.stderr.readline())
        assert found is not None
        yield process, found[1]
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()


def test_two_nodes_are_compared_before_anything_is_served(
    model: ModelDirectory,
    capfd: pytest.CaptureFixture[str],
    listening: tuple[subprocess.Popen[str], str],
) -> None:
    process, port = listening
    node = ("--nnodes", 2, "--node-rank", 1, "--headless", "-pp", 2, "--master-port", port)
    assert doctor(capfd, model.path, *node, "--deep") == (0, {})
    code, failed = doctor(capfd, model.path, *node, "--block-size", 32)
    assert code == 1
    assert "block_size differs: the head has 16" in failed["join"][0]
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert process.stderr is not None
    assert process.stderr.read() == f"node 1 ({socket.gethostname()!r}) asks\n"


def test_the_heads_flags_beside_a_listening_doctor(
    model: ModelDirectory,
    capfd: pytest.CaptureFixture[str],
    listening: tuple[subprocess.Popen[str], str],
) -> None:
    head = ("--nnodes", 2, "-pp", 2, "--master-port", listening[1])
    assert doctor(capfd, model.path, *head) == (0, {})
    assert doctor(capfd, "--master-addr", "127.0.0.1", "--master-port", listening[1]) == (0, {})


def test_a_port_of_the_head_that_nobody_has_named_is_looked_at_too(
    model: ModelDirectory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    listening: tuple[subprocess.Popen[str], str],
) -> None:
    """With the head's flags alone, beside what answers at the default port."""
    monkeypatch.setattr(gather, "DEFAULT_MASTER_PORT", int(listening[1]))
    monkeypatch.setattr(examine, "DEFAULT_MASTER_PORT", int(listening[1]))
    assert doctor(capfd, model.path, "--nnodes", 2, "-pp", 2) == (0, {})


def test_what_answers_as_no_head_keeps_the_port_from_this_one(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(gather, "DEFAULT_MASTER_PORT", port)
        monkeypatch.setattr(examine, "DEFAULT_MASTER_PORT", port)
        flags = ("--nnodes", 2, "-pp", 2, "--timeout-seconds", "0.2")
        code, failed = doctor(capfd, model.path, *flags)
    assert code == 1
    assert failed == {"ports": [f"127.0.0.1:{port} (--master-port) is in use by another process"]}


@pytest.mark.parametrize(
    "flags", [(), ("-pp", "2", "--nnodes", "2", "--node-rank", "1", "--headless")]
)
def test_port_0_is_none_to_ask(capfd: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    code, failed = doctor(capfd, *flags, "--master-port", "0")
    assert code == 1
    rule = "--master-port 0 lets the head choose; name the port from its line 'workers join at'"
    assert failed == {"settings": [rule]}


def test_a_head_that_will_choose_its_port_is_not_asked(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", str(model.path), "--nnodes", "2", "--master-port", "0", "--json", *FREE_PORTS])
    checks = {finding["check"] for finding in json.loads(capfd.readouterr().out)["findings"]}
    assert "ports" in checks and "head" not in checks


def test_a_worker_that_is_started_too_early_is_told(
    listening: tuple[subprocess.Popen[str], str],
) -> None:
    async def join() -> str:
        client = ControlClient("127.0.0.1", int(listening[1]))
        try:
            with pytest.raises(HeadLost) as refusal:
                await client.join(control_pb2.JoinRequest(), timeout_seconds=0.1)
        finally:
            await client.close()
        return refusal.value.message

    assert "a doctor listens here, and no head" in asyncio.run(join())


def test_a_question_has_the_deadline_that_is_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        port = deaf.getsockname()[1]
        code, failed = doctor(capfd, "--master-port", port, "--timeout-seconds", "0.2")
    assert code == 1
    assert "takes connections and does not answer: no answer in 0.2 s" in failed["head"][0]


def test_a_port_in_use(model: ModelDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main(["doctor", str(model.path), "--port", str(port), "--grpc-port", "0"])
    out = capfd.readouterr().out
    assert code == 1
    assert f"127.0.0.1:{port} (--port) is in use by another process" in out


def test_the_configuration_file_of_serve_is_read(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(f"model: {model.path}\npipeline-parallel-size: 2\ncpu_devices: 1\n")
    code, failed = doctor(capfd, "--config", file)
    assert code == 1
    assert "needs 2 devices" in failed["devices"][0]


@pytest.mark.parametrize(
    "argv",
    [
        ("--no-such-flag",),
        ("--config", "/no/such/file.yaml"),
        ("--port",),
        ("--deep",),
        ("--listen", "--nnodes", "2", "--node-rank", "1", "--headless"),
        ("--listen", "--headless"),
        ("model", "another"),
        ("",),
    ],
)
def test_wrong_usage_is_exit_code_2(
    capfd: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    assert main(["doctor", *argv]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1


def test_it_needs_no_torch_and_starts_fast(model: ModelDirectory) -> None:
    program = (
        "import sys\n"
        "from services.cli import main\n"
        f"main(['doctor', {str(model.path)!r}, '--port', '0', '--grpc-port', '0'])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'fastapi', 'ray'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("document", ["doctor.md", "pipeline-parallelism.md"])
def test_every_command_of_the_documents_is_understood(
    model: ModelDirectory, capfd: pytest.CaptureFixture[str], document: str
) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / document).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if line.startswith("stagemesh doctor")]
    # Those that ask a head are run against one by tests/e2e/test_doctor.py.
    commands = [command for command in commands if "--master-addr" not in command]
    assert commands
    for command in commands:
        words = [str(model.path) if w == "/path/to/model" else w for w in shlex.split(command)[1:]]
        code = main([*words, "--cpu-devices", "8", *FREE_PORTS])
        out, err = capfd.readouterr()
        assert (code, err) == (0, ""), f"{command}\n{out}"


@pytest.mark.parametrize("address", ["10.0..1", "0.0.0.0", "8.8.8.8"])
def test_an_address_that_cannot_be_listened_on_is_a_finding(
    address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ("--listen", "--master-addr", address, "--master-port", "0")
    assert main(["doctor", *argv, *FREE_PORTS, "--json"]) == 2
    out, err = capfd.readouterr()
    findings = json.loads(out)["findings"]
    (head,) = [finding for finding in findings if finding["check"] == "head"]
    assert head["outcome"] == "failed"
    assert head["what"].startswith(f"--master-addr {address} is ")
    assert err == f"stagemesh: error: {head['what']}\n"
