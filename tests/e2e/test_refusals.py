"""What cannot be started is refused by the real command, in one line, before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_options_that_nobody_knows_are_named(model: Path) -> None:
    message = refused("serve", model, "--additional-config", '{"xlite": {}}')
    assert message.startswith("--additional-config has the unknown key xlite; known keys: ")
    message = refused("plan", model, "--kv-transfer-config", '{"kv_role": ')
    assert message.startswith("--kv-transfer-config is not valid JSON: Expecting value at line 1,")
