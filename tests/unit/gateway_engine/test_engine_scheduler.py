"""What the scheduler puts into its steps, case by case."""

from __future__ import annotations

from itertools import pairwise

import pytest
from simulated_mesh import SimulatedMesh, Simulation, new_sequence, reference_tokens

from benchmarks.gateway_step import LIMIT_MILLISECONDS, measure
from gateway.engine.scheduled_step import ScheduledStep, SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence, SequenceStatus
from gateway.engine.types import FinishReason, SamplingParams
from services.errors import ContextTooLong, StageFailed
from stagemesh.v1 import step_pb2


def simulation(
    *,
    num_stages: int = 1,
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    min_prompt_chunk_tokens: int = 128,
    async_scheduling: bool = False,
    round_trip_seconds: float = 0.0,
) -> Simulation:
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_stages=num_stages,
        min_prompt_chunk_tokens=min_prompt_chunk_tokens,
        async_scheduling=async_scheduling,
    )
    mesh = SimulatedMesh(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_stages=num_stages,
        round_trip_seconds=round_trip_seconds,
    )
    return Simulation(Scheduler(limits, epoch=1), mesh)


def add(
    sim: Simulation, count: int, *, prompt_length: int = 3, max_tokens: int = 8, start: int = 0
) -> list[Sequence]:
    sequences = [
        new_sequence(range(i, i + prompt_length), max_tokens, name=f"r{i}")
        for i in range(start, start + count)
    ]
    for sequence in sequences:
        sim.scheduler.add(sequence)
    return sequences


def output(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.prompt_length :]


def assert_right(sequence: Sequence) -> None:
    assert sequence.status is SequenceStatus.FINISHED
    prompt = tuple(sequence.token_ids[: sequence.prompt_length])
    assert output(sequence) == reference_tokens(
        prompt, sequence.stop, sequence.sampling.seed, sequence.choice_index
    )


def decode_sizes(steps: list[ScheduledStep]) -> list[int]:
    return [sum(len(row.token_ids) == 1 for row in step.step.rows) for step in steps]


def into_steady_state(sim: Simulation, num_steps: int = 12) -> list[ScheduledStep]:
    """Runs some steps and returns the ones in flight then."""
    for _ in range(num_steps):
        sim.pump()
        sim.finish_next()
    sim.pump()
    return sim.scheduled[-sim.scheduler.num_steps_in_flight :]


def test_one_request_is_a_prompt_then_decodes() -> None:
    sim = simulation()
    (sequence,) = add(sim, 1, prompt_length=5, max_tokens=3)
    sim.run()
    assert_right(sequence)
    shapes = [
        (row.position, len(row.token_ids), row.num_sampled)
        for s in sim.mesh.steps
        for row in s.rows
    ]
    assert shapes == [(0, 5, 1), (5, 1, 1), (6, 1, 1)]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sim.scheduler.num_free_blocks == 256


def test_a_stop_token_ends_a_sequence() -> None:
    sim = simulation()
    expected = reference_tokens((1, 2), new_sequence((1, 2), 10).stop)
    sequence = new_sequence((1, 2), 10, stop_token_ids=frozenset({expected[3]}))
    sim.scheduler.add(sequence)
    sim.run()
    assert output(sequence) == expected[: expected.index(expected[3]) + 1]
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, expected[3])


def test_tokens_after_a_stop_are_dropped() -> None:
    sim = simulation()
    sequence = new_sequence(
        (1, 2), 10, stop_token_ids=frozenset({7}), sampling=SamplingParams(num_logprobs=0)
    )
    sim.scheduler.add(sequence)
    (scheduled,) = sim.pump()
    row = step_pb2.ResultRow(row=0, token_ids=[5, 7, 9])
    for logprob in (-1.0, -2.0, -3.0):
        row.logprobs.add(logprob=logprob)
    (out,) = sim.scheduler.apply(
        step_pb2.StepResult(epoch=1, step_id=scheduled.step.step_id, rows=[row])
    )
    assert out.token_ids == (5, 7)
    assert [entry.token_id for entry in out.logprobs] == [5, 7]
    assert output(sequence) == [5, 7]


@pytest.mark.parametrize(
    ("num_stages", "running", "expected"),
    [
        (2, 8, [4, 4]),
        (4, 8, [2, 2, 2, 2]),
        (4, 5, [1, 1, 1, 2]),
        (2, 1, [1]),
        (4, 2, [1, 1]),
        (1, 8, [8]),
    ],
)
def test_decodes_are_spread_over_the_steps_in_flight(
    num_stages: int, running: int, expected: list[int]
) -> None:
    """F3: every stage has work, and a few requests are not held back for more."""
    sim = simulation(num_stages=num_stages)
    add(sim, running, max_tokens=100)
    assert sorted(decode_sizes(into_steady_state(sim))) == expected


