"""Streamed calls, some at a time, and what each has answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagemesh import AsyncClient

CALL_TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Call:
    """One request: options of `AsyncClient.stream` besides its prompt."""

    prompt: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, put together from its chunks."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: tuple[float, ...] = field(default=(), compare=False)
    """Those of the same token differ in their last bits from batch to batch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All choices of one call, and how long it was without a new token at most."""

    answers: tuple[Answer, ...]
    completion_tokens: int
    longest_pause_seconds: float = field(compare=False)


class Traffic:
    """Runs calls through one client, which tries nothing a second time."""

    def __init__(
        self, address: str, calls: Sequence[Call], num_tokens: int, at_a_time: int
    ) -> None:
        """`num_tokens` is what all calls will have received together."""
        self._address = address
        self._calls = calls
        self._num_tokens = num_tokens
        self._turn = asyncio.Semaphore(at_a_time)
        self._received = 0
        self._more = asyncio.Event()

    @property
    def share(self) -> float:
        """Of all tokens, those that are there."""
        return self._received / max(1, self._num_tokens)

    async def until(self, share: float) -> None:
        """Waits until so many are there."""
        while self.share < share:
            self._more.clear()
            await self._more.wait()

    async def run(self) -> list[Outcome]:
        """All of them, in order. Raises what the first that fails raises."""
        async with AsyncClient(self._address, max_retries=0) as client:
            return await asyncio.gather(*(self._run_one(client, call) for call in self._calls))

    async def _run_one(self, client: AsyncClient, call: Call) -> Outcome:
        async with self._turn:
            tokens: dict[int, list[int]] = {}
            logprobs: dict[int, list[float]] = {}
            texts: dict[int, str] = {}
            ends: dict[int, tuple[str | None, str | int | None]] = {}
            completion_tokens, longest, last = 0, 0.0, time.monotonic()
            stream = client.stream(
                token_ids=list(call.prompt), timeout=CALL_TIMEOUT_SECONDS, **call.options
            )
            async with stream:
                async for chunk in stream:
                    now = time.monotonic()
                    longest, last = max(longest, now - last), now
                    self._received += len(chunk.token_ids)
                    self._more.set()
                    index = chunk.choice_index
                    tokens.setdefault(index, []).extend(chunk.token_ids)
                    logprobs.setdefault(index, []).extend(e.logprob for e in chunk.logprobs)
                    texts[index] = texts.get(index, "") + chunk.text
                    if chunk.finish_reason is not None:
                        assert index not in ends, "a choice has ended twice"
                        ends[index] = (chunk.finish_reason, chunk.stop_reason)
                    if chunk.usage is not None:
                        completion_tokens = chunk.usage.completion_tokens
        answers = tuple(
            Answer(tuple(tokens[i]), texts[i], *ends.get(i, (None, None)), tuple(logprobs[i]))
            for i in sorted(tokens)
        )
        return Outcome(answers, completion_tokens, longest)
