"""Which spare takes over which place, and which spare holds whose weights. Pure.

A place is taken over only by who is further than its holder: a holder with its weights
keeps it, and two who are equally far never swap. So takeovers end. Who could not be brought up in
this recovery counts as one whose rank is not started, and as a spare comes last: only where all
of them have failed do they take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from services.control.member import Place, Spare, place_of
from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2, topology_pb2


class Readiness(IntEnum):
    """How far a worker is from serving at a place."""

    GONE = 0
    """Nobody is there, or nothing is heard of it."""
    STARTING = 1
    """A rank is not started, or has to be replaced."""
    STARTED = 2
    """Its ranks are started and have to load."""
    HOLDS = 3
    """Its ranks hold the weights."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A place, and how far its holder is."""

    placement: StagePlacement
    readiness: Readiness


@dataclass(frozen=True, slots=True)
class Takeover:
    """A spare is given a place."""

    spare: Spare
    placement: StagePlacement
    """The place's, with the devices of whoever had it."""


def readiness(status: stage_worker_pb2.StatusResponse, placement: StagePlacement) -> Readiness:
    """How far a worker that says this of itself is from serving at a place."""
    if not status.ranks or not all(rank.started for rank in status.ranks):
        return Readiness.STARTING
    if status.HasField("holds") and holds(status.holds, placement):
        return Readiness.HOLDS
    return Readiness.STARTED


def holds(held: topology_pb2.Placement, placement: StagePlacement) -> bool:
    """Whether held weights are those of a place. Replicas have the same."""
    return (held.pp_rank, tuple(held.tp_ranks), held.layer_start, held.layer_end) == (
        placement.pp_rank,
        placement.tp_ranks,
        placement.layer_start,
        placement.layer_end,
    )


def takeovers(
    seats: Iterable[Seat], spares: Sequence[Spare], failed: Collection[str] = ()
) -> list[Takeover]:
    """Who takes over what. `spares` are those that are heard of; `failed` names workers that could
    not be brought up in this recovery.

    First whoever holds a place's weights; then the places that are worst off, each with a spare
    of as many ranks, rather one that has not failed, that holds no other weights, and one of the
    same node.
    """
    free = [spare for spare in spares if spare.is_ready]
    chosen: list[Takeover] = []
    left: list[Seat] = []
    for seat in sorted(seats, key=lambda seat: seat.readiness):
        trusted = (spare for spare in free if spare.worker_id not in failed)
        holder = next((s for s in trusted if _readiness_of(s, seat) is Readiness.HOLDS), None)
        if seat.readiness < Readiness.HOLDS and holder is not None:
            free.remove(holder)
            chosen.append(Takeover(holder, seat.placement))
        elif seat.readiness < Readiness.STARTED:
            left.append(seat)
    for seat in left:
        fitting = [spare for spare in free if _fits(spare, seat.placement)]
        if fitting:
            node_rank = seat.placement.node_rank
            best = min(
                fitting,
                key=lambda s: (
                    s.worker_id in failed,
                    s.status.HasField("holds"),
                    s.node_rank != node_rank,
                ),
            )
            free.remove(best)
            chosen.append(Takeover(best, seat.placement))
    return chosen


def to_hold(
    wanted: Sequence[StagePlacement],
    spares: Sequence[Spare],
    failed: Collection[tuple[str, Place]] = (),
) -> tuple[Spare, StagePlacement] | None:
    """The next spare that has to load weights in advance, and which; None where all of `wanted`
    are held, or nobody is free for it. A place may be wanted several times; `failed` has (name of
    a spare, place whose weights it could not load a short time ago)."""
    free = list(spares)
    missing: list[StagePlacement] = []
    for placement in wanted:
        holder = next((s for s in free if _holds(s, placement)), None)
        if holder is None:
            missing.append(placement)
        else:
            free.remove(holder)
    for placement in missing:
        loading = [
            spare
            for spare in free
            if spare.is_ready and _fits(spare, placement)
            if (spare.worker_id, place_of(placement)) not in failed
        ]
        if loading:
            return loading[0], placement
    return None


def _readiness_of(spare: Spare, seat: Seat) -> Readiness:
    if not _fits(spare, seat.placement):
        return Readiness.GONE
    return readiness(spare.status, seat.placement)


def _holds(spare: Spare, placement: StagePlacement) -> bool:
    return spare.status.HasField("holds") and holds(spare.status.holds, placement)


def _fits(spare: Spare, placement: StagePlacement) -> bool:
    return len(spare.device_indices) == len(placement.tp_ranks)
