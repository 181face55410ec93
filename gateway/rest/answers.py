"""Answers in OpenAI's JSON, whole and streamed, for chat and text completions.

A stream's events are put together from bytes that are made once per request
and the encoded text: a token costs microseconds, no models, no dicts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.engine.types import ChoiceDelta, FinishReason, TokenLogprob
from gateway.frontend.frontend import output_length
from gateway.frontend.tokenizer import Tokenizer
from gateway.rest.logprobs import CompletionLogprobs, chat_logprobs

DONE_EVENT = b"data: [DONE]\n\n"
NULL = b"null"


@dataclass(slots=True)
class Choice:
    """One choice while it grows."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def take(self, delta: ChoiceDelta) -> None:
        """Adds what is new."""
        self.texts.append(delta.text)
        self.logprobs.extend(_output_logprobs(delta))
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


def _output_logprobs(delta: ChoiceDelta) -> Sequence[TokenLogprob]:
    return delta.logprobs[: output_length(delta)] if delta.logprobs else ()


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Usage of a request."""

    prompt: int
    completion: int
    cached: int
    """Of the prompt, found in the prefix cache."""

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer(ABC):
    """How one request is answered. `num_choices` counts over all its prompts."""

    object_name: str
    chunk_object_name: str

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        with_logprobs: bool,
        include_usage: bool,
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.tokenizer = tokenizer
        self.with_logprobs = with_logprobs
        self.include_usage = include_usage
        self.num_choices = num_choices
        self.created = int(time.time())
        head = self._head(self.chunk_object_name)
        self._event_prefix = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._usage_prefix = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[],"usage":'
        # With include_usage every chunk has the field, null until the last.
        self._event_end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def usage_event(self, counts: TokenCounts) -> bytes:
        """The last chunk of a stream with include_usage."""
        return self._usage_prefix + orjson.dumps(counts.as_json()) + b"}\n\n"

    def whole(self, choices: Sequence[Choice], counts: TokenCounts) -> bytes:
        """The one answer of a request that does not stream."""
        body = self._head(self.object_name)
        body["choices"] = [self._choice(choice) for choice in choices]
        body["usage"] = counts.as_json()
        return orjson.dumps(body)

    def _finish(self, delta: ChoiceDelta) -> bytes:
        # As with vLLM, stop_reason stands beside it on the choice's last chunk.
        if delta.finish_reason is None:
            return NULL
        reason = b'"' + delta.finish_reason.value.encode() + b'"'
        return reason + b',"stop_reason":' + orjson.dumps(delta.stop_reason)

    @abstractmethod
    def first_event(self, choice_index: int) -> bytes:
        """What a choice's stream starts with; may be empty."""

    @abstractmethod
    def event(self, choice_index: int, delta: ChoiceDelta) -> bytes:
        """One piece; empty where there is nothing to say yet."""

    @abstractmethod
    def _choice(self, choice: Choice) -> dict[str, Any]: ...


class ChatAnswer(Answer):
    """/v1/chat/completions"""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def first_event(self, choice_index: int) -> bytes:
        return b"".join(
            (
                self._event_prefix,
                b"%d" % choice_index,
                b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null',
                self._event_end,
            )
        )

    def event(self, choice_index: int, delta: ChoiceDelta) -> bytes:
        entries = _output_logprobs(delta)
        if not delta.text and not entries:
            if delta.finish_reason is None:
                return b""
            change = b"{}"
        else:
            change = b'{"content":' + orjson.dumps(delta.text) + b"}"
        logprobs = NULL
        if entries:
            logprobs = orjson.dumps(chat_logprobs(self.tokenizer, entries))
        return b"".join(
            (
                self._event_prefix,
                b"%d" % choice_index,
                b',"delta":',
                change,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                self._finish(delta),
                self._event_end,
            )
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": "".join(choice.texts),
                "refusal": None,
            },
            "logprobs": (
                chat_logprobs(self.tokenizer, choice.logprobs) if self.with_logprobs else None
            ),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class CompletionAnswer(Answer):
    """/v1/completions; `echoes` holds the text before each choice (empty without echo)."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        with_logprobs: bool,
        include_usage: bool,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(
            answer_id,
            model,
            tokenizer,
            num_choices=num_choices,
            with_logprobs=with_logprobs,
            include_usage=include_usage,
        )
        self._echoes = echoes
        self._logprobs = [CompletionLogprobs(tokenizer, len(echo)) for echo in echoes]

    def first_event(self, choice_index: int) -> bytes:
        echo = self._echoes[choice_index]
        return self._piece(choice_index, echo, NULL, NULL) if echo else b""

    def event(self, choice_index: int, delta: ChoiceDelta) -> bytes:
        entries = _output_logprobs(delta)
        if not delta.text and not entries and delta.finish_reason is None:
            return b""
        logprobs = NULL
        if entries:
            logprobs = orjson.dumps(self._logprobs[choice_index].take(entries))
        return self._piece(choice_index, delta.text, logprobs, self._finish(delta))

    def _piece(self, choice_index: int, text: str, logprobs: bytes, finish: bytes) -> bytes:
        return b"".join(
            (
                self._event_prefix,
                b"%d" % choice_index,
                b',"text":',
                orjson.dumps(text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                self._event_end,
            )
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs:
            logprobs = self._logprobs[choice.index].take(choice.logprobs)
        return {
            "index": choice.index,
            "text": self._echoes[choice.index] + "".join(choice.texts),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
