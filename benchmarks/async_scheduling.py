"""What it brings to send a decode ahead of its token: time between tokens with and without.

The demo model at PP 1 and 2, one request alone and eight together, both meshes up at once
and asked in turns, so that a busy moment of the machine meets both.

Expected: on a device of its own what is saved is the gateway's round trip. Where the gateway shares
its cores with the ranks, it takes from them while they compute what they had to wait for before:
nothing is won, and with all cores busy some of it is lost.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks.served import DEMO_MODEL, served
from stagemesh import AsyncClient

TURNS = 5
TOKENS = 48
CONCURRENCIES = (1, 8)
FLAGS = ("--max-model-len", "512")


def main() -> None:
    """Prints milliseconds for each token of a request, and the ratio."""
    for pp_size in (1, 2):
        pp = ("-pp", str(pp_size), *FLAGS)
        with (
            served(DEMO_MODEL, *pp, "--async-scheduling") as ahead,
            served(DEMO_MODEL, *pp, "--no-async-scheduling") as waits,
        ):
            addresses = (ahead.grpc_address, waits.grpc_address)
            for concurrency in CONCURRENCIES:
                with_it, without = asyncio.run(measure(addresses, concurrency))
                print(
                    f"PP {pp_size}, {concurrency} at a time: {with_it:.1f} ms for each token, "
                    f"{without:.1f} ms without; ratio {without / with_it:.2f}",
                    flush=True,
                )


async def measure(addresses: tuple[str, ...], concurrency: int) -> list[float]:
    """Milliseconds for each token at each address, the median over the turns."""
    times: dict[str, list[float]] = {address: [] for address in addresses}
    for turn in range(TURNS + 1):
        for address in addresses:
            seconds = await _ask(address, concurrency)
            if turn:  # The first one warms up.
                times[address].append(1e3 * seconds / TOKENS)
    return [statistics.median(times[address]) for address in addresses]


async def _ask(address: str, concurrency: int) -> float:
    """Seconds until all answers are complete."""
    async with AsyncClient(address) as client:

        async def read(index: int) -> None:
            prompt = f"Story number {index}: once upon a time"
            async with client.stream(prompt, max_tokens=TOKENS, ignore_eos=True) as chunks:
                async for _ in chunks:
                    pass

        started = time.monotonic()
        await asyncio.gather(*(read(index) for index in range(concurrency)))
        return time.monotonic() - started
