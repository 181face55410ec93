"""How prompts and decodes share steps, in rules and in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import mean

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from simulated_mesh import SimulatedMesh, Simulation, new_sequence, prompt_of

from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence
from gateway.engine.step_budget import (
    LEAST_PARTS,
    MOST_PARTS,
    ChunkBesideDecodes,
    chunk_beside_decodes,
    lone_prompt_chunk,
)
from gateway.engine.step_costs import (
    MIN_CHUNK_TOKENS,
    MIN_LONE_CHUNK_TOKENS,
    SeenStep,
    StepCosts,
)
from stagemesh.v1 import step_pb2


def observe(seen: StepCosts, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
    """A step apart from others."""
    seen.observe(SeenStep(num_prompt_tokens, num_decodes, seconds, 0.0, 0))


def costs(decode_seconds: float, token_seconds: float, repeats: int = 5) -> StepCosts:
    seen = StepCosts()
    for _ in range(repeats):
        observe(seen, 0, 8, decode_seconds)
        observe(seen, 100, 8, decode_seconds + 100 * token_seconds)
    return seen


def beside(seen: StepCosts, num_prompts: int = 1, num_stages: int = 1) -> ChunkBesideDecodes:
    """Eight decodes in each of the steps of a round."""
    return chunk_beside_decodes(seen, num_prompts, 8 * num_stages, num_stages, 128)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_prompt_beside_decodes_doubles_their_step_at_most(num_stages: int) -> None:
    chunk = beside(costs(0.02, 0.0001), num_stages=num_stages)
    assert not chunk.apart
    assert chunk.num_tokens == pytest.approx(200, abs=1)


@pytest.mark.parametrize(("num_prompts", "shares"), [(1, 1), (2, 2), (3, 4.5), (4, 8), (30, 8)])
def test_a_crowd_of_prompts_gets_the_time_that_its_number_asks_for(
    num_prompts: int, shares: float
) -> None:
    chunk = beside(costs(0.02, 0.0001), num_prompts)
    assert chunk.num_tokens == pytest.approx(200 * shares, abs=1)


def test_before_steps_were_seen_a_chunk_has_its_least_useful_size() -> None:
    assert beside(StepCosts()) == (128, False)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_dear_tokens_do_not_stop_a_prompt(num_stages: int) -> None:
    assert beside(costs(0.001, 0.1), num_stages=num_stages).num_tokens == MIN_CHUNK_TOKENS


def test_outliers_and_tiny_chunks_teach_nothing() -> None:
    """F25: a first step of a second, a negative difference, a chunk of two tokens."""
    seen = costs(0.02, 0.0001)
    observe(seen, 0, 8, 1.0)
    observe(seen, 2, 8, 0.5)
    observe(seen, 100, 8, 0.001)
    assert beside(seen).num_tokens == pytest.approx(200, abs=1)


def test_few_tokens_go_apart_and_get_what_decodes_together_save() -> None:
    """Four decodes take 10 ms, eight 16: of a round of 36 ms, nearly twice the usual one, a step of
    all decodes leaves 20, in which a prompt's tokens cost 2 ms each."""
    seen = StepCosts()
    for _ in range(5):
        observe(seen, 0, 4, 0.010)
        observe(seen, 0, 8, 0.016)
        observe(seen, 50, 0, 0.100)
    assert chunk_beside_decodes(seen, 1, 8, 2, 128) == (10, True)
    # Of a step with a part of the decodes a crowd gets more than a few tokens: 8 * 10 ms, for
    # which a further token costs (100 - 5.5) / 50.
    assert chunk_beside_decodes(seen, 4, 8, 2, 128) == (42, False)
    # 16 decodes, of which none was seen, are taken for 16 + 8 * 6 / 4 = 28 ms: three steps of
    # prompts would have (72 - 28) / 3 each, less than that.
    assert chunk_beside_decodes(seen, 1, 16, 4, 128) == (MIN_CHUNK_TOKENS, False)


