"""The places of one mesh: who holds each, who is missing or silent, and the spares. Pure.

No clock of its own: callers pass the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from services.control.member import Member, Place, Spare, place_of
from services.control.takeover import Readiness, Seat, Takeover, takeovers
from services.topology.facts import MeshShape
from services.topology.placement import StagePlacement


class Places:
    """One worker at a place, at most; a worker at a place, or a spare."""

    def __init__(self, shape: MeshShape, placements: Sequence[StagePlacement]) -> None:
        self._shape = shape
        self._placements = {place_of(placement): placement for placement in placements}
        self._members: dict[Place, Member] = {}
        self._spares: dict[str, Spare] = {}
        self._epochs: dict[int, int] = {}
        """The last one of each replica: in it or before its places were given."""

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        return self._shape

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody who has joined, in rank order."""
        return tuple(self._members[place] for place in sorted(self._members))

    @property
    def spares(self) -> tuple[Spare, ...]:
        """Everybody who has joined and holds no place, in the order of joining."""
        return tuple(self._spares.values())

    @property
    def complete(self) -> bool:
        """Whether every place is taken."""
        return len(self._members) == len(self._placements)

    def is_held(self, placement: StagePlacement) -> bool:
        """Whether a worker holds the place that a placement is for."""
        return place_of(placement) in self._members

    def missing(self) -> tuple[str, ...]:
        """The places that nobody holds, in words."""
        return tuple(map(self._words, sorted(self._placements.keys() - self._members)))

    def absent(self, dp_rank: int, now: float) -> tuple[str, ...]:
        """The places of a replica that nobody holds who is heard of, in words."""
        present = {place for place, member in self._members.items() if not member.is_silent(now)}
        absent = sorted(self._placements.keys() - present)
        return tuple(self._words(place) for place in absent if place[0] == dp_rank)

    def member(self, worker_id: str) -> Member | None:
        """A member by its name."""
        found = (m for m in self._members.values() if m.worker_id == worker_id)
        return next(found, None)

    def begin(self, dp_rank: int, epoch: int) -> None:
        """A replica gives its members their places in an epoch."""
        self._epochs[dp_rank] = epoch

    def forget(self, worker_id: str) -> Member | None:
        """A worker is known to be gone: its place is free. Returns the member that it was; None
        for a spare too."""
        self._spares.pop(worker_id, None)
        for place, member in self._members.items():
            if member.worker_id == worker_id:
                return self._members.pop(place)
        return None

    def silent(self, now: float) -> tuple[Member, ...]:
        """Members that have not been heard of for too long."""
        return tuple(member for member in self.members if member.is_silent(now))

    def forgive(self, now: float) -> None:
        """Counts everybody as just heard of: it was this side that did not listen."""
        for worker in (*self.members, *self.spares):
            worker.heard_at = max(worker.heard_at, now)

    def ready_spares(self, now: float) -> list[Spare]:
        """Those that are heard of."""
        return [spare for spare in self.spares if not spare.is_silent(now)]

    def take_over(
        self,
        dp_rank: int,
        epoch: int,
        now: float,
        known: Mapping[str, Readiness],
        failed: Collection[str] = (),
    ) -> list[tuple[Member, Spare | None]]:
        """Gives places of a replica to spares that are further than who holds them.

        `known` says how far holders are, by name; of whom nothing is known keeps its place unless
        it is silent. `failed` names workers that could not be brought up in this recovery. `epoch`
        is the last one: who held a place in it or before holds it no more, and is a spare. Returns
        each new holder, and the old one where there was one.
        """
        seats = [
            Seat(planned, self._readiness(self._members.get(place), now, known))
            for place, planned in self._placements.items()
            if place[0] == dp_rank
        ]
        chosen = takeovers(seats, self.ready_spares(now), failed)
        return [self._apply(takeover, epoch) for takeover in chosen]

    def _readiness(
        self, holder: Member | None, now: float, known: Mapping[str, Readiness]
    ) -> Readiness:
        if holder is None or holder.is_silent(now):
            return Readiness.GONE
        return known.get(holder.worker_id, Readiness.HOLDS)

    def _apply(self, takeover: Takeover, epoch: int) -> tuple[Member, Spare | None]:
        spare, place = takeover.spare, place_of(takeover.placement)
        old, demoted = self._members.get(place), None
        if old is not None:
            demoted = old.demoted(epoch)
            self._spares[old.worker_id] = demoted
        del self._spares[spare.worker_id]
        placement = replace(
            self._placements[place],
            node_rank=spare.node_rank,
            device_indices=spare.device_indices,
        )
        self._members[place] = spare.promoted(placement)
        return self._members[place], demoted

    def _words(self, place: Place) -> str:
        """A place as people say it: only what there is more than one of."""
        dp_rank, pp_rank, tp_rank_start = place
        words = f"stage {pp_rank}"
        if self._shape.dp_size > 1:
            words += f" of replica {dp_rank}"
        if tp_rank_start > 0:
            words += f" from TP rank {tp_rank_start}"
        return words
