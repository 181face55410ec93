"""Sends requests at their times, at most so many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.bench.endpoint import BenchRequest
from services.bench.outcome import Outcome

Send = Callable[[BenchRequest, float], Awaitable[Outcome]]
"""A request and when it was planned (`time.perf_counter`)."""


@dataclass(slots=True)
class LoadRun:
    """A run and how far it is; the outcomes are in order of their requests."""

    total: int
    outcomes: list[Outcome] = field(default_factory=list)
    running: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    most_running: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first request's time to the end of the last answer."""
        return self.ended_at - self.started_at


async def run_load(
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    max_concurrency: int | None,
    send: Send,
    run: LoadRun,
) -> None:
    """Fills `run`. `times` are seconds from now, ascending, one for each request.

    The loop is open: a request is sent when its time has come, whether or not others have been
    answered, unless `max_concurrency` are on their way; then it waits for one of them, and
    is sent late, which its outcome shows.
    """
    run.outcomes = [Outcome() for _ in requests]
    slots = asyncio.Semaphore(len(requests) if max_concurrency is None else max_concurrency)

    async def one(index: int, planned_at: float) -> None:
        try:
            outcome = run.outcomes[index] = await send(requests[index], planned_at)
        finally:
            run.running -= 1
            slots.release()
        run.done += 1
        run.failed += outcome.error_kind is not None
        run.output_tokens += outcome.output_tokens

    run.started_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index, offset in enumerate(times):
            planned_at = run.started_at + offset
            if (delay := planned_at - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            await slots.acquire()
            run.running += 1
            run.most_running = max(run.most_running, run.running)
            group.create_task(one(index, planned_at))
    run.ended_at = max((outcome.ended_at for outcome in run.outcomes), default=run.started_at)
