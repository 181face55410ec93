"""Load with cancels, deadlines and refusals for as long as is asked for, and what it leaves.

    python -m tests.soak --seconds 3600 [--step-seconds 0.02]

A mesh of two simulated stages gets requests of every kind over both doors: read to their end,
left early, out of time, malformed, one too many. Afterwards nothing may be left: memory that
grows with the number of requests, tasks, KV blocks, file descriptors, threads, metric series.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from services.topology.simulated_cost import StageCost
from stagemesh import AsyncChunkStream, AsyncClient
from stagemesh.errors import DeadlineExceeded, Saturated
from tests.mesh_process import MeshProcess, wait_for
from tests.simulated_mesh import VOCAB_SIZE, simulated_mesh

PP_SIZE = 2
AT_A_TIME = 40
SLOTS, PLACES = 16, 16
"""Fewer together than requests at a time, so that some are refused."""
NUM_BLOCKS = 160
BLOCK_BYTES = 8 * 2 * 16 * 3 * 64 * 4
"""Of one stage's eight layers."""
SAMPLE_SECONDS = 0.5
WARM_UP_SHARE = 0.4
"""Of the time: until memory pools have their size and every kind of request has been there."""
MAX_GROWTH_BYTES = 1e6
"""Of the resident memory of each process, for each thousand requests after the warm-up."""
POOL_THREADS = 4
"""By which the pool inside of gRPC may differ: it makes and ends threads as it likes."""
REQUEST_SECONDS = 30.0
REFUSED = ("429", "saturated")
PAUSE_SECONDS = 0.05
PAUSE_STEPS = 25
"""Whichever is longer, after a refusal, so that they are not most of all."""
PROGRESS_SECONDS = 60.0
SETTLE_SECONDS = 10.0
MAX_PROMPT, MAX_TOKENS = 40, 24


