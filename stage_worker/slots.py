"""What a stage remembers of its sequences between steps.

The gateway decides; a slot table applies. It checks a whole step before it
applies any of it, so a refused step changes nothing. Every stage keeps block
tables and lengths; only the last one keeps sampling state.

Block tables are one preallocated int32 tensor [max_num_seqs, max_blocks_per_seq].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from services.errors import StageFailed
from stage_worker.layers.attention.metadata import RowSpan
from stage_worker.references import ReferenceBook
from stage_worker.sampler import SamplingState
from stagemesh.v1 import step_pb2

ANY_POSITION = -1
"""Length of a slot that no row has used yet: its first row may start anywhere,
because a shared prefix can be in the cache already."""


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The sizes that a step is held to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


@dataclass(slots=True)
class Slot:
    """One sequence."""

    num_blocks: int = 0
    """Entries of its block table that are valid."""
    length: int = ANY_POSITION
    """Tokens in the cache after its last row."""
    num_unverified: int = 0
    """How many of those the last stage may have rejected: the next row may start
    up to this many positions earlier."""
    sampling: SamplingState | None = None


class SlotTable:
    """The slots of one stage on one rank."""

    def __init__(
        self, limits: SlotLimits, *, keeps_sampling: bool, device: torch.device | None = None
    ) -> None:
        """`device` is where the logits are, for what sampling keeps; absent is the CPU."""
        self._limits = limits
        self._device = device
        self._keeps_sampling = keeps_sampling
        self._slots: dict[int, Slot] = {}
        self.references = ReferenceBook()
        self.block_table = torch.zeros(
            (limits.max_num_seqs, limits.max_blocks_per_seq), dtype=torch.int32
        )
        self.block_table_array: np.ndarray = self.block_table.numpy()
        """The same memory."""

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def clear(self) -> None:
        """Empties all slots: a new epoch."""
        self._slots.clear()
        self.references.clear()

    def apply(self, step: step_pb2.Step) -> list[RowSpan]:
        """Applies releases, starts and rows, and returns the rows' spans.

        Raises `StageFailed` for a step that breaks a rule; then nothing has changed.
        """
        self._check(step)
        for slot in step.released_slots:
            del self._slots[slot]
        for start in step.starts:
            entry = Slot()
            if self._keeps_sampling:
                entry.sampling = SamplingState.from_start(
                    start, self._limits.vocab_size, self._device
                )
            self._slots[start.slot] = entry
        self.references.record(step)
        return [self._apply_row(row) for row in step.rows]

    def _apply_row(self, row: step_pb2.StepRow) -> RowSpan:
        entry = self._slots[row.slot]
        if row.new_block_ids:
            end = entry.num_blocks + len(row.new_block_ids)
            self.block_table_array[row.slot, entry.num_blocks : end] = row.new_block_ids
            entry.num_blocks = end
        span = RowSpan(row.slot, row.position, len(row.token_ids))
        entry.length = span.length
        entry.num_unverified = max(0, row.num_sampled - 1)
        return span

    def _check(self, step: step_pb2.Step) -> None:
        if self._are_plain_decodes(step):
            return
        problem = next(self._problems(step), None)
        if problem is not None:
            raise StageFailed(f"step {step.step_id} was refused: {problem}")

    def _are_plain_decodes(self, step: step_pb2.Step) -> bool:
        """Whether the step has rows of one token alone, and nothing is wrong with it: most steps
        are so, which is told here at a fraction of the cost. Others may be right as well."""
        limits = self._limits
        if step.released_slots or step.starts or len(step.rows) > limits.max_num_batched_tokens:
            return False
        seen: set[int] = set()
        for row in step.rows:
            slot, position, token_ids = row.slot, row.position, row.token_ids
            new_block_ids = row.new_block_ids
            entry = self._slots.get(slot)
            if entry is None or slot in seen or position != entry.length:
                return False
            seen.add(slot)
            if len(token_ids) != 1 or token_ids[0] >= limits.vocab_size or row.num_sampled > 1:
                return False
            if new_block_ids and max(new_block_ids) >= limits.num_blocks:
                return False
            num_blocks = entry.num_blocks + len(new_block_ids)
            if num_blocks > limits.max_blocks_per_seq or position >= limits.max_model_len:
                return False
            if position >= num_blocks * limits.block_size:
                return False
            if row.references and any(self.references.problems(step.step_id, row)):
                return False
        return True

    def _problems(self, step: step_pb2.Step) -> Iterator[str]:
        """Yields what is wrong, first things first."""
        limits = self._limits
        used = set(self._slots)
        for slot in step.released_slots:
            if slot not in used:
                yield f"it releases slot {slot}, which is empty"
            used.discard(slot)
        started = set()
        for start in step.starts:
            if start.slot >= limits.max_num_seqs:
                yield f"slot {start.slot} is outside 0 to {limits.max_num_seqs - 1}"
            if start.slot in used:
                yield f"slot {start.slot} is started, but in use"
            yield from self._start_problems(start)
            used.add(start.slot)
            started.add(start.slot)
        seen: set[int] = set()
        for index, row in enumerate(step.rows):
            if row.slot not in used:
                yield f"row {index} is of slot {row.slot}, which is empty"
                return
            if row.slot in seen:
                yield f"row {index} is the second one of slot {row.slot}"
            seen.add(row.slot)
            entry = Slot() if row.slot in started else self._slots[row.slot]
            problems = chain(
                self._row_problems(row, entry), self.references.problems(step.step_id, row)
            )
            for problem in problems:
                yield f"row {index} (slot {row.slot}) {problem}"
        yield from self._token_problems(step)

    def _start_problems(self, start: step_pb2.SlotStart) -> Iterator[str]:
        vocab_size = self._limits.vocab_size
        if not start.sampling.HasField("seed"):
            yield f"the start of slot {start.slot} has no seed"
        if any(token >= vocab_size for token in start.history_token_ids):
            yield f"the history of slot {start.slot} has a token outside 0 to {vocab_size - 1}"
        if any(token >= vocab_size for token in start.sampling.logit_bias):
            yield f"the logit bias of slot {start.slot} is outside 0 to {vocab_size - 1}"

    def _row_problems(self, row: step_pb2.StepRow, entry: Slot) -> Iterator[str]:
        limits = self._limits
        num_tokens = len(row.token_ids)
        end = row.position + num_tokens
        if num_tokens == 0:
            yield "has no query token"
        if row.num_sampled > num_tokens:
            yield f"samples {row.num_sampled} of {num_tokens} query tokens"
        if end > limits.max_model_len:
            yield f"ends at position {end}, above the longest sequence of {limits.max_model_len}"
        if entry.length != ANY_POSITION:
            earliest = entry.length - entry.num_unverified
            if not earliest <= row.position <= entry.length:
                expected = (
                    str(entry.length)
                    if earliest == entry.length
                    else f"{earliest} to {entry.length}"
                )
                yield f"starts at position {row.position}, but {expected} comes next"
        if row.new_block_ids and max(row.new_block_ids) >= limits.num_blocks:
            yield (f"is given block {max(row.new_block_ids)}, outside 0 to {limits.num_blocks - 1}")
        num_blocks = entry.num_blocks + len(row.new_block_ids)
        if num_blocks > limits.max_blocks_per_seq:
            yield f"has {num_blocks} blocks, more than the {limits.max_blocks_per_seq} of a slot"
        if num_blocks * limits.block_size < end:
            yield f"ends at position {end}, but its {num_blocks} blocks hold fewer tokens"

    def _token_problems(self, step: step_pb2.Step) -> Iterator[str]:
        limits = self._limits
        num_tokens = sum(len(row.token_ids) for row in step.rows)
        if num_tokens > limits.max_num_batched_tokens:
            yield f"it has {num_tokens} query tokens, above {limits.max_num_batched_tokens}"
        highest = max(chain.from_iterable(row.token_ids for row in step.rows), default=0)
        if highest >= limits.vocab_size:
            yield f"it has token id {highest}, outside 0 to {limits.vocab_size - 1}"
