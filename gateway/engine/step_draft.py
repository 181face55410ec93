"""A step in the making: from the scheduler's decisions to the message for the stages."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from gateway.engine.scheduled_step import ScheduledRow, ScheduledStep
from gateway.engine.sequence import ExpectedToken, Sequence
from gateway.engine.wire import slot_start
from stagemesh.v1 import step_pb2

UNKNOWN_TOKEN = (0,)
"""Stands where a reference gives the token."""


class StepDraft:
    """Rows so far, and the sequences' side of them: what is sent and what is expected."""

    __slots__ = (
        "_message",
        "free_steps",
        "num_prompt_tokens",
        "num_tokens",
        "round_steps",
        "rows",
        "short_of_blocks",
        "step_id",
    )

    def __init__(self, epoch: int, step_id: int, free_steps: int) -> None:
        self._message = step_pb2.Step(epoch=epoch, step_id=step_id)
        self.step_id = step_id
        self.free_steps = free_steps
        """Steps that may still be sent before a result is due, this one included."""
        self.rows: list[ScheduledRow] = []
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.round_steps = 0
        self.short_of_blocks = False
        """Somebody got no block: this is no step for newcomers."""

    def start(self, sequence: Sequence, slot: int) -> None:
        """A sequence enters a slot with this step."""
        self._message.starts.append(slot_start(sequence, slot))

    def add_row(
        self, sequence: Sequence, num_tokens: int, new_block_ids: Items[int], *, samples: bool
    ) -> None:
        """The next tokens of a sequence: of its log, or the one that it expects."""
        position = sequence.num_scheduled_tokens
        end = position + num_tokens
        row = self._message.rows.add(
            slot=sequence.slot,
            position=position,
            token_ids=sequence.token_ids[position:end] or UNKNOWN_TOKEN,
            num_sampled=1 if samples else 0,
        )
        if new_block_ids:
            row.new_block_ids.extend(new_block_ids)
        if sequence.expected:
            reference = row.references.add().reference
            reference.step_id, reference.row = sequence.expected[0]
        if samples:
            sequence.expected.append(ExpectedToken(self.step_id, len(self.rows)))
        if not self.rows and sequence.last_step_id:
            self.round_steps = self.step_id - sequence.last_step_id
        self.rows.append(ScheduledRow(sequence, 1 if samples else 0))
        self.num_tokens += num_tokens
        sequence.num_scheduled_tokens = end
        sequence.rows_in_flight += 1
        sequence.last_step_id = self.step_id

    def return_tokens(self) -> None:
        """Later steps will refer to what this one samples."""
        self._message.returns_tokens = True

    def finish(self, released_slots: Iterable[int]) -> ScheduledStep:
        """The step, complete."""
        self._message.released_slots.extend(released_slots)
        return ScheduledStep(
            self._message, self.rows, self.num_tokens, self.num_prompt_tokens, self.round_steps
        )
