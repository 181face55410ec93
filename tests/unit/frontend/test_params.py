"""Resolution of sampling parameters and stop conditions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.types import SamplingParams
from gateway.frontend import limits
from gateway.frontend.generation_defaults import GenerationDefaults
from gateway.frontend.params import (
    SamplingInput,
    StopInput,
    check_priority,
    resolve_max_tokens,
    resolve_sampling,
    resolve_stop,
)
from services.errors import ContextTooLong, InvalidRequest, StagemeshError
from services.ranges import as_float32

VOCAB = 100
NO_DEFAULTS = GenerationDefaults()


def sampling(asked: SamplingInput, defaults: GenerationDefaults = NO_DEFAULTS) -> SamplingParams:
    return resolve_sampling(asked, defaults, VOCAB, lambda: 77)


def test_nothing_asked_is_neutral_with_a_drawn_seed() -> None:
    assert sampling(SamplingInput()) == SamplingParams(seed=77)


def test_asked_beats_default_beats_neutral() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=40, repetition_penalty=1.1)
    resolved = sampling(SamplingInput(temperature=0.0, seed=5), defaults)
    assert (resolved.temperature, resolved.top_k, resolved.repetition_penalty) == (0.0, 40, 1.1)
    assert resolved.seed == 5 and resolved.top_p == 1.0


def test_top_k_spellings() -> None:
    assert sampling(SamplingInput(top_k=-1)).top_k == 0
    assert sampling(SamplingInput(top_k=VOCAB)).top_k == 0
    assert sampling(SamplingInput(top_k=10**30)).top_k == 0
    assert sampling(SamplingInput(top_k=VOCAB - 1)).top_k == VOCAB - 1
    assert sampling(SamplingInput(top_k=0), GenerationDefaults(top_k=40)).top_k == 0


@given(
    st.sampled_from(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
         "repetition_penalty")
    ),
    st.floats(),
)  # fmt: skip
def test_any_float_is_taken_or_refused_by_name(name: str, value: float) -> None:
    try:
        resolved = sampling(SamplingInput(**{name: value}))
    except InvalidRequest as error:
        assert error.param == name and name in error.message
    else:
        # The stages get 32 bits, and divide by some of these.
        seen = as_float32(getattr(resolved, name))
        assert math.isfinite(seen)
        assert name not in ("top_p", "repetition_penalty") or seen > 0


@pytest.mark.parametrize("value", [1e-320, 1e-38, 0.0, 0.0099, 100.1, 1e300])
def test_a_repetition_penalty_that_breaks_logits_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"repetition_penalty.*between 0\.01 and 100"):
        sampling(SamplingInput(repetition_penalty=value))


def test_a_number_that_vanishes_in_32_bits_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"top_p.*above 0"):
        sampling(SamplingInput(top_p=1e-320))


@given(
    st.one_of(st.none(), st.integers(-5, 500)),
    st.integers(0, 200),
    st.integers(1, 150),
)
def test_prompt_and_output_always_fit(asked: int | None, prompt: int, context: int) -> None:
    try:
        most = resolve_max_tokens(asked, prompt, context)
    except StagemeshError:
        assert prompt >= context or (asked is not None and (asked < 1 or asked + prompt > context))
    else:
        assert most >= 1 and prompt + most <= context
        assert most == (context - prompt if asked is None else asked)


def test_too_long_names_all_numbers() -> None:
    with pytest.raises(ContextTooLong, match=r"50.*30.*25.*55") as caught:
        resolve_max_tokens(25, 30, 50, max_tokens_field="max_completion_tokens")
    assert caught.value.param == "max_completion_tokens"
    with pytest.raises(ContextTooLong, match=r"50.*50") as caught:
        resolve_max_tokens(None, 50, 50, prompt_field="messages")
    assert caught.value.param == "messages"


def stop(asked: StopInput) -> frozenset[int]:
    return resolve_stop(
        asked, frozenset((2,)), prompt_tokens=1, max_model_len=10, vocab_size=VOCAB
    ).stop_token_ids


def test_end_of_sequence_ids_join_unless_ignored() -> None:
    assert stop(StopInput(stop_token_ids=[5])) == {2, 5}
    assert stop(StopInput(stop_token_ids=[5], ignore_eos=True)) == {5}
    assert stop(StopInput(ignore_eos=True)) == frozenset()


def test_counts_have_limits() -> None:
    for asked in (
        StopInput(stop=["x"] * (limits.MAX_STOP_STRINGS + 1)),
        StopInput(stop=["x" * (limits.MAX_STOP_STRING_CHARS + 1)]),
        StopInput(stop_token_ids=[1] * (limits.MAX_STOP_TOKEN_IDS + 1)),
        StopInput(stop_token_ids=[VOCAB]),
    ):
        with pytest.raises(InvalidRequest, match="stop"):
            stop(asked)


@pytest.mark.parametrize("priority", [-(2**31), 2**31])
def test_a_priority_fits_the_wire(priority: int) -> None:
    with pytest.raises(InvalidRequest, match="'priority' must be a number between"):
        check_priority(priority, by_priority=True)


def test_a_priority_that_nobody_heeds_is_refused() -> None:
    assert check_priority(0, by_priority=False) == 0
    assert check_priority(-5, by_priority=True) == -5
    with pytest.raises(InvalidRequest, match="--scheduling-policy priority"):
        check_priority(-5, by_priority=False)
