"""The demo model through two stages, as a user meets it: real processes, real clients."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh import AsyncClient, Client
from tests.mesh_process import MeshProcess, wait_for

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def mesh(demo_model: Path) -> Iterator[MeshProcess]:
    with MeshProcess(demo_model, "-pp", "2", "--max-model-len", "2048") as running:
        yield running


def free_blocks(mesh: MeshProcess) -> float:
    text = httpx.get(f"{mesh.url}/metrics").text
    found = re.search(r"^stagemesh_kv_free_blocks (\S+)", text, re.MULTILINE)
    assert found is not None
    return float(found.group(1))


def test_an_openai_client_gets_a_right_streamed_answer(mesh: MeshProcess) -> None:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=mesh.model_name, messages=QUESTION, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "Paris" in "".join(pieces)
    assert sum(1 for piece in pieces if piece) > 3


def test_the_mesh_shows_its_stages(mesh: MeshProcess) -> None:
    view = httpx.get(f"{mesh.url}/v1/mesh").json()
    assert view["epoch"] == 1
    ranges = [(stage["layer_start"], stage["layer_end"]) for stage in view["stages"]]
    # A CPU's: the head of the last stage counts as four layers.
    assert ranges == [(0, 16), (16, 30)]
    pids = [rank["pid"] for stage in view["stages"] for rank in stage["ranks"]]
    assert pids == [process.pid for process in mesh.ranks()]
    assert {stage["state"] for stage in view["stages"]} == {"ready"}


def test_the_sdk_and_grpc_health(mesh: MeshProcess) -> None:
    with Client(mesh.grpc_address) as client:
        answer = client.generate(messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in answer.text
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answered = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answered.status == health_pb2.HealthCheckResponse.SERVING


async def test_32_clients_with_mixed_lengths_get_what_each_gets_alone(mesh: MeshProcess) -> None:
    """Greedy text does not depend on the company; blocks are all free afterwards."""
    before = free_blocks(mesh)
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:

        async def ask(index: int) -> str:
            answer = await client.completions.create(
                model=mesh.model_name,
                prompt="One two three four five six seven eight. " * (1 + index % 7) + str(index),
                max_tokens=4 + 5 * (index % 5),
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4 + 5 * (index % 5)
            return answer.choices[0].text

        together = await asyncio.gather(*(ask(index) for index in range(32)))
        alone = [await ask(index) for index in range(0, 32, 8)]
    assert list(together[::8]) == alone
    assert free_blocks(mesh) == before


async def test_a_client_that_goes_away_frees_its_blocks(mesh: MeshProcess) -> None:
    before = free_blocks(mesh)
    body = {"model": mesh.model_name, "prompt": "Count:", "max_tokens": 1000, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=mesh.url, timeout=30) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                break
        assert free_blocks(mesh) < before
    wait_for(lambda: free_blocks(mesh) == before, 3.0, "freeing the blocks (stream)")
    async with AsyncClient(mesh.grpc_address) as client:
        stream = client.stream("Count:", max_tokens=1000, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
    wait_for(lambda: free_blocks(mesh) == before, 3.0, "freeing the blocks (gRPC)")
    async with httpx.AsyncClient(base_url=mesh.url, timeout=1.0) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body)
    wait_for(lambda: free_blocks(mesh) == before, 3.0, "freeing the blocks (whole answer)")


@pytest.mark.quiet
def test_an_idle_mesh_costs_next_to_nothing(mesh: MeshProcess) -> None:
    """At most 2 % of a core over all processes."""
    processes = mesh.tree()

    def used() -> float:
        times = [process.cpu_times() for process in processes]
        return sum(t.user + t.system for t in times)

    # What the last test left behind, and the pages that ranks ask for after they have started.
    deadline, before = time.monotonic() + 20.0, -1.0
    while used() - before > 0.02 and time.monotonic() < deadline:
        before = used()
        time.sleep(1.0)
    before, started = used(), time.monotonic()
    time.sleep(5.0)
    share = (used() - before) / (time.monotonic() - started)
    assert share <= 0.02, f"an idle mesh used {share:.1%} of a core"
