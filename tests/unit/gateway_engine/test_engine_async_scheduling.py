"""Decodes sent ahead of their token: the same text, and no stage waits for the gateway."""

from __future__ import annotations

import pytest
from simulated_mesh import (
    SimulatedMesh,
    Simulation,
    new_sequence,
    prompt_of,
    reference_tokens,
)

from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence, SequenceStatus
from gateway.engine.types import FinishReason, SamplingParams

ROUND_TRIP = 0.4
"""Of a stage's time, which is 1."""


def simulation(
    num_stages: int,
    *,
    ahead: bool = True,
    extra: int = 0,
    hop_seconds: float = 0.0,
    num_blocks: int = 1024,
    block_size: int = 16,
) -> Simulation:
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        num_stages=num_stages,
        async_batch_depth=extra,
        async_scheduling=ahead,
    )
    mesh = SimulatedMesh(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        num_stages=num_stages,
        round_trip_seconds=ROUND_TRIP,
        hop_seconds=hop_seconds,
    )
    return Simulation(Scheduler(limits, epoch=1), mesh)


def add(sim: Simulation, count: int, max_tokens: int = 50) -> list[Sequence]:
    sequences = [new_sequence(prompt_of(8, seed=i), max_tokens) for i in range(count)]
    for sequence in sequences:
        sim.scheduler.add(sequence)
    return sequences


def assert_right(sequence: Sequence) -> None:
    assert sequence.status is SequenceStatus.FINISHED
    prompt = tuple(sequence.token_ids[: sequence.prompt_length])
    assert sequence.token_ids[sequence.prompt_length :] == reference_tokens(
        prompt, sequence.stop, sequence.sampling.seed
    )


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_stages_do_not_wait_for_the_gateway(num_stages: int) -> None:
    """F2: as many batches as stages, and every stage works all the time."""
    sim = simulation(num_stages)
    for sequence in add(sim, 4 * num_stages):
        sim.run()
        assert_right(sequence)
    assert sim.mesh.busy_seconds / sim.now >= 0.95
    without = simulation(num_stages, ahead=False)
    add(without, 4 * num_stages)
    without.run()
    assert sim.now < without.now


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_a_batch_beyond_the_stages_hides_the_way_between_them(num_stages: int, ahead: bool) -> None:
    """As many batches as stages are never where they are needed while they are on their way."""
    busy = []
    for extra in (0, 1):
        sim = simulation(num_stages, ahead=ahead, extra=extra, hop_seconds=0.5 / num_stages)
        sequences = add(sim, 4 * (num_stages + extra))
        sim.run()
        for sequence in sequences:
            assert_right(sequence)
        busy.append(sim.mesh.busy_seconds / sim.now)
    without, with_it = busy
    assert with_it >= 0.95 and with_it > 1.04 * without, busy


def test_more_batches_only_let_requests_wait_longer() -> None:
    """Each token takes as many steps as there are batches in flight."""
    times = {}
    for extra in (0, 4):
        sim = simulation(4, extra=extra)
        add(sim, 16)
        sim.run()
        times[extra] = sim.now
    assert times[4] == pytest.approx(2 * times[0], rel=0.05)


@pytest.mark.parametrize("ahead", [True, False])
def test_batches_beyond_the_stages_are_for_decodes_alone(ahead: bool) -> None:
    """With prompts every step in flight can be large, and later stages have its receive posted."""
    sim = simulation(2, ahead=ahead, extra=3)
    most = 2 + 3 + ahead
    add(sim, 20, max_tokens=200)
    for _ in range(20):
        sim.pump()
        sim.finish_next()
    sim.pump()
    assert sim.scheduler.num_steps_in_flight == most
    long = new_sequence(prompt_of(4096, seed=99), 1)
    sim.scheduler.add(long)
    # What is on its way just ends.
    assert sim.pump() == []
    while long.num_unscheduled_tokens > 1:
        sim.finish_next()
        before = sim.scheduler.num_steps_in_flight
        sim.pump()
        assert sim.scheduler.num_steps_in_flight <= max(before, 2 + ahead)
    while long.status is not SequenceStatus.FINISHED:
        sim.finish_next()
        sim.pump()
    assert_right(long)
    # All that decode share two batches with its chunks.
    mixed = [len(scheduled.rows) for scheduled in sim.scheduled if scheduled.num_prompt_tokens]
    assert set(mixed[1:]) == {10 + 1}
    for _ in range(20):
        sim.finish_next()
        sim.pump()
    assert sim.scheduler.num_steps_in_flight == most
    sizes = [len(scheduled.rows) for scheduled in sim.scheduled[-10:]]
    assert set(sizes) == {4}, "the batches are even again"


