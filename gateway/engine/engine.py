"""The engine in one sentence: schedule steps, send them, apply their results, stream the text.

    front door ── generate() ──> scheduler ── send(step) ──> pipeline of stages
         ^                          ^                              |
         └── deltas <── detokenize ─┴── apply <── next_result() <──┘

Everything runs on one event loop and waits on events: an idle engine costs
nothing. All decisions are the scheduler's; this shell owns requests, their
deadlines and their text.

A pipeline that fails takes no request with it: `suspend` keeps them all, and
`resume` computes them again on another pipeline, from their token logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from gateway.engine.admission import MIN_RETRY_AFTER_SECONDS, Admission
from gateway.engine.detokenizer import Detokenizer
from gateway.engine.pipeline import Pipeline
from gateway.engine.scheduled_step import SchedulerLimits, SequenceOutput
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence
from gateway.engine.stream import Choice, RequestStream, RequestTimings
from gateway.engine.types import (
    ADMITTED,
    ChoiceDelta,
    EngineStats,
    FinishReason,
    GenerationRequest,
)
from services.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PipelineUnavailable,
    StageFailed,
    StagemeshError,
    failure_of,
)

DRAIN_RETRY_AFTER_SECONDS = 5.0


class EngineObserver(Protocol):
    """Hears about every request once, when it is over. Must be quick and not raise."""

    def on_request_finished(self, timings: RequestTimings) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine needs to know besides its pipeline and tokenizer."""

    limits: SchedulerLimits
    max_waiting: int
    """Sequences that may wait for a slot; more are refused with `Saturated`."""


