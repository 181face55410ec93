"""The engine's pipeline: one step stream to every stage worker.

A step is serialized once. It goes to all stages at once, or to later ones with the next steps
(`held_steps`). The last stage's results come back in step order; every stage's clock goes to the
metrics. The
first failure ends it, with its cause: an echo of it on a neighbour ("connection
closed by peer") waits a moment for the better explanation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc

from gateway.observer import StageObserver, StepObserver
from gateway.pipeline.bring_up import Stage
from gateway.pipeline.held_steps import HeldSteps
from gateway.pipeline.stuck_step import HeldStep, StepTimes
from services.control.progress import (
    ProgressTable,
    StageProgress,
    explain_progress,
    furthest_behind,
)
from services.errors import ECHO_REASON, StageFailed
from stagemesh.v1 import stage_worker_pb2, step_pb2

FIRST_CAUSE_WAIT_SECONDS = 1.0
"""How long an echo waits for the failure that caused it. Part of the 3 s in which
clients learn of a failure."""
MAX_UNSENT_STEPS = 256
"""Requests to a stage. No more steps than are in flight: as many as stages, which are at most the
layers, with `services.ranges.MAX_BATCH_DEPTH` and one on top."""
WATCH_INTERVAL_SECONDS = 0.5
OWN_STALL_SECONDS = 0.5
"""A later look says that the event loop did not run: answers are yet to be read."""
MAX_UNREAD_RESULTS = 1024
"""The scheduler's depth bounds both far below this."""

SECONDS_PER_NS = 1e-9
_FURTHER_STEP_KEY = bytes([stage_worker_pb2.ExecuteRequest.FURTHER_STEPS_FIELD_NUMBER << 3 | 2])
"""Key of the field, which is a message; `ExecuteRequest.step` has one of a byte as well."""
STEP_STUCK = "STEP_STUCK"
WORKER_LOST = "WORKER_LOST"
OTHER = "OTHER"
FAILURE_REASONS = frozenset(
    (
        *("RANK_DIED", "RANK_FROZEN", "RANK_FAILED", "STEP_FAILED", ECHO_REASON),
        *(STEP_STUCK, WORKER_LOST, OTHER),
    )
)
"""A closed set, for metrics."""


