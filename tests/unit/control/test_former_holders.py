"""A place that two workers know as theirs, of whom one was a spare: who holds it, who is one."""

from __future__ import annotations

import pytest

from services.control.membership import Membership
from services.errors import JoinRefused
from services.topology.facts import MeshShape
from services.topology.fingerprint import digest
from services.topology.placement import NodeDevices, place
from stagemesh.v1 import control_pb2, topology_pb2

SHAPE = MeshShape(dp_size=1, tp_size=1, pp_size=2, pp_layer_partition=(2, 2))
PLACEMENTS = place(SHAPE, [NodeDevices(0, "head", "cpu", None)])
FINGERPRINT = topology_pb2.Fingerprint(digest=digest(()))


def request(
    pid: int, pp_rank: int, *, took_over: bool = False, devices: tuple[int, ...] = ()
) -> control_pb2.JoinRequest:
    """A worker that asks for a place; `devices` are those that its ranks run on."""
    return control_pb2.JoinRequest(
        node=f"node-{pid}",
        node_rank=pid,
        address=f"127.0.0.1:{pid}",
        pid=pid,
        device="cpu",
        num_devices=4,
        fingerprint=FINGERPRINT,
        wanted=topology_pb2.Placement(pp_rank=pp_rank, tp_ranks=[0], device_indices=devices),
        took_over=took_over,
    )


def table() -> Membership:
    return Membership(SHAPE, PLACEMENTS, FINGERPRINT, "cpu", nodes_planned=False)


@pytest.mark.parametrize("former_spare_first", [True, False])
def test_at_a_new_head_the_second_of_the_two_is_a_spare(former_spare_first: bool) -> None:
    """Whichever it is: the one that had taken over, with its weights, or the one started anew."""
    members = table()
    former, anew = request(1, 1, took_over=True, devices=(2,)), request(2, 1)
    first, second = (former, anew) if former_spare_first else (anew, former)
    assert not members.join(first, 0.0).standby
    answer = members.join(second, 0.0)
    assert answer.standby
    assert [member.pid for member in members.members] == [first.pid]
    if not former_spare_first:
        assert list(answer.placement.device_indices) == [2], "its ranks keep theirs"


def test_two_that_were_none_are_a_mistake() -> None:
    members = table()
    members.join(request(1, 1), 0.0)
    with pytest.raises(JoinRefused, match="wants it too"):
        members.join(request(2, 1), 0.0)