class MeshEngine:
    """`Engine` of `gateway.engine.types` over one pipeline.

    Its owner runs `run()` in a task group. Create and use it on one event loop.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
        config: EngineConfig,
        observer: EngineObserver | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._config = config
        self._observer = observer
        self._scheduler = Scheduler(config.limits, pipeline.epoch)
        self._streams: dict[RequestStream, None] = {}
        self._owners: dict[Sequence, tuple[RequestStream, Choice]] = {}
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._error: StagemeshError | None = None
        self._running = False
        self._started = False
        self._draining = False
        self._admission = Admission(config.max_waiting, config.limits.max_num_seqs)

    # For front doors.

    @property
    def ready(self) -> bool:
        """Whether `run()` is at work, nothing has failed and no drain has begun."""
        return self._running and self._error is None and not self._draining

    @property
    def error(self) -> StagemeshError | None:
        """What ended the engine, if something did."""
        return self._error

    def stats(self) -> EngineStats:
        """Counts of this moment. A request with n choices counts n times."""
        return EngineStats(
            num_blocks=self._config.limits.num_blocks,
            free_blocks=self._scheduler.num_free_blocks,
            waiting_requests=self._scheduler.num_waiting,
            running_requests=self._scheduler.num_running,
            steps_in_flight=self._scheduler.num_steps_in_flight,
            preemptions=self._scheduler.num_preemptions,
            prefix_cache_queries=self._scheduler.prefix_cache_queries,
            prefix_cache_hits=self._scheduler.prefix_cache_hits,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Streams the request's choices, interleaved. Close it (`contextlib.aclosing`) to abort.

        Nothing happens before the first item, `ADMITTED`, is asked for; that is also where a
        refusal is raised: `Saturated`, `PipelineUnavailable`, `ContextTooLong` or
        `InvalidRequest`. Later items may raise `StageFailed`, `PipelineUnavailable` or
        `DeadlineExceeded`.
        """
        stream = self._submit(request)
        try:
            yield ADMITTED
            while deltas := await stream.next_deltas():
                for delta in deltas:
                    yield delta
        finally:
            self._close(stream)

    # For the owner.

    async def run(self) -> StagemeshError:
        """Drives the pipeline until it fails, and returns why; every request is kept.

        The owner decides what follows: `suspend`, then `resume` and another `run`; or `fail`.
        After a call of `fail` it returns that error. Cancel it to stop.
        """
        self._running = self._started = True
        failure: StagemeshError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_steps(), name="engine-send")
                tasks.create_task(self._receive_results(), name="engine-receive")
        except* StagemeshError as group:
            failure = failure_of(group)
        finally:
            self._running = False
        if failure is None:
            raise RuntimeError("the engine's tasks have ended without a failure")
        return failure

    def suspend(self, failure: StagemeshError, max_attempts: int) -> None:
        """The pipeline has failed and another will come: requests are kept, and new ones queued.

        One whose work has met `max_attempts` failures before, without a new token since, ends
        with `StageFailed`: it may be what makes the stages fail.
        """
        for sequence in self._scheduler.count_failure():
            if sequence.num_failures > max_attempts and sequence in self._owners:
                stream, _ = self._owners[sequence]
                stream.fail(
                    StageFailed(
                        f"the stages have failed {sequence.num_failures} times while they worked "
                        f"on this request, which is given up; the last cause: {failure.message}"
                    )
                )
                self._close(stream)

    def resume(self, pipeline: Pipeline) -> int:
        """Goes on with another pipeline, of a later epoch and the same size. `run` must follow.
        Returns the number of tokens that are computed again."""
        self._pipeline = pipeline
        replayed = self._scheduler.restart(pipeline.epoch)
        self._work.set()
        return replayed

    def fail(self, error: StagemeshError) -> None:
        """Ends everything that waits or runs with `error`, and takes no more requests.

        The first error stays; a second call is without effect.
        """
        if self._error is not None:
            return
        self._error = error
        self._work.set()
        for stream in list(self._streams):
            stream.fail(error)
            self._close(stream)

    async def drain(self, deadline: float) -> None:
        """Takes no more requests, waits for those at work until `deadline` (`loop.time()`), then
        ends the rest with `PipelineUnavailable`."""
        self._draining = True
        try:
            async with asyncio.timeout_at(deadline):
                await self._empty.wait()
        except TimeoutError:
            for stream in list(self._streams):
                stream.fail(
                    PipelineUnavailable(
                        "the service is shutting down and the answer was not done in time",
                        retry_after_seconds=DRAIN_RETRY_AFTER_SECONDS,
                    )
                )
                self._close(stream)

    # The loop.

    async def _send_steps(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            if self._error is not None:
                raise self._error
            self._fill_pipeline()

    async def _receive_results(self) -> None:
        while True:
            result = await self._pipeline.next_result()
            outputs = self._scheduler.apply(result)
            # Only stop strings can change what is scheduled next; all other text can wait until
            # the stages have work again.
            for output in outputs:
                if output.sequence.stop.stop_strings:
                    self._deliver(output)
            try:
                self._fill_pipeline()
            finally:
                # Also where the pipeline is broken: these tokens are in the logs, so no later
                # epoch brings them again.
                for output in outputs:
                    if not output.sequence.stop.stop_strings:
                        self._deliver(output)

    def _fill_pipeline(self) -> None:
        while (scheduled := self._scheduler.schedule()) is not None:
            for row in scheduled.rows:
                self._owners[row.sequence][0].mark_started()
            self._pipeline.send(scheduled.step)

    def _deliver(self, output: SequenceOutput) -> None:
        """Turns new tokens into text, finds stop strings, hands both to the reader."""
        sequence = output.sequence
        stream, choice = self._owners[sequence]
        text: list[str] = []
        token_ids = output.token_ids
        for index, token_id in enumerate(output.token_ids):
            if sequence.finish_reason is FinishReason.STOP and token_id == sequence.stop_reason:
                break  # The token that stops has no text.
            delta = choice.detokenizer.push(token_id)
            text.append(delta.text)
            if delta.stop_string is not None:
                token_ids = output.token_ids[: index + 1]
                self._stop_at(sequence, delta.stop_string)
                break
        if sequence.finish_reason is not None and not isinstance(sequence.stop_reason, str):
            delta = choice.detokenizer.flush()
            text.append(delta.text)
            if delta.stop_string is not None:
                self._stop_at(sequence, delta.stop_string)
        stream.push(
            choice,
            ChoiceDelta(
                choice_index=sequence.choice_index,
                text="".join(text),
                token_ids=token_ids,
                logprobs=output.logprobs[: len(token_ids)],
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                num_cached_tokens=self._cached_tokens_to_report(choice),
            ),
            self._now(),
        )
        if sequence.finish_reason is not None:
            del self._owners[sequence]
        if stream.ended:
            self._close(stream)

    @staticmethod
    def _cached_tokens_to_report(choice: Choice) -> int:
        # The other choices share what the first one has computed, which says nothing of the prompt.
        if choice.last_token_at is not None or choice.sequence.choice_index != 0:
            return 0
        return choice.sequence.num_cached_tokens or 0

    def _stop_at(self, sequence: Sequence, stop_string: str) -> None:
        self._scheduler.finish(sequence, FinishReason.STOP, stop_string)
        # The last token may have ended the sequence already, by its own reason.
        sequence.finish_reason = FinishReason.STOP
        sequence.stop_reason = stop_string

    # Requests come and go.

    def _submit(self, request: GenerationRequest) -> RequestStream:
        if self._error is not None:
            raise PipelineUnavailable(
                f"the pipeline is down: {self._error.message}",
                retry_after_seconds=MIN_RETRY_AFTER_SECONDS,
            )
        if self._draining or not self._started:
            raise PipelineUnavailable(
                "the service is shutting down" if self._draining else "the service is starting",
                retry_after_seconds=DRAIN_RETRY_AFTER_SECONDS,
            )
        if not request.prompt_token_ids or request.n < 1 or request.stop.max_tokens < 1:
            raise InvalidRequest("a request needs a prompt, one choice and one token at least")
        if request.deadline is not None and request.deadline <= self._now():
            raise DeadlineExceeded("the request's deadline passed before it was queued")
        self._scheduler.check(len(request.prompt_token_ids), request.stop.max_tokens)
        self._admission.check(request.n, self._scheduler.num_waiting, self._scheduler.num_running)
        stream = RequestStream(request, self._make_choices(request), self._now)
        for choice in stream.choices:
            self._scheduler.add(choice.sequence)
            self._owners[choice.sequence] = (stream, choice)
        if request.deadline is not None:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_at(request.deadline, self._expire, stream)
        self._streams[stream] = None
        self._empty.clear()
        self._work.set()
        return stream

    def _make_choices(self, request: GenerationRequest) -> list[Choice]:
        prompt = request.prompt_token_ids
        return [
            Choice(
                Sequence(
                    request.request_id,
                    index,
                    prompt,
                    request.sampling,
                    request.stop,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                ),
                Detokenizer(self._tokenizer, prompt, request.stop.stop_strings),
            )
            for index in range(request.n)
        ]

    def _expire(self, stream: RequestStream) -> None:
        stream.fail(DeadlineExceeded("the request's deadline passed before its answer was done"))
        self._close(stream)

    def _close(self, stream: RequestStream) -> None:
        """Forgets a request, aborting what is left of it. Without effect the second time."""
        if stream not in self._streams:
            return
        del self._streams[stream]
        if stream.timer is not None:
            stream.timer.cancel()
        for choice in stream.choices:
            if self._owners.pop(choice.sequence, None) is not None:
                self._scheduler.abort(choice.sequence)
        timings = stream.timings()
        if stream.has_started:
            # One that was never run says nothing of how soon a place is free.
            self._admission.finished(timings.total_seconds)
        if not self._streams:
            self._empty.set()
        self._work.set()  # Slots and blocks may be there for others now.
        if self._observer is not None:
            self._observer.on_request_finished(timings)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