def test_uneven_batches_even_out_after_requests_leave() -> None:
    """F3: five of eight leave, all but one from the same batch."""
    sim = simulation(num_stages=2)
    add(sim, 12, max_tokens=100)
    first, second = into_steady_state(sim)
    assert [len(first.rows), len(second.rows)] == [6, 6]
    for row in first.rows[:5]:
        sim.scheduler.abort(row.sequence)
    steps = into_steady_state(sim, num_steps=4)
    assert sorted(decode_sizes(steps)) == [3, 4]


def test_newcomers_keep_the_batches_even() -> None:
    sim = simulation(num_stages=2)
    add(sim, 4, max_tokens=100)
    into_steady_state(sim)
    add(sim, 4, max_tokens=100)
    assert decode_sizes(into_steady_state(sim)) == [4, 4]


def test_chunks_follow_each_other_without_waiting_for_the_last_stage() -> None:
    """F4: chunk k+1 enters stage 0 while chunk k is in stage 1."""
    sim = simulation(num_stages=3, max_num_batched_tokens=16)
    (sequence,) = add(sim, 1, prompt_length=64, max_tokens=2)
    sim.run()
    assert_right(sequence)
    chunks = [step for step in sim.mesh.steps if len(step.rows[0].token_ids) == 16]
    assert [step.rows[0].position for step in chunks] == [0, 16, 32, 48]
    assert [step.rows[0].num_sampled for step in chunks] == [0, 0, 0, 1]
    for earlier, later in pairwise(chunks):
        assert sim.mesh.entries[later.step_id, 0] == sim.mesh.entries[earlier.step_id, 1]


def test_a_sequence_is_in_one_sampling_step_at_a_time() -> None:
    sim = simulation(num_stages=4)
    add(sim, 1, max_tokens=5)
    assert len(sim.pump()) == 1
    assert sim.scheduler.schedule() is None


def test_the_pipeline_is_full() -> None:
    """F2: 16 independent one-token requests through four stages."""
    sim = simulation(num_stages=4, max_num_batched_tokens=1)
    sequences = add(sim, 16, prompt_length=1, max_tokens=1)
    sim.run()
    for sequence in sequences:
        assert_right(sequence)
    assert len(sim.mesh.steps) == 16
    assert sim.now == pytest.approx((16 + 4 - 1) * 1.0, rel=0.1)


def test_the_pipeline_stays_full_over_many_tokens() -> None:
    """F2: 16 running requests as four batches; no stage waits after the pipeline has filled."""
    sim = simulation(num_stages=4, min_prompt_chunk_tokens=1)
    sequences = add(sim, 16, prompt_length=2, max_tokens=32)
    sim.run()
    for sequence in sequences:
        assert_right(sequence)
    assert sim.now == pytest.approx((4 * 32 + 4 - 1) * 1.0, rel=0.1)


def test_idle_stages_share_a_prompt() -> None:
    sim = simulation(num_stages=4)
    add(sim, 1, prompt_length=400)
    assert [s.num_tokens for s in sim.pump()] == [134, 133, 133]


def test_a_short_prompt_is_not_cut() -> None:
    sim = simulation(num_stages=4)
    add(sim, 1, prompt_length=200)
    assert [s.num_tokens for s in sim.pump()] == [200]


def test_one_stage_queues_chunks_but_no_second_decode_batch() -> None:
    sim = simulation(num_stages=1, max_num_batched_tokens=16)
    add(sim, 1, prompt_length=40, max_tokens=50)
    assert [s.num_tokens for s in sim.pump()] == [16, 16]
    into_steady_state(sim)
    add(sim, 1, prompt_length=40, start=1)
    assert sim.pump() == []
    sim.finish_next()
    (mixed,) = sim.pump()
    assert [len(row.token_ids) for row in mixed.step.rows] == [1, 15]


def test_decodes_come_first_under_the_token_budget() -> None:
    sim = simulation(num_stages=1, max_num_batched_tokens=10)
    add(sim, 4, prompt_length=2, max_tokens=50)
    into_steady_state(sim)
    add(sim, 1, prompt_length=30)
    sim.finish_next()
    (step,) = sim.pump()
    assert [len(row.token_ids) for row in step.step.rows] == [1, 1, 1, 1, 6]


