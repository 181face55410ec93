"""The way of one request's text from the engine to its reader.

What the reader has not taken yet is merged per choice, so a slow reader costs
no more memory than its own answer.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.engine.detokenizer import Detokenizer
from gateway.engine.sequence import Sequence
from gateway.engine.types import ChoiceDelta, FinishReason, GenerationRequest, TokenLogprob
from services.errors import StagemeshError


@dataclass(slots=True)
class _Unread:
    """What is new in one choice since the reader's last look."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """One finished request, for metrics. Seconds on a monotonic clock."""

    request_id: str
    queue_seconds: float
    """From arrival until its first row was sent; all its time for one that never ran."""
    time_to_first_token_seconds: float | None
    """From arrival; None when there was no token."""
    inter_token_seconds: tuple[float, ...]
    """Between the tokens of each choice, the gaps of all choices one after the other."""
    total_seconds: float
    num_prompt_tokens: int
    num_completion_tokens: int
    """Of all choices."""
    finish_reason: str
    """The `FinishReason` of the last choice to end ("abort" for a client that went away), or the
    error's reason in lower case."""


@dataclass(slots=True)
class Choice:
    """One sequence with its text."""

    sequence: Sequence
    detokenizer: Detokenizer
    last_token_at: float | None = None


class RequestStream:
    """One request inside the engine: its choices, its unread deltas, its clock."""

    def __init__(
        self, request: GenerationRequest, choices: list[Choice], clock: Callable[[], float]
    ) -> None:
        self.request = request
        self.choices = choices
        self.error: StagemeshError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._clock = clock
        self._unread: dict[int, _Unread] = {}
        self._endings: dict[int, tuple[FinishReason, int | str | None]] = {}
        self._num_ended = 0
        self._last_finish_reason = FinishReason.ABORT
        self._changed = asyncio.Event()
        self._arrived_at = clock()
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._gaps: list[float] = []
        self._num_tokens = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come, apart from what is unread."""
        return self.error is not None or self._num_ended == len(self.choices)

    @property
    def has_started(self) -> bool:
        """Whether stages have worked on it."""
        return self._started_at is not None

    def mark_started(self) -> None:
        """The first row of the request has been sent."""
        if self._started_at is None:
            self._started_at = self._clock()

    def push(self, choice: Choice, delta: ChoiceDelta, now: float) -> None:
        """Adds what one result brought to one choice."""
        for _ in delta.token_ids:
            if choice.last_token_at is not None:
                self._gaps.append(now - choice.last_token_at)
            choice.last_token_at = now
        if delta.token_ids and self._first_token_at is None:
            self._first_token_at = now
        self._num_tokens += len(delta.token_ids)
        unread = self._unread.setdefault(delta.choice_index, _Unread())
        unread.text.append(delta.text)
        unread.token_ids.extend(delta.token_ids)
        unread.logprobs.extend(delta.logprobs)
        unread.num_cached_tokens += delta.num_cached_tokens
        if delta.finish_reason is not None:
            self._endings[delta.choice_index] = (delta.finish_reason, delta.stop_reason)
            self._last_finish_reason = delta.finish_reason
            self._num_ended += 1
        self._changed.set()

    def fail(self, error: StagemeshError) -> None:
        """Ends the request; the reader gets what is unread, then the error."""
        if not self.ended:
            self.error = error
            self._changed.set()

    async def next_deltas(self) -> list[ChoiceDelta]:
        """Waits for something new, takes all of it. Empty when the request is over.

        Raises the error that ended the request, after everything before it was taken.
        """
        while not self._unread and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._unread and self.error is not None:
            # A copy: one error may end many requests, and each raise leaves its traceback on it.
            raise copy.copy(self.error)
        deltas = []
        for choice_index, unread in self._unread.items():
            reason, stop_reason = self._endings.pop(choice_index, (None, None))
            deltas.append(
                ChoiceDelta(
                    choice_index=choice_index,
                    text="".join(unread.text),
                    token_ids=tuple(unread.token_ids),
                    logprobs=tuple(unread.logprobs),
                    finish_reason=reason,
                    stop_reason=stop_reason,
                    num_cached_tokens=unread.num_cached_tokens,
                )
            )
        self._unread.clear()
        return deltas

    def timings(self) -> RequestTimings:
        """What the request took, at its end."""
        now = self._clock()
        started_at = now if self._started_at is None else self._started_at
        first = self._first_token_at
        ended_well = self._num_ended == len(self.choices)
        reason = self._last_finish_reason.value
        if self.error is not None:
            reason = self.error.reason.lower()
        elif not ended_well:
            reason = FinishReason.ABORT.value
        return RequestTimings(
            request_id=self.request.request_id,
            queue_seconds=started_at - self._arrived_at,
            time_to_first_token_seconds=None if first is None else first - self._arrived_at,
            inter_token_seconds=tuple(self._gaps),
            total_seconds=now - self._arrived_at,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_completion_tokens=self._num_tokens,
            finish_reason=reason,
        )
