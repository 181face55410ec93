"""Which tokens a simulated mesh gives, in plain integers: the reference for `hashing`.

A token at a position has a key; the keys of a sequence up to a position add up to
its history; the history decides the next token. So a token depends on every
(token, position) before it and on nothing else: not on batches, chunks, stages,
partitions or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from stage_worker.splitmix64 import MASK_64, mix


def token_key(token_id: int, position: int) -> int:
    """What a token at a position leaves in the KV cache."""
    return mix(mix(token_id) + position)


def next_token(history: int, vocab_size: int) -> int:
    """The token after a history, a sum of keys modulo 2**64."""
    return mix(history) % vocab_size


def expected_tokens(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The `num_tokens` tokens that a right mesh gives after `prompt`."""
    history = 0
    for position, token_id in enumerate(prompt):
        history = (history + token_key(token_id, position)) & MASK_64
    output: list[int] = []
    while len(output) < num_tokens:
        token_id = next_token(history, vocab_size)
        output.append(token_id)
        history = (history + token_key(token_id, len(prompt) + len(output) - 1)) & MASK_64
    return output
