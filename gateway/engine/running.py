"""Sequences with a slot, and what can be sent of each next. Pure bookkeeping, one owner."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator

from gateway.engine.sequence import Sequence, SequenceStatus
from gateway.engine.waiting_queue import service_order


class RunningSequences:
    """Each is in one of three places: its prompt is not sent yet, it is ready to decode (its
    token may still be expected), or nothing is to be sent before its token is known."""

    __slots__ = ("_free_slots", "_released_slots", "_sequences", "prefilling", "ready")

    def __init__(self, max_num_seqs: int) -> None:
        self._free_slots = list(range(max_num_seqs))
        self._released_slots: list[int] = []
        # Dicts stand for ordered sets.
        self._sequences: dict[Sequence, None] = {}
        self.prefilling: list[Sequence] = []
        """In order of service."""
        self.ready: dict[Sequence, None] = {}
        """In order of their last tokens."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def num_decoding(self) -> int:
        """Those whose prompts are sent."""
        return len(self._sequences) - len(self.prefilling)

    @property
    def num_free_slots(self) -> int:
        """How many more can run."""
        return len(self._free_slots)

    def admit(self, sequence: Sequence) -> int:
        """Gives a sequence a slot, which it returns; its prompt is to be sent."""
        slot = heapq.heappop(self._free_slots)
        sequence.slot = slot
        sequence.status = SequenceStatus.RUNNING
        self._sequences[sequence] = None
        insort(self.prefilling, sequence, key=service_order)
        return slot

    def vacate(self, sequence: Sequence) -> None:
        """Takes the slot away. Rows in flight finish on the stages first: the slot is released by a
        later step."""
        if sequence.slot is None:
            raise RuntimeError(f"{sequence.request_id} is running without a slot")
        self._released_slots.append(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = None
        del self._sequences[sequence]
        self.ready.pop(sequence, None)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)

    def take_released_slots(self) -> list[int]:
        """Slots that are free from the next step on."""
        released, self._released_slots = self._released_slots, []
        return released
