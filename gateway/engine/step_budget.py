"""How much goes into a step: pure functions of what steps have been seen to cost.

Decodes. Running sequences are spread evenly over the steps in flight, so that
every stage has work; none takes more than its share.

Prompts while nobody decodes. n chunks take n + P - 1 chunk times through P
stages, so a prompt is cut into enough of them to keep that bubble small, but
not finer than pays: each chunk costs a step.

Prompts while others decode. Whoever decodes waits for the prompt tokens of a round
too. One prompt may add what a round of decodes alone takes, so it doubles the time
between the tokens of others at most. W prompts wait for each other too, W * W / 2
times a prompt's time together, and may add so many times as much, eight times at
most: a crowd is not held up by the few that decode already, and decodes the better
in company.

Each step of a round holds its part of the decodes and of the prompts. Where that
would be only a few prompt tokens, which read a long context for little, a round is
one step with all decodes and P - 1 steps of prompts. These wait for nobody, so every
stage always has one to work on, as long as none of them takes less time than the step
of all decodes, which then comes around in a round.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.engine.step_costs import MIN_CHUNK_TOKENS, MIN_LONE_CHUNK_TOKENS, StepCosts

LEAST_PARTS = 12
"""Chunks of a prompt that runs alone, for each stage after the first, whatever steps cost: its
bubble is 1/13 of the time, or somewhat more, since the last chunks take longest."""
MOST_PARTS = 48
"""The bubble is then next to nothing."""
NOT_HIDDEN = 0.25
"""Of a step's fixed costs, beside a chunk: none to all, as the device is."""
USEFUL_DECODE_STEPS = 3.0
"""A chunk of a prompt alone is worth its fixed costs, which a step of decodes mostly is, when it
takes so many times as long."""
MIN_MIXED_CHUNK_TOKENS = 32
"""Fewer are no company for decodes, where there are other steps for them."""
LEAST_PROMPT_SHARE = 1.0
"""Time of a step's prompt tokens by the time of its decodes that is always allowed."""
MOST_PROMPT_SHARE = 8.0
"""However many prompts there are: who decodes gets on in every step."""


def decode_quota(num_ready: int, num_decoding: int, free_batches: int, num_batches: int) -> int:
    """Decodes in the next step, of `num_ready` that could go into it.

    `num_decoding` counts those on their way too. Decodes travel in `num_batches`, of which
    `free_batches` are not on their way, this one included.
    """
    # The first bound spreads what is ready over the batches that can still be sent; the
    # second keeps an even share when those in flight have become uneven.
    return min(_ceil_div(num_ready, free_batches), _ceil_div(num_decoding, num_batches))


def lone_prompt_chunk(
    costs: StepCosts, whole: int, pending: int, num_stages: int, default_tokens: int
) -> int:
    """Tokens of a chunk while nobody decodes. `whole` is the length of the prompts at work,
    `pending` what is left of it. Chunks are not smaller than `default_tokens` until steps of both
    kinds were seen."""
    if num_stages == 1:
        return pending
    parts = _parts(costs, whole, num_stages) * (num_stages - 1)
    chunk = max(_useful_chunk(costs, default_tokens), _ceil_div(whole, parts))
    # A tail that is too short goes with the chunks before it.
    return _ceil_div(pending, max(1, pending // chunk))


def _parts(costs: StepCosts, whole: int, num_stages: int) -> int:
    """Chunks for each stage after the first."""
    token_by_step = costs.token_by_step()
    if token_by_step is None:
        return LEAST_PARTS
    # n chunks of N tokens, each as dear as c steps, take (n + P - 1) * (f + c * N / n) steps' time,
    # which is least at n = sqrt((P - 1) * c * N / f). Of what a step of one decode takes, mostly
    # reading weights, f is what arithmetic for many tokens does not hide.
    best = math.sqrt((num_stages - 1) * token_by_step * whole / NOT_HIDDEN) / (num_stages - 1)
    return max(LEAST_PARTS, min(MOST_PARTS, round(best)))


def _useful_chunk(costs: StepCosts, default_tokens: int) -> int:
    tokens = costs.tokens_alone(USEFUL_DECODE_STEPS)
    return default_tokens if tokens is None else max(MIN_LONE_CHUNK_TOKENS, tokens)


class ChunkBesideDecodes(NamedTuple):
    """What a step may hold of prompts while some sequences decode."""

    num_tokens: int
    apart: bool
    """In a step of its own, between two that hold all decodes."""


def chunk_beside_decodes(
    costs: StepCosts, num_prompts: int, num_decodes: int, num_stages: int, default_tokens: int
) -> ChunkBesideDecodes:
    """Of `num_prompts` that are to be computed while `num_decodes` sequences decode.
    `default_tokens` holds until steps of both kinds were seen."""
    share = max(LEAST_PROMPT_SHARE, min(MOST_PROMPT_SHARE, num_prompts**2 / 2))
    mixed = costs.tokens_beside_decodes(_ceil_div(num_decodes, num_stages), share)
    if num_stages > 1 and mixed is not None and mixed < MIN_MIXED_CHUNK_TOKENS:
        between = costs.tokens_between_decodes(num_decodes, num_stages, share)
        if between is not None:
            return ChunkBesideDecodes(max(MIN_CHUNK_TOKENS, between), apart=True)
    tokens = default_tokens if mixed is None else mixed
    return ChunkBesideDecodes(max(MIN_CHUNK_TOKENS, tokens), apart=False)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
