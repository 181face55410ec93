"""Requests leave at their times, and never more at once than allowed."""

from __future__ import annotations

import asyncio
import time

from services.bench.endpoint import BenchRequest
from services.bench.load import LoadRun, run_load
from services.bench.outcome import Outcome
from services.bench.progress import progress_line

REQUESTS = [BenchRequest(str(i).encode(), 1) for i in range(6)]


class FakeEndpoint:
    """Answers each request after the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = 0
        self.most = 0

    async def send(self, request: BenchRequest, planned_at: float) -> Outcome:
        outcome = Outcome(planned_at=planned_at, sent_at=time.perf_counter())
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        outcome.ended_at = time.perf_counter()
        outcome.completion_tokens = int(request.body)
        outcome.error_kind = "timeout" if request.body == b"3" else None
        return outcome


async def load(
    endpoint: FakeEndpoint, times: list[float], max_concurrency: int | None = None
) -> LoadRun:
    run = LoadRun(total=len(REQUESTS))
    await run_load(REQUESTS, times, max_concurrency, endpoint.send, run)
    return run


async def test_a_fixed_concurrency_is_kept_full_and_not_exceeded() -> None:
    endpoint = FakeEndpoint(0.02)
    run = await load(endpoint, [0.0] * 6, max_concurrency=2)
    assert endpoint.most == run.most_running == 2
    assert run.seconds >= 0.06
    assert [outcome.completion_tokens for outcome in run.outcomes] == list(range(6))
    assert (run.done, run.failed, run.running, run.output_tokens) == (6, 1, 0, 15)


async def test_the_loop_is_open_a_slow_answer_holds_nobody_back() -> None:
    endpoint = FakeEndpoint(0.3)
    run = await load(endpoint, [0.02 * i for i in range(6)])
    assert endpoint.most == 6
    for index, outcome in enumerate(run.outcomes):
        assert outcome.planned_at == run.started_at + 0.02 * index
        assert outcome.sent_at >= outcome.planned_at


async def test_what_waited_for_a_slot_was_sent_late() -> None:
    run = await load(FakeEndpoint(0.05), [0.0] * 6, max_concurrency=3)
    late = [outcome.sent_at - outcome.planned_at for outcome in run.outcomes]
    assert min(late[3:]) >= 0.05


def test_the_line_of_progress() -> None:
    run = LoadRun(total=32, done=12, running=4, failed=1, output_tokens=50, started_at=100.0)
    assert progress_line(run, 102.0) == "12/32 done, 4 running, 1 failed, 25 tokens/s"
    assert progress_line(LoadRun(total=3), 5.0) == "0/3 done, 0 running, 0 tokens/s"
