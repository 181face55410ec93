"""What goes into the clients and comes out of them: frozen facts, no gRPC types."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""stop: end of sequence or a stop; length: max_tokens or the context; abort: from outside."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """"system", "user", "assistant", "developer" or "tool"."""
    content: str
    """Text of the turn."""
    name: str | None = None
    """Who speaks, where several have one role; for templates that write it."""
    tool_call_id: str | None = None
    """Which call a "tool" turn answers; for templates that write it."""


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """How to talk to a service that has a certificate."""

    ca_file: Path | str | None = None
    """PEM file of the CA that signed it; None trusts the system's CAs."""
    certificate_file: Path | str | None = None
    """PEM file of the client's own certificate, where the service asks for one."""
    key_file: Path | str | None = None
    """PEM file of its private key."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token, of the model's own distribution."""

    token_id: int
    """The token that was drawn."""
    logprob: float
    """Its natural-log probability."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens as (token id, log probability), best first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens generated, over all choices."""
    cached_prompt_tokens: int = 0
    """Those of prompt_tokens that were in the prefix cache and not computed again."""

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice, as it comes."""

    choice_index: int
    """Which choice it continues."""
    text: str
    """Text that is new; may be empty while a character is incomplete."""
    token_ids: tuple[int, ...]
    """Token ids that are new."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of token_ids, where asked for."""
    finish_reason: FinishReason | None = None
    """Set on the choice's last chunk."""
    usage: Usage | None = None
    """Set on the stream's last chunk."""
    request_id: str = ""
    """Name of the request in the service's logs."""
    stop_reason: str | int | None = None
    """The stop text or stop token id that ended the choice, where one did."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    text: str
    """All of its text, without stop strings and special tokens."""
    token_ids: tuple[int, ...]
    """All of its token ids."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each token, where asked for."""
    finish_reason: FinishReason
    """Why it ended."""
    stop_reason: str | int | None = None
    """The stop text or stop token id that ended it, where one did."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Everything that one request has given."""

    choices: tuple[Choice, ...]
    """n of them, at least one."""
    usage: Usage
    """Token counts."""
    request_id: str
    """Name of the request in the service's logs."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the first choice."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop that ended the first choice."""
        return self.choices[0].stop_reason


@dataclass(frozen=True, slots=True)
class Tokenization:
    """A text, or a conversation, as the model would see it."""

    token_ids: tuple[int, ...]
    """Its token ids."""
    token_strs: tuple[str, ...]
    """Text of each; part of a character is U+FFFD."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One served name."""

    id: str
    """The name that requests use."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output."""
    created: int
    """When serving began, seconds since 1970."""
