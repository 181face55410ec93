"""Who is served first, and that nobody waits for ever."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from simulated_mesh import SimulatedMesh, Simulation, new_sequence, prompt_of

from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence, SequenceStatus
from gateway.engine.waiting_queue import MOST_OVERTAKINGS, SchedulingPolicy, WaitingQueue


def queue_of(policy: SchedulingPolicy, priorities: list[int]) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for arrival, priority in enumerate(priorities):
        queue.add(arrived(arrival, priority))
    return queue


def arrived(arrival: int, priority: int) -> Sequence:
    sequence = new_sequence((1,), 1, priority=priority)
    sequence.arrival = arrival
    return sequence


def drained(queue: WaitingQueue) -> list[int]:
    return [queue.admit_first().arrival for _ in range(len(queue))]


@given(priorities=st.lists(st.integers(-5, 5), max_size=20))
def test_in_order_of_arrival_priorities_mean_nothing(priorities: list[int]) -> None:
    assert drained(queue_of(SchedulingPolicy.FCFS, priorities)) == list(range(len(priorities)))


@given(priorities=st.lists(st.integers(-5, 5), max_size=20))
def test_lower_priorities_first_and_ties_by_arrival(priorities: list[int]) -> None:
    order = drained(queue_of(SchedulingPolicy.PRIORITY, priorities))
    assert order == sorted(range(len(priorities)), key=lambda arrival: priorities[arrival])


@given(
    priorities=st.lists(st.integers(-3, 3), min_size=1, max_size=8),
    stream=st.lists(st.integers(-3, 3), min_size=1, max_size=6),
)
def test_nobody_is_overtaken_for_ever(priorities: list[int], stream: list[int]) -> None:
    """However good the priorities of those who keep coming."""
    queue = queue_of(SchedulingPolicy.PRIORITY, priorities)
    waiting = set(range(len(priorities)))
    arrival = len(priorities)
    for _ in range((MOST_OVERTAKINGS + 1) * len(priorities)):
        queue.add(arrived(arrival, stream[arrival % len(stream)]))
        arrival += 1
        waiting.discard(queue.admit_first().arrival)
    assert not waiting


def test_a_preempted_sequence_comes_back_to_its_place() -> None:
    queue = queue_of(SchedulingPolicy.FCFS, [0, 0, 0])
    first = queue.admit_first()
    queue.put_back(first)
    assert drained(queue) == [0, 1, 2]


def simulation(num_blocks: int = 64, max_num_seqs: int = 4) -> Simulation:
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        num_stages=2,
        policy=SchedulingPolicy.PRIORITY,
    )
    mesh = SimulatedMesh(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        num_stages=2,
    )
    return Simulation(Scheduler(limits, epoch=1), mesh)


def test_the_lower_priority_loses_its_blocks_first_whenever_it_came() -> None:
    sim = simulation(num_blocks=11)
    humble = new_sequence(prompt_of(8, seed=1), 24, priority=5)
    proud = new_sequence(prompt_of(8, seed=2), 24, priority=0)
    sim.scheduler.add(humble)
    sim.scheduler.add(proud)
    while not sim.scheduler.num_preemptions:
        sim.pump()
        sim.finish_next()
    assert (humble.status, proud.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    sim.run()
    assert humble.status is proud.status is SequenceStatus.FINISHED


def test_a_stream_of_better_priorities_starves_nobody() -> None:
    """The humble one is admitted in its turn and then not preempted for those it waited for."""
    sim = simulation(num_blocks=24, max_num_seqs=3)
    humble = new_sequence(prompt_of(20, seed=1), 30, priority=9)
    finished: list[Sequence] = []
    count = 0

    def come() -> None:
        nonlocal count
        count += 1
        sim.scheduler.add(new_sequence(prompt_of(8, seed=1 + count), 20, priority=0))

    sim.on_output = lambda output: (
        finished.append(output.sequence) if output.sequence.finish_reason is not None else None
    )
    for _ in range(4):
        come()
    sim.scheduler.add(humble)
    while humble not in finished:
        while sim.scheduler.num_waiting < 4:
            come()
        sim.pump()
        sim.finish_next()
        assert len(finished) < 4 * MOST_OVERTAKINGS
    assert len(finished) > MOST_OVERTAKINGS / 2


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_big_prompt_is_not_passed_by_small_ones(policy: SchedulingPolicy) -> None:
    sim = simulation(num_blocks=12)
    running = new_sequence(prompt_of(16, seed=1), 16)
    sim.scheduler.add(running)
    sim.pump()
    big = new_sequence(prompt_of(40, seed=2), 4)
    small = [new_sequence(prompt_of(2, seed=3 + i), 2) for i in range(6)]
    for sequence in (big, *small):
        sim.scheduler.add(sequence)
    sim.run()
    order = list(
        dict.fromkeys(row.sequence for scheduled in sim.scheduled for row in scheduled.rows)
    )
    assert order[:2] == [running, big]
