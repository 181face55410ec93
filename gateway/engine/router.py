"""Which replica of the pipeline takes a request: the one with the least outstanding work,
with affinity for prompts that begin alike.

Pure bookkeeping, one owner. Affinity pays where a replica keeps the KV blocks of
earlier prompts; it gives way when it would make one replica much busier, or when that one
has no room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

AFFINITY_TOKENS = 64
"""Prompts that share this many first tokens count as beginning alike; shorter ones have
little that is worth keeping."""
AFFINITY_SLACK = 4
"""Sequences that a preferred replica may be ahead of the least busy one."""
MAX_REMEMBERED_PREFIXES = 4096


def most_sequences(num_replicas: int, replica_sequences: int, n: int) -> int:
    """How many sequences of requests with `n` each all replicas can hold: the sequences of one
    request are not divided between replicas."""
    return num_replicas * (replica_sequences // n) * n


class ReplicaRouter:
    """Outstanding sequences of each replica, and who has seen which prefix last."""

    def __init__(self, num_replicas: int, replica_sequences: int) -> None:
        """`replica_sequences` may run and wait in each replica at a time."""
        self._replica_sequences = replica_sequences
        self._outstanding = [0] * num_replicas
        self._seen_by: OrderedDict[tuple[int, ...], int] = OrderedDict()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Sequences that each replica has taken and not finished."""
        return tuple(self._outstanding)

    def take(
        self,
        prompt_token_ids: Sequence[int],
        num_sequences: int,
        serving: Collection[int] | None = None,
    ) -> int:
        """Chooses a replica for a request and counts it there, until `give_back`: one of those
        `serving`, where there are any, and one with room, where there is any (the least busy has
        most)."""
        usable = serving or range(len(self._outstanding))
        least = min(usable, key=self._outstanding.__getitem__)
        chosen = least
        if len(prompt_token_ids) >= AFFINITY_TOKENS:
            prefix = tuple(prompt_token_ids[:AFFINITY_TOKENS])
            preferred = self._seen_by.pop(prefix, least)
            ahead = self._outstanding[preferred] - self._outstanding[least]
            has_room = self._outstanding[preferred] + num_sequences <= self._replica_sequences
            if ahead <= AFFINITY_SLACK and has_room and preferred in usable:
                chosen = preferred
            self._seen_by[prefix] = chosen
            if len(self._seen_by) > MAX_REMEMBERED_PREFIXES:
                self._seen_by.popitem(last=False)
        self._outstanding[chosen] += num_sequences
        return chosen

    def give_back(self, replica: int, num_sequences: int) -> None:
        """The request is over."""
        self._outstanding[replica] -= num_sequences
