"""From what a client asked for to resolved sampling parameters and stop conditions.

Pure functions. Every refusal is an `InvalidRequest` that names field, value
and range. Field names are those of REST and gRPC alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.engine.types import SamplingParams, StopConditions
from gateway.frontend import limits
from gateway.frontend.generation_defaults import GenerationDefaults
from services.errors import ContextTooLong, InvalidRequest
from services.ranges import as_float32


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """What a client said about sampling; None where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopInput:
    """What a client said about the end of a choice."""

    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


def _in_range(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> None:
    # The stages get 32 bits: what counts is the value that they see.
    seen = as_float32(value) if isinstance(value, float) else value
    if math.isfinite(value) and low <= seen <= high and seen > above:
        return
    if above != -math.inf:
        rule = f"above {above:g}" + (f" and at most {high:g}" if high != math.inf else "")
    elif high == math.inf:
        rule = f"at least {low:g}"
    else:
        rule = f"between {low:g} and {high:g}"
    raise InvalidRequest(f"'{name}' must be a number {rule}; it is {value!r}", param=name)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises for the first id outside the vocabulary."""
    # Two passes in C: a list may be a whole body long.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"'{name}[{index}]' is {token_id}, which is outside the vocabulary: ids are "
                f"0 to {vocab_size - 1}",
                param=name,
            )


def check_timeout(seconds: float | None) -> float:
    """How long a request may take, queue included; raises for what is no such time."""
    if seconds is None:
        return limits.MAX_REQUEST_SECONDS
    _in_range("timeout", seconds, above=0.0, high=limits.MAX_REQUEST_SECONDS)
    return seconds


def check_count(name: str, count: int, most: int) -> None:
    """Raises where a list of the request is too long."""
    if count > most:
        raise InvalidRequest(f"'{name}' has {count} entries; at most {most} work", param=name)


def resolve_sampling(
    asked: SamplingInput,
    defaults: GenerationDefaults,
    vocab_size: int,
    draw_seed: Callable[[], int],
    *,
    logprobs_field: str = "top_logprobs",
) -> SamplingParams:
    """Fills the gaps with the model's defaults, then with neutral values, and checks ranges."""
    temperature = _first(asked.temperature, defaults.temperature, 1.0)
    top_p = _first(asked.top_p, defaults.top_p, 1.0)
    top_k = int(_first(asked.top_k, defaults.top_k, 0))
    min_p = _first(asked.min_p, defaults.min_p, 0.0)
    presence_penalty = _first(asked.presence_penalty, None, 0.0)
    frequency_penalty = _first(asked.frequency_penalty, None, 0.0)
    repetition_penalty = _first(asked.repetition_penalty, defaults.repetition_penalty, 1.0)
    # -1 is vLLM's spelling of "all tokens".
    top_k = 0 if top_k == -1 else top_k
    _in_range("temperature", temperature, low=0.0, high=limits.MAX_TEMPERATURE)
    _in_range("top_p", top_p, above=0.0, high=1.0)
    _in_range("top_k", top_k, low=0)
    _in_range("min_p", min_p, low=0.0, high=1.0)
    bound = limits.PENALTY_BOUND
    _in_range("presence_penalty", presence_penalty, low=-bound, high=bound)
    _in_range("frequency_penalty", frequency_penalty, low=-bound, high=bound)
    _in_range(
        "repetition_penalty",
        repetition_penalty,
        low=limits.MIN_REPETITION_PENALTY,
        high=limits.MAX_REPETITION_PENALTY,
    )
    seed = draw_seed() if asked.seed is None else asked.seed
    if not 0 <= seed <= limits.MAX_SEED:
        raise InvalidRequest(
            f"'seed' must be between 0 and {limits.MAX_SEED}; it is {seed}", param="seed"
        )
    if asked.num_logprobs is not None:
        _in_range(logprobs_field, asked.num_logprobs, low=0, high=limits.MAX_LOGPROBS)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        # More than the vocabulary is all of it; the sampler need not know the difference.
        top_k=0 if top_k >= vocab_size else top_k,
        min_p=min_p,
        seed=seed,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_checked_logit_bias(asked.logit_bias, vocab_size),
        num_logprobs=asked.num_logprobs,
    )


def _first(asked: float | None, default: float | None, neutral: float) -> float:
    if asked is not None:
        return asked
    return neutral if default is None else default


