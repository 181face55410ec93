"""Who is admitted next.

* `fcfs`: in order of arrival. The first in the queue waits for what it needs and
  nobody overtakes it, however much that is.
* `priority`: the lowest priority value first, ties in order of arrival. So that
  nobody waits for ever, the one that has waited longest is *promoted* after
  `MOST_OVERTAKINGS` others were admitted past it: it is next, and from then on
  comes before all that are not promoted, so it is not preempted for them either.

A preempted sequence comes back to its place. Pure bookkeeping, one owner.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from enum import Enum

from gateway.engine.sequence import Sequence

MOST_OVERTAKINGS = 32
"""Admissions past the one that has waited longest before its turn comes: at most one
admission in thirty-three is what strict priorities pay for starving nobody."""
PROMOTED = -(1 << 63)
"""Below every priority that a request can have."""


class SchedulingPolicy(str, Enum):
    """Order of service; the values are those of --scheduling-policy."""

    FCFS = "fcfs"
    PRIORITY = "priority"


def service_order(sequence: Sequence) -> tuple[int, int]:
    """The lower one is served first and preempted last; no two are equal."""
    return sequence.rank


class WaitingQueue:
    """Sequences without a slot, in order of service."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._sequences: list[Sequence] = []
        self._oldest: Sequence | None = None
        self._num_overtakings = 0
        """Admissions past `_oldest` since it is the one that has waited longest."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        """A newcomer, whose arrival is set."""
        priority = sequence.priority if self._policy is SchedulingPolicy.PRIORITY else 0
        sequence.rank = (priority, sequence.arrival)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence takes its place again."""
        insort(self._sequences, sequence, key=service_order)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that waits no longer, for a reason of its own."""
        self._sequences.remove(sequence)

    def admit_first(self) -> Sequence:
        """Takes the first out of the queue, and sees to it that nobody is passed for ever."""
        admitted = self._sequences.pop(0)
        if self._policy is SchedulingPolicy.PRIORITY and self._sequences:
            self._count_overtaking(admitted)
        return admitted

    def _count_overtaking(self, admitted: Sequence) -> None:
        oldest = min(self._sequences, key=lambda sequence: sequence.arrival)
        if oldest is not self._oldest:
            self._oldest, self._num_overtakings = oldest, 0
        if admitted.arrival < oldest.arrival or oldest.rank[0] == PROMOTED:
            return
        self._num_overtakings += 1
        if self._num_overtakings == MOST_OVERTAKINGS:
            self._sequences.remove(oldest)
            oldest.rank = (PROMOTED, oldest.arrival)
            self.put_back(oldest)
