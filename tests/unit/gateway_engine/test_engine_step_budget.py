"""How prompts and decodes share steps, in rules and in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from statistics import mean

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from simulated_mesh import SimulatedMesh, Simulation, new_sequence, prompt_of

from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence
from gateway.engine.step_budget import (
    MIN_LONE_CHUNK_TOKENS,
    MIN_MIXED_CHUNK_TOKENS,
    StepCosts,
    lone_prompt_chunk,
    mixed_prompt_chunk,
    useful_chunk,
)
from stagemesh.v1 import step_pb2


def costs(decode_seconds: float, token_seconds: float, repeats: int = 5) -> StepCosts:
    seen = StepCosts()
    for _ in range(repeats):
        seen.observe(0, 8, decode_seconds)
        seen.observe(100, 8, decode_seconds + 100 * token_seconds)
    return seen


def test_a_prompt_beside_decodes_doubles_their_step_at_most() -> None:
    assert mixed_prompt_chunk(costs(0.02, 0.0001), 1, 128) == pytest.approx(200, abs=1)


@pytest.mark.parametrize(("num_prompts", "shares"), [(1, 1), (2, 2), (3, 4.5), (4, 8), (30, 8)])
def test_a_crowd_of_prompts_gets_the_time_that_its_number_asks_for(
    num_prompts: int, shares: float
) -> None:
    chunk = mixed_prompt_chunk(costs(0.02, 0.0001), num_prompts, 128)
    assert chunk == pytest.approx(200 * shares, abs=1)


def test_before_steps_were_seen_a_chunk_has_its_least_useful_size() -> None:
    assert mixed_prompt_chunk(StepCosts(), 1, 128) == 128


def test_dear_tokens_do_not_stop_a_prompt() -> None:
    assert mixed_prompt_chunk(costs(0.001, 0.1), 1, 128) == MIN_MIXED_CHUNK_TOKENS


def test_outliers_and_tiny_chunks_teach_nothing() -> None:
    """F25: a first step of a second, a negative difference, a chunk of two tokens."""
    seen = costs(0.02, 0.0001)
    seen.observe(0, 8, 1.0)
    seen.observe(2, 8, 0.5)
    seen.observe(100, 8, 0.001)
    assert mixed_prompt_chunk(seen, 1, 128) == pytest.approx(200, abs=1)


def test_a_chunk_alone_is_worth_three_steps_of_decodes() -> None:
    seen = costs(0.02, 0.0001)
    for _ in range(5):
        seen.observe(512, 0, 0.02 + 512 * 0.0001)
    each = (0.02 + 512 * 0.0001) / 512
    assert useful_chunk(seen, 128) == int(3 * 0.02 / each)
    assert useful_chunk(costs(0.01, 0.0012), 128) == MIN_LONE_CHUNK_TOKENS
    assert useful_chunk(StepCosts(), 128) == 128


@given(
    whole=st.integers(1, 20000),
    done=st.integers(0, 20000),
    num_stages=st.integers(1, 16),
    min_chunk=st.integers(1, 512),
)
def test_chunks_of_a_lone_prompt_are_useful(
    whole: int, done: int, num_stages: int, min_chunk: int
) -> None:
    pending = max(1, whole - done)
    chunk = lone_prompt_chunk(whole, pending, num_stages, min_chunk)
    assert 1 <= chunk <= pending
    assert chunk >= min(min_chunk, pending)


@dataclass
class Watch:
    """Virtual times of tokens, by sequence."""

    sim: Simulation
    times: dict[Sequence, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sim.on_output = lambda output: self.times.setdefault(output.sequence, []).append(
            self.sim.now
        )

    def gaps(self, start: float, end: float, sequences: list[Sequence]) -> list[float]:
        return [
            later - earlier
            for sequence in sequences
            for earlier, later in zip(self.times[sequence], self.times[sequence][1:], strict=False)
            if start <= earlier and later <= end
        ]


def simulation(num_stages: int, fixed: float, per_token: float) -> Simulation:
    """Stages whose steps cost something fixed and something for each token, as devices' do."""

    def seconds(step: step_pb2.Step) -> float:
        return fixed + per_token * sum(len(row.token_ids) for row in step.rows)

    sizes = {"num_blocks": 1024, "block_size": 16, "max_num_seqs": 64}
    limits = SchedulerLimits(**sizes, max_num_batched_tokens=512, num_stages=num_stages)
    mesh = SimulatedMesh(
        **sizes, max_num_batched_tokens=512, num_stages=num_stages, stage_seconds=seconds
    )
    return Simulation(Scheduler(limits, epoch=1), mesh)