class MeshPipeline:
    """Implements `gateway.engine.pipeline.Pipeline` over gRPC."""

    def __init__(
        self,
        stages: Sequence[Stage],
        epoch: int,
        on_stage_step: StageObserver,
        on_step: StepObserver,
    ) -> None:
        self._stages = tuple(stages)
        self._epoch = epoch
        self._on_stage_step = on_stage_step
        self._on_step = on_step
        self._sent_at = deque[float]()
        """Of each step without a result, by `loop.time()`."""
        self._unsent = tuple(asyncio.Queue[bytes | None](MAX_UNSENT_STEPS) for _ in self._stages)
        self._results = asyncio.Queue[step_pb2.StepResult | StageFailed](MAX_UNREAD_RESULTS)
        self._failure: StageFailed | None = None
        self._failed = asyncio.Event()
        self._sent = asyncio.Event()
        self.failed_by = ""
        """Why it has failed, as one of `FAILURE_REASONS`."""
        self.stuck_step: HeldStep | None = None
        """The one that does not end, where it is that."""
        self._num_tokens: dict[int, int] = {}
        """Query tokens of the last steps."""
        pp_ranks = {stage.placement.pp_rank for stage in self._stages}
        self._last_pp_rank = max(pp_ranks)
        self._held = HeldSteps(pp_ranks)
        self._serialized: dict[int, bytes] = {}
        """Steps that not every stage was given."""
        self._progress = ProgressTable(self._stages[0].placement.dp_rank, pp_ranks)
        self._step_times = {stage.placement.pp_rank: StepTimes() for stage in self._stages}

    @property
    def num_stages(self) -> int:
        """Pipeline-parallel size."""
        return self._last_pp_rank + 1

    @property
    def epoch(self) -> int:
        """Epoch of every step on this pipeline."""
        return self._epoch

    def send(self, step: step_pb2.Step) -> None:
        """Hands a step to every stage, now or when it needs it. Raises `StageFailed` on a broken
        pipeline."""
        if self._failure is not None:
            raise self._failure
        step_id = step.step_id
        num_tokens = sum(len(row.token_ids) for row in step.rows)
        self._serialized[step_id] = stage_worker_pb2.ExecuteRequest(step=step).SerializeToString()
        self._held.add(step_id, is_alike=num_tokens == len(step.rows))
        self._release()
        self._sent_at.append(asyncio.get_running_loop().time())
        self._num_tokens[step_id] = num_tokens
        # Stages are never further apart than this.
        self._num_tokens.pop(step_id - MAX_UNREAD_RESULTS, None)

    async def next_result(self) -> step_pb2.StepResult:
        """The last stage's next result. Raises `StageFailed` with the first cause."""
        # What the last result has made due, where no step has followed from it.
        self._release()
        result = await self._results.get()
        if isinstance(result, StageFailed):
            raise result
        self._held.done(result.step_id)
        return result

    def _release(self) -> None:
        """Gives every stage the steps that are due there, as one message."""
        requests: dict[range, bytes] = {}
        due = {pp_rank: self._held.release(pp_rank) for pp_rank in range(self.num_stages)}
        given_to_all = self._held.given_to_all
        now = asyncio.get_running_loop().time()
        for stage, queue in zip(self._stages, self._unsent, strict=True):
            pp_rank = stage.placement.pp_rank
            if not (steps := due[pp_rank]):
                continue
            if steps not in requests:
                requests[steps] = _together([self._serialized[step_id] for step_id in steps])
            queue.put_nowait(requests[steps])
            self._progress.given(pp_rank, self._held.given(pp_rank), now)
            self._sent.set()
        while self._serialized and (oldest := next(iter(self._serialized))) <= given_to_all:
            del self._serialized[oldest]

    async def run(self) -> None:
        """Runs the streams until cancelled. Failures go to `next_result`, not out of here."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            for stage, queue in zip(self._stages, self._unsent, strict=True):
                tasks.create_task(self._read(stage, queue))

    async def _watch(self) -> None:
        """Notices a step that no stage moves any more, and names the stage that holds it."""
        loop = asyncio.get_running_loop()
        while self._failure is None:
            await self._sent.wait()  # An idle mesh needs no watch.
            due = loop.time() + WATCH_INTERVAL_SECONDS
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)
            now = loop.time()
            if now - due > OWN_STALL_SECONDS:
                self._progress.forgive(now)
                continue
            held = self.held_step()
            if held is None:
                self._sent.clear()
            elif now - held.since > held.limit_seconds:
                self.stuck_step = held
                words = explain_progress(self.progress()) or "no stage has moved"
                limit = f"a step may take {held.limit_seconds:.1f} s"
                self.fail(StageFailed(f"{words} ({limit})"), STEP_STUCK)

    def held_step(self) -> HeldStep | None:
        """What all wait for, of the stage that is furthest behind; None where all is done."""
        holder = furthest_behind(self.progress())
        if holder is None:
            return None
        now = asyncio.get_running_loop().time()
        num_tokens = self._num_tokens.get(holder.done_step_id + 1, 0)
        limit = self._step_times[holder.pp_rank].stuck_after(num_tokens)
        return HeldStep(
            holder.pp_rank, now - self._progress.held_seconds(holder.pp_rank, now), limit
        )

    def _observe(self, pp_rank: int, result: step_pb2.StepResult, held_seconds: float) -> None:
        """One result of one step of a stage, which had held it for so long, as `_watch` counts."""
        num_tokens = self._num_tokens.get(result.step_id)
        if num_tokens is not None:
            seconds = result.clock.compute_ns * SECONDS_PER_NS
            self._step_times[pp_rank].observe(num_tokens, max(seconds, held_seconds))
        self._on_stage_step(pp_rank, result)

    def progress(self) -> tuple[StageProgress, ...]:
        """How far every stage is now."""
        return self._progress.stages(asyncio.get_running_loop().time())

    async def _read(self, stage: Stage, queue: asyncio.Queue[bytes | None]) -> None:
        pp_rank = stage.placement.pp_rank
        first_of_stage = stage.placement.tp_ranks[0] == 0
        loop = asyncio.get_running_loop()
        call = stage.client.execute(_drain(queue))
        try:
            async for response in call:
                if response.WhichOneof("event") == "error":
                    await self._failed_on(response.error)
                    return
                # An old epoch's are nobody's any more.
                if first_of_stage and response.result.epoch == self._epoch:
                    self._refuse_out_of_turn(pp_rank, response.result)
                    now = loop.time()
                    held_seconds = self._progress.held_seconds(pp_rank, now)
                    self._progress.answered(pp_rank, response.result.step_id, now)
                    if pp_rank == self._last_pp_rank:
                        self._results.put_nowait(response.result)
                        self._on_step(now - self._sent_at.popleft())
                    for result in results_of(response.result):
                        self._observe(pp_rank, result, held_seconds)
        except StageFailed as failure:
            self.fail(failure, OTHER)
        except grpc.aio.AioRpcError as error:
            self.fail(stage.client.gone(error), WORKER_LOST)
        else:
            message = f"stage {pp_rank} at {stage.client.address} has left the mesh"
            self.fail(StageFailed(message), WORKER_LOST)
        finally:
            call.cancel()
            _end(queue)

    def _refuse_out_of_turn(self, pp_rank: int, result: step_pb2.StepResult) -> None:
        """Raises `StageFailed` for an answer to other steps than those that are due."""
        due = self._progress.open_steps(pp_rank)
        first = result.step_id - len(result.earlier_clocks)
        # What the last stage has sampled comes step by step.
        together = pp_rank < self._last_pp_rank or first == result.step_id
        if first != due.start or result.step_id not in due or not together:
            raise StageFailed(
                f"stage {pp_rank} answered steps {first} to {result.step_id}; it has "
                f"{due.start} to {due.stop - 1} to answer, in order"
            )

    async def _failed_on(self, error: step_pb2.StageError) -> None:
        failure = StageFailed(f"stage {error.pp_rank} failed ({error.reason}): {error.message}")
        if error.reason == ECHO_REASON:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), FIRST_CAUSE_WAIT_SECONDS)
        self.fail(failure, error.reason)

    def fail(self, failure: StageFailed, reason: str) -> None:
        """Ends the pipeline; the first failure counts. Also for one seen from outside."""
        if self._failure is None:
            self._failure = failure
            self.failed_by = reason if reason in FAILURE_REASONS else OTHER
            self._failed.set()
            self._results.put_nowait(failure)


def results_of(result: step_pb2.StepResult) -> list[step_pb2.StepResult]:
    """One result for each step that `result` answers for, oldest first; itself the last."""
    if not result.earlier_clocks:
        return [result]
    first = result.step_id - len(result.earlier_clocks)
    earlier = [
        step_pb2.StepResult(epoch=result.epoch, step_id=step_id, clock=clock)
        for step_id, clock in enumerate(result.earlier_clocks, start=first)
    ]
    return [*earlier, result]


def _together(requests: Sequence[bytes]) -> bytes:
    """One `ExecuteRequest` of several with a step each, all serialized: so a step is serialized
    once, whatever others it goes with."""
    first, *further = requests
    return b"".join((first, *(_FURTHER_STEP_KEY + request[1:] for request in further)))


async def _drain(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (request := await queue.get()) is not None:
        yield request


def _end(queue: asyncio.Queue[bytes | None]) -> None:
    """Lets `_drain` return: gRPC does not end the iterator of a call that is over."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
