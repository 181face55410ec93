"""What a step costs the gateway's CPU: its decisions, its message, its result.

Steady state: every row is a decode at 300 to 1000 tokens of context, and a block is new now and
then. No sockets and no stages: results are made up, as the stages would send them. What is counted
is done on the event loop before the next step is sent; text is made after that, while the stages
compute (`front-door` has it).

Limits: 1.5 ms at 64 rows, 4 ms at 256.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from gateway.engine.scheduled_step import ScheduledStep, SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence as TokenSequence
from gateway.engine.types import SamplingParams, StopConditions
from stagemesh.v1 import stage_worker_pb2, step_pb2

PROMPT_TOKENS = 300
MAX_TOKENS = 2000
"""Above what any sequence gets while the prompts of all are computed, and then is measured."""
WARM_UP_STEPS = 20
STEPS = 200
LIMIT_MILLISECONDS = {64: 1.5, 256: 4.0}


def main() -> None:
    """Prints milliseconds of CPU time for each part, the median over the steps."""
    for num_rows, limit in LIMIT_MILLISECONDS.items():
        parts = measure(num_rows)
        total = sum(parts.values())
        shown = ", ".join(f"{name} {milliseconds:.3f}" for name, milliseconds in parts.items())
        print(f"{num_rows:3} rows: {shown}; total {total:.3f} ms, limit {limit} ms", flush=True)


def measure(
    num_rows: int, summary: Callable[[Sequence[float]], float] = statistics.median
) -> dict[str, float]:
    """Milliseconds of CPU time by part of a step with so many decodes."""
    scheduler = _running(num_rows)
    in_flight = deque(_schedule_all(scheduler))
    seconds: dict[str, list[float]] = {"decode": [], "apply": [], "schedule": [], "encode": []}
    for step in range(WARM_UP_STEPS + STEPS):
        data = _response(in_flight.popleft())
        times = [time.process_time()]
        response = stage_worker_pb2.ExecuteResponse.FromString(data)
        times.append(time.process_time())
        scheduler.apply(response.result)
        times.append(time.process_time())
        scheduled = scheduler.schedule()
        times.append(time.process_time())
        if scheduled is None or len(scheduled.rows) != num_rows:
            raise RuntimeError("the benchmark has left its steady state")
        stage_worker_pb2.ExecuteRequest(step=scheduled.step).SerializeToString()
        times.append(time.process_time())
        in_flight.append(scheduled)
        if step >= WARM_UP_STEPS:
            for name, start, end in zip(seconds, times, times[1:], strict=False):
                seconds[name].append(end - start)
    return {name: 1e3 * summary(values) for name, values in seconds.items()}


def _running(num_rows: int) -> Scheduler:
    """A scheduler whose sequences all decode."""
    blocks = num_rows * (-(-(PROMPT_TOKENS + MAX_TOKENS) // 16) + 2)
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=blocks,
            block_size=16,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(512, num_rows),
            num_stages=1,
        ),
        epoch=1,
    )
    for index in range(num_rows):
        prompt = tuple(index * 7 + k for k in range(PROMPT_TOKENS))
        scheduler.add(
            TokenSequence(
                str(index),
                0,
                prompt,
                SamplingParams(temperature=0.7, seed=index),
                StopConditions(MAX_TOKENS, stop_token_ids=frozenset({1})),
            )
        )
    while True:
        steps = _schedule_all(scheduler)
        for sent in steps:
            scheduler.apply(_result(sent))
        if scheduler.num_waiting == 0 and len(steps[-1].rows) == num_rows:
            return scheduler


def _schedule_all(scheduler: Scheduler) -> list[ScheduledStep]:
    steps = []
    while (scheduled := scheduler.schedule()) is not None:
        steps.append(scheduled)
    return steps


def _result(scheduled: ScheduledStep) -> step_pb2.StepResult:
    result = step_pb2.StepResult(epoch=1, step_id=scheduled.step.step_id)
    result.clock.compute_ns = 20_000_000
    for index, row in enumerate(scheduled.rows):
        if row.num_sampled:
            result.rows.add(row=index, token_ids=[1000 + index])
    return result


def _response(scheduled: ScheduledStep) -> bytes:
    return stage_worker_pb2.ExecuteResponse(result=_result(scheduled)).SerializeToString()


if __name__ == "__main__":
    main()
