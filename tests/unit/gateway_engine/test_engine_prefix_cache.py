"""Prompts that begin alike are computed once, and give the text that they give without."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given
from simulated_mesh import (
    SimulatedMesh,
    Simulation,
    new_sequence,
    prompt_of,
    reference_tokens,
)

from gateway.engine.block_hash import extend_block_hashes
from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 16


def simulation(
    *,
    num_stages: int = 2,
    num_blocks: int = 1024,
    block_size: int = BLOCK_SIZE,
    max_num_seqs: int = 32,
    caching: bool = True,
) -> Simulation:
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        num_stages=num_stages,
        enable_prefix_caching=caching,
    )
    mesh = SimulatedMesh(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        num_stages=num_stages,
    )
    return Simulation(Scheduler(limits, epoch=1), mesh)


def run(sim: Simulation, *sequences: Sequence) -> None:
    for sequence in sequences:
        sim.scheduler.add(sequence)
    sim.run()
    for sequence in sequences:
        assert_right(sequence)


def assert_right(sequence: Sequence) -> None:
    assert sequence.status is SequenceStatus.FINISHED
    prompt = tuple(sequence.token_ids[: sequence.prompt_length])
    expected = reference_tokens(
        prompt, sequence.stop, sequence.sampling.seed, sequence.choice_index
    )
    assert sequence.token_ids[sequence.prompt_length :] == expected


def prompt_tokens_computed(sim: Simulation) -> int:
    return sum(scheduled.num_prompt_tokens for scheduled in sim.scheduled)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_shared_prefix_is_computed_once(num_stages: int) -> None:
    """512 tokens in common, 16 requests of 16 more once the first is done: at least 85 % less."""
    prefix = prompt_of(512)
    computed = {}
    for caching in (True, False):
        sim = simulation(num_stages=num_stages, caching=caching)
        run(sim, new_sequence([*prefix, *prompt_of(16, seed=1)], 4))
        before = prompt_tokens_computed(sim)
        followers = [new_sequence([*prefix, *prompt_of(16, seed=2 + i)], 8) for i in range(16)]
        run(sim, *followers)
        computed[caching] = prompt_tokens_computed(sim) - before
        hits = {follower.num_cached_tokens for follower in followers}
        assert hits == ({512} if caching else {0})
    assert computed[False] == 16 * 528
    assert computed[True] <= 0.15 * computed[False]


def test_a_second_turn_finds_the_first_with_its_answer() -> None:
    sim = simulation()
    first = new_sequence(prompt_of(40), 30)
    run(sim, first)
    second = new_sequence([*first.token_ids, *prompt_of(10, seed=1)], 4)
    run(sim, second)
    # The last token drawn was never fed back: 69 of the 70 are in the cache.
    assert second.num_cached_tokens == 64


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_last_prompt_token_is_always_computed(length: int, cached: int) -> None:
    sim = simulation()
    run(sim, new_sequence(prompt_of(length), 3))
    again = new_sequence(prompt_of(length), 3)
    run(sim, again)
    assert again.num_cached_tokens == cached


def test_the_counters_count_each_prompt_once() -> None:
    sim = simulation(num_stages=1, num_blocks=10, block_size=4)
    old, new = new_sequence(prompt_of(8), 30), new_sequence(prompt_of(9, seed=1), 24)
    run(sim, old, new)
    assert sim.scheduler.num_preemptions
    assert new.num_cached_tokens == 0
    assert sim.scheduler.prefix_cache_queries == 8 + 9
    assert sim.scheduler.prefix_cache_hits == 0


def test_a_preempted_sequence_finds_what_it_left() -> None:
    """Recomputation costs only what has been overwritten since."""
    computed = {}
    for caching in (True, False):
        sim = simulation(num_stages=1, num_blocks=24, block_size=4, caching=caching)
        sequences = [new_sequence(prompt_of(20, seed=i), 40) for i in range(3)]
        run(sim, *sequences)
        assert sim.scheduler.num_preemptions
        computed[caching] = prompt_tokens_computed(sim)
    assert computed[True] < computed[False]


def test_requests_that_come_together_wait_for_the_one_that_computes() -> None:
    sim = simulation()
    sequences = [new_sequence(prompt_of(100), 6, choice_index=i) for i in range(8)]
    run(sim, *sequences)
    assert prompt_tokens_computed(sim) == 100 + 7 * 4
    first = sim.scheduled[0]
    assert len(first.rows) == 1


def test_who_computes_the_same_at_once_corrupts_nothing() -> None:
    """The first prompt's writer is aborted while its step is in flight: the followers read
    what it leaves."""
    sim = simulation(num_stages=4)
    doomed = new_sequence(prompt_of(200), 8)
    sim.scheduler.add(doomed)
    sim.pump()
    followers = [new_sequence([*prompt_of(192), *prompt_of(9, seed=i)], 8) for i in range(1, 4)]
    for follower in followers:
        sim.scheduler.add(follower)
    sim.scheduler.abort(doomed)
    sim.run()
    for follower in followers:
        assert_right(follower)
        assert follower.num_cached_tokens == 192


def test_the_cache_gives_way_to_those_who_run() -> None:
    sim = simulation(num_blocks=20)
    run(sim, *[new_sequence(prompt_of(200, seed=i), 50) for i in range(5)])
    assert sim.scheduler.num_free_blocks == 20


def test_salts_keep_tenants_apart() -> None:
    sim = simulation()
    run(sim, new_sequence(prompt_of(64), 2, cache_salt="a"))
    other = new_sequence(prompt_of(64), 2, cache_salt="b")
    same = new_sequence(prompt_of(64), 2, cache_salt="a")
    run(sim, other, same)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 48)


def test_a_new_epoch_starts_empty() -> None:
    """A hit in the cache of stages that are gone would read what is not there."""
    sim = simulation()
    run(sim, new_sequence(prompt_of(64), 2))
    sim.scheduler.restart(epoch=2)
    again = Simulation(sim.scheduler, simulation().mesh)
    again.mesh.epoch = 2
    follower = new_sequence(prompt_of(64), 2)
    run(again, follower)
    assert follower.num_cached_tokens == 0


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    other=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_size=st.integers(1, 8),
)
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(
    tokens: list[int], other: list[int], block_size: int
) -> None:
    hashes: list[bytes] = []
    others: list[bytes] = []
    extend_block_hashes(hashes, tokens, block_size)
    extend_block_hashes(others, other, block_size)
    for index, (one, two) in enumerate(zip(hashes, others, strict=False)):
        end = (index + 1) * block_size
        assert (one == two) == (tokens[:end] == other[:end])


@given(tokens=st.lists(st.integers(0, 9), max_size=30), cut=st.integers(0, 30))
def test_hashes_grow_with_the_log(tokens: list[int], cut: int) -> None:
    whole: list[bytes] = []
    grown: list[bytes] = []
    extend_block_hashes(whole, tokens, 4)
    extend_block_hashes(grown, tokens[:cut], 4)
    extend_block_hashes(grown, tokens, 4)
    assert grown == whole


def test_a_long_prompt_is_hashed_quickly() -> None:
    tokens = prompt_of(8192)
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        extend_block_hashes([], tokens, BLOCK_SIZE)
        best = min(best, time.process_time() - started)
    assert best < 5e-3
