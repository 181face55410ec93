"""How long prompts and answers are, in tokens. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MIN_SHAREGPT_TOKENS = 4
MAX_SHAREGPT_PROMPT_TOKENS = 1024
MAX_SHAREGPT_TOTAL_TOKENS = 2048
"""vLLM's bench leaves conversations outside of these limits out."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(normal(log(median), sigma))."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> int:
        """A whole number, 0 included."""
        return round(rng.lognormvariate(math.log(self.median), self.sigma))


SHAREGPT_PROMPT = LogNormal(median=175.0, sigma=1.4)
SHAREGPT_OUTPUT = LogNormal(median=119.0, sigma=1.1)
"""Within the limits above their means are about 230 and 203 tokens, which is what 1,000
conversations of ShareGPT have with Llama 3's tokenizer (229,711 and 203,068 in all, vLLM's
pull request 18566); the spread is an assumption."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Tokens of one request."""

    input_tokens: int
    output_tokens: int


def random_lengths(
    count: int, input_len: int, output_len: int, range_ratio: float, rng: random.Random
) -> list[RequestLengths]:
    """Uniform in [floor(len * (1 - ratio)), ceil(len * (1 + ratio))], at least 1."""

    def draw(length: int) -> int:
        low = max(1, math.floor(length * (1 - range_ratio)))
        return rng.randint(low, max(low, math.ceil(length * (1 + range_ratio))))

    return [RequestLengths(draw(input_len), draw(output_len)) for _ in range(count)]


def sharegpt_like_lengths(count: int, rng: random.Random) -> list[RequestLengths]:
    """Log-normal lengths within the limits that a ShareGPT file is cut to."""
    found: list[RequestLengths] = []
    while len(found) < count:
        lengths = RequestLengths(SHAREGPT_PROMPT.draw(rng), SHAREGPT_OUTPUT.draw(rng))
        if is_usable(lengths):
            found.append(lengths)
    return found


def is_usable(lengths: RequestLengths) -> bool:
    """Whether a conversation of these lengths is within vLLM's limits."""
    return (
        lengths.input_tokens >= MIN_SHAREGPT_TOKENS
        and lengths.output_tokens >= MIN_SHAREGPT_TOKENS
        and lengths.input_tokens <= MAX_SHAREGPT_PROMPT_TOKENS
        and lengths.input_tokens + lengths.output_tokens <= MAX_SHAREGPT_TOTAL_TOKENS
    )
