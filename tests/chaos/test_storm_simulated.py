"""A storm over simulated devices: what each stage has truly received decides the tokens, so
text is exactly that of an undisturbed mesh, or something was lost, doubled or mixed up."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.topology.simulated_cost import StageCost
from stage_worker.simulated.tokens import expected_tokens
from tests.chaos.storm import MARKER, marked_processes, plan_storm
from tests.chaos.traffic import Call
from tests.chaos.weather import run_in_storm
from tests.simulated_mesh import VOCAB_SIZE, simulated_mesh

PP_SIZE = 3
AT_A_TIME = 16
COST = StageCost(0.004)
FLAGS = ("--max-num-batched-tokens", "256")
"""Small, so that a long prompt is several steps and many steps have prompts in them."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a call answers with."""

    tokens: tuple[int, ...]
    """Of each choice."""
    num_choices: int
    stop_token_id: int | None
    """That ends it: it is counted, and no part of the output."""

    @property
    def num_received(self) -> int:
        """Tokens over all choices."""
        return self.num_choices * len(self.tokens)

    @property
    def num_counted(self) -> int:
        """The same in `usage`."""
        return self.num_received + (self.num_choices if self.stop_token_id is not None else 0)


def make_calls(seed: int, count: int) -> tuple[list[Call], list[Expected]]:
    """Calls of many lengths, some with stops, several choices or a shared prompt."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(100)]
    calls, expected = list[Call](), list[Expected]()
    for index in range(count):
        length = rng.choice((1, 8, 40, 600))
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        if index % 4 == 0:
            prompt = shared + prompt[:40]
        num_tokens = rng.randrange(30, 120)
        options: dict[str, object] = {"max_tokens": num_tokens, "temperature": 0.0}
        tokens = expected_tokens(prompt, num_tokens, VOCAB_SIZE)
        stop = tokens[num_tokens // 2] if index % 5 == 1 else None
        if stop is not None:
            options["stop_token_ids"] = [stop]
            tokens = tokens[: tokens.index(stop)]
        else:
            options["ignore_eos"] = True
        options["n"] = num_choices = 2 if index % 7 == 3 else 1
        calls.append(Call(tuple(prompt), options))
        expected.append(Expected(tuple(tokens), num_choices, stop))
    return calls, expected


def storm(directory: Path, seed: int, num_calls: int, kills: int, stops: int) -> None:
    print(f"seed {seed}: {num_calls} calls, {kills} kills, {stops} stops", flush=True)
    calls, expected = make_calls(seed, num_calls)
    num_tokens = sum(each.num_received for each in expected)
    blows = plan_storm(seed, PP_SIZE, kills=kills, stops=stops)
    mark = str(directory)
    mesh = simulated_mesh(directory / "mesh", PP_SIZE, COST, *FLAGS, environment={MARKER: mark})
    with mesh:
        outcomes = run_in_storm(mesh, calls, num_tokens, blows, AT_A_TIME)
        assert marked_processes(mark)
    for outcome, right in zip(outcomes, expected, strict=True):
        assert [answer.tokens for answer in outcome.answers] == [right.tokens] * right.num_choices
        assert {answer.stop_reason for answer in outcome.answers} == {right.stop_token_id}
        assert outcome.completion_tokens == right.num_counted
    assert not marked_processes(mark)


def test_a_short_storm(tmp_path: Path) -> None:
    storm(tmp_path, seed=5, num_calls=60, kills=4, stops=2)


@pytest.mark.chaos
@pytest.mark.timeout(420)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_storm(tmp_path: Path, seed: int) -> None:
    storm(tmp_path, seed, num_calls=200, kills=10, stops=5)
