"""How much goes into a step: pure functions, and what steps have been seen to cost.

Decodes. Running sequences are spread evenly over the steps in flight, so that
every stage has work; none takes more than its share.

Prompts while nobody decodes. n chunks take n + P - 1 chunk times through P
stages, so a prompt is cut into enough of them to keep that bubble small, but
not finer than a chunk is worth.

Prompts while others decode. Each step takes the time of its decodes and that of
its prompt tokens, and whoever decodes waits for both. One prompt may add what a
step of decodes alone takes, so it doubles the time between the tokens of others at
most. W prompts wait for each other too, W * W / 2 times a prompt's time together,
and may add so many times as much, eight times at most: a crowd is not held up by
the few that decode already, and decodes the better in company.
"""

from __future__ import annotations

from collections import deque
from statistics import median

PARTS_PER_FURTHER_STAGE = 12
"""Chunks of a prompt that runs alone, for each stage after the first: its bubble is
1/13 of the time."""
MIN_LONE_CHUNK_TOKENS = 32
"""Of a prompt alone, whatever steps cost: matrix products of fewer rows are slower everywhere."""
USEFUL_DECODE_STEPS = 3.0
"""A chunk of a prompt alone is worth its fixed costs, which a step of decodes mostly is, when it
takes so many times as long."""
MIN_MIXED_CHUNK_TOKENS = 16
"""Of a prompt beside decodes, whatever steps cost: every step has its fixed costs too."""
LEAST_PROMPT_SHARE = 1.0
"""Time of a step's prompt tokens by the time of its decodes that is always allowed."""
MOST_PROMPT_SHARE = 8.0
"""However many prompts there are: who decodes gets on in every step."""
NUM_REMEMBERED_STEPS = 15
"""Of each kind. Their median is not moved by a few outliers (a first step, a busy moment)."""


class StepCosts:
    """What recent steps took on the last stage, by kind of work."""

    __slots__ = ("_decode_seconds", "_mixed_token_seconds", "_prompt_token_seconds")

    def __init__(self) -> None:
        self._decode_seconds = _recent()
        self._mixed_token_seconds = _recent()
        """A prompt token's beside decodes, which are not counted."""
        self._prompt_token_seconds = _recent()
        """A prompt token's in a step of prompts alone, with its part of what every step costs."""

    def observe(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step is done that held so many prompt tokens and decodes."""
        if seconds <= 0:
            return
        if num_prompt_tokens == 0:
            self._decode_seconds.append(seconds)
        elif num_prompt_tokens < MIN_MIXED_CHUNK_TOKENS:
            return  # It is the fixed costs that would be measured.
        elif num_decodes == 0:
            self._prompt_token_seconds.append(seconds / num_prompt_tokens)
        elif self._decode_seconds:
            beside = median(self._decode_seconds)
            self._mixed_token_seconds.append(max(0.0, seconds - beside) / num_prompt_tokens)

    def tokens_beside_decodes(self, decode_steps: float) -> int | None:
        """Prompt tokens that add as much to a step of decodes as so many of these take; None
        while that is unknown."""
        return self._worth(decode_steps, self._mixed_token_seconds or self._prompt_token_seconds)

    def tokens_alone(self, decode_steps: float) -> int | None:
        """Prompt tokens that take as long, in a step of their own, as so many steps of decodes
        alone; None while that is unknown."""
        return self._worth(decode_steps, self._prompt_token_seconds or self._mixed_token_seconds)

    def _worth(self, decode_steps: float, token_seconds: deque[float]) -> int | None:
        if not self._decode_seconds or not token_seconds:
            return None
        each = median(token_seconds)
        seconds = decode_steps * median(self._decode_seconds)
        return None if each <= 0 else int(seconds / each)


def _recent() -> deque[float]:
    return deque(maxlen=NUM_REMEMBERED_STEPS)


def decode_quota(num_ready: int, num_decoding: int, free_batches: int, num_batches: int) -> int:
    """Decodes in the next step, of `num_ready` that could go into it.

    `num_decoding` counts those on their way too. Decodes travel in `num_batches`, of which
    `free_batches` are not on their way, this one included.
    """
    # The first bound spreads what is ready over the batches that can still be sent; the
    # second keeps an even share when those in flight have become uneven.
    return min(_ceil_div(num_ready, free_batches), _ceil_div(num_decoding, num_batches))


def lone_prompt_chunk(whole: int, pending: int, num_stages: int, min_chunk: int) -> int:
    """Tokens of a chunk while nobody decodes. `whole` is the length of the prompts at work,
    `pending` what is left of it."""
    if num_stages == 1:
        return pending
    parts = PARTS_PER_FURTHER_STAGE * (num_stages - 1)
    chunk = max(min_chunk, _ceil_div(whole, parts))
    # A tail that is too short goes with the chunks before it.
    return _ceil_div(pending, max(1, pending // chunk))


def useful_chunk(costs: StepCosts, default_tokens: int) -> int:
    """The smallest chunk that a prompt is cut into while nobody decodes. `default_tokens` holds
    until steps of both kinds were seen."""
    tokens = costs.tokens_alone(USEFUL_DECODE_STEPS)
    return default_tokens if tokens is None else max(MIN_LONE_CHUNK_TOKENS, tokens)


def mixed_prompt_chunk(costs: StepCosts, num_prompts: int, default_tokens: int) -> int:
    """Most prompt tokens of a step while some sequences decode and `num_prompts` have prompts to
    compute. `default_tokens` holds until steps of both kinds were seen."""
    share = max(LEAST_PROMPT_SHARE, min(MOST_PROMPT_SHARE, num_prompts**2 / 2))
    tokens = costs.tokens_beside_decodes(share)
    return max(MIN_MIXED_CHUNK_TOKENS, default_tokens if tokens is None else tokens)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
