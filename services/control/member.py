"""Who is in a mesh: a worker at a place, or a spare that may take one over."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2

HEARTBEAT_INTERVAL_SECONDS = 1.0
MISSED_SECONDS = 2 * HEARTBEAT_INTERVAL_SECONDS
MEMBER_TIMEOUT_SECONDS = 3.0
"""A death or a frozen process is known after this long."""

Place = tuple[int, int, int]
"""(replica, stage, first TP rank): what one worker holds."""


@dataclass(slots=True)
class Worker:
    """One worker that has joined."""

    worker_id: str
    node: str
    node_rank: int
    address: str
    pid: int
    heard_at: float
    status: stage_worker_pb2.StatusResponse = field(
        default_factory=stage_worker_pb2.StatusResponse, kw_only=True
    )
    has_beaten: bool = field(default=False, kw_only=True)
    """Whether it has heard that it has joined: only then does it send heartbeats."""

    back_at: float = field(default=-math.inf, kw_only=True)
    """When it was last heard of again after heartbeats that did not come: it was cut off, or did
    not run."""

    def heard(self, now: float) -> None:
        """A heartbeat has come."""
        if self.has_missed(now):
            self.back_at = now
        self.heard_at, self.has_beaten = now, True

    def has_missed(self, now: float) -> bool:
        """Whether a heartbeat is late: it may be cut off, or not run."""
        return self.has_beaten and now - self.heard_at > MISSED_SECONDS

    def is_silent(self, now: float) -> bool:
        """Whether it has not been heard of for too long."""
        return now - self.heard_at > MEMBER_TIMEOUT_SECONDS


@dataclass(slots=True)
class Member(Worker):
    """A worker at a place of the mesh."""

    placement: StagePlacement
    took_over: bool = False
    """It was a spare: whoever had the place before is one when it comes back."""

    @property
    def device_indices(self) -> tuple[int, ...]:
        """Devices of its node that its ranks run on."""
        return self.placement.device_indices

    def demoted(self, epoch: int) -> Spare:
        """The same worker when another has taken over the place that it had up to an epoch. What it
        has said of itself says nothing of it as a spare."""
        return Spare(
            *(self.worker_id, self.node, self.node_rank, self.address, self.pid, self.heard_at),
            self.device_indices,
            epoch,
            has_beaten=self.has_beaten,
        )


@dataclass(slots=True)
class Spare(Worker):
    """A worker without a place."""

    device_indices: tuple[int, ...]
    """Devices of its node, one for each of its ranks."""
    lost_epoch: int = 0
    """It has lost the place that it was given in this epoch or before; 0 where it never had one."""
    loads_in_advance: bool = field(default=False, kw_only=True)
    """The head lets it load, whatever it has said of itself since: it has no time for a place."""

    def promoted(self, placement: StagePlacement) -> Member:
        """The same worker at a place."""
        return Member(
            *(self.worker_id, self.node, self.node_rank, self.address, self.pid, self.heard_at),
            placement,
            True,
            status=self.status,
            has_beaten=self.has_beaten,
        )

    @property
    def is_ready(self) -> bool:
        """Whether its ranks are started and in no group, as it last said, and nothing is asked of
        them."""
        is_idle = self.status.state == stage_worker_pb2.COMPONENT_STATE_STANDBY
        return is_idle and not self.loads_in_advance


def place_of(placement: StagePlacement) -> Place:
    """The place that a placement is for."""
    return (placement.dp_rank, placement.pp_rank, placement.tp_ranks[0])
