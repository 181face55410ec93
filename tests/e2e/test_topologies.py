"""Every topology serves the same text as `transformers`: replicas, several nodes, stages that
share a node and stages that span two. Nodes are process trees of their own on loopback.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.test_oracle import PROMPTS, Oracle, ask_all, check
from tests.mesh_process import HeadProcess, MeshProcess, is_running, wait_for
from tests.tiny_models import TinyShape, make_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("topologies") / "tiny"
    return make_tiny_llama(path, tied=True, shape=TinyShape(num_layers=5))


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


def nodes(count: int, *flags: str) -> list[list[str]]:
    """Flags of every node but the head."""
    return [["--nnodes", str(count), "--node-rank", str(rank), *flags] for rank in range(1, count)]


@pytest.mark.parametrize(
    ("count", "flags"),
    [(2, ("-pp", "2")), (2, ("-tp", "2", "-pp", "2")), (4, ("-pp", "4")), (2, ("-tp", "2"))],
    ids=["2-nodes-pp2", "2-nodes-tp2-pp2", "4-nodes-pp4", "2-nodes-one-stage-spans-both"],
)
async def test_several_nodes(tiny: Path, oracle: Oracle, count: int, flags: Sequence[str]) -> None:
    """F9, with vLLM's flags."""
    head = ("--nnodes", str(count), "--master-port", "0", *flags)
    with MeshProcess(tiny, *head, nodes=nodes(count, *flags)) as mesh:
        answers = await ask_all(mesh, [oracle.encode(text[:60]) for text in PROMPTS[:8]])
    check(oracle, answers)
    assert [node.returncode for node in mesh.node_processes] == [0] * (count - 1)