PROMPT = 4096


def alone(num_stages: int, fixed: float, per_token: float) -> tuple[float, float]:
    """Time to first token of a long prompt, and how much of it the stages worked."""
    sim = simulation(num_stages, fixed, per_token)
    sim.scheduler.add(new_sequence(prompt_of(PROMPT), 1))
    sim.run()
    return sim.now, sim.mesh.busy_seconds / sim.now


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_overlap_while_a_long_prompt_is_computed(num_stages: int) -> None:
    """F4: at P = 2, both stages work for 80 % of the time, and each for 90 %."""
    seconds, busy = alone(num_stages, 0.005, 0.001)
    overlap = 1 - num_stages * (1 - busy)
    assert busy >= (0.9 if num_stages == 2 else 0.88)
    if num_stages == 2:
        assert overlap >= 0.8
    assert seconds >= PROMPT * 0.001


def test_a_long_prompt_beside_decodes() -> None:
    """Eight decodes wait at most twice as long for a token, and the prompt's first token
    comes within 1.5 times what it takes alone (a device whose fixed cost is that of 200 tokens)."""
    fixed, per_token = 0.020, 0.0001
    ttft_alone, _ = alone(2, fixed, per_token)
    sim = simulation(2, fixed, per_token)
    watch = Watch(sim)
    decodes = [new_sequence(prompt_of(16, seed=1 + i), 150) for i in range(8)]
    for sequence in decodes:
        sim.scheduler.add(sequence)
    long = new_sequence(prompt_of(PROMPT), 1)
    comes_at = 2.0
    sim.run([(comes_at, partial(sim.scheduler.add, long))])
    (first_token,) = watch.times[long]
    normal = mean(watch.gaps(1.0, comes_at, decodes))
    beside = mean(watch.gaps(comes_at, first_token, decodes))
    assert beside <= 2.0 * normal
    assert first_token - comes_at <= 1.5 * ttft_alone


@settings(max_examples=10, deadline=None)
@given(ratio=st.integers(5, 400), num_stages=st.integers(1, 4))
def test_decodes_are_never_held_up_much(ratio: int, num_stages: int) -> None:
    """Whatever a token costs: the step that holds a piece of a prompt is about twice theirs,
    or the smallest that is worth sending."""
    fixed = 0.020
    sim = simulation(num_stages, fixed, fixed / ratio)
    watch = Watch(sim)
    decodes = [new_sequence(prompt_of(16, seed=1 + i), 150) for i in range(8)]
    for sequence in decodes:
        sim.scheduler.add(sequence)
    long = new_sequence(prompt_of(1000), 1)
    comes_at = 50 * num_stages * fixed * (1 + 8 / ratio)
    sim.run([(comes_at, partial(sim.scheduler.add, long))])
    normal = mean(watch.gaps(comes_at / 2, comes_at, decodes))
    beside = watch.gaps(comes_at, watch.times[long][0], decodes)
    smallest = num_stages * MIN_MIXED_CHUNK_TOKENS * fixed / ratio
    assert beside, "no decode waited beside the prompt"
    assert mean(beside) <= normal + max(1.1 * normal, 1.1 * smallest)
