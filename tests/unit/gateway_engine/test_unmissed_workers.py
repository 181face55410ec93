"""With whose end for good `stagemesh serve` ends: not with that of a worker whose place is held by
a former spare."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gateway.app import Gateway
from gateway.mesh import Mesh
from gateway.recovery import RecoveryLimits
from services.control.membership import Membership
from services.control.service import ControlService
from services.launch.launcher import GoesOn, IsMissed, WorkerExit
from services.topology.facts import MeshShape
from services.topology.fingerprint import digest
from services.topology.placement import NodeDevices, place
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2

SHAPE = MeshShape(dp_size=1, tp_size=1, pp_size=2, pp_layer_partition=(2, 2))
PLACEMENTS = place(SHAPE, [NodeDevices(0, "head", "cpu", 3)])
FINGERPRINT = topology_pb2.Fingerprint(digest=digest(()))


class GivesUp:
    """A launcher that starts no other where the worker of stage 1 has ended."""

    async def watch(self, goes_on: GoesOn, is_missed: IsMissed) -> WorkerExit:
        ended = WorkerExit(PLACEMENTS[1], 0, "exited with 1, after 10 restarts", code=1, pid=2)
        goes_on(ended)
        return ended


def join(table: Membership, pid: int, *, standby: bool = False) -> str:
    request = control_pb2.JoinRequest(
        address=f"127.0.0.1:{pid}",
        pid=pid,
        device="cpu",
        num_devices=3,
        fingerprint=FINGERPRINT,
        standby=standby,
    )
    return table.join(request, asyncio.get_running_loop().time()).worker_id


def gateway(control: ControlService, max_attempts: int) -> Gateway:
    """As much of one as looks after workers, with a mesh that serves."""
    plan = SimpleNamespace(
        shape=SHAPE,
        stage_plan=stage_worker_pb2.StagePlan(),
        placements_of_stages=lambda stages: (),
    )
    observer = SimpleNamespace(
        on_stage_step=print, on_step=print, on_recovered=print, on_taken_over=print
    )
    made = object.__new__(Gateway)
    limits = RecoveryLimits(max_attempts, 10.0)
    made._mesh = Mesh(plan, control, None, observer, 1.0, limits, 4)  # type: ignore[arg-type]
    made._mesh.ready_event.set()
    made._stopping = False
    return made


@pytest.mark.parametrize(
    ("held_by", "max_attempts", "fails"),
    [("itself", 3, True), ("a spare", 3, False), ("nobody yet", 3, False), ("a spare", 0, True)],
)
async def test_the_mesh_fails_only_where_the_worker_is_missed(
    held_by: str, max_attempts: int, fails: bool
) -> None:
    table = Membership(SHAPE, PLACEMENTS, FINGERPRINT, "cpu", nodes_planned=True)
    control = ControlService(table)
    for pid in (1, 2):
        join(table, pid)
    now = asyncio.get_running_loop().time()
    if held_by != "itself":
        ready = stage_worker_pb2.StatusResponse(state=stage_worker_pb2.COMPONENT_STATE_STANDBY)
        beat = control_pb2.HeartbeatRequest(worker_id=join(table, 3, standby=True), status=ready)
        table.heartbeat(beat, now)
    if held_by == "a spare":
        table.members[1].heard_at -= 60.0
        assert table.take_over(0, 1, now, {})
    watching = gateway(control, max_attempts)
    await asyncio.wait_for(watching._watch_workers(GivesUp()), 5.0)  # type: ignore[arg-type]
    assert watching._mesh._failed.done() is fails
    if not fails:
        assert 2 not in [worker.pid for worker in (*table.members, *table.spares)]
