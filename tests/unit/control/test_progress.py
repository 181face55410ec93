"""Who holds a step and who waits on whom, from who has answered what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.control.progress import (
    ProgressTable,
    StageProgress,
    explain_progress,
    furthest_behind,
)


def stages(sent: int, *done: int, silent: float = 12.34) -> list[StageProgress]:
    return [StageProgress(0, pp_rank, sent, each, silent) for pp_rank, each in enumerate(done)]


def give(table: ProgressTable, num_stages: int, step_id: int, now: float) -> None:
    for pp_rank in range(num_stages):
        table.given(pp_rank, step_id, now)


def test_the_stage_that_is_furthest_behind_holds_the_step() -> None:
    assert explain_progress(stages(44, 42, 41, 41)) == (
        "stage 1 has been silent for 12.3 s: it has done step 41 and holds step 42, whose "
        "activations stage 0 has sent: it computes, does not run, or they do not arrive; stage 2 "
        "waits for activations of step 42 from stage 1"
    )


def test_what_its_ranks_say_is_told_instead_of_what_may_be() -> None:
    doing = {1: "TP rank 0 has waited for activations for 12.0 s", 2: "not asked for"}
    words = explain_progress(stages(44, 42, 41, 41), doing)
    assert words is not None
    assert "has sent: TP rank 0 has waited for activations for 12.0 s; stage 2 waits" in words


def test_the_first_stage_waits_on_nobody() -> None:
    assert explain_progress(stages(1, 0, 0)) == (
        "stage 0 has been silent for 12.3 s: it has done no step yet and holds step 1, which needs "
        "nothing of another stage: it computes, or does not run; stage 1 waits for activations of "
        "step 1 from stage 0"
    )


def test_nothing_in_flight_is_nothing_to_explain() -> None:
    assert explain_progress(stages(7, 7, 7)) is None
    assert explain_progress([]) is None
    assert furthest_behind(stages(0, 0, 0)) is None


def test_silence_counts_from_the_last_answer_or_from_new_work() -> None:
    table = ProgressTable(1, {1, 0})
    give(table, 2, 1, now=100.0)
    give(table, 2, 2, now=104.0)
    table.answered(0, 1, now=105.0)
    first, second = table.stages(now=110.0)
    assert (first.dp_rank, first.pp_rank, first.sent_step_id, first.done_step_id) == (1, 0, 2, 1)
    assert (first.silent_seconds, second.silent_seconds) == (5.0, 10.0)
    for pp_rank, step_id in ((0, 2), (1, 1), (1, 2)):
        table.answered(pp_rank, step_id, now=111.0)
    # What lies idle for an hour is not silent when it gets work again.
    give(table, 2, 3, now=3711.0)
    assert [stage.silent_seconds for stage in table.stages(now=3712.0)] == [1.0, 1.0]


def test_a_stage_that_was_not_given_a_step_yet_has_nothing_to_do() -> None:
    """Later stages get steps later: one that has answered all it has is not silent."""
    table = ProgressTable(0, range(3))
    for pp_rank, step_id in enumerate((5, 4, 3)):
        table.given(pp_rank, step_id, now=0.0)
    for pp_rank, step_id in enumerate((4, 4, 2)):
        table.answered(pp_rank, step_id, now=1.0)
    assert [list(table.open_steps(pp_rank)) for pp_rank in range(3)] == [[5], [], [3]]
    found = table.stages(now=31.0)
    assert [stage.sent_step_id for stage in found] == [5, 4, 3]
    assert [stage.stalled_seconds for stage in found] == [30.0, 0.0, 30.0]
    words = explain_progress(found)
    assert words is not None
    assert words.startswith("stage 2 ") and "stage 1 waits" not in words
    # It has the step only from now on.
    table.given(1, 5, now=31.0)
    assert table.stages(now=33.0)[1].stalled_seconds == 2.0
    assert list(table.open_steps(1)) == [5]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 5))
def test_what_holds_is_never_idle_and_never_ahead(done: list[int], sent: int) -> None:
    # A stage cannot be ahead of the one before it, nor of what was given.
    ordered = sorted((min(each, sent) for each in done), reverse=True)
    found = stages(sent, *ordered)
    holder = furthest_behind(found)
    if holder is None:
        assert all(stage.is_idle for stage in found)
        return
    assert not holder.is_idle
    assert holder.done_step_id == min(ordered)
    words = explain_progress(found)
    assert words is not None and words.startswith(f"stage {holder.pp_rank} ")
    assert words.count("waits for activations") == len(ordered) - 1 - holder.pp_rank


@pytest.mark.parametrize("pp_rank", [0, 1, 2])
def test_every_stage_can_be_the_one(pp_rank: int) -> None:
    done = [9 if stage < pp_rank else 8 for stage in range(3)]
    holder = furthest_behind(stages(9, *done))
    assert holder is not None and holder.pp_rank == pp_rank


def test_a_stage_holds_a_step_only_since_those_before_it_have_moved() -> None:
    """Stage 1 was silent while stage 0 computed a long prompt: that was no fault of its own."""
    table = ProgressTable(0, range(2))
    give(table, 2, 1, 0.0)
    table.answered(0, 1, 30.0)
    assert table.held_seconds(1, 31.0) == pytest.approx(1.0)
    assert table.held_seconds(0, 31.0) == pytest.approx(1.0)
    table.forgive(40.0)
    assert table.held_seconds(1, 41.0) == pytest.approx(1.0)
