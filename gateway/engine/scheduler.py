"""Decides what every step holds: pure, without clock, I/O or asyncio.

`schedule()` makes the next step or says that there is nothing to send now;
`apply()` takes the last stage's result for the oldest step in flight.

* Decodes first, then prompt chunks in order of service, under a token budget
  (`step_budget`: how much of each). The order of service is that of arrival, or
  of priority (`waiting_queue`).
* Where little of a prompt would fit beside decodes, all that are due go together in one
  step of a round, and its others are for prompts.
* As many steps as there are stages travel through them at a time, and with
  `async_batch_depth` so many more while no prompt is computed or could begin. The chunks
  of a prompt follow each other without waiting for a result.
* With `async_scheduling`, and while decodes and prompts are apart, there is one step
  more: a sequence's next decode is sent while its token is still being sampled, as a
  reference that the first stage replaces with what the last one hands it. So no stage
  waits for the way over the gateway. A token past a stop is dropped. Never more than one
  decode ahead, and never one that refers to a step less than a round before: it would
  make the first stage wait while others have work for it.
* A prompt starts behind what the prefix cache has of it (`block_manager`).
* When blocks run out, the last in the order of service give theirs to earlier
  ones and are computed again later from their token log. A sequence never takes
  blocks from an earlier one; it waits. So the first always gets on, and nobody
  starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from gateway.engine.block_manager import CachedPrefix
from gateway.engine.pace import Pace
from gateway.engine.running import RunningSequences
from gateway.engine.scheduled_step import ScheduledStep, SchedulerLimits, SequenceOutput
from gateway.engine.sequence import Sequence, SequenceStatus
from gateway.engine.sequence_blocks import SequenceBlocks
from gateway.engine.step_budget import decode_quota
from gateway.engine.step_costs import SeenStep, StepCosts
from gateway.engine.step_draft import StepDraft
from gateway.engine.types import FinishReason
from gateway.engine.waiting_queue import WaitingQueue, service_order
from gateway.engine.wire import sampled_by
from services.errors import ContextTooLong, StageFailed
from stagemesh.v1 import step_pb2

SECONDS_PER_NS = 1e-9


class Scheduler:
    """Owner of every sequence, slot and block of one engine."""

    def __init__(self, limits: SchedulerLimits, epoch: int) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        """Prompt tokens looked up in the prefix cache, once for each sequence."""
        self.prefix_cache_hits = 0
        """Those of them that were there."""
        self._num_arrivals = 0
        self._waiting = WaitingQueue(limits.policy)
        self._costs = StepCosts()
        self._start_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_step_id = 1
        self._last_decode_step_id = 0
        self._blocks = SequenceBlocks(
            self.limits.num_blocks,
            self.limits.block_size,
            enable_prefix_caching=self.limits.enable_prefix_caching,
        )
        self._running = RunningSequences(self.limits.max_num_seqs)
        self._pace = Pace(self.limits, self._running, self._waiting, self._costs)
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
        num_tokens = num_prompt_tokens + max_tokens - 1
        if not self._blocks.can_ever_hold(num_tokens):
            limits = self.limits
            raise ContextTooLong(
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} need "
                f"{_ceil_div(num_tokens, limits.block_size)} KV blocks, and the cache has "
                f"{limits.num_blocks} ({limits.num_blocks * limits.block_size} tokens): "
                "ask for fewer tokens or raise --kv-cache-memory-bytes",
                param="max_tokens",
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. Raises `ContextTooLong` as `check` does."""
        self.check(sequence.prompt_length, sequence.stop.max_tokens)
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.add(sequence)

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

    def count_failure(self) -> list[Sequence]:
        """The stages have failed: counts it for every sequence that was at work on them, and
        returns those."""
        at_work = [sequence for sequence in self._running if sequence.rows_in_flight]
        for sequence in at_work:
            sequence.num_failures += 1
        return at_work

    def restart(self, epoch: int) -> int:
        """Forgets what the stages hold: every sequence is computed again from its log.

        Step ids start at 1 again. Results of the epoch before are ignored. Returns the number of
        tokens that the stages had been sent and will be sent again.
        """
        replayed = sum(sequence.num_scheduled_tokens for sequence in self._running)
        for sequence in list(self._running):
            self._vacate(sequence)
            self._requeue(sequence)
        for sequence in self._waiting:
            sequence.expected.clear()
            sequence.rows_in_flight = 0
            sequence.last_step_id = 0
        self._start_epoch(epoch)
        return replayed

    def schedule(self) -> ScheduledStep | None:
        """Makes the next step, or None while there is nothing to send.

        Call it until it returns None, after every `add`, `finish` and `apply`.
        """
        self._pace.apart = self._are_apart()
        free_steps = self._pace.most_in_flight() - len(self._in_flight)
        if free_steps <= 0:
            return None
        draft = StepDraft(self._epoch, self._next_step_id, free_steps)
        if self._pace.apart:
            self._fill_with_either(draft)
        else:
            self._add_decodes(draft)
            self._add_prompt_chunks(draft)
        if not draft.rows:
            return None
        scheduled = draft.finish(self._running.take_released_slots())
        self._next_step_id += 1
        self._in_flight.append(scheduled)
        if scheduled.num_decodes:
            self._last_decode_step_id = scheduled.step.step_id
        return scheduled

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
        sampled = sampled_by(self._in_flight[0], result)  # Refused whole, before anything changes.
        scheduled = self._in_flight.popleft()
        self._blocks.step_done(result.step_id)
        self._costs.observe(
            SeenStep(
                scheduled.num_prompt_tokens,
                scheduled.num_decodes,
                result.clock.compute_ns * SECONDS_PER_NS,
                result.clock.end_ns * SECONDS_PER_NS,
                scheduled.round_steps,
            )
        )
        outputs = []
        for index, row in enumerate(scheduled.rows):
            sequence = row.sequence
            sequence.rows_in_flight -= 1
            if index not in sampled:
                continue
            token_ids, logprobs = sampled[index]
            sequence.expected.popleft()
            accepted = self._accept(sequence, token_ids)
            outputs.append(SequenceOutput(sequence, accepted, logprobs[: len(accepted)]))
        return outputs

    # Filling a step.

    def _are_apart(self) -> bool:
        """Whether decodes and prompts, of which there are both, go in different steps."""
        if not self._pace.would_be_apart():
            return False
        if self._running.prefilling:
            return True
        return self._next_admission(self._next_step_id) is not None

    def _fill_with_either(self, draft: StepDraft) -> None:
        """All decodes, a round after they went the last time; prompts in between."""
        due = draft.step_id - self._last_decode_step_id >= self.limits.num_stages
        if not due:
            self._add_prompt_chunks(draft)
            if not draft.rows:
                self._add_decodes(draft)
            return
        self._add_decodes(draft, together=True)
        if not draft.rows and not any(scheduled.num_decodes for scheduled in self._in_flight):
            self._add_prompt_chunks(draft)

    def _add_decodes(self, draft: StepDraft, *, together: bool = False) -> None:
        latest = draft.step_id - self._pace.steps_of_a_round()
        ready = [sequence for sequence in self._running.ready if _can_decode(sequence, latest)]
        if not ready:
            return
        num_batches = self._pace.num_batches()
        free_batches = max(1, num_batches - len(self._in_flight))
        quota = len(ready)
        if not together:
            quota = decode_quota(quota, self._running.num_decoding, free_batches, num_batches)
        quota = min(quota, self.limits.max_num_batched_tokens)
        for sequence in ready:
            if draft.num_tokens >= quota:
                break
            if sequence not in self._running.ready:
                continue  # Preempted for an earlier one a moment ago.
            if self._make_room(draft, sequence, sequence.num_scheduled_tokens + 1):
                del self._running.ready[sequence]
                self._add_row(draft, sequence, 1)

    def _add_prompt_chunks(self, draft: StepDraft) -> None:
        if not self._running.prefilling and not self._waiting:
            return
        budget = min(
            self.limits.max_num_batched_tokens - draft.num_tokens,
            self._pace.prompt_tokens(draft.free_steps, self._uncached(draft)),
        )
        for sequence in list(self._running.prefilling):
            if budget <= 0:
                return
            if sequence.status is SequenceStatus.RUNNING:
                budget -= self._add_chunk(draft, sequence, budget)
        while budget > 0 and not draft.short_of_blocks:
            prefix = self._next_admission(draft.step_id)
            if prefix is None:
                return
            sequence = self._waiting.admit_first()
            self._admit(draft, sequence, prefix)
            budget -= self._add_chunk(draft, sequence, budget)

    def _uncached(self, draft: StepDraft) -> Iterator[int]:
        """Tokens to compute of each prompt that gets a slot next."""
        for sequence in islice(self._waiting, self._running.num_free_slots):
            cached = len(self._blocks.find_prefix(sequence, draft.step_id).blocks)
            yield len(sequence.token_ids) - cached * self.limits.block_size

    def _next_admission(self, step_id: int) -> CachedPrefix | None:
        """What is cached of the first in the queue, if it can run now: if it gets a slot and,
        for certain, the blocks of its log."""
        sequence = self._waiting.first
        if sequence is None or not self._running.num_free_slots:
            return None
        if sequence.rows_in_flight:
            return None  # Preempted; a token of it is still on the way.
        prefix = self._blocks.find_prefix(sequence, step_id)
        if prefix.grows:
            return None  # This very step computes more of it: the next one need not.
        # Prompts that run count in full. One more block for each running sequence keeps a
        # newcomer from being preempted at once.
        needed = self._blocks.free_blocks_taken(sequence, prefix) + len(self._running)
        needed += self._blocks.missing_in_all(self._running.prefilling)
        return prefix if needed <= self._blocks.num_free else None

    def _admit(self, draft: StepDraft, sequence: Sequence, prefix: CachedPrefix) -> None:
        slot = self._running.admit(sequence)
        self._blocks.start(sequence, prefix)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_scheduled_tokens
            if self.limits.enable_prefix_caching:
                self.prefix_cache_queries += sequence.prompt_length
                self.prefix_cache_hits += sequence.num_cached_tokens
        draft.start(sequence, slot)

    def _add_chunk(self, draft: StepDraft, sequence: Sequence, budget: int) -> int:
        """Adds as much of a prompt as budget and blocks allow; returns its tokens."""
        position = sequence.num_scheduled_tokens
        if not self._make_room(draft, sequence, position + 1):
            return 0
        room = self._blocks.room(sequence) - position
        num_tokens = min(sequence.num_unscheduled_tokens, budget, room)
        if num_tokens == sequence.num_unscheduled_tokens:
            self._running.prefilling.remove(sequence)
        self._add_row(draft, sequence, num_tokens)
        draft.num_prompt_tokens += num_tokens
        return num_tokens

    def _add_row(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> None:
        end = sequence.num_scheduled_tokens + num_tokens
        samples = num_tokens == sequence.num_unscheduled_tokens
        new_block_ids = self._blocks.grow(sequence, end, draft.step_id)
        draft.add_row(sequence, num_tokens, new_block_ids, samples=samples)
        if samples and self._pace.sends_ahead and sequence.num_tokens_to_come > 0:
            self._running.ready[sequence] = None
            draft.return_tokens()

    def _make_room(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Sees to it that `num_tokens` of a sequence get blocks, at the cost of later ones."""
        needed = self._blocks.missing(sequence, num_tokens)
        while needed > self._blocks.num_free:
            draft.short_of_blocks = True
            if sequence.expected or self._blocks.come_free_for(needed):
                return False  # Its token may be its last; or enough are on their way.
            later = [
                other
                for other in self._running
                if other.rank > sequence.rank and other.last_step_id != draft.step_id
            ]
            if not later:
                return False
            self._preempt(max(later, key=service_order))
        return True

    # Ends of lives.

    def _accept(self, sequence: Sequence, token_ids: Iterable[int]) -> tuple[int, ...]:
        sampled = tuple(token_ids)
        count = 0
        for count, token_id in enumerate(sampled, 1):  # noqa: B007 (counts what was accepted)
            if sequence.append(token_id):
                break
        if sequence.finish_reason is not None:
            self._end(sequence)
        elif sequence.status is SequenceStatus.RUNNING and not sequence.expected:
            self._running.ready[sequence] = None
        return sampled[:count]

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
        self._waiting.put_back(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes slot and blocks away. Its rows in flight finish on the stages first: the slot is
        released by a later step, and the blocks stay fenced until then."""
        self._blocks.release(sequence)
        self._running.vacate(sequence)


def _can_decode(sequence: Sequence, latest_step_id: int) -> bool:
    """Whether its last token is known, or the only one expected and of that step or before."""
    expected = sequence.expected
    return not expected or (len(expected) == 1 and expected[0].step_id <= latest_step_id)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
