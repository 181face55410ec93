"""A prompt of 4,096 tokens at PP 2: how full it keeps the stages, and what others notice of it.

On a simulated device first, whose step costs 20 ms and 0.1 ms a token, as of a device that reads
its weights for every step; then the demo model in fp32 on two cores. In each round a prompt alone,
then the same length beside eight requests that decode. Prompts are random, so that no prefix is in
the cache.

Expected: both stages compute for 0.8 of the prefill or more. Beside decodes their time between
tokens doubles at most. On the simulated device the prompt then gets half of each step, which holds
as much of it as half a chunk alone, so it needs hardly more than its time alone. On the CPU decodes
take their time from the prompt. What that alone would cost is printed too: the prompt's work W,
which is what stages compute for it alone, and that of the decodes, D for a step of all of them at
half the usual rate, share P stages, so the first token would come after
W / (P - D / (2 * normal)) if small chunks were no dearer than large ones and nobody ever waited.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.served import DEMO_MODEL, served
from services.topology.simulated_cost import StageCost
from stagemesh import AsyncClient
from tests.simulated_mesh import TRACE_FILE, VOCAB_SIZE, StageStep, read_trace, simulated_mesh

PROMPT_TOKENS = 4096
DECODES = 8
DECODE_TOKENS = 900
SHORT_PROMPT_TOKENS = 16
SETTLE_SECONDS = 1.0
NORMAL_SECONDS = 4.0
ROUNDS = 3
DEMO_VOCABULARY = 49152
PP_SIZE = 2
CACHE_BYTES = 400_000_000
"""Of each rank, for what a round needs and little more: after a round that is not counted every
block has been in use, as on a mesh that has served for a while, and asks for no new page."""
FLAGS = (
    *("-pp", str(PP_SIZE), "--cpu-devices", "2", "--max-model-len", "8192"),
    *("--kv-cache-memory-bytes", str(CACHE_BYTES)),
)
COST = StageCost(fixed_seconds=0.02, per_token_seconds=0.0001)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round has shown."""

    alone_start: float
    alone_seconds: float
    normal_end: float
    beside_seconds: float
    normal_interval: float
    interval: float
    slowest_interval: float


def main() -> None:
    """Prints a line for each round, and the medians."""
    with tempfile.TemporaryDirectory() as directory:
        print("simulated device:")
        own = Path(directory) / "sim"
        with simulated_mesh(own, PP_SIZE, COST, "--max-model-len", "8192") as mesh:
            rounds = asyncio.run(_rounds(mesh.grpc_address, VOCAB_SIZE))
        _report(rounds, read_trace(own))
        print("CPU:")
        trace = Path(directory) / TRACE_FILE
        with served(DEMO_MODEL, *FLAGS, "--step-trace", str(trace)) as mesh:
            rounds = asyncio.run(_rounds(mesh.grpc_address, DEMO_VOCABULARY))
        steps = read_trace(trace.parent)
        _report(rounds, steps)
        shares = [_by_work_alone(steps, r) / r.alone_seconds for r in rounds]
        print(f"time to first token against alone by work alone: {statistics.median(shares):.2f}")


def _report(rounds: Sequence[Round], steps: Sequence[StageStep]) -> None:
    for name, values in (
        ("overlap of the stages", [_overlap(steps, r) for r in rounds]),
        ("time to first token against alone", [r.beside_seconds / r.alone_seconds for r in rounds]),
        ("time between tokens against normal", [r.interval / r.normal_interval for r in rounds]),
    ):
        print(f"{name}: {statistics.median(values):.2f} (median of {len(values)})", flush=True)


async def _rounds(address: str, vocabulary: int) -> list[Round]:
    rng = random.Random(0)

    def prompt_of(length: int) -> list[int]:
        return rng.choices(range(vocabulary // 16, vocabulary), k=length)

    rounds = []
    async with AsyncClient(address) as client:
        # The mesh is to know what steps of both kinds cost.
        await _one_round(client, prompt_of)
        for _ in range(ROUNDS):
            done = await _one_round(client, prompt_of)
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


async def _one_round(client: AsyncClient, prompt_of: Callable[[int], list[int]]) -> Round:
    alone_start = time.perf_counter()
    alone = await _first_token(client, prompt_of(PROMPT_TOKENS))
    async with asyncio.TaskGroup() as tasks:
        readers = [Reader() for _ in range(DECODES)]
        for reader in readers:
            prompt = prompt_of(SHORT_PROMPT_TOKENS)
            reader.task = tasks.create_task(reader.read(client, prompt))
        for reader in readers:
            await reader.begun.wait()
        await asyncio.sleep(SETTLE_SECONDS)
        start = time.perf_counter()
        await asyncio.sleep(NORMAL_SECONDS)
        middle = time.perf_counter()
        beside = await _first_token(client, prompt_of(PROMPT_TOKENS))
        end = time.perf_counter()
        for reader in readers:
            if reader.task is not None:
                reader.task.cancel()
    arrivals = [reader.arrivals for reader in readers]
    normal, meanwhile = _intervals(arrivals, start, middle), _intervals(arrivals, middle, end)
    return Round(
        alone_start,
        alone,
        middle,
        beside,
        statistics.mean(normal),
        statistics.mean(meanwhile),
        max(meanwhile),
    )


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


def _overlap(steps: Sequence[StageStep], done: Round) -> float:
    """Share of the prefill alone in which both stages compute.

    The ranks' clock is the one of `time.perf_counter` (CLOCK_MONOTONIC on Linux).
    """
    own = _within(steps, done.alone_start, done.alone_start + done.alone_seconds)
    edges = sorted(edge for step in own for edge in ((step.start, 1), (step.end, -1)))
    both, active, last = 0.0, 0, edges[0][0]
    for at, change in edges:
        if active == PP_SIZE:
            both += at - last
        active += change
        last = at
    return both / (edges[-1][0] - edges[0][0])


def _by_work_alone(steps: Sequence[StageStep], done: Round) -> float:
    """Seconds to the first token beside decodes, if only what stages compute took time; NaN where
    no step held all decodes and nothing else."""
    alone = _within(steps, done.alone_start, done.alone_start + done.alone_seconds)
    beside = _within(steps, done.normal_end, done.normal_end + done.beside_seconds)
    together = {step.step_id for step in beside if step.sampled_rows == DECODES}
    if not together:
        return math.nan
    decodes = sum(step.compute for step in beside if step.step_id in together) / len(together)
    work = sum(step.compute for step in alone)
    return work / (PP_SIZE - decodes / (2 * done.normal_interval))


def _within(steps: Sequence[StageStep], start: float, end: float) -> list[StageStep]:
    return [step for step in steps if start <= step.start and step.end <= end]