def test_a_slow_first_step_of_all_decodes_does_not_keep_prompts_beside_them_for_ever() -> None:
    """While they stay beside them, no other is seen."""
    seen = StepCosts()
    for _ in range(5):
        observe(seen, 0, 4, 0.010)
        observe(seen, 50, 0, 0.100)
    observe(seen, 0, 8, 0.200)
    # It is taken for two steps of four decodes, and prompts get as much.
    assert chunk_beside_decodes(seen, 1, 8, 2, 128) == (10, True)


def test_decodes_whose_contexts_have_grown_leave_prompts_as_long_a_step_as_theirs() -> None:
    """What was learned of steps and rounds is old; only steps of all decodes are seen now."""
    seen = StepCosts()
    for _ in range(15):
        observe(seen, 0, 4, 0.010)
        observe(seen, 0, 8, 0.016)
        observe(seen, 20, 0, 0.040)
    for _ in range(15):
        observe(seen, 0, 8, 0.100)
    assert chunk_beside_decodes(seen, 1, 8, 2, 128) == (50, True)


def test_short_prompts_alone_do_not_look_dear_where_every_step_is() -> None:
    """Eight tokens take 20.8 ms, but add 0.8 to a step of decodes."""
    seen = StepCosts()
    for _ in range(5):
        observe(seen, 0, 3, 0.0203)
        observe(seen, 0, 1, 0.0201)
        observe(seen, 16, 0, 0.0216)
    chunk = chunk_beside_decodes(seen, 1, 6, 2, 128)
    assert not chunk.apart
    assert chunk.num_tokens == pytest.approx(0.0203 / ((0.0216 - 0.0201) / 16), abs=1)


def test_a_prompt_alone_is_cut_as_finely_as_pays() -> None:
    def chunk(fixed: float, token: float, num_stages: int = 2) -> int:
        seen = StepCosts()
        for _ in range(5):
            observe(seen, 0, 1, fixed)
            observe(seen, 100, 0, fixed + 100 * token)
        return lone_prompt_chunk(seen, 4096, 4096, num_stages, 128)

    assert chunk(0.020, 0.0001) == pytest.approx(4096 / LEAST_PARTS, rel=0.1)
    assert chunk(0.010, 0.001) == pytest.approx(4096 / math.sqrt(4096 / 2.5), rel=0.1)
    assert chunk(0.002, 0.002) == pytest.approx(4096 / MOST_PARTS, rel=0.1)
    assert chunk(0.001, 0.010) == pytest.approx(4096 / MOST_PARTS, rel=0.1)
    # More would pay, but products of fewer rows are slow.
    assert chunk(0.001, 0.010, num_stages=4) == pytest.approx(MIN_LONE_CHUNK_TOKENS, abs=2)
    assert lone_prompt_chunk(StepCosts(), 4096, 4096, 2, 128) == pytest.approx(4096 / 12, rel=0.1)
    assert lone_prompt_chunk(StepCosts(), 1000, 1000, 2, 128) == pytest.approx(128, rel=0.2)


@given(
    whole=st.integers(1, 20000),
    done=st.integers(0, 20000),
    num_stages=st.integers(1, 16),
    default=st.integers(1, 512),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 4, 20, 500]), st.integers(0, 9), st.floats(0, 10)),
        max_size=20,
    ),
)
def test_chunks_of_a_lone_prompt_are_useful(
    whole: int,
    done: int,
    num_stages: int,
    default: int,
    steps: list[tuple[int, int, float]],
) -> None:
    pending = max(1, whole - done)
    seen = StepCosts()
    for num_prompt_tokens, num_decodes, seconds in steps:
        if num_prompt_tokens or num_decodes:
            observe(seen, num_prompt_tokens, num_decodes, seconds)
    chunk = lone_prompt_chunk(seen, whole, pending, num_stages, default)
    assert 1 <= chunk <= pending
    assert chunk >= min(default, MIN_LONE_CHUNK_TOKENS, pending)
    if num_stages > 1:
        beside = chunk_beside_decodes(seen, 1, 9, num_stages, default)
        assert beside.num_tokens >= MIN_CHUNK_TOKENS


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


