"""The sampler against plain numpy, and its distributions by many draws."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stage_worker import sampler
from stage_worker.sampler import (
    DrawRequest,
    Sampler,
    SamplingState,
    best_tokens,
    draw,
    invert,
    uniform,
)
from stagemesh.v1 import step_pb2

VOCAB_SIZE = 20
NUM_DRAWS = 4000


def state(
    history: list[int] | None = None, prompt_length: int = 0, choice: int = 0, **params: object
) -> SamplingState:
    start = step_pb2.SlotStart(
        choice_index=choice,
        sampling=step_pb2.SamplingParams(**{"seed": 5, **params}),
        prompt_length=prompt_length,
        history_token_ids=history or [],
    )
    return SamplingState.from_start(start, VOCAB_SIZE)


def some_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(logits: torch.Tensor, **params: object) -> np.ndarray:
    """Shares of the tokens over many positions, [vocab]."""
    sampled = state(**params)
    tokens = draw(logits.expand(NUM_DRAWS, -1), [sampled] * NUM_DRAWS, list(range(NUM_DRAWS)))
    counts = Counter(tokens)
    return np.array([counts[token] / NUM_DRAWS for token in range(VOCAB_SIZE)])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def assert_close_to(shares: np.ndarray, expected: np.ndarray) -> None:
    """Within five standard deviations of each share; nothing where nothing may be."""
    assert (shares[expected == 0] == 0).all()
    bound = 5 * np.sqrt(expected * (1 - expected) / NUM_DRAWS) + 1e-9
    assert (np.abs(shares - expected) <= bound).all()


def test_draws_follow_the_distribution_at_a_temperature() -> None:
    logits = some_logits()
    expected = softmax(logits[0].double().numpy() / 0.7)
    assert_close_to(draw_many(logits, temperature=0.7), expected)


def test_absent_temperature_is_one() -> None:
    logits = some_logits()
    assert_close_to(draw_many(logits), softmax(logits[0].double().numpy()))


def test_top_k_keeps_the_best_and_renormalizes() -> None:
    logits = some_logits()
    kept = logits[0].double().numpy()
    kept[np.argsort(-kept)[3:]] = -np.inf
    assert_close_to(draw_many(logits, top_k=3), softmax(kept))


def test_min_p_is_relative_to_the_best() -> None:
    logits = some_logits()
    full = softmax(logits[0].double().numpy())
    expected = np.where(full >= 0.2 * full.max(), full, 0)
    assert 1 < np.count_nonzero(expected) < VOCAB_SIZE
    assert_close_to(draw_many(logits, min_p=0.2), expected / expected.sum())


def test_top_p_is_the_smallest_set_that_reaches_the_mass() -> None:
    logits = some_logits()
    full = softmax(logits[0].double().numpy())
    order = np.argsort(-full)
    count = int(np.searchsorted(np.cumsum(full[order]), 0.8)) + 1
    expected = np.zeros(VOCAB_SIZE)
    expected[order[:count]] = full[order[:count]]
    assert 1 < count < VOCAB_SIZE
    assert_close_to(draw_many(logits, top_p=0.8), expected / expected.sum())


def test_greedy_takes_the_best_whatever_the_filters_say() -> None:
    logits = some_logits(4)
    states = [state(temperature=0.0, top_p=0.1, top_k=2, min_p=0.5)] * 4
    assert draw(logits, states, [0, 1, 2, 3]) == logits.argmax(-1).tolist()


@settings(max_examples=30, deadline=None)
@given(
    history=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    prompt_length=st.integers(0, 30),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=4),
)
def test_penalties_and_bias_equal_a_loop_over_tokens(
    history: list[int],
    prompt_length: int,
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    prompt, output = history[:prompt_length], history[prompt_length:]
    sampled = state(
        history,
        min(prompt_length, len(history)),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
    )
    logits = some_logits()[0]
    expected = logits.tolist()
    for token in range(VOCAB_SIZE):
        expected[token] += bias.get(token, 0.0)
        if token in prompt or token in output:
            positive = expected[token] > 0
            expected[token] *= 1 / repetition if positive else repetition
        expected[token] -= frequency * output.count(token)
        expected[token] -= presence * (token in output)
    sampled.adjust(logits)
    assert logits.tolist() == pytest.approx(expected, abs=1e-3, rel=1e-4)


def test_sampled_tokens_count_as_output() -> None:
    sampled = state(temperature=0.0, presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :3] = torch.tensor([1.5, 1.0, 0.5])
    request = [DrawRequest(0, 0, 0, (), sampled)]
    tokens = [Sampler()(logits, request)[0].token_ids[0] for _ in range(3)]
    assert tokens == [0, 1, 2]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = some_logits(2)
    wants = state(temperature=0.3, top_k=1, logit_bias={4: 100.0}, num_logprobs=3)
    mute = state(temperature=0.0)
    first, second = Sampler()(
        logits, [DrawRequest(0, 0, 9, (), wants), DrawRequest(3, 1, 9, (), mute)]
    )
    reference = torch.log_softmax(logits[0], -1)
    best = reference.topk(3)
    assert first.token_ids == [4]
    assert first.logprobs[0].logprob == pytest.approx(float(reference[4]), abs=1e-6)
    assert list(first.logprobs[0].top_token_ids) == best.indices.tolist()
    assert list(first.logprobs[0].top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-6)
    assert second.row == 3
    assert not second.logprobs


def test_zero_logprobs_report_the_drawn_token_alone() -> None:
    request = DrawRequest(0, 0, 0, (), state(temperature=0.0, num_logprobs=0))
    (result,) = Sampler()(some_logits(), [request])
    assert len(result.logprobs) == 1
    assert not result.logprobs[0].top_token_ids


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = some_logits(6)
    states = [state(choice=i, temperature=0.5 + i / 4, top_p=0.5 + i / 12) for i in range(6)]
    together = draw(logits, states, list(range(6)))
    alone = [draw(logits[i : i + 1], states[i : i + 1], [i])[0] for i in range(6)]
    assert together == alone


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_drafts_give_what_sampling_one_by_one_gives(num_right: int) -> None:
    """Right drafts are accepted, the first wrong one is replaced, the rest dropped (F5)."""
    logits = some_logits(3)

    def fresh() -> SamplingState:
        return state(temperature=1.0, presence_penalty=1.0, num_logprobs=0)

    one_by_one = fresh()
    truth = []
    for i in range(3):
        request = DrawRequest(0, 0, 10 + i, (), one_by_one)
        truth.append(Sampler()(logits[i : i + 1], [request])[0].token_ids[0])
    wrong = (truth[num_right] + 1) % VOCAB_SIZE
    drafts = (*truth[:num_right], wrong, 0, 0)[:2]
    (result,) = Sampler()(logits, [DrawRequest(0, 0, 10, drafts, fresh())])
    assert list(result.token_ids) == truth[: num_right + 1]
    assert len(result.logprobs) == num_right + 1


def test_noise_is_uniform_and_a_function_of_its_three_arguments() -> None:
    values = [
        uniform(seed, choice, position)
        for seed in (0, 1 << 63)
        for choice in (0, 1, 2)
        for position in range(2000)
    ]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    histogram = np.histogram(values, bins=20, range=(0, 1))[0]
    expected = len(values) / 20
    chi_squared = float(((histogram - expected) ** 2 / expected).sum())
    assert chi_squared < 50  # 19 degrees of freedom: 1 in 10,000
    correlation = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(len(values))
    assert uniform(3, 1, 2) == uniform(3, 1, 2)


def test_noise_keeps_its_values_from_release_to_release() -> None:
    # A change here changes every seeded answer.
    assert uniform(1, 2, 3) == 0.4175580595044027


def test_a_token_without_weight_is_never_drawn() -> None:
    logits = torch.full((3, 5), -math.inf)
    logits[:, [1, 3]] = 0.0
    largest = math.nextafter(1.0, 0.0)
    assert invert(logits, [0.0, 0.5, largest]) == [1, 3, 3]


UNUSUAL = {
    "tiny penalty": {"repetition_penalty": 1e-38},
    "penalty that is 0 in float32": {"repetition_penalty": 1e-320},
    "infinite penalty": {"repetition_penalty": math.inf},
    "infinite temperature": {"temperature": math.inf},
    "least temperature": {"temperature": 1e-5, "repetition_penalty": 1e-30},
    "NaN": {"temperature": math.nan},
    "NaN bias": {"logit_bias": {3: math.nan}},
    "top_p": {"repetition_penalty": 1e-38, "top_p": 0.9},
    "top_k": {"repetition_penalty": 1e-38, "top_k": 3, "min_p": 0.1},
}


@pytest.mark.parametrize("params", UNUSUAL.values(), ids=UNUSUAL)
def test_no_parameter_draws_outside_the_vocabulary(params: dict[str, object]) -> None:
    """M1: such an id would break the next step for everybody."""
    sampled = state([0, 1, 2, 3], 2, **params)
    requests = [DrawRequest(0, 0, 7, (), sampled)]
    for _ in range(3):
        (result,) = Sampler()(some_logits(), requests)
        assert 0 <= result.token_ids[0] < VOCAB_SIZE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_overflowed_give_tokens_and_spare_other_rows(
    value: float, temperature: float
) -> None:
    logits = some_logits(3)
    right = state(temperature=temperature, num_logprobs=2)

    def sample(rows: torch.Tensor) -> list[step_pb2.ResultRow]:
        return Sampler()(rows, [DrawRequest(i, i, 7, (), right) for i in range(3)])

    expected = sample(logits)
    broken = logits.clone()
    broken[1] = value
    results = sample(broken)
    assert 0 <= results[1].token_ids[0] < VOCAB_SIZE
    assert math.isfinite(results[1].logprobs[0].logprob)
    assert results[0] == expected[0]
    assert results[2] == expected[2]


def test_not_a_number_is_the_last_token_to_be_taken() -> None:
    logits = some_logits()
    best = int(logits.argmax())
    logits[0, (best + 1) % VOCAB_SIZE] = math.nan
    for temperature in (0.0, 1e-4):
        request = [DrawRequest(0, 0, 0, (), state(temperature=temperature))]
        assert Sampler()(logits, request)[0].token_ids == [best]


class Operations(TorchDispatchMode):
    """Records what torch is asked to do, by name, with the shape of the first operand."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        self.seen.append((func.overloadpacket.__name__, shape))
        return func(*args, **(kwargs or {}))


