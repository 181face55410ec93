"""Token ids to text, bit by bit, for one choice.

Text comes out as soon as it is final: not while a character is incomplete,
and not while it may still become part of a stop string. A stop string ends
the text in front of it; whichever stop string is complete first wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

PROMPT_TAIL_TOKENS = 6
"""Prompt tokens shown to the decoder, so that a word that goes on after the prompt keeps its
leading space (SentencePiece decoders strip it at the start of a text)."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Final text, and the stop string that ended it, if one did."""

    text: str
    stop_string: str | None = None


class Detokenizer:
    """Incremental text of one choice. Special tokens have no text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: tuple[int, ...],
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        self._tokenizer = tokenizer
        # The ids of the last text, and the ids since then that have no text yet.
        self._context: list[int] = list(prompt_token_ids[-PROMPT_TAIL_TOKENS:])
        self._pending: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        self._stop = StopStringFilter(stop_strings)

    def push(self, token_id: int) -> TextDelta:
        """Adds a token; returns the text that has become final by it."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # The library has no class of its own for it.
            if "Invalid prefix" not in str(error):
                raise
            # Byte fall-back turns a whole run of bytes into U+FFFD when one of them is wrong, also
            # those whose text is out already. Go on from the bytes that have no text yet.
            text = self._decode(self._pending)
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=True)
        if not text:
            return TextDelta("")
        self._context, self._pending = self._pending, []
        return self._stop.push(text)

    def flush(self) -> TextDelta:
        """The rest at the end: incomplete characters as U+FFFD, and text that was held back."""
        rest = TextDelta("")
        if self._pending:
            before = self._decode(self._context)
            whole = self._decode(self._context + self._pending)
            if whole.startswith(before):
                rest = self._stop.push(whole[len(before) :])
            else:
                rest = self._stop.push(self._decode(self._pending))
            self._pending = []
            if rest.stop_string is not None:
                return rest
        return TextDelta(rest.text + self._stop.flush())

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStringFilter:
    """Cuts a stream of text at the first stop string that is complete."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stop_strings = stop_strings
        self._held = ""
        """A tail that is the beginning of a stop string."""

    def push(self, text: str) -> TextDelta:
        """Adds text; returns what can no longer become part of a stop string."""
        if not self._stop_strings:
            return TextDelta(text)
        text = self._held + text
        found = [
            (position + len(stop), position, stop)
            for stop in self._stop_strings
            if (position := text.find(stop)) >= 0
        ]
        if found:
            self._held = ""
            _, position, stop = min(found)
            return TextDelta(text[:position], stop)
        keep = max(_overlap(text, stop) for stop in self._stop_strings)
        self._held = text[len(text) - keep :]
        return TextDelta(text[: len(text) - keep])

    def flush(self) -> str:
        """The held tail, when no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
