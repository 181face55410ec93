"""Random traffic: whatever comes and goes, every finished answer is the sequential one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import hypothesis.strategies as st
from hypothesis import event, given, settings
from simulated_mesh import Action, SimulatedMesh, Simulation, new_sequence, reference_tokens

from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence, SequenceStatus
from gateway.engine.types import FinishReason, SamplingParams
from gateway.engine.waiting_queue import SchedulingPolicy


@dataclass(frozen=True)
class Visit:
    """One request of the traffic."""

    arrives: float
    prompt_length: int
    max_tokens: int
    leaves_after: float | None
    """When its client goes away; None stays."""
    beginning: int = 0
    """Prompts with the same one are alike as far as both go."""
    priority: int = 0


@dataclass(frozen=True)
class Setting:
    """One mesh and its limits."""

    num_stages: int
    num_stages_known: int
    """To the scheduler: it has to be right with any."""
    async_batch_depth: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    min_prompt_chunk_tokens: int
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.FCFS


SETTINGS = st.builds(
    Setting,
    num_stages=st.integers(1, 4),
    num_stages_known=st.integers(1, 5),
    async_batch_depth=st.integers(0, 3),
    num_blocks=st.integers(12, 40),
    block_size=st.sampled_from([1, 2, 3, 4]),
    max_num_seqs=st.integers(1, 9),
    max_num_batched_tokens=st.integers(1, 24),
    min_prompt_chunk_tokens=st.integers(1, 16),
    enable_prefix_caching=st.booleans(),
    async_scheduling=st.booleans(),
    policy=st.sampled_from(SchedulingPolicy),
)
VISITS = st.lists(
    st.builds(
        Visit,
        arrives=st.integers(0, 40).map(float),
        prompt_length=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        leaves_after=st.none() | st.integers(0, 30).map(float),
        beginning=st.integers(0, 3),
        priority=st.integers(-2, 2),
    ),
    min_size=1,
    max_size=14,
)


def build(setting: Setting) -> Simulation:
    limits = SchedulerLimits(
        num_blocks=setting.num_blocks,
        block_size=setting.block_size,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        num_stages=setting.num_stages_known,
        async_batch_depth=setting.async_batch_depth,
        min_prompt_chunk_tokens=setting.min_prompt_chunk_tokens,
        enable_prefix_caching=setting.enable_prefix_caching,
        async_scheduling=setting.async_scheduling,
        policy=setting.policy,
    )
    mesh = SimulatedMesh(
        num_blocks=setting.num_blocks,
        block_size=setting.block_size,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        num_stages=setting.num_stages,
    )
    return Simulation(Scheduler(limits, epoch=1), mesh)


def traffic(
    sim: Simulation, setting: Setting, visits: list[Visit]
) -> tuple[list[Sequence], list[Action]]:
    """Sequences for the visits that can fit, and their comings and goings."""
    sequences: list[Sequence] = []
    actions: list[Action] = []
    capacity = setting.num_blocks * setting.block_size
    for index, visit in enumerate(visits):
        if visit.prompt_length + visit.max_tokens - 1 > capacity:
            continue
        sequence = new_sequence(
            (visit.beginning * 7 + k * k for k in range(visit.prompt_length)),
            visit.max_tokens,
            name=str(index),
            stop_token_ids=frozenset({11, 12}),
            sampling=SamplingParams(seed=index),
            priority=visit.priority,
        )
        sequences.append(sequence)
        add: Callable[[], None] = partial(sim.scheduler.add, sequence)
        actions.append((visit.arrives, add))
        if visit.leaves_after is not None:
            abort: Callable[[], None] = partial(sim.scheduler.abort, sequence)
            actions.append((visit.arrives + visit.leaves_after, abort))
    return sequences, actions


def check_ends(sim: Simulation, setting: Setting, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        assert sequence.status is SequenceStatus.FINISHED
        prompt = tuple(sequence.token_ids[: sequence.prompt_length])
        generated = sequence.token_ids[sequence.prompt_length :]
        expected = reference_tokens(prompt, sequence.stop, sequence.sampling.seed)
        if sequence.finish_reason is FinishReason.ABORT:
            assert generated == expected[: len(generated)]
        else:
            assert generated == expected
    assert sim.scheduler.num_free_blocks == setting.num_blocks
    assert sim.scheduler.num_waiting == sim.scheduler.num_running == 0
    assert sim.scheduler.num_steps_in_flight == 0


@settings(max_examples=150, deadline=None)
@given(setting=SETTINGS, visits=VISITS)
def test_any_traffic_gives_the_sequential_answers(setting: Setting, visits: list[Visit]) -> None:
    sim = build(setting)
    sequences, actions = traffic(sim, setting, visits)
    sim.run(actions)
    check_ends(sim, setting, sequences)
    event(f"cached: {min(sim.mesh.num_cached_tokens, 1)}")
    event(f"references: {min(sim.mesh.num_references, 1)}")
    steps = [(step.num_decodes > 0, step.num_prompt_tokens > 0) for step in sim.scheduled]
    apart = ((True, False), (False, True), (True, False))
    event(f"apart: {apart in zip(steps, steps[1:], steps[2:], strict=False)}")


@settings(max_examples=150, deadline=None)
@given(
    num_stages=st.integers(2, 4),
    extra_depth=st.integers(0, 2),
    num_blocks=st.integers(14, 30),
    budget=st.integers(2, 16),
    policy=st.sampled_from(SchedulingPolicy),
    visits=st.lists(
        st.builds(
            Visit,
            arrives=st.integers(0, 6).map(float),
            prompt_length=st.integers(1, 6),
            max_tokens=st.integers(4, 9),
            leaves_after=st.none() | st.integers(0, 20).map(float),
            beginning=st.integers(0, 3),
            priority=st.integers(0, 1),
        ),
        min_size=6,
        max_size=12,
    ),
)
def test_answers_survive_constant_preemption(
    num_stages: int,
    extra_depth: int,
    num_blocks: int,
    budget: int,
    policy: SchedulingPolicy,
    visits: list[Visit],
) -> None:
    sizes = (num_blocks, 1, 8, budget, 2)
    setting = Setting(num_stages, num_stages, extra_depth, *sizes, policy=policy)
    sim = build(setting)
    sequences, actions = traffic(sim, setting, visits)
    sim.run(actions)
    check_ends(sim, setting, sequences)
    event(f"preemptions: {min(sim.scheduler.num_preemptions, 3)}")


@settings(max_examples=60, deadline=None)
@given(setting=SETTINGS, visits=VISITS)
def test_first_come_first_started(setting: Setting, visits: list[Visit]) -> None:
    sim = build(replace(setting, policy=SchedulingPolicy.FCFS))
    _, actions = traffic(sim, setting, visits)
    sim.run(actions)
    first_steps: dict[int, int] = {}
    for index, scheduled in enumerate(sim.scheduled):
        for row in scheduled.rows:
            first_steps.setdefault(row.sequence.arrival, index)
    order = [first_steps[arrival] for arrival in sorted(first_steps)]
    assert order == sorted(order)


@settings(max_examples=60, deadline=None)
@given(
    setting=SETTINGS,
    visits=VISITS,
    kills_at=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    pumped=st.booleans(),
)
def test_a_new_epoch_at_any_time_changes_no_answer(
    setting: Setting, visits: list[Visit], kills_at: list[int], pumped: bool
) -> None:
    """F24: the stages lose everything, at any step, also again while they compute it once more;
    with steps on their way (`pumped`) or before any is sent."""
    sim = build(setting)
    sequences, _ = traffic(sim, setting, visits)
    for sequence in sequences:
        sim.scheduler.add(sequence)
    for epoch, kill_at in enumerate(kills_at, start=2):
        for _ in range(kill_at):
            sim.pump()
            if sim.mesh.next_finish_time is None:
                break
            sim.finish_next()
        if pumped:
            sim.pump()
        before = sum(s.num_output_tokens for s in sequences)
        at_work = sim.scheduler.count_failure()
        assert all(s.rows_in_flight and s.num_failures >= 1 for s in at_work)
        assert sim.scheduler.restart(epoch) >= 0
        assert sim.scheduler.num_free_blocks == setting.num_blocks
        assert sim.scheduler.num_running == sim.scheduler.num_steps_in_flight == 0
        assert sum(s.num_output_tokens for s in sequences) == before
        sim = Simulation(sim.scheduler, build(setting).mesh)
        sim.mesh.epoch = epoch
    sim.run()
    check_ends(sim, setting, sequences)


@settings(max_examples=40, deadline=None)
@given(
    block_size=st.integers(1, 4),
    leaves=st.lists(st.integers(0, 12).map(float), min_size=24, max_size=24),
)
def test_an_abort_storm_leaves_the_survivors_blocks_alone(
    block_size: int, leaves: list[float]
) -> None:
    """F16: four stages, few blocks, three of four clients leave while their steps are in flight."""
    setting = Setting(4, 4, 0, 96 // block_size, block_size, 16, 32, 4)
    visits = [
        Visit(
            arrives=float(index // 4),
            prompt_length=5 + index % 9,
            max_tokens=12,
            leaves_after=None if index % 4 == 0 else leaves[index],
            beginning=index % 3,
        )
        for index in range(24)
    ]
    sim = build(setting)
    sequences, actions = traffic(sim, setting, visits)
    sim.run(actions)
    check_ends(sim, setting, sequences)
    survivors = [s for s in sequences if s.finish_reason is not FinishReason.ABORT]
    assert len(survivors) >= 6