def test_a_token_copies_nothing_of_its_state_to_the_device() -> None:
    """S16: the meta device stands for an accelerator."""
    device = torch.device("meta")
    params = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {3: 1.0}}
    start = step_pb2.SlotStart(
        sampling=step_pb2.SamplingParams(seed=1, **params),
        prompt_length=1,
        history_token_ids=[1, 2],
    )
    sampled = SamplingState.from_start(start, VOCAB_SIZE, device)
    logits = torch.zeros(VOCAB_SIZE, device=device)
    with Operations() as operations:
        sampled.adjust(logits)
    # The one that is left makes a mask into numbers, on the device.
    copies = [name for name, _ in operations.seen if name in ("_to_copy", "lift_fresh")]
    assert copies == ["_to_copy"]


@pytest.mark.parametrize(("temperatures", "shapes"), [((1, 1), []), ((0, 1), [(1, VOCAB_SIZE)])])
def test_only_greedy_rows_are_searched_for_their_best(
    temperatures: tuple[float, ...],
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = []

    def search(rows: torch.Tensor) -> list[int]:
        searched.append(tuple(rows.shape))
        return best_tokens(rows)

    monkeypatch.setattr(sampler, "best_tokens", search)
    states = [state(temperature=temperature) for temperature in temperatures]
    draw(some_logits(2), states, [0, 1])
    assert searched == shapes


@pytest.mark.parametrize("size", [1, 7, 49_152])
def test_the_best_of_a_row_is_what_torch_finds(size: int) -> None:
    rows = torch.randn(5, size + 1)[:, :size]  # As where a vocabulary is padded.
    rows[1], rows[2, size // 2 :] = 3.0, 9.0  # The first of several.
    assert best_tokens(rows) == rows.argmax(-1).tolist()
    assert best_tokens(rows)[1:3] == [0, size // 2]
