"""Recovery where a replica has others beside it, spans a node, or computes with real weights."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

import httpx
import psutil

from stagemesh import AsyncClient
from tests.e2e.test_recovery import (
    NOTICED_SECONDS,
    RECOVERED_SECONDS,
    epoch_of,
    gauge,
    is_ready,
)
from tests.mesh_process import MeshProcess, is_running, wait_for
from tests.simulated_mesh import expected_outputs, generate_all, make_model, prompts_of
from tests.tiny_models import TinyShape, make_tiny_llama

PROMPTS = [[1 + (7 * i + 3 * j) % 200 for j in range(20 + i)] for i in range(4)]


def states(mesh: MeshProcess) -> list[str]:
    return [replica["state"] for replica in httpx.get(f"{mesh.url}/v1/mesh").json()["replicas"]]


def test_another_node_s_worker_comes_back_while_the_other_replica_serves(tmp_path: Path) -> None:
    """The node's launcher starts it again; the head is never unready, and sends nothing there."""
    model = make_model(tmp_path / "model")
    sizes = ("-dp", "2", "-pp", "2", "--nnodes", "2", "--device", "sim")
    node = [*sizes, "--node-rank", "1"]
    with (
        MeshProcess(model, "--master-port", "0", *sizes, nodes=[node]) as mesh,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        tree = len(mesh.tree())
        prompts = prompts_of(16, 8)
        answers = pool.submit(generate_all, mesh, prompts, 200)
        mesh.wait_until_running(16)
        there = psutil.Process(mesh.node_processes[0].pid).children()
        (victim,) = [w for w in there if "--pp-rank=1" in w.cmdline()]
        victim.kill()
        wait_for(lambda: "recovering" in states(mesh), NOTICED_SECONDS, "the recovery")
        while "recovering" in states(mesh):
            assert is_ready(mesh)
            assert generate_all(mesh, prompts[:1], 2) == expected_outputs(prompts[:1], 2)
        assert answers.result(60) == expected_outputs(prompts, 200)
        assert states(mesh) == ["serving", "serving"]
        assert len(mesh.tree()) == tree


def test_greedy_text_is_the_same_with_real_weights(tmp_path: Path) -> None:
    """One rank of a TP group dies, its neighbour keeps its weights; then a whole stage. A prompt
    that was cached before gives the right text."""
    model = make_tiny_llama(tmp_path / "tiny", tied=True, shape=TinyShape(num_layers=4))

    async def ask(mesh: MeshProcess, num_tokens: int) -> list[list[int]]:
        async with AsyncClient(mesh.grpc_address) as client:
            calls = (
                client.generate(
                    token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True
                )
                for prompt in PROMPTS
            )
            return [list(answer.token_ids) for answer in await asyncio.gather(*calls)]

    with (
        MeshProcess(model, "-tp", "2", "-pp", "2") as mesh,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        undisturbed = asyncio.run(ask(mesh, 100))
        interrupted = pool.submit(asyncio.run, ask(mesh, 100))
        mesh.wait_until_running(len(PROMPTS))
        for victim, num_kept in ((mesh.ranks()[1], 3), (mesh.workers()[1], 2)):
            epoch, before = epoch_of(mesh), {rank.pid for rank in mesh.ranks()}
            victim.kill()
            wait_for(lambda v=victim: not is_running(v), NOTICED_SECONDS, "its end")
            wait_for(
                lambda e=epoch: epoch_of(mesh) > e and is_ready(mesh), RECOVERED_SECONDS, "recovery"
            )
            assert len(before & {rank.pid for rank in mesh.ranks()}) == num_kept
        assert interrupted.result(60) == undisturbed
        assert asyncio.run(ask(mesh, 100)) == undisturbed
        assert gauge(mesh, "stagemesh_kv_free_blocks ") == gauge(mesh, "stagemesh_kv_blocks ")
