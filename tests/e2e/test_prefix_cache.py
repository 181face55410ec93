"""The prefix cache of a served mesh: the same text, less work, and told to the client."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import httpx
import pytest

from stagemesh import AsyncClient, Generation
from tests.mesh_process import MeshProcess
from tests.tiny_models import VOCAB_SIZE, TinyShape, make_tiny_llama

PREFIX_TOKENS = 128
FOLLOWERS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prefix-cache") / "tiny"
    return make_tiny_llama(path, tied=True, shape=TinyShape(num_layers=4))


def prompts() -> list[list[int]]:
    """A first prompt, then followers that share 128 tokens with it, and one stranger."""
    numbers = random.Random(5)
    prefix = numbers.choices(range(3, VOCAB_SIZE), k=PREFIX_TOKENS)
    alike = [[*prefix, *numbers.choices(range(3, VOCAB_SIZE), k=9)] for _ in range(FOLLOWERS)]
    return [*alike, numbers.choices(range(3, VOCAB_SIZE), k=40)]


async def ask_all(mesh: MeshProcess) -> list[Generation]:
    """The first alone, then the others together."""
    first, *others = prompts()
    async with AsyncClient(mesh.grpc_address) as client:

        async def ask(token_ids: list[int]) -> Generation:
            return await client.generate(
                token_ids=token_ids, max_tokens=24, temperature=0, ignore_eos=True
            )

        return [await ask(first), *await asyncio.gather(*map(ask, others))]


def counter(mesh: MeshProcess, name: str) -> float:
    metrics = httpx.get(f"{mesh.url}/metrics").text
    (value,) = re.findall(rf"^{name} (\S+)", metrics, re.MULTILINE)
    return float(value)


def test_text_is_the_same_with_and_without(tiny: Path) -> None:
    with MeshProcess(tiny, "-pp", "2") as mesh:
        cached = asyncio.run(ask_all(mesh))
        hits = counter(mesh, "stagemesh_prefix_cache_hits_total")
        queries = counter(mesh, "stagemesh_prefix_cache_queries_total")
    with MeshProcess(tiny, "-pp", "2", "--no-enable-prefix-caching") as mesh:
        plain = asyncio.run(ask_all(mesh))
        assert counter(mesh, "stagemesh_prefix_cache_queries_total") == 0
    assert [answer.token_ids for answer in cached] == [answer.token_ids for answer in plain]
    assert len({answer.token_ids for answer in cached}) > 1
    shared = [0, *[PREFIX_TOKENS] * (FOLLOWERS - 1), 0]
    assert [answer.usage.cached_prompt_tokens for answer in cached] == shared
    assert all(answer.usage.cached_prompt_tokens == 0 for answer in plain)
    assert hits == sum(shared)
    assert queries == sum(map(len, prompts()))
