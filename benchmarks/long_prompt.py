"""A prompt of 4,096 tokens at PP 2: how full it keeps the stages, and what others notice of it.

The demo model in fp32 on two cores. In each round a prompt alone, then the same length beside eight
requests that decode. Prompts are random, so that no prefix is in the cache.

Expected: twelve chunks and two stages overlap for 11/13 of the prefill or a little less, because
later chunks take longer. Beside decodes the prompt gets at least half of each step, so the time
between tokens of the others at most doubles; the prompt takes what decode rows leave of a step,
and since rows beside a chunk cost less than in a step of their own, it needs less than
twice its time alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.served import DEMO_MODEL, served
from stagemesh import AsyncClient

PROMPT_TOKENS = 4096
DECODES = 8
DECODE_TOKENS = 900
SHORT_PROMPT_TOKENS = 16
SETTLE_SECONDS = 1.0
NORMAL_SECONDS = 4.0
ROUNDS = 3
FLAGS = ("-pp", "2", "--cpu-devices", "2", "--max-model-len", "8192")
VOCABULARY = range(1000, 40000)


@dataclass(frozen=True, slots=True)
class Span:
    """A stage's work on one step, in seconds of one clock."""

    stage: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Round:
    """What one round has shown."""

    alone_start: float
    alone_seconds: float
    beside_seconds: float
    normal_interval: float
    interval: float
    slowest_interval: float


def main() -> None:
    """Prints a line for each round, and the medians."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        with served(DEMO_MODEL, *FLAGS, "--step-trace", str(trace)) as mesh:
            rounds = asyncio.run(_rounds(mesh.grpc_address))
        spans = _spans(trace)
    for name, values in (
        ("overlap of the stages", [_overlap(spans, r) for r in rounds]),
        ("time to first token against alone", [r.beside_seconds / r.alone_seconds for r in rounds]),
        ("time between tokens against normal", [r.interval / r.normal_interval for r in rounds]),
    ):
        print(f"{name}: {statistics.median(values):.2f} (median of {len(values)})")


async def _rounds(address: str) -> list[Round]:
    rng = random.Random(0)
    rounds = []
    async with AsyncClient(address) as client:
        await _first_token(client, _random_prompt(rng, PROMPT_TOKENS))  # warms up
        for _ in range(ROUNDS):
            done = await _one_round(client, rng)
            rounds.append(done)
            print(
                f"alone {done.alone_seconds:.2f} s; beside "
                f"{DECODES} decodes {done.beside_seconds:.2f} s "
                f"({done.beside_seconds / done.alone_seconds:.2f} times); their tokens come every "
                f"{1e3 * done.normal_interval:.0f} ms, meanwhile {1e3 * done.interval:.0f} ms "
                f"({done.interval / done.normal_interval:.2f} times), at most "
                f"{1e3 * done.slowest_interval:.0f} ms",
                flush=True,
            )
    return rounds


async def _one_round(client: AsyncClient, rng: random.Random) -> Round:
    alone_start = time.perf_counter()
    alone = await _first_token(client, _random_prompt(rng, PROMPT_TOKENS))
    async with asyncio.TaskGroup() as tasks:
        readers = [Reader() for _ in range(DECODES)]
        for reader in readers:
            prompt = _random_prompt(rng, SHORT_PROMPT_TOKENS)
            reader.task = tasks.create_task(reader.read(client, prompt))
        for reader in readers:
            await reader.begun.wait()
        await asyncio.sleep(SETTLE_SECONDS)
        start = time.perf_counter()
        await asyncio.sleep(NORMAL_SECONDS)
        middle = time.perf_counter()
        beside = await _first_token(client, _random_prompt(rng, PROMPT_TOKENS))
        end = time.perf_counter()
        for reader in readers:
            if reader.task is not None:
                reader.task.cancel()
    arrivals = [reader.arrivals for reader in readers]
    normal, meanwhile = _intervals(arrivals, start, middle), _intervals(arrivals, middle, end)
    return Round(
        alone_start,
        alone,
        beside,
        statistics.mean(normal),
        statistics.mean(meanwhile),
        max(meanwhile),
    )


def _random_prompt(rng: random.Random, length: int) -> list[int]:
    return rng.choices(VOCABULARY, k=length)


async def _first_token(client: AsyncClient, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    await client.generate(token_ids=prompt, max_tokens=1, temperature=0, ignore_eos=True)
    return time.perf_counter() - started


class Reader:
    """One request that decodes until it is cancelled, and when its tokens came."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.arrivals: list[float] = []
        self.task: asyncio.Task[None] | None = None

    async def read(self, client: AsyncClient, prompt: Sequence[int]) -> None:
        """Reads all tokens."""
        stream = client.stream(
            token_ids=prompt, max_tokens=DECODE_TOKENS, temperature=0, ignore_eos=True
        )
        async for _ in stream:
            self.arrivals.append(time.perf_counter())
            self.begun.set()


def _intervals(arrivals: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Times between tokens that came in a span of time."""
    return [
        later - earlier
        for times in arrivals
        for earlier, later in pairwise(times)
        if start <= later <= end
    ]


def _spans(trace: Path) -> list[Span]:
    lines = trace.read_text("utf-8").splitlines()
    events = (json.loads(line[:-1]) for line in lines if line.endswith("},"))
    return [
        Span(event["tid"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in events
        if event["ph"] == "X"
    ]


def _overlap(spans: Sequence[Span], done: Round) -> float:
    """Share of the prefill alone in which both stages compute.

    The ranks' clock is the one of `time.perf_counter` (CLOCK_MONOTONIC on Linux).
    """
    end = done.alone_start + done.alone_seconds
    own = [span for span in spans if done.alone_start <= span.start and span.end <= end]
    edges = sorted(edge for span in own for edge in ((span.start, 1), (span.end, -1)))
    both, active, last = 0.0, 0, edges[0][0]
    for at, change in edges:
        if active > 1:
            both += at - last
        active += change
        last = at
    return both / (edges[-1][0] - edges[0][0])