@dataclass(frozen=True, slots=True)
class Sample:
    """The processes at one moment; by their names."""

    num_requests: int
    rss_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an idle mesh holds, by process where there are several."""

    descriptors: dict[str, int]
    threads: dict[str, int]
    series: int
    tasks: float
    free_blocks: float


@dataclass(slots=True)
class Report:
    """What a soak has found."""

    seconds: float
    outcomes: Counter[str]
    before: Footprint
    after: Footprint
    samples: list[Sample] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        """Of all kinds."""
        return sum(self.outcomes.values())

    def growth_bytes(self) -> dict[str, float]:
        """For each thousand requests after the warm-up: of the medians of its two ends."""
        measured = self.samples[int(len(self.samples) * WARM_UP_SHARE) :]
        part = max(1, len(measured) // 4)
        first, last = measured[:part], measured[-part:]
        requests = statistics.mean(s.num_requests for s in last) - statistics.mean(
            s.num_requests for s in first
        )
        return {
            name: 1000
            * (
                statistics.median(s.rss_bytes[name] for s in last)
                - statistics.median(s.rss_bytes[name] for s in first)
            )
            / requests
            for name in self.samples[0].rss_bytes
        }

    def problems(self) -> list[str]:
        """What has grown or is left, in words; empty where nothing is."""
        found = [
            f"{name} grows by {growth / 1e6:.2f} MB for each 1,000 requests"
            for name, growth in self.growth_bytes().items()
            if growth > MAX_GROWTH_BYTES
        ]
        found += [
            f"{name} had {self.before.threads[name]} threads and has {count}"
            for name, count in self.after.threads.items()
            if count > self.before.threads[name] + POOL_THREADS
        ]
        # Fewer are none left: a connection of before may have been idle for too long.
        found += [
            f"{name} had {self.before.descriptors[name]} descriptors and has {count}"
            for name, count in self.after.descriptors.items()
            if count > self.before.descriptors[name]
        ]
        for what in ("series", "tasks", "free_blocks"):
            was, is_ = getattr(self.before, what), getattr(self.after, what)
            if was != is_:
                found.append(f"{what} were {was} and are {is_}")
        return found


class Load:
    """Sends requests of every kind, `AT_A_TIME`, until it is told to stop."""

    def __init__(
        self, mesh: MeshProcess, client: AsyncClient, seed: int, pause_seconds: float
    ) -> None:
        self._host, _, port = mesh.url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._client = client
        self._pause_seconds = pause_seconds
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self._kinds: Sequence[Callable[[], Awaitable[str]]] = (
            self._rest_stream,
            self._rest_left,
            self._rest_whole,
            self._rest_late,
            self._rest_wrong,
            self._state,
            self._grpc_stream,
            self._grpc_left,
            self._grpc_late,
        )

    async def run(self, seconds: float) -> None:
        """All kinds in turn; raises what is none of their outcomes."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for index in range(AT_A_TIME):
                tasks.create_task(self._send(index, until))

    async def _send(self, index: int, until: float) -> None:
        while time.monotonic() < until:
            kind = self._kinds[index % len(self._kinds)]
            async with asyncio.timeout(REQUEST_SECONDS):
                outcome = await kind()
            self.outcomes[f"{kind.__name__.removeprefix('_')} {outcome}"] += 1
            if outcome in REFUSED:
                await asyncio.sleep(self._pause_seconds)
            index += 1

    def _body(self, **fields: object) -> dict[str, object]:
        count = self._random.randint(1, MAX_PROMPT)
        return {
            "prompt": [self._random.randrange(VOCAB_SIZE) for _ in range(count)],
            "max_tokens": self._random.randint(1, MAX_TOKENS),
            "ignore_eos": True,
            "n": self._random.choice((1, 1, 2)),
            **fields,
        }

    async def _rest(self, method: str, path: str, body: object, most_bytes: int = 1 << 20) -> str:
        """The status; the connection is closed after so many bytes of the answer."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            content = json.dumps(body).encode() if body is not None else b""
            writer.write(
                b"%s %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%s"
                % (method.encode(), path.encode(), len(content), content)
            )
            status = (await reader.readline()).split()[1].decode()
            while most_bytes > 0 and (data := await reader.read(min(most_bytes, 65536))):
                most_bytes -= len(data)
            return status
        finally:
            writer.close()

    async def _rest_stream(self) -> str:
        return await self._rest("POST", "/v1/completions", self._body(stream=True, logprobs=2))

    async def _rest_left(self) -> str:
        body = self._body(stream=self._random.random() < 0.5)
        return await self._rest("POST", "/v1/completions", body, self._random.randint(0, 800))

    async def _rest_whole(self) -> str:
        return await self._rest("POST", "/v1/completions", self._body())

    async def _rest_late(self) -> str:
        body = self._body(timeout=self._random.choice((0.0001, 0.02, 0.1)))
        return await self._rest("POST", "/v1/completions", body)

    async def _rest_wrong(self) -> str:
        body = self._body(temperature=self._random.uniform(3, 99), model=str(self._random.random()))
        path = self._random.choice(("/v1/completions", f"/v1/{self._random.random()}"))
        return await self._rest("POST", path, body)

    async def _state(self) -> str:
        return await self._rest(
            "GET", self._random.choice(("/metrics", "/ready", "/v1/mesh")), None
        )

    async def _grpc(self, most_chunks: int, timeout_seconds: float) -> str:
        body = self._body()
        try:
            stream = self._client.stream(
                token_ids=body["prompt"],  # type: ignore[arg-type]
                max_tokens=body["max_tokens"],  # type: ignore[arg-type]
                n=body["n"],  # type: ignore[arg-type]
                ignore_eos=True,
                timeout=timeout_seconds,
            )
            async with stream, aclosing(_counted(stream)) as counted:
                async for number in counted:
                    if number >= most_chunks:
                        return "left"
        except Saturated:
            return "saturated"
        except DeadlineExceeded:
            return "late"
        return "done"

    async def _grpc_stream(self) -> str:
        return await self._grpc(1 << 20, REQUEST_SECONDS)

    async def _grpc_left(self) -> str:
        return await self._grpc(self._random.randint(1, 5), REQUEST_SECONDS)

    async def _grpc_late(self) -> str:
        return await self._grpc(1 << 20, self._random.choice((0.005, 0.02, 0.1)))


async def _counted(stream: AsyncChunkStream) -> AsyncIterator[int]:
    number = 0
    async for _ in stream:
        number += 1
        yield number


def soak(directory: Path, seconds: float, seed: int = 1, step_seconds: float = 0.0) -> Report:
    """Runs a mesh under load for so long. Where a step takes no time, the mesh is as busy as the
    machine lets it be."""
    flags = (
        *("--max-model-len", "256", "--max-num-seqs", str(SLOTS)),
        *("--max-queued-requests", str(PLACES)),
        *("--kv-cache-memory-bytes", str(NUM_BLOCKS * BLOCK_BYTES)),
    )
    pause_seconds = max(PAUSE_SECONDS, PAUSE_STEPS * step_seconds)
    with simulated_mesh(directory, PP_SIZE, StageCost(step_seconds), *flags) as mesh:
        processes = name_processes(mesh)
        # So that what is made once, by the first request of a kind, is there before.
        asyncio.run(_load(mesh, 2.0, seed, [], processes, pause_seconds))
        before = settled(mesh, processes, None)
        samples: list[Sample] = []
        outcomes = asyncio.run(_load(mesh, seconds, seed + 1, samples, processes, pause_seconds))
        after = settled(mesh, processes, before)
        return Report(seconds, outcomes, before, after, samples)


def name_processes(mesh: MeshProcess) -> dict[str, psutil.Process]:
    """Every process of the mesh."""
    return {
        "gateway": psutil.Process(mesh.process.pid),
        **{f"worker {index}": process for index, process in enumerate(mesh.workers())},
        **{f"rank {index}": process for index, process in enumerate(mesh.ranks())},
    }


async def _load(
    mesh: MeshProcess,
    seconds: float,
    seed: int,
    samples: list[Sample],
    processes: dict[str, psutil.Process],
    pause_seconds: float,
) -> Counter[str]:
    async with AsyncClient(mesh.grpc_address, max_retries=0) as client:
        load = Load(mesh, client, seed, pause_seconds)
        running = asyncio.ensure_future(load.run(seconds))
        started_at = told_at = time.monotonic()
        while not running.done():
            rss = {name: process.memory_info().rss for name, process in processes.items()}
            samples.append(Sample(sum(load.outcomes.values()), rss))
            if (now := time.monotonic()) - told_at >= PROGRESS_SECONDS:
                told_at = now
                print(
                    f"{now - started_at:.0f} of {seconds:.0f} s, {samples[-1].num_requests} "
                    f"requests, {sum(rss.values()) / 1e6:.1f} MB in all processes",
                    flush=True,
                )
            await asyncio.wait([running], timeout=SAMPLE_SECONDS)
        await running
        return load.outcomes


def settled(
    mesh: MeshProcess, processes: dict[str, psutil.Process], wanted: Footprint | None
) -> Footprint:
    """The footprint once nothing runs any more: as soon as it is what is wanted."""
    found = _footprint(mesh, processes)

    def look() -> bool:
        nonlocal found
        found = _footprint(mesh, processes)
        if wanted is None:
            return found.free_blocks == NUM_BLOCKS
        return replace(found, threads=wanted.threads) == wanted

    try:
        wait_for(look, SETTLE_SECONDS, "a mesh at rest")
    except AssertionError:
        return found
    return found


def _footprint(mesh: MeshProcess, processes: dict[str, psutil.Process]) -> Footprint:
    text = httpx.get(f"{mesh.url}/metrics", timeout=10).text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    return Footprint(
        descriptors={name: process.num_fds() for name, process in processes.items()},
        threads={name: process.num_threads() for name, process in processes.items()},
        series=len(values),
        tasks=values["stagemesh_gateway_tasks"],
        free_blocks=values["stagemesh_kv_free_blocks"],
    )


def main() -> int:
    """Prints what was done and what is left; 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.0,
        help="what a step takes on each stage; with 0 the machine is as busy as it can be",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mesh"
        report = soak(path, given.seconds, step_seconds=given.step_seconds)
    print(f"{report.num_requests} requests in {report.seconds:.0f} s")
    for outcome, count in sorted(report.outcomes.items()):
        print(f"  {outcome}: {count}")
    for name, growth in report.growth_bytes().items():
        print(f"{name}: {growth / 1e6:+.3f} MB for each 1,000 requests")
    problems = report.problems()
    print("\n".join(problems) or "nothing is left")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
