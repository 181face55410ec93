"""Steps that wait at the gateway to go with others: none is lost, and no stage waits for one."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gateway.pipeline.held_steps import HeldSteps

NUM_STEPS = 120


def given_at_once(held: HeldSteps, num_stages: int) -> list[range]:
    return [held.release(pp_rank) for pp_rank in range(num_stages)]


@pytest.mark.parametrize(
    ("num_stages", "in_flight", "messages"), [(2, 3, 1.5), (4, 5, 2.9), (8, 9, 3.6)]
)
def test_later_stages_get_several_steps_at_a_time(
    num_stages: int, in_flight: int, messages: float
) -> None:
    """Stage i gets i steps at a time where as many are in flight as stages, and one."""
    held = HeldSteps(range(num_stages))
    count = 0
    for step_id in range(1, 1001):
        held.done(max(0, step_id - in_flight))
        held.add(step_id, is_alike=True)
        count += sum(bool(steps) for steps in given_at_once(held, num_stages))
    assert count / 1000 == pytest.approx(messages + 0.5 * (num_stages == 2), abs=0.25)


@settings(max_examples=200)
@given(
    num_stages=st.integers(1, 9),
    moves=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=120),
)
def test_every_step_comes_to_every_stage_once_and_in_order(
    num_stages: int, moves: list[tuple[bool, bool]]
) -> None:
    """Whatever is sent and done when: and what the mesh has to do next, all stages have."""
    held = HeldSteps(range(num_stages))
    last = done = 0
    got: list[list[int]] = [[] for _ in range(num_stages)]
    for is_new, is_alike in moves:
        if is_new:
            last += 1
            held.add(last, is_alike=is_alike)
        elif done < last:
            done += 1
            held.done(done)
        for pp_rank, steps in enumerate(given_at_once(held, num_stages)):
            got[pp_rank] += steps
            assert got[pp_rank] == list(range(1, len(got[pp_rank]) + 1))
            assert held.given(pp_rank) == len(got[pp_rank])
            assert len(got[pp_rank]) >= min(last, done + 3)
        assert held.given_to_all == min(len(steps) for steps in got)


def test_a_prompt_waits_for_nothing_and_nothing_waits_behind_it() -> None:
    held = HeldSteps(range(8))
    for step_id in range(1, 9):
        held.add(step_id, is_alike=True)
        given_at_once(held, 8)
    assert held.given(7) == 3
    held.add(9, is_alike=False)
    given_at_once(held, 8)
    assert held.given_to_all == 9
    held.add(10, is_alike=True)
    given_at_once(held, 8)
    assert held.given_to_all == 10
    held.done(9)
    for step_id in range(11, 20):
        held.add(step_id, is_alike=True)
        given_at_once(held, 8)
    assert held.given_to_all == 12


def seconds_taken(
    stage_seconds: Sequence[float],
    in_flight: int,
    message_seconds: float,
    release: Callable[[HeldSteps, int], range],
) -> float:
    """How long a pipeline takes for many steps; each is sent once the one `in_flight` before it is
    done, and each stage prepares a step while it computes the one before."""
    num_stages = len(stage_seconds)
    held = HeldSteps(range(num_stages))
    events: list[tuple[float, int, int, int]] = []
    order = itertools.count()
    arrived = [[0.0] * (NUM_STEPS + 1) for _ in stage_seconds]
    known = [0] * num_stages
    ends = [[0.0] * (NUM_STEPS + 1) for _ in stage_seconds]
    computed = [0] * num_stages

    def send(now: float, step_id: int) -> None:
        if step_id <= NUM_STEPS:
            held.add(step_id, is_alike=True)
        for pp_rank in range(num_stages):
            for given_id in release(held, pp_rank):
                arrived[pp_rank][given_id] = now + message_seconds
                known[pp_rank] = given_id
        for pp_rank in range(num_stages):
            while computed[pp_rank] < known[pp_rank]:
                step = computed[pp_rank] + 1
                before = ends[pp_rank - 1][step] if pp_rank else 0.0
                if pp_rank and computed[pp_rank - 1] < step:
                    break
                start = max(arrived[pp_rank][step], before, ends[pp_rank][step - 1])
                ends[pp_rank][step] = start + stage_seconds[pp_rank]
                computed[pp_rank] = step
                if pp_rank == num_stages - 1:
                    heapq.heappush(
                        events, (ends[pp_rank][step] + message_seconds, next(order), step, 0)
                    )

    for step_id in range(1, in_flight + 1):
        send(0.0, step_id)
    last = in_flight
    while events:
        now, _, done, _ = heapq.heappop(events)
        held.done(done)
        last += 1
        send(now, last)
    assert computed == [NUM_STEPS] * num_stages
    return ends[-1][-1] - ends[-1][NUM_STEPS // 2]


def at_once(held: HeldSteps, pp_rank: int) -> range:
    """What `release` would do if nothing ever waited."""
    first = held.given(pp_rank) + 1
    held._given[pp_rank] = held._last
    return range(first, held._last + 1)


@settings(max_examples=150, deadline=None)
@given(
    stage_seconds=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=9),
    extra=st.integers(0, 3),
    message_share=st.floats(0.0, 0.5),
)
def test_holding_steps_back_costs_no_throughput(
    stage_seconds: list[float], extra: int, message_share: float
) -> None:
    """Whatever each stage takes, where a message takes at most half of what the slowest does: a
    result and the message behind it are two."""
    message_seconds = message_share * max(stage_seconds)
    in_flight = len(stage_seconds) + 1 + extra
    plain = seconds_taken(stage_seconds, in_flight, message_seconds, at_once)
    held = seconds_taken(stage_seconds, in_flight, message_seconds, HeldSteps.release)
    assert held <= plain * 1.02 + 1e-9
