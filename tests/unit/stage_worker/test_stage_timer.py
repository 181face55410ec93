"""The four phases of a stage's clock."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stage_worker.clock import Phase, StageTimer, StepClock


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def test_what_the_loop_does_now_is_known() -> None:
    clock = Clock()
    timer = StageTimer(clock)
    clock.now_ns += 2_000_000_000
    assert timer.present() == (Phase.CONTROL_WAIT, 2.0)
    timer.enter(Phase.RECEIVE)
    clock.now_ns += 500_000_000
    assert timer.present() == (Phase.RECEIVE, 0.5)
    timer.restart()
    assert timer.present() == (Phase.RECEIVE, 0.0)


def phases(clock: StepClock) -> tuple[int, int, int, int]:
    return clock.control_wait_ns, clock.receive_ns, clock.compute_ns, clock.send_ns


def test_each_phase_has_its_own_time() -> None:
    clock = Clock()
    timer = StageTimer(clock)
    for phase, nanoseconds in (
        (Phase.CONTROL_WAIT, 5),
        (Phase.COMPUTE, 10),
        (Phase.RECEIVE, 30),
        (Phase.COMPUTE, 200),
        (Phase.SEND, 7),
    ):
        timer.enter(phase)
        clock.now_ns += nanoseconds
    found = timer.finish_step(3, 4)
    assert phases(found) == (5, 30, 210, 7)
    assert (found.compute_start_ns, found.compute_end_ns, found.end_ns) == (3, 4, clock.now_ns)
    sent = found.to_proto()
    assert {field.name: value for field, value in sent.ListFields()} == found._asdict()


def test_what_follows_a_step_is_computing_of_the_next() -> None:
    clock = Clock()
    timer = StageTimer(clock)
    timer.finish_step(0, 0)
    clock.now_ns += 11
    timer.enter(Phase.CONTROL_WAIT)
    clock.now_ns += 2
    assert phases(timer.finish_step(0, 0)) == (2, 0, 11, 0)


def test_what_belongs_to_no_step_is_forgotten() -> None:
    clock = Clock()
    timer = StageTimer(clock)
    clock.now_ns += 99
    timer.restart()
    clock.now_ns += 1
    assert sum(phases(timer.finish_step(0, 0))) == 1


@given(st.lists(st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 10**9)))))
def test_phases_add_up_to_the_time_between_the_ends_of_steps(
    steps: Sequence[Sequence[tuple[Phase, int]]],
) -> None:
    clock = Clock()
    timer = StageTimer(clock)
    ended_ns = clock.now_ns
    for step in steps:
        for phase, nanoseconds in step:
            timer.enter(phase)
            clock.now_ns += nanoseconds
        found = timer.finish_step(0, 0)
        assert sum(phases(found)) == found.end_ns - ended_ns
        ended_ns = found.end_ns
