"""A storm over real arithmetic: what was computed before a failure is computed again.

Greedy text is that of an undisturbed run. Another batch may change the last bits of a logit: a
first difference counts as equal where the model itself is undecided there, in few calls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.storm import MARKER, marked_processes, plan_storm
from tests.chaos.traffic import Call, Outcome
from tests.chaos.weather import run_in_storm
from tests.e2e.test_oracle import MOST_UNDECIDED, UNDECIDED_GAP, Oracle
from tests.e2e.test_oracle import Answer as OracleAnswer
from tests.mesh_process import MeshProcess
from tests.tiny_models import TinyShape, make_tiny_llama

PP_SIZE = 3
LOGPROB_TOLERANCE = 1e-3
SAMPLED = (
    {"temperature": 0.8, "seed": 11, "top_p": 0.9},
    {"temperature": 1.2, "seed": 5, "top_k": 40, "n": 2},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 8, "repetition_penalty": 1.2, "min_p": 0.02, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {65: 2.0}, "logprobs": 1},
)
"""What a continuation depends on besides its tokens."""


def greedy_calls(seed: int, count: int, vocab_size: int, num_tokens: int) -> list[Call]:
    """Of many lengths; a quarter has a beginning in common."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(64)]
    calls = []
    for index in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice((1, 8, 40, 200)))]
        prompt = shared + prompt[:40] if index % 4 == 0 else prompt
        options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        calls.append(Call(tuple(prompt), options))
    return calls


def sampled_calls(seed: int, count: int, vocab_size: int, num_tokens: int) -> list[Call]:
    """With a seed, penalties, several choices, logprobs; one in five stops at a letter."""
    calls = greedy_calls(seed, count, vocab_size, num_tokens)
    return [
        Call(
            call.prompt,
            {
                **call.options,
                **SAMPLED[index % len(SAMPLED)],
                **({"stop": ["e", "qu"]} if index % 5 == 0 else {}),
            },
        )
        for index, call in enumerate(calls)
    ]


def check_equal(
    oracle: Oracle, calls: Sequence[Call], undisturbed: Sequence[Outcome], found: Sequence[Outcome]
) -> None:
    """By the rule above."""
    undecided = 0
    for call, before, after in zip(calls, undisturbed, found, strict=True):
        if before == after:
            for one, other in zip(before.answers, after.answers, strict=True):
                pairs = zip(one.logprobs, other.logprobs, strict=True)
                assert all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs)
            continue
        assert call.options["temperature"] == 0.0 and "logit_bias" not in call.options, call
        (one,), (other,) = before.answers, after.answers
        agreed = next(
            i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b
        )
        best = oracle.logits(OracleAnswer(call.prompt, one.tokens, ()))[agreed].topk(2).values
        gap = float(best[0] - best[1])
        assert gap < UNDECIDED_GAP, f"token {agreed} differs where the model's gap is {gap}"
        undecided += 1
    print(f"{undecided} of {len(calls)} differ first where the model is undecided", flush=True)
    assert undecided <= MOST_UNDECIDED * len(calls)


def storm(
    mesh: MeshProcess, oracle: Oracle, calls: Sequence[Call], seed: int, kills: int, stops: int
) -> None:
    """The same calls twice: undisturbed, then hit."""
    print(f"seed {seed}: {len(calls)} calls, {kills} kills, {stops} stops", flush=True)
    at_a_time = 16
    undisturbed = run_in_storm(mesh, calls, 0, [], at_a_time)
    num_tokens = sum(len(answer.tokens) for each in undisturbed for answer in each.answers)
    blows = plan_storm(seed, PP_SIZE, kills=kills, stops=stops)
    found = run_in_storm(mesh, calls, num_tokens, blows, at_a_time)
    check_equal(oracle, calls, undisturbed, found)


@pytest.mark.chaos
@pytest.mark.timeout(420)
def test_tiny_weights(tmp_path: Path) -> None:
    """Greedy calls, then sampled ones, on one mesh."""
    shape = TinyShape(num_layers=6, max_position_embeddings=1024)
    model = make_tiny_llama(tmp_path / "tiny", tied=True, shape=shape)
    oracle, mark = Oracle(model), str(tmp_path)
    flags = ("-pp", str(PP_SIZE), "--max-num-batched-tokens", "256")
    with MeshProcess(model, *flags, environment={MARKER: mark}) as mesh:
        storm(mesh, oracle, greedy_calls(1, 200, 256, 120), seed=1, kills=10, stops=5)
        storm(mesh, oracle, sampled_calls(2, 60, 256, 120), seed=2, kills=4, stops=2)
    assert not marked_processes(mark)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_demo_model(demo_model: Path, tmp_path: Path) -> None:
    """200 streamed greedy requests, 10 kills, 5 stops."""
    oracle, mark = Oracle(demo_model), str(tmp_path)
    flags = ("-pp", str(PP_SIZE), "--max-model-len", "1024", "--max-num-batched-tokens", "256")
    with MeshProcess(demo_model, *flags, environment={MARKER: mark}) as mesh:
        storm(mesh, oracle, greedy_calls(1, 200, 49_000, 24), seed=1, kills=10, stops=5)
    assert not marked_processes(mark)
