"""Decides what every step holds: pure, without clock, I/O or asyncio.

`schedule()` makes the next step or says that there is nothing to send now;
`apply()` takes the last stage's result for the oldest step in flight.

* Decodes first, then prompt chunks in order of arrival, under a token budget.
* Up to `max_steps_in_flight` steps travel through the stages at a time. A
  sequence is in one sampling step at a time, but the chunks of its prompt may
  follow each other without waiting for a result.
* Running decodes are spread evenly over those steps: none takes more than its
  share, so that every stage has work.
* When blocks run out, the newest sequences give theirs to older ones and are
  computed again later from their token log. A sequence never takes blocks from
  an older one; it waits. So the oldest always gets on, and nobody starves.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.engine.block_manager import BlockManager
from gateway.engine.sequence import Sequence, SequenceStatus
from gateway.engine.types import FinishReason, TokenLogprob
from gateway.engine.wire import logprobs_from_proto, slot_start
from services.errors import ContextTooLong, StageFailed
from stagemesh.v1 import step_pb2

MIN_PROMPT_CHUNK_TOKENS = 128
"""A prompt is not cut finer than this to fill idle stages: below it, a chunk on a CPU
costs almost as much as a larger one (0.6 ms at 1 row, 3.7 ms at 128 for one linear)."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that the scheduler keeps to."""

    num_blocks: int
    """KV blocks of the weakest rank."""
    block_size: int
    """Tokens in a block."""
    max_num_seqs: int
    """Sequences with a slot, over all steps in flight."""
    max_num_batched_tokens: int
    """Query tokens in one step."""
    max_steps_in_flight: int
    """Usually the number of stages: fewer leave stages idle, more make batches small."""
    min_prompt_chunk_tokens: int = MIN_PROMPT_CHUNK_TOKENS
    """Prompts are not cut finer than this to fill idle stages."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Which sequence a row of a step belongs to, and how many tokens it samples."""

    sequence: Sequence
    num_sampled: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step to send, and whose rows it holds."""

    step: step_pb2.Step
    rows: list[ScheduledRow]

    @property
    def num_tokens(self) -> int:
        """Query tokens in the step."""
        return sum(len(row.token_ids) for row in self.step.rows)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """Tokens that a step brought to a sequence, whose `finish_reason` may be set by them."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    scheduled: ScheduledStep
    step_id: int
    free_steps: int
    """Steps that may still be sent before a result is due, this one included."""
    num_tokens: int = 0
    short_of_blocks: bool = False


