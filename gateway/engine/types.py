"""What crosses the line between front doors and engine: plain, frozen facts.

Front doors build a `GenerationRequest` and read `ChoiceDelta`s; the engine
knows nothing of HTTP, gRPC services or chat templates.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class FinishReason(str, Enum):
    """Why a choice ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Every field is resolved: no None means "default" here.

    Ranges are those of proto/stagemesh/v1/step.proto and checked at the front door.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    seed: int = 0
    """Noise depends on seed, choice index and position only. 64 bits, unsigned."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    """Top tokens to report with each token; None reports no logprobs at all."""

    @property
    def needs_history(self) -> bool:
        """Whether the sampler has to know the tokens before the one it draws."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a choice ends, apart from the context length."""

    max_tokens: int
    """At least 1; prompt + max_tokens is at most max_model_len."""
    stop_strings: tuple[str, ...] = ()
    """Not part of the output."""
    stop_token_ids: frozenset[int] = frozenset()
    """The request's own and, unless it ignores them, the model's end-of-sequence ids."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated request: ids inside the vocabulary, lengths inside the context."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    n: int = 1
    deadline: float | None = None
    """On the event loop's clock (`loop.time()`), seconds."""
    priority: int = 0
    """The lower is served earlier, where the scheduling policy asks for it."""
    cache_salt: str = ""
    """Cached blocks are shared only between requests with the same salt."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token, and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new in one choice. Text may be empty while a character is incomplete
    or might still become part of a stop string."""

    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice, where one did."""
    num_cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache, said once: with the first token of choice 0.
    The sum over a request's deltas is the request's."""


ADMITTED = ChoiceDelta(0, "", ())
"""The first item of every request's stream: it is in the queue, and nothing is computed yet."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of the engine, for /metrics and tests."""

    num_blocks: int
    free_blocks: int
    waiting_requests: int
    running_requests: int
    steps_in_flight: int
    preemptions: int
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Those of them that were there."""


class Engine(Protocol):
    """What a front door needs. `gateway.engine.engine` has the real one."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]:
        """Streams the request's choices, interleaved. `ADMITTED` comes first, without a wait: so
        whoever asks for the first items of several requests has them all admitted in one moment,
        or one of them refused before anything is computed for the others.

        Closing the iterator (or cancelling its reader) aborts the request and
        frees its blocks. Raises `Saturated`, `PipelineUnavailable`,
        `StageFailed` or `DeadlineExceeded` of `services.errors`.
        """
        ...

    def stats(self) -> EngineStats: ...

    @property
    def ready(self) -> bool:
        """Whether a complete pipeline can take requests now."""
        ...
