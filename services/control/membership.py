"""Who is in the mesh: a pure table of places, joins and heartbeats.

No I/O and no clock of its own: callers pass the time. One worker holds one
stage; the table says who may join, who is missing and who has gone silent.
A worker that is gone loses its place when another asks for it, and is sent away
should it wake up after that.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

from services.errors import JoinRefused
from services.topology.facts import MeshShape
from services.topology.fingerprint import require_equal
from services.topology.placement import StagePlacement
from services.topology.wire import placement_to_proto, shape_to_proto
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2

HEARTBEAT_INTERVAL_SECONDS = 1.0
MEMBER_TIMEOUT_SECONDS = 3.0
"""A death or a frozen process is known after this long."""
HEAD_TIMEOUT_SECONDS = 8.0
"""A worker leaves after this long without its head: inside the 10 s that users are promised.
Where it waits for its head, it asks to be let in again from then on."""
MAX_EPOCH = 2**48
"""No mesh lives for so many; a worker that says it has been in a later one is wrong."""


@dataclass(slots=True)
class Member:
    """One worker that has joined."""

    worker_id: str
    node: str
    node_rank: int
    address: str
    pid: int
    placement: StagePlacement
    heard_at: float
    status: stage_worker_pb2.StatusResponse = field(default_factory=stage_worker_pb2.StatusResponse)
    has_beaten: bool = False
    """Whether it has heard that it has joined: only then does it send heartbeats."""


class Membership:
    """The places of one mesh and who holds them."""

    def __init__(
        self,
        shape: MeshShape,
        placements: Sequence[StagePlacement],
        fingerprint: topology_pb2.Fingerprint,
        device: str,
        *,
        nodes_planned: bool,
        name: str | None = None,
    ) -> None:
        """`device` is the kind that every worker must bring: "cpu", "npu", "cuda".

        Without `nodes_planned` the workers come from nodes that the placements know nothing
        of, and get the devices of their node in the order in which they join. `name` tells
        this head from an earlier one; default: a random one.
        """
        self._name = secrets.token_hex(4) if name is None else name
        self._last_epoch = 0
        self._shape = shape
        self._device = device
        self._fingerprint = fingerprint
        self._placements = {_place(placement): placement for placement in placements}
        self._members: dict[tuple[int, int, int], Member] = {}
        self._nodes_planned = nodes_planned
        self._joined = 0

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        return self._shape

    @property
    def fingerprint(self) -> topology_pb2.Fingerprint:
        """What joining workers are compared with."""
        return self._fingerprint

    @property
    def device(self) -> str:
        """Kind of device that every worker must bring."""
        return self._device

    @property
    def last_epoch(self) -> int:
        """The highest that any worker has been in when it joined."""
        return self._last_epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody who has joined, in rank order."""
        return tuple(self._members[place] for place in sorted(self._members))

    @property
    def complete(self) -> bool:
        """Whether every place is taken."""
        return len(self._members) == len(self._placements)

    def missing(self) -> tuple[str, ...]:
        """The places that nobody holds, in words."""
        return tuple(map(self._words, sorted(self._placements.keys() - self._members)))

    def absent(self, dp_rank: int, now: float) -> tuple[str, ...]:
        """The places of a replica that nobody holds who is heard of, in words."""
        present = {place for place, member in self._members.items() if not _is_silent(member, now)}
        absent = sorted(self._placements.keys() - present)
        return tuple(self._words(place) for place in absent if place[0] == dp_rank)

    def in_the_way(self, request: control_pb2.JoinRequest, now: float) -> tuple[Member, ...]:
        """Who holds what a worker asks for, as far as anybody knows. Where one of them is gone,
        `forget` makes room."""
        gone = self.making_way(request, now)
        if request.HasField("wanted"):
            holder = self._members.get(_wanted(request.wanted))
            return () if holder is None or holder in gone else (holder,)
        return self.members if self.complete and not gone else ()

    def making_way(self, request: control_pb2.JoinRequest, now: float) -> tuple[Member, ...]:
        """Who is a member no more when `join` lets this worker in: itself where it joins anew, and
        the silent holder of the place that it is given. Whoever else is silent may be cut off,
        and keeps its place and its weights."""
        own = (request.address, request.pid)
        gone = [member for member in self.members if (member.address, member.pid) == own]
        if request.HasField("wanted"):
            holder = self._members.get(_wanted(request.wanted))
            holders: tuple[Member, ...] = () if holder is None else (holder,)
        else:
            holders = self.members if self.complete and not gone else ()
        silent = (member for member in holders if member not in gone and _is_silent(member, now))
        return (*gone, *islice(silent, 1))

    def member(self, worker_id: str) -> Member | None:
        """A member by its name."""
        found = (m for m in self._members.values() if m.worker_id == worker_id)
        return next(found, None)

    def forget(self, worker_id: str) -> Member | None:
        """A worker is known to be gone: its place is free. Returns the member that it was."""
        for place, member in self._members.items():
            if member.worker_id == worker_id:
                return self._members.pop(place)
        return None

    def join(self, request: control_pb2.JoinRequest, now: float) -> control_pb2.JoinResponse:
        """Gives a worker its place. Raises `JoinRefused` and changes nothing when it cannot."""
        require_equal(
            self._fingerprint,
            request.fingerprint,
            worker_name=_who(request),
        )
        if request.device != self._device:
            raise JoinRefused(
                f"device differs: the head's mesh runs on {self._device} and {_who(request)} "
                f"brings {request.device}; give both the same --device"
            )
        if request.last_epoch > MAX_EPOCH:
            raise JoinRefused(
                f"{_who(request)} says that it has been in epoch {request.last_epoch}, and there "
                f"is none above {MAX_EPOCH}; restart the worker"
            )
        gone = self.making_way(request, now)
        place = self._wanted_place(request, gone)
        staying = [member for member in self.members if member not in gone]
        placement = self._on_node_of(request, self._placements[place], staying, now)
        needed = max(placement.device_indices) + 1
        if request.HasField("num_devices") and request.num_devices < needed:
            raise JoinRefused(
                f"{self._words(place)} needs device {needed - 1} of its node, and {_who(request)} "
                f"has {request.num_devices}; place fewer ranks there, or make more devices visible"
            )
        for other in gone:
            self.forget(other.worker_id)
        self._joined += 1
        self._last_epoch = max(self._last_epoch, request.last_epoch)
        member = Member(
            worker_id=f"worker-{self._joined}@{self._name}",
            node=request.node,
            node_rank=request.node_rank,
            address=request.address,
            pid=request.pid,
            placement=placement,
            heard_at=now,
        )
        self._members[place] = member
        return control_pb2.JoinResponse(
            worker_id=member.worker_id,
            topology=shape_to_proto(self._shape),
            placement=placement_to_proto(placement),
            heartbeat_interval_seconds=HEARTBEAT_INTERVAL_SECONDS,
            head_timeout_seconds=HEAD_TIMEOUT_SECONDS,
        )

    def _on_node_of(
        self,
        request: control_pb2.JoinRequest,
        planned: StagePlacement,
        staying: Sequence[Member],
        now: float,
    ) -> StagePlacement:
        """The placement with device indices of the node that the worker is really on. Raises
        `JoinRefused` where its ranks run on devices that another worker has been given.

        Devices of a silent worker are given only where there are no others: it may wake up."""
        if planned.node_rank == request.node_rank and self._nodes_planned:
            return planned
        here = (request.node, request.node_rank)
        beside = [member for member in staying if (member.node, member.node_rank) == here]
        taken = _devices(member for member in beside if not _is_silent(member, now))
        if held := tuple(request.wanted.device_indices):
            if len(held) != len(planned.tp_ranks) or len({*held} - taken) != len(held):
                raise JoinRefused(
                    f"the ranks of {_who(request)} run on devices {_listed(held)} of its node, and "
                    f"{len(planned.tp_ranks)} are needed where {_listed(sorted(taken)) or 'none'} "
                    "are taken; restart the worker, which gives it others"
                )
            return replace(planned, device_indices=held)
        indices = _first_free(len(planned.tp_ranks), _devices(beside))
        if request.HasField("num_devices") and indices[-1] >= request.num_devices:
            indices = _first_free(len(planned.tp_ranks), taken)
        return replace(planned, device_indices=indices)

    def forgive(self, now: float) -> None:
        """Counts everybody as just heard of: it was this side that did not listen."""
        for member in self._members.values():
            member.heard_at = max(member.heard_at, now)

    def _wanted_place(
        self, request: control_pb2.JoinRequest, gone: Sequence[Member]
    ) -> tuple[int, int, int]:
        held = self._members.keys() - {_place(member.placement) for member in gone}
        free = sorted(self._placements.keys() - held)
        if not request.HasField("wanted"):
            if free:
                return free[0]
            raise JoinRefused(
                f"{_who(request)} is one too many: all {len(self._placements)} places of this "
                "mesh are taken"
            )
        place = _wanted(request.wanted)
        if place not in self._placements:
            raise JoinRefused(
                f"{_who(request)} wants {self._words(place)}, and this mesh has stages 0 to "
                f"{self._shape.pp_size - 1} of {self._shape.dp_size} replicas; check that all "
                "nodes have the same sizes and --nnodes"
            )
        if place in free:
            return place
        holder = self._members[place]
        raise JoinRefused(
            f"{self._words(place)} is held by worker {holder.address} on {holder.node} (node rank "
            f"{holder.node_rank}, pid {holder.pid}); {_who(request)} wants it too. Give each node "
            "a --node-rank of its own, and each stage worker a --pp-rank"
        )

    def _words(self, place: tuple[int, int, int]) -> str:
        """A place as people say it: only what there is more than one of."""
        dp_rank, pp_rank, tp_rank_start = place
        words = f"stage {pp_rank}"
        if self._shape.dp_size > 1:
            words += f" of replica {dp_rank}"
        if tp_rank_start > 0:
            words += f" from TP rank {tp_rank_start}"
        return words

    def heartbeat(
        self, request: control_pb2.HeartbeatRequest, now: float
    ) -> control_pb2.HeartbeatResponse:
        """Takes a worker's word that it lives; tells a stranger to leave."""
        for member in self._members.values():
            if member.worker_id == request.worker_id:
                member.heard_at, member.has_beaten = now, True
                member.status.CopyFrom(request.status)
                return control_pb2.HeartbeatResponse()
        return control_pb2.HeartbeatResponse(
            leave=True,
            leave_reason=f"{request.worker_id} is no member of this mesh, or is one no more",
            other_head=not request.worker_id.endswith(f"@{self._name}"),
        )

    def silent(self, now: float) -> tuple[Member, ...]:
        """Members that have not been heard of for too long."""
        return tuple(member for member in self.members if _is_silent(member, now))


def _is_silent(member: Member, now: float) -> bool:
    return now - member.heard_at > MEMBER_TIMEOUT_SECONDS


def _devices(members: Iterable[Member]) -> set[int]:
    return {index for member in members for index in member.placement.device_indices}


def _first_free(needed: int, taken: set[int]) -> tuple[int, ...]:
    return tuple(islice((index for index in count() if index not in taken), needed))


def _place(placement: StagePlacement) -> tuple[int, int, int]:
    return (placement.dp_rank, placement.pp_rank, placement.tp_ranks[0])


def _wanted(wanted: topology_pb2.Placement) -> tuple[int, int, int]:
    return (wanted.dp_rank, wanted.pp_rank, wanted.tp_ranks[0] if wanted.tp_ranks else 0)


def _who(request: control_pb2.JoinRequest) -> str:
    return (
        f"worker {request.address} on {request.node} (node rank {request.node_rank}, pid "
        f"{request.pid})"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
