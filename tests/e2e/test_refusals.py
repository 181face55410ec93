"""What cannot be started is refused by the real command, in one line, before torch is imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.launch.memory import host_memory
from services.topology.weights import model_weights
from tests.tiny_models import make_tiny_llama
from tests.unit.topology.model_directory import ModelDirectory
from tests.unit.topology.published_configs import DEEPSEEK_V3, write_config

ROOT = Path(__file__).resolve().parents[2]
# The command as the console script runs it, and what it has imported when it is over.
PROGRAM = """
import sys
from services.cli import main
code = main(sys.argv[1:])
print("TORCH", "torch" in sys.modules)
sys.exit(code)
"""
XLITE = '{"xlite_graph_config": {"enabled": true}}'
SPARSE = '{"sparse_kv_offload_config": {"enabled": true}}'
MOONCAKE = json.dumps(
    {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_producer",
        "kv_port": "20001",
        "kv_connector_extra_config": {"prefill": {"pp_size": 2}, "decode": {"pp_size": 2}},
    }
)
SECOND_NODE = (
    *("--nnodes", "2", "--node-rank", "1", "--headless"),
    *("--master-addr", "127.0.0.1", "--master-port", "1"),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = ModelDirectory(tmp_path / "tiny")
    directory.write_single()
    return directory.path


def refused(*argv: object, code: int = 2) -> str:
    """The one line that the command ends with."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PP_LAYER_PARTITION"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, argv)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "TORCH False\n"), done.stderr
    return done.stderr.splitlines()[-1].removeprefix("stagemesh: error: ")


@pytest.mark.parametrize(
    ("flags", "rule", "words"),
    [
        (
            ("-pp", 2, "--prefill-context-parallel-size", 2),
            "pp-with-prefill-context-parallelism",
            "--prefill-context-parallel-size 2 with --pipeline-parallel-size 2: ",
        ),
        (
            ("-pp", 2, "--additional-config", XLITE),
            "pp-with-xlite-graph",
            "xlite_graph_config.enabled = true with --pipeline-parallel-size 2: ",
        ),
        (
            ("-pp", 2, "--additional-config", SPARSE),
            "pp-with-sparse-kv-offload",
            "sparse_kv_offload_config.enabled = true with --pipeline-parallel-size 2: ",
        ),
        (
            ("-pp", 2, "--kv-transfer-config", MOONCAKE),
            "mooncake-decode-pp",
            "MooncakeConnectorV1 with decode.pp_size 2: ",
        ),
        (("-tp", 4), "tp-does-not-divide", "that work for this model: 1, 2, 6"),
        (("--interconnect", "roce"), "interconnect-without-npu", "use --interconnect auto"),
        (
            ("--prefill-context-parallel-size", 2),
            "prefill-context-parallelism-not-served",
            "is not served yet",
        ),
        (("--additional-config", XLITE), "xlite-graph-not-served", "is not served yet"),
    ],
)
def test_serve_and_plan_refuse_alike(
    model: Path, flags: tuple[object, ...], rule: str, words: str
) -> None:
    message = refused("serve", model, "--device", "cpu", *flags)
    assert words in message
    assert message.endswith(f" (rule {rule})")
    assert refused("plan", model, "--device", "cpu", *flags, code=1) == message


def test_every_node_refuses(model: Path) -> None:
    message = refused("serve", model, "-pp", 2, "--additional-config", XLITE, *SECOND_NODE)
    assert message.endswith(" (rule pp-with-xlite-graph)")
    message = refused("serve", model, "-tp", 4, "--cpu-devices", 2, *SECOND_NODE)
    assert message.endswith(" (rule tp-does-not-divide)")
    message = refused("gateway", model, "--prefill-context-parallel-size", 2)
    assert message.endswith(" (rule prefill-context-parallelism-not-served)")


def test_a_file_is_refused_like_the_command_line(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {model}\npipeline-parallel-size: 2\n"
        "additional-config:\n  sparse_kv_offload_config: {enabled: true}\n",
        encoding="utf-8",
    )
    assert refused("serve", "--config", file).endswith(" (rule pp-with-sparse-kv-offload)")