def simulation(
    num_stages: int, fixed: float, per_token: float, *, ahead: bool = True, num_blocks: int = 1024
) -> Simulation:
    """Stages whose steps cost something fixed and something for each token, as devices' do."""

    def seconds(step: step_pb2.Step) -> float:
        return fixed + per_token * sum(len(row.token_ids) for row in step.rows)

    sizes = {"num_blocks": num_blocks, "block_size": 16, "max_num_seqs": 64}
    limits = SchedulerLimits(
        **sizes, max_num_batched_tokens=512, num_stages=num_stages, async_scheduling=ahead
    )
    mesh = SimulatedMesh(
        **sizes, max_num_batched_tokens=512, num_stages=num_stages, stage_seconds=seconds
    )
    return Simulation(Scheduler(limits, epoch=1), mesh)


PROMPT = 4096


def alone(
    num_stages: int, fixed: float, per_token: float, *, knows: bool = True
) -> tuple[float, float]:
    """Time to first token of a long prompt, and how much of it the stages worked; where the
    scheduler knows what steps cost, or has never seen one."""
    sim = simulation(num_stages, fixed, per_token)
    if knows:
        sim.scheduler.add(new_sequence(prompt_of(100, seed=1), 20))
        sim.run()
    start, worked = sim.now, sim.mesh.busy_seconds
    sim.scheduler.add(new_sequence(prompt_of(PROMPT), 1))
    sim.run()
    seconds = sim.now - start
    return seconds, (sim.mesh.busy_seconds - worked) / seconds


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_overlap_while_a_long_prompt_is_computed(num_stages: int) -> None:
    """F4: at P = 2, both stages work for 80 % of the time, and each for 90 %."""
    for knows in (False, True):
        seconds, busy = alone(num_stages, 0.005, 0.001, knows=knows)
        overlap = 1 - num_stages * (1 - busy)
        assert busy >= (0.9 if num_stages == 2 else 0.88)
        if num_stages == 2:
            assert overlap >= 0.8
        assert seconds >= PROMPT * 0.001


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("fixed", [0.005, 0.02])
def test_a_step_that_costs_much_is_not_sent_for_a_small_bubble(
    num_stages: int, fixed: float
) -> None:
    """Few tokens cost a step too, and twelve chunks for each further stage are enough of them."""
    seconds, _ = alone(num_stages, fixed, 0.0001)
    chunks = max(8, min(LEAST_PARTS * (num_stages - 1), PROMPT // 128))
    assert seconds <= 1.1 * (chunks + num_stages - 1) * (fixed + PROMPT / chunks * 0.0001)


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


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_decodes_go_together_where_little_of_a_prompt_fits_beside_them(
    num_stages: int, ahead: bool
) -> None:
    """A CPU's costs: a token is as dear as a twentieth of a step. No stage waits meanwhile."""
    sim = simulation(num_stages, 0.004, 0.001, ahead=ahead)
    watch = Watch(sim)
    decodes = [new_sequence(prompt_of(16, seed=1 + i), 250) for i in range(2 * num_stages)]
    for sequence in decodes:
        sim.scheduler.add(sequence)
    long = new_sequence(prompt_of(600), 1)
    comes_at = 2.0
    sim.run([(comes_at, partial(sim.scheduler.add, long))])
    chunks = [
        index
        for index, step in enumerate(sim.scheduled)
        if any(row.sequence is long for row in step.rows)
    ]
    steps = sim.scheduled[chunks[0] : chunks[-1] + 1]
    assert all(step.num_decodes == 0 or step.num_prompt_tokens == 0 for step in steps)
    together = [i for i, step in enumerate(steps) if step.num_decodes == len(decodes)]
    rounds = [later - earlier for earlier, later in pairwise(together)]
    assert len(rounds) > 10
    assert set(rounds) == {num_stages}
    (first_token,) = watch.times[long]
    normal = mean(watch.gaps(comes_at / 2, comes_at, decodes))
    assert mean(watch.gaps(comes_at, first_token, decodes)) <= 2.1 * normal
    spent = sum(0.004 + 0.001 * step.num_tokens for step in steps)
    assert spent >= 0.93 * (first_token - comes_at)


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
    smallest = num_stages * MIN_CHUNK_TOKENS * fixed / ratio
    assert beside, "no decode waited beside the prompt"
    assert mean(beside) <= normal + max(1.15 * normal, 1.1 * smallest)
