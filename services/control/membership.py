"""Who may join a mesh, and who has to leave: pure, over the table of its places.

No I/O and no clock of its own: callers pass the time. One worker holds one stage. A worker that
is gone loses its place when another asks for it, and is sent away should it wake up after that.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from services.control.devices import Holder, devices_at_place, devices_of_spare, who
from services.control.member import HEARTBEAT_INTERVAL_SECONDS as HEARTBEAT_INTERVAL_SECONDS
from services.control.member import MEMBER_TIMEOUT_SECONDS as MEMBER_TIMEOUT_SECONDS
from services.control.member import Member, Place, Spare, place_of
from services.control.places import Places
from services.errors import JoinRefused
from services.topology.facts import MeshShape
from services.topology.fingerprint import require_equal
from services.topology.placement import StagePlacement
from services.topology.wire import placement_to_proto, shape_to_proto
from stagemesh.v1 import control_pb2, topology_pb2

HEAD_TIMEOUT_SECONDS = 8.0
"""A worker leaves after this long without its head: inside the 10 s that users are promised.
Where it waits for its head, it asks to be let in again from then on."""
MAX_SPARES = 1024
"""Above any use, so that whoever asks again and again does not fill the head's memory."""
MAX_EPOCH = 2**48
"""No mesh lives for so many; a worker that says it has been in a later one is wrong."""


