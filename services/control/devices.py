"""Which devices of its node a worker is given. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, islice

from services.control.member import Member, Spare
from services.errors import JoinRefused
from services.topology.placement import StagePlacement
from stagemesh.v1 import control_pb2

Holder = Member | Spare


def devices_at_place(
    request: control_pb2.JoinRequest,
    planned: StagePlacement,
    beside: Sequence[Holder],
    now: float,
    *,
    is_planned_here: bool,
) -> tuple[int, ...]:
    """For the ranks of a place that are started on the node of `request`, with `beside` on it.

    Ranks that run keep theirs; else the planned ones where the node is that of the plan, else the
    first that are free. Devices of a silent worker are given only where there are no others: it
    may wake up. Raises `JoinRefused` where its ranks run on devices that another has been given.
    """
    needed = len(planned.tp_ranks)
    taken = _used(worker for worker in beside if not worker.is_silent(now))
    if held := tuple(request.wanted.device_indices):
        if len(held) != needed or len({*held} - taken) != len(held):
            raise JoinRefused(
                f"the ranks of {who(request)} run on devices {_listed(held)} of its node, and "
                f"{needed} are needed where {_listed(sorted(taken)) or 'none'} are taken; restart "
                "the worker, which gives it others"
            )
        return held
    for others in (_used(beside), taken):
        if is_planned_here and not others & {*planned.device_indices}:
            return planned.device_indices
        indices = _first_free(needed, others)
        if not request.HasField("num_devices") or indices[-1] < request.num_devices:
            break
    return indices


def devices_of_spare(
    request: control_pb2.JoinRequest,
    needed: int,
    reserved: Iterable[int],
    beside: Sequence[Holder],
    now: float,
) -> tuple[int, ...]:
    """For a spare with so many ranks; `reserved` are planned for places that nobody holds, and
    given only where there are no others. Raises `JoinRefused` where its node has too few, or its
    ranks run on others' or on too few."""
    taken = _used(w for w in beside if isinstance(w, Member) or not w.is_silent(now))
    if held := tuple(request.wanted.device_indices):
        if len(held) == needed and len({*held} - taken) == needed:
            return held
        raise JoinRefused(
            f"the ranks of {who(request)} run on devices {_listed(held)} of its node, and a spare "
            f"needs {needed} where {_listed(sorted(taken)) or 'none'} are taken; restart the worker"
        )
    for others in ({*reserved} | _used(beside), {*reserved} | taken, taken):
        indices = _first_free(needed, others)
        if not request.HasField("num_devices") or indices[-1] < request.num_devices:
            return indices
    raise JoinRefused(
        f"{who(request)} is a spare and needs {needed} free devices of its node, which has "
        f"{request.num_devices} with {_listed(sorted(taken)) or 'none'} taken; start fewer "
        "spares, or make more devices visible (--cpu-devices on a CPU)"
    )


def who(request: control_pb2.JoinRequest) -> str:
    """A worker that asks to be let in, for a message."""
    return (
        f"worker {request.address} on {request.node} (node rank {request.node_rank}, pid "
        f"{request.pid})"
    )


def _used(workers: Iterable[Holder]) -> set[int]:
    return {index for worker in workers for index in worker.device_indices}


def _first_free(needed: int, taken: set[int]) -> tuple[int, ...]:
    return tuple(islice((index for index in count() if index not in taken), needed))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
