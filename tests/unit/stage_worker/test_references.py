"""Query tokens by reference: the same text as by value, and what a stage refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.errors import StageFailed
from stage_worker.references import KEPT_STEPS
from stage_worker.runner import StageOutput
from stage_worker.slots import SlotTable
from stagemesh.v1 import step_pb2
from tests.stage_chain import GREEDY, Job, StageChain, random_prompts, run_jobs
from tests.tiny_models import VOCAB_SIZE, make_tiny_llama
from tests.unit.stage_worker.test_slot_table import LIMITS, row, start


def refer(query_index: int, step_id: int, row: int = 0, index: int = 0) -> step_pb2.QueryReference:
    reference = step_pb2.TokenReference(step_id=step_id, row=row, index=index)
    return step_pb2.QueryReference(query_index=query_index, reference=reference)


class ByReference:
    """Runs a chain with every token that the last stage has sampled given as a reference."""

    def __init__(self, chain: StageChain) -> None:
        self._runners = chain.runners
        self._returned: dict[int, Tensor] = {}
        self._sampled_at: dict[tuple[int, int], tuple[int, int]] = {}
        """(slot, position) of a token: the step and row that sample it."""
        self.num_references = 0

    def __call__(self, step: step_pb2.Step) -> list[step_pb2.ResultRow]:
        step.returns_tokens = True
        for slot in step.released_slots:
            self._sampled_at = {k: v for k, v in self._sampled_at.items() if k[0] != slot}
        for index, given in enumerate(step.rows):
            for query, position in enumerate(range(given.position, given.position + 999)):
                if query == len(given.token_ids):
                    break
                if (at := self._sampled_at.get((given.slot, position))) is not None:
                    given.token_ids[query] = 0
                    given.references.append(refer(query, *at))
                    self.num_references += 1
            if given.num_sampled:
                end = given.position + len(given.token_ids)
                self._sampled_at[given.slot, end] = (step.step_id, index)
        output = StageOutput((), [])
        for runner in self._runners:
            prepared = runner.prepare(step)
            output = runner.compute(prepared, output.sent, self._returned)
        if output.returned is not None:
            self._returned[step.step_id] = output.returned
        return output.rows


def test_the_text_is_that_of_tokens_given_by_value(tmp_path: Path) -> None:
    """Prompt chunks, decodes and a preemption mixed, at PP 1 and PP 2."""
    path = make_tiny_llama(tmp_path / "tiny", tied=True)
    prompts = random_prompts(4, VOCAB_SIZE)

    def jobs() -> list[Job]:
        penalized = step_pb2.SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.3)
        sampling = [GREEDY, penalized, step_pb2.SamplingParams(temperature=0.9, seed=5), GREEDY]
        return [Job(p, 12, sampling=s) for p, s in zip(prompts, sampling, strict=True)]

    expected = run_jobs(StageChain(path, [5]), jobs(), chunk=16, preempted_at={9: 1})
    for partition in ([5], [3, 2]):
        execute = ByReference(StageChain(path, partition))
        assert run_jobs(execute, jobs(), chunk=16, preempted_at={9: 1}) == expected
        assert execute.num_references > 30


def table() -> SlotTable:
    """Step 1 samples position 10 of slot 1 and returns it; step 2 decodes it, silently."""
    table = SlotTable(LIMITS, keeps_sampling=True)
    first = row(1, 0, 10, new_block_ids=[3, 5], num_sampled=1)
    other = row(2, 0, 2, new_block_ids=[4], num_sampled=0)
    starts = [start(1), start(2)]
    table.apply(step_pb2.Step(step_id=1, starts=starts, rows=[first, other], returns_tokens=True))
    decode = row(1, 10, 1, num_sampled=1, references=[refer(0, 1)])
    table.apply(step_pb2.Step(step_id=2, rows=[decode]))
    return table


REFUSED = {
    "step 2, which does not return its tokens": row(1, 11, 1, references=[refer(0, 2)]),
    "step 3, which does not return": row(1, 11, 1, references=[refer(0, 3)]),
    "row 2 of step 1, which samples no such token": row(1, 11, 1, references=[refer(0, 1, 2)]),
    "row 1 of step 1, which samples no such token": row(1, 11, 1, references=[refer(0, 1, 1)]),
    "token 1 of row 0 of step 1, which samples no": row(1, 11, 1, references=[refer(0, 1, 0, 1)]),
    "of slot 1 at position 10, not of slot 1 at position 11": row(
        1, 11, 1, references=[refer(0, 1)]
    ),
    "of slot 1 at position 10, not of slot 2 at position 2": row(2, 2, 1, references=[refer(0, 1)]),
    "for query token 1, which it does not have": row(1, 11, 1, references=[refer(1, 1)]),
    "for a draft": row(1, 11, 2, num_sampled=2, references=[refer(1, 1)]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_reference_is_refused(message: str) -> None:
    checked = table()
    with pytest.raises(StageFailed, match=message):
        checked.apply(step_pb2.Step(step_id=3, rows=[REFUSED[message]]))
    assert checked[1].length == 11


def test_how_far_back_a_reference_reaches() -> None:
    for distance, accepted in ((KEPT_STEPS, True), (KEPT_STEPS + 1, False)):
        checked = SlotTable(LIMITS, keeps_sampling=False)
        first = row(1, 0, 10, new_block_ids=[3, 5], num_sampled=1)
        checked.apply(
            step_pb2.Step(step_id=1, starts=[start(1)], rows=[first], returns_tokens=True)
        )
        for step_id in range(2, 1 + distance):
            checked.apply(step_pb2.Step(step_id=step_id))
        step = step_pb2.Step(step_id=1 + distance, rows=[row(1, 10, 1, references=[refer(0, 1)])])
        if accepted:
            checked.apply(step)
            (group,) = checked.references.resolve(step.rows)
            assert (group.step_id, *group.query_indices, *group.offsets) == (1, 0, 0)
        else:
            with pytest.raises(StageFailed, match="is not one of the last"):
                checked.apply(step)


def test_a_new_epoch_knows_no_steps() -> None:
    checked = table()
    checked.clear()
    step = step_pb2.Step(step_id=1, starts=[start(1)], returns_tokens=True)
    step.rows.append(row(1, 0, 1, new_block_ids=[1], references=[refer(0, 1)]))
    with pytest.raises(StageFailed, match="does not return"):
        checked.apply(step)


def test_what_is_not_asked_for_is_not_returned(tmp_path: Path) -> None:
    chain = StageChain(make_tiny_llama(tmp_path / "tiny"), [5])
    begun = step_pb2.SlotStart(slot=0, sampling=GREEDY)
    first = step_pb2.Step(step_id=1, starts=[begun], returns_tokens=True)
    first.rows.add(slot=0, token_ids=[1, 2, 3], new_block_ids=[0], num_sampled=1)
    (runner,) = chain.runners
    output = runner.compute(runner.prepare(first), ())
    assert output.returned is not None
    assert torch.equal(output.returned, torch.tensor(output.rows[0].token_ids))
    second = step_pb2.Step(step_id=2)
    second.rows.add(slot=0, position=3, token_ids=[4], num_sampled=1)
    assert runner.compute(runner.prepare(second), ()).returned is None