def test_a_prompt_that_waits_for_a_slot_does_not_keep_the_depth_down() -> None:
    """It cannot be in a step: with more requests than slots all the time, the depth still holds."""
    sim = simulation(2, extra=3)
    *_, last = add(sim, 65, max_tokens=20)
    most = 0
    for _ in range(30):
        sim.pump()
        assert last.status is SequenceStatus.WAITING
        most = max(most, sim.scheduler.num_steps_in_flight)
        sim.finish_next()
    assert most == 2 + 3 + 1


@pytest.mark.parametrize("extra", [0, 3])
def test_chunks_of_a_prompt_alone_queue_up_by_one(extra: int) -> None:
    sim = simulation(2, extra=extra)
    sim.scheduler.add(new_sequence(prompt_of(4096), 1))
    sim.pump()
    assert sim.scheduler.num_steps_in_flight == 2 + 1


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_one_request_alone_does_not_wait_for_the_gateway(num_stages: int, extra: int) -> None:
    sim = simulation(num_stages, extra=extra)
    (sequence,) = add(sim, 1, max_tokens=40)
    sim.run()
    assert_right(sequence)
    assert sim.now == pytest.approx(40 * num_stages + ROUND_TRIP)
    assert sim.mesh.num_references == 39


def test_a_decode_refers_to_a_step_of_the_round_before() -> None:
    """Otherwise the first stage would wait for the last, with work of others behind it."""
    sim = simulation(4)
    add(sim, 16)
    sim.run()
    distances = {
        step.step_id - given.reference.step_id
        for step in sim.mesh.steps[8:-8]
        for row in step.rows
        for given in row.references
    }
    assert distances == {4}


def test_the_batches_stay_even() -> None:
    sim = simulation(2)
    add(sim, 12, max_tokens=200)
    for _ in range(12):
        sim.pump()
        sim.finish_next()
    sim.pump()
    first, second = sim.scheduled[-2:]
    assert [len(first.rows), len(second.rows)] == [6, 6]
    for row in first.rows[:5]:
        sim.scheduler.abort(row.sequence)
    for _ in range(6):
        sim.pump()
        sim.finish_next()
    sim.pump()
    assert sorted(len(scheduled.rows) for scheduled in sim.scheduled[-2:]) == [3, 4]


def test_no_decode_is_sent_past_the_last_token() -> None:
    sim = simulation(2)
    add(sim, 6, max_tokens=9)
    sim.run()
    assert sum(len(scheduled.rows) for scheduled in sim.scheduled) == 6 * 9


def test_a_token_past_a_stop_is_dropped() -> None:
    prompt = prompt_of(8)
    expected = reference_tokens(prompt, new_sequence(prompt, 30).stop)
    sequence = new_sequence(prompt, 30, stop_token_ids=frozenset({expected[5]}))
    sim = simulation(1)
    sim.scheduler.add(sequence)
    sim.run()
    assert_right(sequence)
    end = expected.index(expected[5]) + 1
    assert sequence.token_ids[8:] == expected[:end]
    assert sequence.finish_reason is FinishReason.STOP
    assert sum(len(scheduled.rows) for scheduled in sim.scheduled) == end + 1
    assert sim.scheduler.num_free_blocks == 1024


def test_only_steps_that_may_be_referred_to_return_their_tokens() -> None:
    sim = simulation(1)
    add(sim, 1, max_tokens=3)
    sim.run()
    assert [step.returns_tokens for step in sim.mesh.steps] == [True, True, False]


def test_nobody_loses_blocks_for_a_token_that_may_not_come() -> None:
    """A decode ahead takes a free block or waits; what its token needs is decided once it is
    known."""
    sim = simulation(1, num_blocks=5, block_size=4)
    old, new = (new_sequence(prompt_of(7, seed=i), 2) for i in range(2))
    for sequence in (old, new):
        sim.scheduler.add(sequence)
    sim.run()
    for sequence in (old, new):
        assert_right(sequence)
    assert sim.scheduler.num_preemptions == 0


def test_a_step_with_penalties_is_sent_ahead_too() -> None:
    """The last stage counts each token as it samples it, so nothing has to wait for the gateway."""
    sim = simulation(1)
    sequence = new_sequence(prompt_of(8), 10, sampling=SamplingParams(presence_penalty=1.0))
    sim.scheduler.add(sequence)
    sim.run()
    assert sim.mesh.num_references == 9


def test_a_long_prompt_keeps_its_chunks_flowing_beside_a_decode() -> None:
    """F4: one request decodes; chunks of the other's prompt do not wait for its tokens."""
    sim = simulation(2)
    decode = new_sequence(prompt_of(8), 300)
    sim.scheduler.add(decode)
    for _ in range(10):
        sim.pump()
        sim.finish_next()
    long = new_sequence(prompt_of(4096, seed=1), 1)
    sim.scheduler.add(long)
    started, busy = sim.now, sim.mesh.busy_seconds
    while long.status is not SequenceStatus.FINISHED:
        sim.pump()
        sim.finish_next()
    assert (sim.mesh.busy_seconds - busy) / (sim.now - started) >= 0.9
