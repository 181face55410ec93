"""The slot table: what a stage accepts, and that a refused step changes nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import event, given, settings

from services.errors import StageFailed
from stage_worker.slots import SlotLimits, SlotTable
from stagemesh.v1 import step_pb2

LIMITS = SlotLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=40,
    block_size=8,
    num_blocks=16,
    vocab_size=100,
)


def start(slot: int, **fields: object) -> step_pb2.SlotStart:
    sampling = step_pb2.SamplingParams(seed=1)
    return step_pb2.SlotStart(slot=slot, **{"sampling": sampling, **fields})


def row(slot: int, position: int, count: int, **fields: object) -> step_pb2.StepRow:
    return step_pb2.StepRow(slot=slot, position=position, token_ids=[7] * count, **fields)


def table_with_ten_tokens() -> SlotTable:
    """Slot 1 holds 10 tokens in blocks 3 and 5."""
    table = SlotTable(LIMITS, keeps_sampling=True)
    first = row(1, 0, 10, new_block_ids=[3, 5], num_sampled=1)
    table.apply(step_pb2.Step(step_id=1, starts=[start(1)], rows=[first]))
    return table


def test_rows_extend_the_block_table_and_the_length() -> None:
    table = table_with_ten_tokens()
    spans = table.apply(step_pb2.Step(step_id=2, rows=[row(1, 10, 7, new_block_ids=[2])]))
    assert [(s.slot, s.position, s.num_tokens) for s in spans] == [(1, 10, 7)]
    assert table.block_table[1, :3].tolist() == [3, 5, 2]
    assert table[1].length == 17


def test_a_slot_is_released_before_it_is_started_again() -> None:
    table = table_with_ten_tokens()
    again = row(1, 0, 2, new_block_ids=[9])
    table.apply(step_pb2.Step(step_id=2, released_slots=[1], starts=[start(1)], rows=[again]))
    assert table.block_table[1, 0] == 9
    assert table[1].length == 2


def test_a_first_row_may_start_behind_a_shared_prefix() -> None:
    table = SlotTable(LIMITS, keeps_sampling=False)
    shared = row(0, 16, 4, new_block_ids=[1, 2, 3])
    table.apply(step_pb2.Step(step_id=1, starts=[start(0)], rows=[shared]))
    assert table[0].length == 20


def test_after_drafts_the_next_row_may_start_where_one_was_rejected() -> None:
    table = table_with_ten_tokens()
    table.apply(step_pb2.Step(step_id=2, rows=[row(1, 10, 4, num_sampled=4)]))
    for position in (10, 15):
        with pytest.raises(StageFailed, match="11 to 14 comes next"):
            table.apply(step_pb2.Step(step_id=3, rows=[row(1, position, 1)]))
    table.apply(step_pb2.Step(step_id=3, rows=[row(1, 12, 1)]))


REFUSED = {
    "releases slot 2, which is empty": step_pb2.Step(released_slots=[2]),
    "slot 1 is started, but in use": step_pb2.Step(starts=[start(1)]),
    "slot 4 is outside 0 to 3": step_pb2.Step(starts=[start(4)]),
    "slot 0 has no seed": step_pb2.Step(starts=[step_pb2.SlotStart(slot=0)]),
    "history of slot 0": step_pb2.Step(starts=[start(0, history_token_ids=[100])]),
    "logit bias of slot 0": step_pb2.Step(
        starts=[start(0, sampling=step_pb2.SamplingParams(seed=1, logit_bias={100: 1.0}))]
    ),
    "row 0 is of slot 2, which is empty": step_pb2.Step(rows=[row(2, 0, 1)]),
    "second one of slot 1": step_pb2.Step(rows=[row(1, 10, 1), row(1, 11, 1)]),
    "starts at position 11, but 10 comes next": step_pb2.Step(rows=[row(1, 11, 1)]),
    "starts at position 9, but 10 comes next": step_pb2.Step(rows=[row(1, 9, 1)]),
    "no query token": step_pb2.Step(rows=[row(1, 10, 0)]),
    "samples 2 of 1": step_pb2.Step(rows=[row(1, 10, 1, num_sampled=2)]),
    "given block 16": step_pb2.Step(rows=[row(1, 10, 1, new_block_ids=[16])]),
    "2 blocks hold fewer": step_pb2.Step(rows=[row(1, 10, 7)]),
    "more than the 5 of a slot": step_pb2.Step(rows=[row(1, 10, 1, new_block_ids=[0] * 4)]),
    "above the longest sequence": step_pb2.Step(rows=[row(1, 10, 31, new_block_ids=[0, 1, 2])]),
    "token id 100": step_pb2.Step(rows=[step_pb2.StepRow(slot=1, position=10, token_ids=[100])]),
    "33 query tokens, above 32": step_pb2.Step(
        starts=[start(0)], rows=[row(0, 0, 32, new_block_ids=[6, 7, 8, 9])]
    ),
    "of step 0, which does not return": step_pb2.Step(
        rows=[row(1, 10, 1, references=[step_pb2.QueryReference(query_index=0)])]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_step_that_breaks_a_rule_changes_nothing(message: str) -> None:
    table = table_with_ten_tokens()
    # Everything before the fault is right, and must not be applied either.
    step = step_pb2.Step(step_id=2, starts=[start(3)], rows=[row(3, 0, 1, new_block_ids=[11])])
    step.MergeFrom(REFUSED[message])
    fault = step.rows[1:] or step.starts[1:] or step.released_slots
    assert fault
    if "row 0" in message:
        message = message.replace("row 0", "row 1")
    before = table.block_table.clone()
    with pytest.raises(StageFailed, match=message) as refused:
        table.apply(step)
    assert refused.value.message.startswith("step 2 was refused: ")
    with pytest.raises(KeyError):
        table[3]
    assert table[1].length == 10
    assert table[1].num_blocks == 2
    assert table.block_table.equal(before)


def test_only_the_last_stage_keeps_sampling_state() -> None:
    for keeps in (False, True):
        table = SlotTable(LIMITS, keeps_sampling=keeps)
        table.apply(step_pb2.Step(starts=[start(0)]))
        assert (table[0].sampling is not None) is keeps


def test_a_new_epoch_has_no_slots() -> None:
    table = table_with_ten_tokens()
    table.clear()
    with pytest.raises(KeyError):
        table[1]
    table.apply(step_pb2.Step(starts=[start(1)]))


def row_of(
    slot: int,
    ahead: int,
    tokens: list[int],
    sampled: int,
    blocks: list[int],
    refers: tuple[int, int, int] | None,
) -> step_pb2.StepRow:
    """A row of a slot that holds 10 tokens, `ahead` of where it goes on."""
    made = step_pb2.StepRow(
        slot=slot,
        position=max(0, 10 + ahead),
        token_ids=tokens,
        num_sampled=sampled,
        new_block_ids=blocks,
    )
    if refers is not None:
        step_id, row_index, index = refers
        reference = step_pb2.TokenReference(step_id=step_id, row=row_index, index=index)
        made.references.add(query_index=0, reference=reference)
    return made


DECODES = st.lists(
    st.builds(
        row_of,
        slot=st.sampled_from([0, 1, 2, 5]),
        ahead=st.sampled_from([-1, 0, 0, 0, 1, 30]),
        tokens=st.lists(st.sampled_from([7, 99, 100]), min_size=0, max_size=2),
        sampled=st.integers(0, 2),
        blocks=st.lists(st.sampled_from([0, 15, 16]), max_size=5),
        refers=st.sampled_from([None, None, (1, 0, 0), (1, 1, 0), (9, 0, 0)]),
    ),
    max_size=4,
)


@settings(max_examples=400)
@given(rows=DECODES)
def test_a_plain_decode_is_told_without_a_list_of_problems(
    rows: list[step_pb2.StepRow],
) -> None:
    """What is accepted at once has no problem; a decode that has none is accepted at once."""
    table = SlotTable(LIMITS, keeps_sampling=True)
    starts = [start(slot) for slot in (0, 1, 2)]
    for slot in (0, 1, 2):
        first = row(slot, 0, 8, new_block_ids=[3 * slot, 3 * slot + 1])
        table.apply(step_pb2.Step(step_id=1, starts=[starts[slot]], rows=[first]))
    second = [row(slot, 8, 2, num_sampled=1) for slot in (0, 1, 2)]
    table.apply(step_pb2.Step(step_id=1, rows=second, returns_tokens=True))
    step = step_pb2.Step(step_id=2, rows=rows)
    problem = next(table._problems(step), None)
    is_plain = all(len(r.token_ids) == 1 and r.num_sampled <= 1 for r in rows)
    assert table._are_plain_decodes(step) == (problem is None and is_plain)
    event(f"refused: {problem is not None}")