def test_experts_over_roce_are_refused_by_plan_and_said_by_serve(tmp_path: Path) -> None:
    config = write_config(tmp_path / "deepseek-v3", DEEPSEEK_V3)
    flags = ("-tp", 8, "-pp", 2, "-dp", 2, "--nnodes", 4, "--interconnect", "roce")
    planned = refused("plan", config, *flags, code=1)
    assert planned.endswith(" (rule roce-experts-with-pp-and-dp)")
    assert "DeepseekV3ForCausalLM with 256 experts on --nnodes 4" in planned
    served = refused("serve", config.parent, *flags)
    assert "can be planned (stagemesh plan) but is not served yet" in served
    assert served.endswith(f"Besides, {planned}")


def test_a_stage_that_does_not_fit_is_refused_with_the_numbers(model: Path) -> None:
    message = refused("serve", model, "-pp", 3, "--cpu-devices", 3, "--kv-cache-memory-bytes", "9T")
    assert message.startswith("stage 2 (layers 2 to 2) does not fit: each of its ranks needs 9.0 T")
    assert "KV cache 9.0 TiB for --kv-cache-memory-bytes), and node 0 (" in message
    assert "free for its 3 ranks, which need 27.0 TiB together" in message
    (most,) = re.findall(r"use --kv-cache-memory-bytes of at most (\d+)", message)
    memory = host_memory()
    assert memory is not None and 0 < int(most) < memory.total_bytes // 3


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """A checkpoint of 2 TB that takes no disk: only its headers are read."""
    directory = ModelDirectory(tmp_path / "large")
    directory.write_config(
        hidden_size=65536, intermediate_size=262144, num_hidden_layers=9, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=1000,
    )  # fmt: skip
    header: dict[str, object] = {}
    end = 0
    for spec in model_weights(directory.facts()):
        begin, end = end, end + spec.num_bytes("float32")
        header[spec.name] = {"dtype": "F32", "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file = directory.path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    flags = ("-pp", 2, "--nnodes", 2, "--pp-layer-partition", "4,5", "--dtype", "bfloat16")
    message = refused("serve", directory.path, *flags, *SECOND_NODE[2:], "--cpu-devices", 1)
    assert message.startswith("stage 1 (layers 4 to 8) does not fit: each of its ranks needs ")
    assert re.search(r"weights \d+ GiB, of them the LM head 125 MiB, activations", message)
    assert "no partition of TP 1 x PP 2 fits there; use more nodes (--nnodes)" in message


def test_what_ranks_report_is_looked_at_before_they_load(tmp_path: Path) -> None:
    """Workers that others start: the head knows their memory once they have joined."""
    model = make_tiny_llama(tmp_path / "model", tied=True)
    command = (sys.executable, "-m", "services.cli")
    flags = ("--device", "cpu", "--kv-cache-memory-bytes", "9T", "--master-port", "0")
    gateway = subprocess.Popen(
        [*command, "gateway", str(model), *flags, "--port", "0", "--grpc-port", "0"],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert gateway.stderr is not None
    with gateway, gateway.stderr as log:
        joins = (re.search(r"workers join at \S+:(\d+)", line) for line in log)
        port = next(found[1] for found in joins if found is not None)
        worker = subprocess.Popen(
            [*command, "stage-worker", "--device", "cpu", "--master-port", port],
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        lines = log.read().splitlines()
        worker.terminate()
        worker.wait(30)
        assert gateway.wait(30) == 2  # A supervisor need not try again.
    assert lines[-1].startswith("stagemesh: error: stage 0 (layers 0 to 4) does not fit: each of")
    assert "KV cache 9.0 TiB for --kv-cache-memory-bytes), and node 0 (" in lines[-1]
    assert not any("loaded" in line for line in lines)


def test_options_that_nobody_knows_are_named(model: Path) -> None:
    message = refused("serve", model, "--additional-config", '{"xlite": {}}')
    assert message.startswith("--additional-config has the unknown key xlite; known keys: ")
    message = refused("plan", model, "--kv-transfer-config", '{"kv_role": ')
    assert message.startswith("--kv-transfer-config is not valid JSON: Expecting value at line 1,")
