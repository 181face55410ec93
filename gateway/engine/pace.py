"""How many steps are under way, and how much of prompts each may hold: what the scheduler decides
with, from how many sequences there are of each kind and what steps have been seen to cost."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.engine.running import RunningSequences
from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.step_budget import (
    ChunkBesideDecodes,
    chunk_beside_decodes,
    lone_prompt_chunk,
)
from gateway.engine.step_costs import StepCosts
from gateway.engine.waiting_queue import WaitingQueue


class Pace:
    """Of one epoch; changes nothing of what it looks at."""

    __slots__ = ("_costs", "_limits", "_running", "_waiting", "apart")

    def __init__(
        self,
        limits: SchedulerLimits,
        running: RunningSequences,
        waiting: WaitingQueue,
        costs: StepCosts,
    ) -> None:
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._costs = costs
        self.apart = False
        """Decodes and prompts, of which there are both, go in different steps now."""

    def num_batches(self) -> int:
        """Batches that travel at a time now; those beyond it that are on their way just end.

        A later stage posts the receive of every step that it was given, of up to
        `max_num_batched_tokens` x hidden with prompts, which the memory plan does not count. So
        batches beyond one for each stage are for decodes alone, which are small.
        """
        if self._running.prefilling or (self._waiting and self._running.num_free_slots):
            return self._limits.num_stages
        return self._limits.num_batches

    def most_in_flight(self) -> int:
        """Steps without a result."""
        # With one step more than there are batches, the first stage has its next one before the
        # gateway has heard of the last. Chunks of prompts lose nothing by queueing up; decodes do,
        # unless they are sent ahead: a batch more would make all of them smaller.
        if self._running.num_decoding == 0 or self.sends_ahead:
            return self.num_batches() + 1
        return self.num_batches()

    @property
    def sends_ahead(self) -> bool:
        """Whether decodes are sent before the token is known that they follow."""
        # Apart from prompts decodes are due as a stage is done with one: it should not ask for them
        # then.
        return self._limits.async_scheduling or self.apart

    def steps_of_a_round(self) -> int:
        """After so many, a decode does not keep others waiting that could run."""
        if self._running.prefilling or self._waiting:
            return self.num_batches()
        return min(self.num_batches(), self._running.num_decoding)

    def would_be_apart(self) -> bool:
        """Whether decodes and prompts should go in different steps, if there are prompts that
        can."""
        running = self._running
        if not running.num_decoding or not (running.prefilling or self._waiting):
            return False
        if running.num_decoding > self._limits.max_num_batched_tokens:
            return False
        return self._chunk_beside_decodes().apart

    def prompt_tokens(self, free_steps: int, uncached: Iterable[int]) -> int:
        """Tokens of prompts for the next step: at least one, and no more than any step may hold.

        `free_steps` can be sent before a result is due. `uncached` is how much of each prompt that
        gets a slot next is to be computed; as many are asked for as matter.
        """
        limits = self._limits
        if self._running.num_decoding:
            return self._chunk_beside_decodes().num_tokens
        whole = sum(len(sequence.token_ids) for sequence in self._running.prefilling)
        pending = sum(sequence.num_unscheduled_tokens for sequence in self._running.prefilling)
        most = limits.max_num_batched_tokens * free_steps
        candidates = iter(uncached)
        while pending < most and (num_tokens := next(candidates, None)) is not None:
            whole += num_tokens
            pending += num_tokens
        return lone_prompt_chunk(
            self._costs, whole, pending, limits.num_stages, limits.min_prompt_chunk_tokens
        )

    def _chunk_beside_decodes(self) -> ChunkBesideDecodes:
        limits = self._limits
        return chunk_beside_decodes(
            self._costs,
            num_prompts=len(self._running.prefilling)
            + min(len(self._waiting), self._running.num_free_slots),
            num_decodes=self._running.num_decoding,
            num_stages=limits.num_stages,
            default_tokens=limits.min_prompt_chunk_tokens,
        )
