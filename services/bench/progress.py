"""How far a run is, on one line of a terminal."""

from __future__ import annotations

import asyncio
import time
from typing import TextIO

from services.bench.load import LoadRun

INTERVAL_SECONDS = 0.5
_TO_END_OF_LINE = "\x1b[K"


async def show_progress(run: LoadRun, stream: TextIO) -> None:
    """Rewrites the line until it is cancelled, then clears it. Does nothing where the
    stream is no terminal."""
    if not stream.isatty():
        return
    try:
        while True:
            stream.write(f"\r{progress_line(run, time.perf_counter())}{_TO_END_OF_LINE}")
            stream.flush()
            await asyncio.sleep(INTERVAL_SECONDS)
    finally:
        stream.write(f"\r{_TO_END_OF_LINE}")
        stream.flush()


def progress_line(run: LoadRun, now: float) -> str:
    """`12/32 done, 4 running, 96 tokens/s`"""
    seconds = now - run.started_at
    rate = run.output_tokens / seconds if run.started_at and seconds > 0 else 0.0
    failed = f", {run.failed} failed" if run.failed else ""
    return f"{run.done}/{run.total} done, {run.running} running{failed}, {rate:.0f} tokens/s"
