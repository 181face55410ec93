"""Log probabilities in OpenAI's two shapes, as plain data for the JSON encoder."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.engine.types import TokenLogprob
from gateway.frontend.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI uses the same number."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[i].logprobs` of chat: a list of tokens with text, bytes and alternatives."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, one.token_id, one.logprob),
                "top_logprobs": [_chat_token(tokenizer, *entry) for entry in one.top],
            }
            for one in logprobs
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(raw),
    }


class CompletionLogprobs:
    """`choices[i].logprobs` of completions: parallel lists; offsets count characters of the
    choice's tokens (after the prompt where it is echoed)."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        # A character may be spread over several tokens: all of them begin where it begins.
        self._decoder = _Utf8Decoder(errors="replace")

    def take(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next tokens."""
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        for one in logprobs:
            text = self._spelled(one.token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(one.token_id)))
            top = {self._spelled(token_id): _finite(logprob) for token_id, logprob in one.top}
            if one.top:
                # As with OpenAI the drawn token is among them, so there may be one more.
                top.setdefault(text, _finite(one.logprob))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _spelled(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            # Part of a character: OpenAI's spelling, which keeps different tokens apart.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