class Scheduler:
    """Owner of every sequence, slot and block of one engine."""

    def __init__(self, limits: SchedulerLimits, epoch: int) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._waiting: deque[Sequence] = deque()
        self._start_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_step_id = 1
        self._blocks = BlockManager(self.limits.num_blocks, self.limits.block_size)
        self._free_slots = list(range(self.limits.max_num_seqs))
        self._released_slots: list[int] = []
        # Dicts stand for ordered sets. Every running sequence is in one of three places:
        # its prompt is not sent yet, it is ready to decode, or its next token is on the way.
        self._running: dict[Sequence, None] = {}
        self._prefilling: list[Sequence] = []
        self._ready: dict[Sequence, None] = {}
        self._in_flight: deque[ScheduledStep] = deque()

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps sent whose result has not been applied."""
        return len(self._in_flight)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, without those behind a fence."""
        return self._blocks.num_free

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises `ContextTooLong` when such a sequence could not run even if it were alone."""
        needed = self._blocks.blocks_for(num_prompt_tokens + max_tokens - 1)
        if needed > self._blocks.num_blocks:
            capacity = self._blocks.num_blocks * self._blocks.block_size
            raise ContextTooLong(
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} need {needed} KV "
                f"blocks, and the cache has {self._blocks.num_blocks} ({capacity} tokens): "
                "ask for fewer tokens or raise --kv-cache-memory-bytes",
                param="max_tokens",
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. Raises `ContextTooLong` as `check` does."""
        self.check(sequence.prompt_length, sequence.stop.max_tokens)
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence from outside; without effect on one that has ended."""
        self.finish(sequence, FinishReason.ABORT)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: str | None = None
    ) -> None:
        """Ends a sequence for a reason the scheduler cannot see, such as a stop string.

        Its slot is released with the next step; its blocks are free when the last step that
        touches them is done.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        self._end(sequence)

    def restart(self, epoch: int) -> None:
        """Forgets what the stages hold: every sequence is computed again from its log.

        Step ids start at 1 again. Results of the epoch before are ignored.
        """
        for sequence in sorted(self._running, key=_arrival, reverse=True):
            self._vacate(sequence)
            self._requeue(sequence)
        for sequence in self._waiting:
            sequence.rows_in_flight = 0
            sequence.last_step_id = 0
        self._start_epoch(epoch)

    def schedule(self) -> ScheduledStep | None:
        """Makes the next step, or None while there is nothing to send.

        Call it until it returns None, after every `add`, `finish` and `apply`.
        """
        free_steps = self._depth() - len(self._in_flight)
        if free_steps <= 0:
            return None
        step = step_pb2.Step(epoch=self._epoch, step_id=self._next_step_id)
        draft = _Draft(ScheduledStep(step, []), self._next_step_id, free_steps)
        self._add_decodes(draft)
        self._add_prompt_chunks(draft)
        if not draft.scheduled.rows:
            return None
        step.released_slots.extend(self._released_slots)
        self._released_slots.clear()
        self._next_step_id += 1
        self._in_flight.append(draft.scheduled)
        return draft.scheduled

    def apply(self, result: step_pb2.StepResult) -> list[SequenceOutput]:
        """Takes the result of the oldest step in flight.

        Sequences that have ended since are passed over; a preempted one keeps its token, so
        nothing sampled is lost. Raises `StageFailed` for a result that does not fit its step.
        """
        if result.epoch != self._epoch:
            return []
        if not self._in_flight or self._in_flight[0].step.step_id != result.step_id:
            due = self._in_flight[0].step.step_id if self._in_flight else "none"
            raise StageFailed(f"a result for step {result.step_id} came, due was {due}")
        scheduled = self._in_flight.popleft()
        self._blocks.step_done(result.step_id)
        result_rows = {row.row: row for row in result.rows}
        outputs = []
        for index, row in enumerate(scheduled.rows):
            sequence = row.sequence
            sequence.rows_in_flight -= 1
            if row.num_sampled == 0 or sequence.status is SequenceStatus.FINISHED:
                continue
            result_row = result_rows.get(index)
            token_ids = result_row.token_ids if result_row is not None else ()
            if result_row is None or not token_ids:
                raise StageFailed(f"step {result.step_id} brought no token for its row {index}")
            accepted = self._accept(sequence, token_ids)
            logprobs = logprobs_from_proto(result_row, len(accepted))
            outputs.append(SequenceOutput(sequence, accepted, logprobs))
        return outputs

    # How much goes into a step.

    def _num_decoding(self) -> int:
        return len(self._running) - len(self._prefilling)

    def _depth(self) -> int:
        # With one stage, a second decode batch in flight would only halve the first; but
        # chunks of prompts lose nothing by queueing up while nobody decodes.
        if self._num_decoding() == 0:
            return max(self.limits.max_steps_in_flight, 2)
        return self.limits.max_steps_in_flight

    def _decode_quota(self, draft: _Draft) -> int:
        # The first bound spreads what is ready over the steps that can still be sent; the
        # second keeps an even share when the batches in flight have become uneven.
        depth = self.limits.max_steps_in_flight
        return min(
            _ceil_div(len(self._ready), min(draft.free_steps, depth)),
            _ceil_div(self._num_decoding(), depth),
            self.limits.max_num_batched_tokens,
        )

    def _prompt_quota(self, draft: _Draft) -> int:
        # While stages are idle, pending prompts are cut so that each gets a part soon.
        budget = self.limits.max_num_batched_tokens - draft.num_tokens
        most = budget * draft.free_steps
        pending = sum(sequence.num_unscheduled_tokens for sequence in self._prefilling)
        for sequence, _ in zip(self._waiting, self._free_slots, strict=False):
            if pending >= most:
                return budget
            pending += len(sequence.token_ids)
        parts = min(draft.free_steps, pending // self.limits.min_prompt_chunk_tokens)
        return min(budget, _ceil_div(pending, max(parts, 1)))

    # Filling a step.

    def _add_decodes(self, draft: _Draft) -> None:
        if not self._ready:
            return
        quota = self._decode_quota(draft)
        for sequence in list(self._ready):
            if draft.num_tokens >= quota:
                break
            if sequence not in self._ready:
                continue  # Preempted for an older one a moment ago.
            if self._make_room(draft, sequence, sequence.num_scheduled_tokens + 1):
                del self._ready[sequence]
                self._add_row(draft, sequence, 1)

    def _add_prompt_chunks(self, draft: _Draft) -> None:
        if not self._prefilling and not self._waiting:
            return
        budget = self._prompt_quota(draft)
        for sequence in list(self._prefilling):
            if budget <= 0:
                return
            if sequence.status is SequenceStatus.RUNNING:
                budget -= self._add_chunk(draft, sequence, budget)
        while budget > 0 and not draft.short_of_blocks and self._can_admit():
            sequence = self._waiting.popleft()
            self._admit(draft, sequence)
            budget -= self._add_chunk(draft, sequence, budget)

    def _can_admit(self) -> bool:
        """Whether the first in the queue gets a slot and, for certain, the blocks of its log."""
        if not self._waiting or not self._free_slots:
            return False
        sequence = self._waiting[0]
        if sequence.rows_in_flight:
            return False  # Preempted; a token of it is still on the way.
        needed = self._blocks.blocks_for(len(sequence.token_ids))
        # Prompts that run count in full. One more block for each running sequence keeps a
        # newcomer from being preempted at once.
        needed += len(self._running)
        for other in self._prefilling:
            needed += self._blocks.blocks_for(len(other.token_ids)) - len(other.block_table)
        return needed <= self._blocks.num_free

    def _admit(self, draft: _Draft, sequence: Sequence) -> None:
        slot = heapq.heappop(self._free_slots)
        sequence.slot = slot
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence] = None
        insort(self._prefilling, sequence, key=_arrival)
        draft.scheduled.step.starts.append(slot_start(sequence, slot))

    def _add_chunk(self, draft: _Draft, sequence: Sequence, budget: int) -> int:
        """Adds as much of a prompt as budget and blocks allow; returns its tokens."""
        position = sequence.num_scheduled_tokens
        if not self._make_room(draft, sequence, position + 1):
            return 0
        blocks = len(sequence.block_table) + self._blocks.num_free
        room = blocks * self._blocks.block_size - position
        num_tokens = min(sequence.num_unscheduled_tokens, budget, room)
        if num_tokens == sequence.num_unscheduled_tokens:
            self._prefilling.remove(sequence)
        self._add_row(draft, sequence, num_tokens)
        return num_tokens

    def _add_row(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        position = sequence.num_scheduled_tokens
        end = position + num_tokens
        num_sampled = 1 if end == len(sequence.token_ids) else 0
        draft.scheduled.step.rows.add(
            slot=sequence.slot,
            position=position,
            token_ids=sequence.token_ids[position:end],
            new_block_ids=self._blocks.extend(sequence.block_table, end),
            num_sampled=num_sampled,
        )
        draft.scheduled.rows.append(ScheduledRow(sequence, num_sampled))
        draft.num_tokens += num_tokens
        sequence.num_scheduled_tokens = end
        sequence.rows_in_flight += 1
        sequence.last_step_id = draft.step_id

    def _make_room(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> bool:
        """Sees to it that `num_tokens` of a sequence get blocks, at the cost of newer ones."""
        needed = self._blocks.blocks_for(num_tokens) - len(sequence.block_table)
        while needed > self._blocks.num_free:
            draft.short_of_blocks = True
            if needed <= self._blocks.num_free + self._blocks.num_fenced:
                return False  # Enough are on their way.
            newer = [
                other
                for other in self._running
                if other.arrival > sequence.arrival and other.last_step_id != draft.step_id
            ]
            if not newer:
                return False
            self._preempt(max(newer, key=_arrival))
        return True

    # Ends of lives.

    def _accept(self, sequence: Sequence, token_ids: Iterable[int]) -> tuple[int, ...]:
        accepted: list[int] = []
        for token_id in token_ids:
            accepted.append(token_id)
            if sequence.append(token_id):
                break
        if sequence.finish_reason is not None:
            self._end(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._ready[sequence] = None
        return tuple(accepted)

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._vacate(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self._requeue(sequence)
        self.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        sequence.num_scheduled_tokens = 0
        behind = 0
        while behind < len(self._waiting) and self._waiting[behind].arrival < sequence.arrival:
            behind += 1
        self._waiting.insert(behind, sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes slot and blocks away. Its rows in flight finish on the stages first: the slot is
        released by a later step, and the blocks stay fenced until then."""
        if sequence.slot is None:
            raise RuntimeError(f"{sequence.request_id} is running without a slot")
        self._blocks.free(sequence.block_table, sequence.last_step_id)
        sequence.block_table = []
        self._released_slots.append(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = None
        del self._running[sequence]
        self._ready.pop(sequence, None)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