def test_no_more_sequences_than_slots() -> None:
    sim = simulation(num_stages=2, max_num_seqs=3)
    sequences = add(sim, 9, max_tokens=4)
    sim.pump()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (3, 6)
    sim.run()
    for sequence in sequences:
        assert_right(sequence)


def test_a_request_that_can_never_fit_is_refused() -> None:
    sim = simulation(num_blocks=4, block_size=4)
    sim.scheduler.add(new_sequence(range(10), 7))
    with pytest.raises(ContextTooLong, match="4 \\(16 tokens\\)"):
        sim.scheduler.add(new_sequence(range(10), 8))
    assert sim.scheduler.num_waiting == 1


def test_block_shortage_preempts_the_newest_and_loses_nothing() -> None:
    sim = simulation(num_stages=2, num_blocks=10, block_size=4)
    old, new = add(sim, 2, prompt_length=4, max_tokens=30)
    sim.run()
    assert sim.scheduler.num_preemptions >= 1
    assert_right(old)
    assert_right(new)
    started = [
        (start.slot, start.prompt_length) for step in sim.mesh.steps for start in step.starts
    ]
    assert len(started) == 2 + sim.scheduler.num_preemptions
    assert {length for _, length in started} == {4}
    assert sim.scheduler.num_free_blocks == 10


def test_the_newest_is_preempted_first() -> None:
    sim = simulation(num_stages=1, num_blocks=11, block_size=2)
    oldest, middle, newest = add(sim, 3, prompt_length=4, max_tokens=8)
    while not sim.scheduler.num_preemptions:
        sim.pump()
        sim.finish_next()
    statuses = [sequence.status for sequence in (oldest, middle, newest)]
    assert statuses == [SequenceStatus.RUNNING, SequenceStatus.RUNNING, SequenceStatus.WAITING]
    sim.run()
    for sequence in (oldest, middle, newest):
        assert_right(sequence)


def test_blocks_that_are_on_their_way_are_waited_for() -> None:
    """No sequence loses its work for a block that an abort has given back already."""
    sim = simulation(num_stages=3, num_blocks=12, block_size=1)
    old, new = add(sim, 2, prompt_length=2, max_tokens=5)
    doomed = new_sequence(range(30, 35), 8)
    sim.scheduler.add(doomed)
    while sim.scheduler.num_free_blocks or old.rows_in_flight:
        sim.pump()
        sim.finish_next()
    assert doomed.rows_in_flight == 1
    sim.scheduler.abort(doomed)
    sim.run()
    assert_right(old)
    assert_right(new)
    assert sim.scheduler.num_preemptions == 0


def test_a_newcomer_leaves_a_block_for_each_running_sequence() -> None:
    """Otherwise it would be preempted as soon as the others grow."""
    sim = simulation(num_stages=1, num_blocks=8, block_size=4)
    add(sim, 2, prompt_length=4, max_tokens=12)
    into_steady_state(sim, num_steps=2)
    newcomer = new_sequence(range(60, 72), 8)
    sim.scheduler.add(newcomer)
    sim.run()
    assert_right(newcomer)
    assert sim.scheduler.num_preemptions == 0


def test_a_preempted_sequence_keeps_its_token_and_its_place() -> None:
    sim = simulation(num_stages=2, num_blocks=8, block_size=2, min_prompt_chunk_tokens=1)
    old, new = add(sim, 2, prompt_length=3, max_tokens=14)
    sim.pump()
    while not sim.scheduler.num_preemptions:
        sim.finish_next()
        sim.pump()
    assert new.status is SequenceStatus.WAITING
    assert new.block_table == []
    assert new.rows_in_flight == 1
    late = new_sequence(range(50, 53), 3)
    sim.scheduler.add(late)
    num_tokens, num_steps = len(new.token_ids), len(sim.scheduled)
    sim.finish_next()
    assert len(new.token_ids) == num_tokens + 1
    sim.run()
    for sequence in (old, new, late):
        assert_right(sequence)
    later = [row.sequence for scheduled in sim.scheduled[num_steps:] for row in scheduled.rows]
    assert later.index(new) < later.index(late)


def test_blocks_of_an_abort_are_fenced_until_the_step_is_done() -> None:
    """F16: an aborted sequence's blocks are not free while its step is in flight."""
    sim = simulation(num_stages=2, num_blocks=4, block_size=4)
    (doomed,) = add(sim, 1, prompt_length=12, max_tokens=4)
    sim.pump()
    sim.scheduler.abort(doomed)
    assert sim.scheduler.num_free_blocks == 1
    follower = new_sequence(range(20, 30), 2)
    sim.scheduler.add(follower)
    assert sim.pump() == []
    assert sim.finish_next() == []
    assert sim.scheduler.num_free_blocks == 4
    (step,) = sim.pump()
    assert list(step.step.released_slots) == [0]
    assert step.step.starts[0].slot == 0
    sim.run()
    assert_right(follower)


