"""What the head tells a doctor. Reads the membership and asks its workers; changes nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from services.control.membership import Membership
from services.control.progress import StageProgress
from services.control.worker_reports import WORKER_TIMEOUT_SECONDS, WorkerReports
from services.errors import InvalidRequest
from services.models.content_hash import ContentHash
from services.software import installed_versions
from services.topology.wire import shape_to_proto
from stagemesh.v1 import control_pb2, topology_pb2

MAX_ECHO_BYTES = 4 << 20
"""Long enough to measure a bandwidth, short enough that nobody fills the head's memory."""


class MeshState(Protocol):
    """The mesh that the head drives."""

    def progress(self) -> Sequence[StageProgress]:
        """How far every stage is; empty before the mesh is up."""
        ...

    def not_ready_reason(self) -> str:
        """What the mesh waits for before it takes requests; empty once it does."""
        ...


async def diagnose(
    request: control_pb2.DiagnoseRequest,
    membership: Membership,
    mesh: MeshState | None,
    weights: ContentHash | None,
    workers: WorkerReports,
    remaining_seconds: float | None,
) -> control_pb2.DiagnoseResponse:
    """Everything that the head knows; workers are asked all at once, within half of what remains
    to the doctor: one that hangs must not cost it the answer."""
    timeout_seconds = WORKER_TIMEOUT_SECONDS
    if remaining_seconds is not None:
        timeout_seconds = min(timeout_seconds, remaining_seconds / 2)
    reports = await workers.ask(membership.members, timeout_seconds)
    return control_pb2.DiagnoseResponse(
        node=socket.gethostname(),
        topology=shape_to_proto(membership.shape),
        fingerprint=membership.fingerprint,
        versions=version_fields(),
        device=membership.device,
        members=reports,
        missing=membership.missing(),
        not_ready_reason="" if mesh is None else mesh.not_ready_reason(),
        progress=() if mesh is None else map(progress_to_proto, mesh.progress()),
        content_hash=hash_to_proto(weights) if request.hash_weights else None,
    )


def hash_to_proto(weights: ContentHash | None) -> control_pb2.ContentHash:
    """How far the hash is that somebody asks for; the first who asks has it started."""
    if weights is None:
        return control_pb2.ContentHash(error="there is no model here to hash")
    weights.start()
    progress = weights.progress
    return control_pb2.ContentHash(
        hashed_bytes=progress.hashed_bytes,
        total_bytes=progress.total_bytes,
        files=[control_pb2.FileHash(name=f.name, sha256=f.sha256) for f in progress.files],
        error=progress.error,
    )


@cache
def version_fields() -> tuple[topology_pb2.FingerprintField, ...]:
    """Software of this node. Read from files once: it does not change under a process."""
    return tuple(
        topology_pb2.FingerprintField(name=each.name, value=each.version)
        for each in installed_versions()
    )


def echo(request: control_pb2.EchoRequest) -> control_pb2.EchoResponse:
    """The same bytes and the time. Raises `InvalidRequest` for too many."""
    if len(request.payload) > MAX_ECHO_BYTES:
        raise InvalidRequest(
            f"payload has {len(request.payload)} bytes; at most {MAX_ECHO_BYTES} are sent back",
            param="payload",
        )
    return control_pb2.EchoResponse(payload=request.payload, clock_seconds=time.time())


def progress_to_proto(progress: StageProgress) -> control_pb2.StageProgress:
    """The message."""
    return control_pb2.StageProgress(
        dp_rank=progress.dp_rank,
        pp_rank=progress.pp_rank,
        sent_step_id=progress.sent_step_id,
        done_step_id=progress.done_step_id,
        silent_seconds=progress.silent_seconds,
    )


def progress_from_proto(message: control_pb2.StageProgress) -> StageProgress:
    """The facts in the message."""
    return StageProgress(
        dp_rank=message.dp_rank,
        pp_rank=message.pp_rank,
        sent_step_id=message.sent_step_id,
        done_step_id=message.done_step_id,
        silent_seconds=message.silent_seconds,
    )