async def ask_64(mesh: MeshProcess) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:

        async def ask(index: int) -> str:
            answer = await client.completions.create(
                model=mesh.model_name,
                prompt=f"{index % 8} once upon a time",
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            return answer.choices[0].text

        return list(await asyncio.gather(*(ask(index) for index in range(64))))


def test_replicas_share_the_requests(tiny: Path) -> None:
    """DP 2 x PP 2: 64 requests are right, and both replicas have worked."""
    with MeshProcess(tiny, "-dp", "2", "-pp", "2", "--max-model-len", "256") as mesh:
        view = httpx.get(f"{mesh.url}/v1/mesh").json()
        places = [(stage["dp_rank"], stage["pp_rank"]) for stage in view["stages"]]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
        texts = asyncio.run(ask_64(mesh))
        assert texts == [texts[index % 8] for index in range(64)]
        metrics = httpx.get(f"{mesh.url}/metrics").text
        taken = re.findall(r"^stagemesh_replica_requests_total\{.*\} (\S+)", metrics, re.MULTILINE)
        assert sum(map(float, taken)) == 64
        assert min(map(float, taken)) >= 16


def refused(model: Path, *flags: str, timeout: float = 60, **environment: str) -> str:
    """What a headless node or head says that does not start."""
    command = [sys.executable, "-m", "services.cli", "serve", str(model), "--cpu-devices", "8"]
    done = subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert done.returncode != 0
    return done.stderr


@pytest.fixture(scope="module")
def waiting_head(tiny: Path) -> Iterator[list[str]]:
    """Flags of a node that meets a head which waits for node 1 of 2, with PP 2."""
    with HeadProcess(tiny, "--nnodes", "2", "-pp", "2") as head:
        yield ["--nnodes", "2", "--node-rank", "1", *head.join_flags]


DIFFERENT = {
    "tp_size": (("-pp", "2", "-tp", "2"), "tp_size differs: the head has 1.* has 2"),
    "pp_size": (("-pp", "4"), "pp_size differs: the head has 2.* has 4"),
    "dp_size": (("-pp", "2", "-dp", "2"), "dp_size differs: the head has 1.* has 2"),
    "dtype": (("-pp", "2", "--dtype", "bfloat16"), "dtype differs: .*float32.* has .*bfloat16"),
    "partition": (
        ("-pp", "2", "--pp-layer-partition", "2,3"),
        "pp_layer_partition differs: .*3,2.*2,3",
    ),
    "block-size": (("-pp", "2", "--block-size", "32"), "block_size differs: .*16.*32"),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_node_that_differs_is_refused_with_field_and_both_values(
    tiny: Path, waiting_head: Sequence[str], field: str
) -> None:
    flags, expected = DIFFERENT[field]
    text = refused(tiny, *waiting_head, "--headless", *flags)
    assert re.search(expected, text), text
    assert "node rank 1" in text


def test_a_partition_from_the_environment_is_compared_too(
    tiny: Path, waiting_head: Sequence[str]
) -> None:
    text = refused(tiny, *waiting_head, "--headless", "-pp", "2", VLLM_PP_LAYER_PARTITION="2,3")
    assert re.search("pp_layer_partition differs: .*3,2.*2,3", text), text


def test_another_model_is_refused(tiny: Path, tmp_path: Path, waiting_head: Sequence[str]) -> None:
    other = make_tiny_llama(tmp_path / "other", tied=True, shape=TinyShape(num_layers=6))
    flags = ("--headless", "-pp", "2", "--pp-layer-partition", "3,3")
    text = refused(other, *waiting_head, *flags)
    assert re.search(r"(config|weights) differs", text), text


def test_a_node_without_headless_is_told_so(tiny: Path, waiting_head: Sequence[str]) -> None:
    assert "needs --headless" in refused(tiny, *waiting_head, "-pp", "2")


def test_a_node_rank_twice_names_both_nodes(tiny: Path) -> None:
    """F11."""
    flags = ("--nnodes", "3", "-pp", "3")
    with (
        pytest.raises(AssertionError) as failure,
        MeshProcess(
            tiny,
            *(*flags, "--master-port", "0", "--join-timeout-seconds", "10"),
            nodes=[[*flags, "--node-rank", "1"], [*flags, "--node-rank", "1"]],
        ),
    ):
        pass
    text = str(failure.value)
    assert re.search(r"stage 1 .*is held by worker \S+ on \S+ \(node rank 1.*wants it too", text)
    assert "missing stage 2" in text


def test_wrong_words_about_nodes(tiny: Path) -> None:
    assert "does not exist with --nnodes 2" in refused(
        tiny, "--nnodes", "2", "--node-rank", "2", "--headless"
    )
    assert "--headless is for the other nodes" in refused(tiny, "--headless")
    assert "evenly" in refused(tiny, "--nnodes", "2", "-pp", "3")
    assert "is a public address" in refused(tiny, "--master-addr", "8.8.8.8")
    too_few = refused(tiny, "-pp", "5", "-dp", "2")
    assert "TP 1 x PP 5 x DP 2 needs 10 devices" in too_few
    assert "--cpu-devices 10" in too_few


def test_an_unreachable_head_fails_in_30_s(tiny: Path) -> None:
    """F10: names address and port."""
    started = time.monotonic()
    text = refused(
        tiny,
        *("--nnodes", "2", "-pp", "2", "--node-rank", "1", "--headless"),
        *("--master-addr", "127.0.0.1", "--master-port", "9"),
    )
    assert time.monotonic() - started < 30 + 5  # and the time to start and stop
    assert "no head answers at 127.0.0.1:9" in text
    assert "--master-addr" in text


def test_nodes_leave_when_the_head_dies(tiny: Path) -> None:
    """F12: within 10 s, with a code that is not 0."""
    flags = ("--nnodes", "2", "-pp", "2")
    with MeshProcess(
        tiny, *flags, "--master-port", "0", nodes=[[*flags, "--node-rank", "1"]]
    ) as mesh:
        tree = mesh.tree()
        mesh.process.kill()
        wait_for(lambda: not any(is_running(p) for p in tree), 10.0, "the end of the node")
        assert mesh.node_processes[0].wait(1) == 1
