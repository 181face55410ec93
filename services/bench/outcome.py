"""What became of one request, and how its stream is read. Pure but for the clock that the
caller hands in: times are seconds of `time.perf_counter`."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

from services.bench.sse import SseParser

DONE = b"[DONE]"


class StreamFailed(Exception):
    """The stream cannot be read on, or says that the request failed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Outcome:
    """One request. Without `error_kind` it has succeeded."""

    planned_at: float = 0.0
    """When it was to be sent."""
    sent_at: float = 0.0
    """When it was sent, before a connection was there."""
    ended_at: float = 0.0
    """When the last event came, or the error."""
    delivered_at: array[float] = field(default_factory=lambda: array("d"))
    """When each event with text came."""
    requested_output_tokens: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """From `usage`; None where the endpoint sends none."""
    finish_reason: str | None = None
    error_kind: str | None = None
    """"connect", "timeout", "disconnected", "malformed", "stream_error" or "http_503"."""
    error: str = ""

    @property
    def output_tokens(self) -> int:
        """As the endpoint counts, else one for each event with text."""
        return len(self.delivered_at) if self.completion_tokens is None else self.completion_tokens

    @property
    def e2el_seconds(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def ttft_seconds(self) -> float:
        """To the first text; to the end where there was none."""
        return (self.delivered_at[0] if self.delivered_at else self.ended_at) - self.sent_at

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_seconds - self.ttft_seconds) / (self.output_tokens - 1)

    @property
    def itl_seconds(self) -> list[float]:
        """Gaps between deliveries, of which one may hold several tokens."""
        times = self.delivered_at
        return [times[i] - times[i - 1] for i in range(1, len(times))]


class AnswerReader:
    """Fills an `Outcome` from the bytes of a streamed completion or chat completion."""

    __slots__ = ("_done", "_outcome", "_parser")

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._parser = SseParser()
        self._done = False

    def feed(self, data: bytes, at: float) -> None:
        """Takes bytes that came at `at`. Raises `StreamFailed`."""
        try:
            events = self._parser.feed(data)
        except ValueError as error:
            raise StreamFailed("malformed", str(error)) from None
        for event in events:
            self._outcome.ended_at = at
            if event == DONE:
                self._done = True
            else:
                self._take(event, at)

    def end(self) -> None:
        """The stream has ended. Raises `StreamFailed` where the answer has not."""
        if not self._done and self._outcome.finish_reason is None:
            raise StreamFailed("disconnected", "the stream ended before the answer did")

    def _take(self, event: bytes, at: float) -> None:
        try:
            body = json.loads(event)
        except ValueError:
            raise StreamFailed("malformed", f"an event is not JSON: {event[:80]!r}") from None
        if not isinstance(body, dict):
            raise StreamFailed("malformed", f"an event is not an object: {event[:80]!r}")
        if body.get("error"):
            raise StreamFailed("stream_error", error_message(body))
        for choice in body.get("choices") or ():
            if _text_of(choice):
                self._outcome.delivered_at.append(at)
            if choice.get("finish_reason") is not None:
                self._outcome.finish_reason = choice["finish_reason"]
        usage = body.get("usage")
        if usage:
            self._outcome.prompt_tokens = usage.get("prompt_tokens")
            self._outcome.completion_tokens = usage.get("completion_tokens")


def _text_of(choice: dict[str, Any]) -> str | None:
    """New text of a choice; a model's reasoning is text too."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


def error_message(body: object) -> str:
    """The words of an OpenAI error body, or what there is in their place."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error
    return " ".join(str(error).split())[:300]