def _checked_logit_bias(logit_bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    check_count("logit_bias", len(logit_bias), limits.MAX_LOGIT_BIAS_ENTRIES)
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"'logit_bias' names token {token_id}, which is outside the vocabulary: ids are "
                f"0 to {vocab_size - 1}",
                param="logit_bias",
            )
        if not math.isfinite(bias) or abs(bias) > limits.LOGIT_BIAS_BOUND:
            raise InvalidRequest(
                f"'logit_bias' of token {token_id} must be between -{limits.LOGIT_BIAS_BOUND:g} "
                f"and {limits.LOGIT_BIAS_BOUND:g}; it is {bias!r}",
                param="logit_bias",
            )
    return dict(logit_bias)


def resolve_stop(
    asked: StopInput,
    eos_token_ids: frozenset[int],
    *,
    prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    max_tokens_field: str = "max_tokens",
    prompt_field: str = "prompt",
) -> StopConditions:
    """Checks stops and lengths. Absent max_tokens means what the context leaves.

    Raises `ContextTooLong` with both numbers where prompt and output do not fit.
    """
    check_count("stop", len(asked.stop), limits.MAX_STOP_STRINGS)
    for index, text in enumerate(asked.stop):
        if not 1 <= len(text) <= limits.MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"'stop[{index}]' has {len(text)} characters; between 1 and "
                f"{limits.MAX_STOP_STRING_CHARS} work",
                param="stop",
            )
    check_count("stop_token_ids", len(asked.stop_token_ids), limits.MAX_STOP_TOKEN_IDS)
    check_token_ids("stop_token_ids", asked.stop_token_ids, vocab_size)
    stop_token_ids = frozenset(asked.stop_token_ids)
    return StopConditions(
        max_tokens=resolve_max_tokens(
            asked.max_tokens,
            prompt_tokens,
            max_model_len,
            max_tokens_field=max_tokens_field,
            prompt_field=prompt_field,
        ),
        stop_strings=tuple(asked.stop),
        stop_token_ids=stop_token_ids if asked.ignore_eos else stop_token_ids | eos_token_ids,
    )


def resolve_max_tokens(
    asked: int | None,
    prompt_tokens: int,
    max_model_len: int,
    *,
    max_tokens_field: str = "max_tokens",
    prompt_field: str = "prompt",
) -> int:
    """Most tokens to generate; see `resolve_stop`."""
    if asked is not None and asked < 1:
        raise InvalidRequest(
            f"'{max_tokens_field}' must be at least 1; it is {asked}", param=max_tokens_field
        )
    room = max_model_len - prompt_tokens
    if room < 1:
        raise prompt_too_long(str(prompt_tokens), max_model_len, prompt_field)
    if asked is None:
        return room
    if asked > room:
        raise ContextTooLong(
            f"this model's maximum context length is {max_model_len} tokens; the prompt has "
            f"{prompt_tokens} and '{max_tokens_field}' asks for {asked}, together "
            f"{prompt_tokens + asked}. Shorten one of them",
            param=max_tokens_field,
        )
    return asked


def prompt_too_long(prompt_tokens: str, max_model_len: int, prompt_field: str) -> ContextTooLong:
    """The prompt alone leaves no room for one token; the count may be "at least N"."""
    return ContextTooLong(
        f"this model's maximum context length is {max_model_len} tokens, prompt and output "
        f"together; the prompt has {prompt_tokens} tokens. Shorten it",
        param=prompt_field,
    )


def check_priority(priority: int, *, by_priority: bool) -> int:
    """Order of service; refused where the service would pay no heed to it."""
    _in_range("priority", priority, low=-limits.MAX_PRIORITY, high=limits.MAX_PRIORITY)
    if priority and not by_priority:
        raise InvalidRequest(
            f"'priority' is {priority}, and this service takes requests in order of arrival: "
            "leave it out, or start the service with --scheduling-policy priority",
            param="priority",
        )
    return priority


def check_cache_salt(cache_salt: str) -> str:
    """Who shares cached prefixes with whom."""
    if len(cache_salt) > limits.MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"'cache_salt' has {len(cache_salt)} characters; at most "
            f"{limits.MAX_CACHE_SALT_CHARS} work",
            param="cache_salt",
        )
    return cache_salt


def check_n(n: int, field_name: str = "n") -> int:
    """Choices for each prompt."""
    if not 1 <= n <= limits.MAX_N:
        raise InvalidRequest(
            f"'{field_name}' must be between 1 and {limits.MAX_N}; it is {n}", param=field_name
        )
    return n
