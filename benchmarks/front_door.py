"""What a streamed token costs the front door CPU: `/v1/completions` as server-sent events.

The service's REST door, on loopback, streams to clients in another process. Once with an engine
that only counts out tokens, which leaves what the door costs; once with the real engine over stages
that answer at once, which adds scheduling, detokenizing and the way from one to the other.

Limit for the door: 100 us for each token.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import uvloop

from gateway.engine.engine import EngineConfig, MeshEngine
from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.types import (
    ADMITTED,
    ChoiceDelta,
    Engine,
    EngineStats,
    FinishReason,
    GenerationRequest,
)
from gateway.frontend.frontend import Frontend, ModelAssets, load_assets
from gateway.rest.app import RestConfig, create_rest_app
from gateway.rest.server import RestServer
from services.config import ServeConfig
from services.telemetry import Metrics
from tests.instant_stages import InstantStages
from tests.tiny_models import VOCAB_SIZE, make_tokenizer

STREAMS = 32
TOKENS_EACH = 300
STEP_SECONDS = 0.005
"""One token for every stream, then a pause, as stages would make it."""
LIMIT_MICROSECONDS = 100.0
MODEL = "tiny"
MAX_REQUESTS = 1024


class CountingEngine:
    """One token for every stream at each tick; no text to make, nothing to decide."""

    ready = True

    def __init__(self) -> None:
        self._tick = asyncio.Event()

    def stats(self) -> EngineStats:
        return EngineStats(1, 1, 0, 0, 0, 0)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]:
        yield ADMITTED
        for index in range(1, request.stop.max_tokens + 1):
            await self._tick.wait()
            last = index == request.stop.max_tokens
            yield ChoiceDelta(0, " word", (index,), (), FinishReason.LENGTH if last else None)


def main() -> None:
    """Prints microseconds of CPU time for each token, both ways."""
    with tempfile.TemporaryDirectory() as directory:
        make_tokenizer(Path(directory))
        assets = load_assets(ServeConfig(model=directory), Path(directory))
        door = uvloop.run(measure(assets, lambda: CountingEngine()))
        print(f"door: {door:.0f} us for each token, limit {LIMIT_MICROSECONDS:.0f} us", flush=True)
        both = uvloop.run(measure(assets, lambda: _real_engine(assets)))
        print(f"door and engine: {both:.0f} us for each token")


def _real_engine(assets: ModelAssets) -> MeshEngine:
    limits = SchedulerLimits(
        num_blocks=4096,
        block_size=16,
        max_num_seqs=STREAMS,
        max_num_batched_tokens=512,
        num_stages=1,
    )
    return MeshEngine(
        InstantStages(STEP_SECONDS), assets.tokenizer.backend, EngineConfig(limits, MAX_REQUESTS)
    )


async def measure(assets: ModelAssets, make_engine: Callable[[], Any]) -> float:
    """Microseconds of this process's CPU time for each streamed token."""
    engine: Engine = make_engine()
    metrics = Metrics()
    frontend = Frontend(
        engine,
        assets,
        model_names=(MODEL,),
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
        metrics=metrics,
        max_requests=MAX_REQUESTS,
    )
    app = create_rest_app(frontend, engine, lambda: {}, metrics, RestConfig(version="0"))
    server = RestServer(app)
    port = server.bind("127.0.0.1", 0)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run(stop, grace_seconds=1))
        running = tasks.create_task(make_run(engine))
        await _clients(port, 1)  # Whatever is made once is made now.
        started = time.process_time()
        num_tokens = await _clients(port, STREAMS)
        seconds = time.process_time() - started
        running.cancel()
        stop.set()
    frontend.close()
    return 1e6 * seconds / num_tokens


async def make_run(engine: Any) -> None:
    """Drives an engine until cancelled."""
    await engine.run()


async def _clients(port: int, count: int) -> int:
    """Runs the clients in a process of their own; returns the tokens that they were sent."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.front_door", str(port), str(count)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the clients ended with {process.returncode}")
    return int(output)


async def _read_streams(port: int, count: int) -> int:
    async with asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(_read_stream(port)) for _ in range(count)]
    return sum(read.result() for read in reads)


async def _read_stream(port: int) -> int:
    """One streamed completion over a plain socket; returns its events with text."""
    body = (
        b'{"prompt": "once upon a time", "stream": true, "ignore_eos": true, "max_tokens": %d}'
        % TOKENS_EACH
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )
    num_tokens = 0
    async with aclosing(_lines(reader)) as lines:
        async for line in lines:
            num_tokens += line.startswith(b'data: {"id"')
    writer.close()
    return num_tokens


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line


if __name__ == "__main__":
    print(asyncio.run(_read_streams(int(sys.argv[1]), int(sys.argv[2]))))