def test_abort_of_a_waiting_sequence() -> None:
    sim = simulation(max_num_seqs=1)
    first, second, third = add(sim, 3)
    sim.pump()
    sim.scheduler.abort(second)
    sim.scheduler.abort(second)
    sim.run()
    assert_right(first)
    assert_right(third)
    assert second.finish_reason is FinishReason.ABORT
    assert output(second) == []


def test_history_travels_only_where_penalties_need_it() -> None:
    sim = simulation()
    plain = new_sequence((1, 2, 3), 2)
    penal = new_sequence((4, 5, 6), 2, sampling=SamplingParams(repetition_penalty=1.2, seed=9))
    for sequence in (plain, penal):
        sim.scheduler.add(sequence)
    (step,) = sim.pump()
    assert [list(start.history_token_ids) for start in step.step.starts] == [[], [4, 5, 6]]
    assert [start.prompt_length for start in step.step.starts] == [3, 3]
    sampling = step.step.starts[1].sampling
    assert sampling.seed == 9
    assert sampling.repetition_penalty == pytest.approx(1.2)
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"):
        assert sampling.HasField(name)
    assert not sampling.HasField("num_logprobs")


def test_choices_differ_only_by_their_index() -> None:
    sim = simulation()
    sequences = [new_sequence((1, 2, 3), 6, choice_index=i) for i in range(3)]
    for sequence in sequences:
        sim.scheduler.add(sequence)
    sim.run()
    for sequence in sequences:
        assert_right(sequence)
    assert len({tuple(output(sequence)) for sequence in sequences}) == 3


@pytest.mark.parametrize("step_id", [0, 2])
def test_a_result_out_of_order_is_an_error(step_id: int) -> None:
    sim = simulation()
    add(sim, 1)
    sim.pump()
    with pytest.raises(StageFailed, match="due was 1"):
        sim.scheduler.apply(step_pb2.StepResult(epoch=1, step_id=step_id))


def test_a_result_without_its_token_is_an_error() -> None:
    sim = simulation()
    add(sim, 1)
    sim.pump()
    with pytest.raises(StageFailed, match="no token for its row 0"):
        sim.scheduler.apply(step_pb2.StepResult(epoch=1, step_id=1))


def test_restart_replays_from_the_log() -> None:
    """F24: a new epoch knows nothing; every answer goes on as if nothing had happened."""
    sim = simulation(num_stages=3, num_blocks=30)
    sequences = add(sim, 6, prompt_length=9, max_tokens=12)
    into_steady_state(sim, num_steps=9)
    late = sim.mesh.finish_next()
    sim.scheduler.restart(epoch=2)
    assert sim.scheduler.apply(late) == []
    assert sim.scheduler.num_free_blocks == 30
    again = Simulation(sim.scheduler, simulation(num_stages=3, num_blocks=30).mesh)
    again.mesh.epoch = 2
    again.run()
    for sequence in sequences:
        assert_right(sequence)
    assert again.scheduler.num_free_blocks == 30


def test_a_step_message_carries_what_changed() -> None:
    """64 decodes: a dozen bytes for a row, and a new block for one in sixteen of them."""
    sim = simulation(num_stages=1, num_blocks=1024, block_size=16)
    add(sim, 64, prompt_length=100, max_tokens=150)
    while sim.scheduler.num_waiting or len(sim.scheduled[-1].rows) < 64:
        sim.pump()
        sim.finish_next()
    num_new_blocks = 0
    for _ in range(16):
        (scheduled,) = sim.pump()
        sim.finish_next()
        assert len(scheduled.rows) == 64
        assert not scheduled.step.starts
        assert scheduled.step.ByteSize() <= 64 * 16
        num_new_blocks += sum(len(row.new_block_ids) for row in scheduled.step.rows)
    assert num_new_blocks == 64


@pytest.mark.parametrize("num_rows", LIMIT_MILLISECONDS)
def test_a_step_costs_the_gateway_little(num_rows: int) -> None:
    """CPU time to read a result, apply it, and make and encode the next step, undisturbed."""
    assert sum(measure(num_rows, min).values()) <= LIMIT_MILLISECONDS[num_rows]
