"""Who is told to leave when the mesh goes, over workers that are scripted."""

from __future__ import annotations

import asyncio

import pytest

from gateway import replica as replica_module
from gateway import standby as standby_module
from services.control.takeover import Readiness
from stagemesh.v1 import control_pb2, stage_worker_pb2
from tests.unit.gateway_engine.test_replica_recovery import FINGERPRINT, rig


class Leaving:
    """A worker's client at the end."""

    def __init__(self, told: list[str], address: str) -> None:
        self._told, self._address = told, address

    async def drain(self) -> None:
        self._told.append(self._address)

    async def close(self) -> None:
        """Nothing to close."""


async def test_whoever_holds_a_place_since_the_last_epoch_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A spare has taken a place over, and no groups were formed since: it is no stage of the last
    epoch, and no spare. Whoever lost the place is one of these and not of the others."""
    async with rig(monkeypatch) as (made, _):
        now = asyncio.get_running_loop().time()
        request = control_pb2.JoinRequest(
            address="127.0.0.1:9",
            pid=9,
            device="cpu",
            num_devices=9,
            fingerprint=FINGERPRINT,
            standby=True,
        )
        worker_id = made.membership.join(request, now).worker_id
        ready = stage_worker_pb2.StatusResponse(
            state=stage_worker_pb2.COMPONENT_STATE_STANDBY,
            ranks=[stage_worker_pb2.RankStatus(started=True)],
        )
        beat = control_pb2.HeartbeatRequest(worker_id=worker_id, status=ready)
        made.membership.heartbeat(beat, now)
        lost = {made.membership.members[1].worker_id: Readiness.STARTING}
        assert made.membership.take_over(0, made.replica.epoch, now, lost)
        told: list[str] = []
        for module in (replica_module, standby_module):
            monkeypatch.setattr(
                module, "StageClient", lambda channel, address, pp_rank: Leaving(told, address)
            )
        await made.replica.dismiss_workers()
        await made.standby.dismiss()
        assert sorted(told) == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:9"]
