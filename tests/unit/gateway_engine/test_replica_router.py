"""Which replica takes a request: least outstanding work, with affinity for like beginnings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.router import AFFINITY_SLACK, AFFINITY_TOKENS, ReplicaRouter, most_sequences

ENOUGH = 10_000
LONG = tuple(range(AFFINITY_TOKENS + 10))


def test_the_least_busy_replica_takes_it() -> None:
    router = ReplicaRouter(3, ENOUGH)
    assert [router.take((1,), 1) for _ in range(3)] == [0, 1, 2]
    router.give_back(1, 1)
    assert router.take((1,), 1) == 1
    assert router.take((1,), 4) == 0
    assert router.outstanding == (5, 1, 1)


def test_prompts_that_begin_alike_stay_together_until_it_costs_too_much() -> None:
    router = ReplicaRouter(2, ENOUGH)
    assert router.take(LONG, 1) == 0
    for _ in range(AFFINITY_SLACK):
        assert router.take((*LONG, 7), 1) == 0
    assert router.take(LONG, 1) == 1
    # Who took it last is who knows it now.
    router.give_back(0, AFFINITY_SLACK + 1)
    assert router.take(LONG, 1) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=60), st.integers(1, 4))
def test_no_replica_is_far_ahead_and_nothing_is_lost(
    asked: list[tuple[int, int]], num_replicas: int
) -> None:
    router = ReplicaRouter(num_replicas, ENOUGH)
    taken = []
    for prefix, num_sequences in asked:
        taken.append((router.take((prefix, *LONG), num_sequences), num_sequences))
        spread = max(router.outstanding) - min(router.outstanding)
        assert spread <= AFFINITY_SLACK + max(n for _, n in taken)
    for replica, num_sequences in taken:
        router.give_back(replica, num_sequences)
    assert router.outstanding == (0,) * num_replicas


def test_a_replica_that_recovers_is_passed_over() -> None:
    """Also by prompts that it has seen the beginning of; they come back when it is there again."""
    router = ReplicaRouter(2, ENOUGH)
    assert router.take(LONG, 1, [0, 1]) == 0
    assert router.take(LONG, 1, [1]) == 1
    assert router.take((1,), 9, [1]) == 1
    assert router.take((1,), 1, [1]) == 1


def test_a_full_replica_is_not_preferred() -> None:
    """Though it has seen the beginning, and is not far ahead."""
    router = ReplicaRouter(2, 4)
    assert [router.take(LONG, 2) for _ in range(4)] == [0, 0, 1, 1]
    router.give_back(0, 2)
    assert router.take(LONG, 2) == 0


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 5), st.data())
def test_as_many_sequences_as_fit_find_a_replica_with_room(
    num_replicas: int, replica_sequences: int, n: int, data: st.DataObject
) -> None:
    router = ReplicaRouter(num_replicas, replica_sequences)
    most = most_sequences(num_replicas, replica_sequences, n)
    for _ in range(most // n):
        router.take((data.draw(st.integers(0, 1)), *LONG), n)
    assert max(router.outstanding) <= replica_sequences
    # And not one more does.
    router.take((1,), n)
    assert max(router.outstanding) > replica_sequences
