"""What a client asked for, as both doors hand it to the frontend. Plain facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from gateway.frontend import limits
from gateway.frontend.chat_template import Message
from gateway.frontend.params import SamplingInput, StopInput, check_count
from services.errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Who can speak in a conversation; OpenAI's names."""

ROLES: frozenset[str] = frozenset(get_args(Role))
# Templates of open models know "system" and not OpenAI's newer name for it.
_TEMPLATE_ROLES = {"developer": "system"}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, continued as it stands."""

    text: str
    add_special_tokens: bool = True
    """Adds what a prompt of this model starts with."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    """Ends with the start of an assistant's turn."""
    add_special_tokens: bool = False
    """Templates write the special tokens themselves."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids. A list may be a whole body long: it is copied after its length is checked."""

    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a door calls the fields, for errors."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    logprobs: str = "logprobs"


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """What a client asked for, apart from the prompt."""

    sampling: SamplingInput = field(default_factory=SamplingInput)
    stop: StopInput = field(default_factory=StopInput)
    n: int = 1
    priority: int = 0
    cache_salt: str = ""


def check_message_count(count: int) -> None:
    """Raises for a conversation without messages, or with too many."""
    if not count:
        raise InvalidRequest("'messages' is empty", param="messages")
    check_count("messages", count, limits.MAX_MESSAGES)


def template_role(role: str) -> str:
    """The name that chat templates know the role by."""
    return _TEMPLATE_ROLES.get(role, role)


def content_chars(prompt: TextPrompt | ChatPrompt) -> int:
    """Characters of what is said, which a template adds to."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(len(message.content) for message in prompt.messages)


def text_chars(prompt: TextPrompt | ChatPrompt) -> int:
    """Characters of all texts of a prompt, those included that a template may leave out."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return content_chars(prompt) + sum(
        len(message.name or "") + len(message.tool_call_id or "") for message in prompt.messages
    )