class Membership(Places):
    """The places of one mesh, and who is let in."""

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
        super().__init__(shape, placements)
        self._name = secrets.token_hex(4) if name is None else name
        self._last_epoch = 0
        self._device = device
        self._fingerprint = fingerprint
        self._nodes_planned = nodes_planned
        planned = [(each.node_rank, i) for each in placements for i in each.device_indices]
        self._share_devices = not nodes_planned or len({*planned}) == len(planned)
        """Whether the workers of a node count the same devices: Ray shows each only its own, so
        each has a device 0."""
        self._joined = 0

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

    def in_the_way(self, request: control_pb2.JoinRequest, now: float) -> tuple[Holder, ...]:
        """Who holds what a worker asks for, as far as anybody knows. Where one of them is gone,
        `forget` makes room."""
        gone = self.making_way(request, now)
        holders: tuple[Member, ...] = ()
        if not request.standby:
            holders = self.members if self.complete and not gone else ()
            if request.HasField("wanted"):
                holder = self._members.get(_wanted(request.wanted))
                holders = () if holder is None or holder in gone else (holder,)
        try:
            if request.standby or self._is_taken_over(request, gone):
                self._devices_of_spare(request, gone, now)
            elif not holders:
                self._placement_of(request, gone, now)
        except JoinRefused:
            # A silent spare is in nobody's way: `join` lets it go.
            beside = [
                worker
                for worker in self._beside(request, gone)
                if worker not in holders
                if isinstance(worker, Member) or not worker.is_silent(now)
            ]
            return (*holders, *beside)
        return holders

    def making_way(self, request: control_pb2.JoinRequest, now: float) -> tuple[Member, ...]:
        """Who is a member no more when `join` lets this worker in: itself where it joins anew, and
        the silent holder of the place that it is given. Whoever else is silent may be cut off,
        and keeps its place and its weights."""
        gone = [member for member in self.members if _is_own(request, member)]
        if request.standby:
            return tuple(gone)
        if request.HasField("wanted"):
            holder = self._members.get(_wanted(request.wanted))
            holders: tuple[Member, ...] = () if holder is None else (holder,)
        else:
            holders = self.members if self.complete and not gone else ()
        silent = (member for member in holders if member not in gone and member.is_silent(now))
        return (*gone, *islice(silent, 1))

    def join(self, request: control_pb2.JoinRequest, now: float) -> control_pb2.JoinResponse:
        """Gives a worker its place. Raises `JoinRefused` and changes nothing when it cannot."""
        require_equal(
            self._fingerprint,
            request.fingerprint,
            worker_name=who(request),
        )
        if request.device != self._device:
            raise JoinRefused(
                f"device differs: the head's mesh runs on {self._device} and {who(request)} "
                f"brings {request.device}; give both the same --device"
            )
        if request.last_epoch > MAX_EPOCH:
            raise JoinRefused(
                f"{who(request)} says that it has been in epoch {request.last_epoch}, and there "
                f"is none above {MAX_EPOCH}; restart the worker"
            )
        gone = self.making_way(request, now)
        if request.standby or self._is_taken_over(request, gone):
            return self._join_as_spare(request, gone, now)
        placement = self._placement_of(request, gone, now)
        place, beside = place_of(placement), self._beside(request, gone)
        self._members[place] = Member(
            self._admit(request, gone, placement.device_indices),
            request.node,
            request.node_rank,
            request.address,
            request.pid,
            now,
            placement,
            request.took_over or any(m.took_over for m in gone if _is_own(request, m)),
        )
        self._evict(beside, placement.device_indices)
        return self._answer(self._members[place].worker_id, placement_to_proto(placement))

    def _placement_of(
        self, request: control_pb2.JoinRequest, gone: Sequence[Member], now: float
    ) -> StagePlacement:
        """The place that a worker is given, with devices. Raises `JoinRefused`."""
        place = self._wanted_place(request, gone)
        planned = self._placements[place]
        here = planned.node_rank == request.node_rank and self._nodes_planned
        beside = self._beside(request, gone)
        indices = devices_at_place(request, planned, beside, now, is_planned_here=here)
        placement = replace(planned, device_indices=indices)
        needed = max(placement.device_indices) + 1
        if request.HasField("num_devices") and request.num_devices < needed:
            raise JoinRefused(
                f"{self._words(place)} needs device {needed - 1} of its node, and {who(request)} "
                f"has {request.num_devices}; place fewer ranks there, or make more devices visible"
            )
        return placement

    def _admit(
        self, request: control_pb2.JoinRequest, gone: Sequence[Member], indices: Sequence[int]
    ) -> str:
        """The name of a worker that is let in on these devices, in the place of others. One of
        them that was a spare before is one again, should it wake up."""
        for spare in [spare for spare in self.spares if _is_own(request, spare)]:
            self.forget(spare.worker_id)
        for member in gone:
            self.forget(member.worker_id)
            if self._stays(request, member, indices):
                epoch = self._epochs[member.placement.dp_rank]
                self._spares[member.worker_id] = member.demoted(epoch)
        self._joined += 1
        self._last_epoch = max(self._last_epoch, request.last_epoch)
        return f"worker-{self._joined}@{self._name}"

    def _stays(
        self, request: control_pb2.JoinRequest, member: Member, indices: Sequence[int]
    ) -> bool:
        """Whether a member that makes way is a spare from now on: it was one, its devices are not
        the newcomer's, and there is an epoch by which it can be told that it has lost its place."""
        if not member.took_over or _is_own(request, member) or not self._share_devices:
            return False
        here = (member.node, member.node_rank) == (request.node, request.node_rank)
        if here and {*member.device_indices} & {*indices}:
            return False
        return member.placement.dp_rank in self._epochs and len(self._spares) < MAX_SPARES

    def _evict(self, beside: Sequence[Holder], indices: Sequence[int]) -> None:
        """Spares that are silent, and whose devices are another's from now on."""
        for other in beside:
            if isinstance(other, Spare) and {*other.device_indices} & {*indices}:
                self.forget(other.worker_id)

    def _answer(
        self, worker_id: str, placement: topology_pb2.Placement, *, standby: bool = False
    ) -> control_pb2.JoinResponse:
        return control_pb2.JoinResponse(
            worker_id=worker_id,
            topology=shape_to_proto(self._shape),
            placement=placement,
            heartbeat_interval_seconds=HEARTBEAT_INTERVAL_SECONDS,
            head_timeout_seconds=HEAD_TIMEOUT_SECONDS,
            standby=standby,
        )

    def _beside(self, request: control_pb2.JoinRequest, gone: Sequence[Member]) -> list[Holder]:
        """Who else is on the node of a worker that asks to be let in, and counts its devices."""
        if not self._share_devices:
            return []
        others: list[Holder] = [worker for worker in self.members if worker not in gone]
        others += [spare for spare in self.spares if not _is_own(request, spare)]
        here = (request.node, request.node_rank)
        return [each for each in others if (each.node, each.node_rank) == here]

    # Spares.

    def _is_taken_over(self, request: control_pb2.JoinRequest, gone: Sequence[Member]) -> bool:
        """Whether what a worker asks for is held by another, and one of the two was a spare: then
        the worker that asks is one, whichever was first at a new head."""
        if request.HasField("wanted"):
            holder = self._members.get(_wanted(request.wanted))
            if holder is None or holder in gone:
                return False
            return holder.took_over or request.took_over
        return self.complete and not gone and any(member.took_over for member in self.members)

    def _join_as_spare(
        self, request: control_pb2.JoinRequest, gone: Sequence[Member], now: float
    ) -> control_pb2.JoinResponse:
        if len(self._spares) >= MAX_SPARES:
            for spare in [spare for spare in self.spares if spare.is_silent(now)]:
                self.forget(spare.worker_id)
        if len(self._spares) >= MAX_SPARES:
            raise JoinRefused(
                f"{who(request)} is one spare too many: there are {MAX_SPARES} already; stop some"
            )
        indices = self._devices_of_spare(request, gone, now)
        beside = self._beside(request, gone)
        worker_id = self._admit(request, gone, indices)
        self._evict(beside, indices)
        self._spares[worker_id] = Spare(
            worker_id,
            request.node,
            request.node_rank,
            request.address,
            request.pid,
            now,
            indices,
        )
        placement = topology_pb2.Placement(device_indices=indices)
        return self._answer(worker_id, placement, standby=True)

    def _devices_of_spare(
        self, request: control_pb2.JoinRequest, gone: Sequence[Member], now: float
    ) -> tuple[int, ...]:
        needed = max(len(planned.tp_ranks) for planned in self._placements.values())
        reserved = {
            index
            for place, planned in self._placements.items()
            if place not in self._members
            if self._nodes_planned and planned.node_rank == request.node_rank
            for index in planned.device_indices
        }
        return devices_of_spare(request, needed, reserved, self._beside(request, gone), now)

    def _wanted_place(self, request: control_pb2.JoinRequest, gone: Sequence[Member]) -> Place:
        held = self._members.keys() - {place_of(member.placement) for member in gone}
        free = sorted(self._placements.keys() - held)
        if not request.HasField("wanted"):
            if free:
                return free[0]
            raise JoinRefused(
                f"{who(request)} is one too many: all {len(self._placements)} places of this "
                "mesh are taken"
            )
        place = _wanted(request.wanted)
        if place not in self._placements:
            raise JoinRefused(
                f"{who(request)} wants {self._words(place)}, and this mesh has stages 0 to "
                f"{self._shape.pp_size - 1} of {self._shape.dp_size} replicas; check that all "
                "nodes have the same sizes and --nnodes"
            )
        if place in free:
            return place
        holder = self._members[place]
        raise JoinRefused(
            f"{self._words(place)} is held by worker {holder.address} on {holder.node} (node rank "
            f"{holder.node_rank}, pid {holder.pid}); {who(request)} wants it too. Give each node "
            "a --node-rank of its own, and each stage worker a --pp-rank"
        )

    def heartbeat(
        self, request: control_pb2.HeartbeatRequest, now: float
    ) -> control_pb2.HeartbeatResponse:
        """Takes a worker's word that it lives; tells a stranger to leave."""
        for member in self._members.values():
            if member.worker_id == request.worker_id:
                member.heard(now)
                member.status.CopyFrom(request.status)
                return control_pb2.HeartbeatResponse()
        if (spare := self._spares.get(request.worker_id)) is not None:
            spare.heard(now)
            spare.status.CopyFrom(request.status)
            return control_pb2.HeartbeatResponse(place_lost_epoch=spare.lost_epoch)
        return control_pb2.HeartbeatResponse(
            leave=True,
            leave_reason=f"{request.worker_id} is no member of this mesh, or is one no more",
            other_head=not request.worker_id.endswith(f"@{self._name}"),
        )


def _is_own(request: control_pb2.JoinRequest, worker: Holder) -> bool:
    return (worker.address, worker.pid) == (request.address, request.pid)


def _wanted(wanted: topology_pb2.Placement) -> Place:
    return (wanted.dp_rank, wanted.pp_rank, wanted.tp_ranks[0] if wanted.tp_ranks else 0)
