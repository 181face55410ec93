"""Prefix cache and decodes sent ahead of their token: less work and waiting, the same text."""

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
    path = tmp_path_factory.mktemp("scheduling") / "tiny"
    return make_tiny_llama(path, tied=True, shape=TinyShape(num_layers=4))


def prompts() -> list[list[int]]:
    """A first prompt, then followers that share 128 tokens with it, and one stranger."""
    numbers = random.Random(5)
    prefix = numbers.choices(range(3, VOCAB_SIZE), k=PREFIX_TOKENS)
    alike = [[*prefix, *numbers.choices(range(3, VOCAB_SIZE), k=9)] for _ in range(FOLLOWERS)]
    return [*alike, numbers.choices(range(3, VOCAB_SIZE), k=40)]


async def ask_all(mesh: MeshProcess) -> list[Generation]:
    """The first alone, then the others together; then those whose tokens depend on earlier ones,
    on noise, or end early."""
    first, *others = prompts()
    async with AsyncClient(mesh.grpc_address) as client:

        async def ask(token_ids: list[int]) -> Generation:
            return await client.generate(
                token_ids=token_ids, max_tokens=24, temperature=0, ignore_eos=True
            )

        async def draw(seed: int) -> Generation:
            return await client.generate(
                token_ids=others[-1][:20],
                max_tokens=30,
                temperature=0.9,
                seed=seed,
                repetition_penalty=1.3,
                presence_penalty=0.5,
                logit_bias={7: 2.0},
                stop_token_ids=list(range(0, VOCAB_SIZE, 16)),
                n=2,
            )

        alike = [await ask(first), *await asyncio.gather(*map(ask, others))]
        return [*alike, *await asyncio.gather(*map(draw, range(6)))]


def counter(mesh: MeshProcess, name: str) -> float:
    metrics = httpx.get(f"{mesh.url}/metrics").text
    (value,) = re.findall(rf"^{name} (\S+)", metrics, re.MULTILINE)
    return float(value)


def tokens(answers: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in answer.choices] for answer in answers]


def test_text_is_the_same_with_and_without(tiny: Path) -> None:
    with MeshProcess(tiny, "-pp", "2", "--async-scheduling") as mesh:
        cached = asyncio.run(ask_all(mesh))
        hits = counter(mesh, "stagemesh_prefix_cache_hits_total")
    flags = ("--no-enable-prefix-caching", "--no-async-scheduling")
    with MeshProcess(tiny, "-pp", "2", *flags) as mesh:
        plain = asyncio.run(ask_all(mesh))
        assert counter(mesh, "stagemesh_prefix_cache_queries_total") == 0
    assert tokens(cached) == tokens(plain)
    drawn = [choice for answer in cached[-6:] for choice in answer.choices]
    assert {choice.finish_reason for choice in drawn} == {"stop", "length"}
    shared = [0, *[PREFIX_TOKENS] * (FOLLOWERS - 1), 0]
    assert [answer.usage.cached_prompt_tokens for answer in cached[: len(shared)]] == shared
    assert all(answer.usage.cached_prompt_tokens == 0 for answer in plain)
    assert hits >= sum(shared)
