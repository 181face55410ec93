"""A place that two workers know as theirs, of whom one was a spare: who holds it, who is one."""

from __future__ import annotations

import pytest

from services.control.membership import MEMBER_TIMEOUT_SECONDS, Membership
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


LATER = MEMBER_TIMEOUT_SECONDS + 0.5


def replaced(
    devices: tuple[int, ...] = (2,), *, same_node: bool = False, epoch: int = 7
) -> tuple[Membership, control_pb2.HeartbeatResponse]:
    """A former spare goes silent at its place, another worker is given it, the former one wakes up:
    the table, and what it hears."""
    members = table()
    former, anew = request(1, 1, took_over=True, devices=devices), request(2, 1)
    if same_node:
        anew.node, anew.node_rank = former.node, former.node_rank
    name = members.join(former, 0.0).worker_id
    if epoch:
        members.begin(0, epoch)
    assert not members.join(anew, LATER).standby
    beat = control_pb2.HeartbeatRequest(worker_id=name)
    return members, members.heartbeat(beat, LATER)


@pytest.mark.parametrize("same_node", [True, False])
def test_a_former_spare_that_makes_way_is_one_again(same_node: bool) -> None:
    """It hears up to which epoch it has lost its place, and may take over another's."""
    members, heard = replaced(same_node=same_node)
    assert (heard.leave, heard.place_lost_epoch) == (False, 7)
    assert [spare.pid for spare in members.spares] == [1]
    assert [member.pid for member in members.members] == [2]


def test_one_whose_devices_are_the_newcomers_is_sent_away() -> None:
    members, heard = replaced((0,), same_node=True)
    assert heard.leave
    assert members.spares == ()
    assert replaced((0,))[0].spares, "those of another node are its own"


def test_before_the_first_epoch_there_is_none_that_a_place_was_lost_in() -> None:
    _, heard = replaced(epoch=0)
    assert heard.leave


def test_a_worker_that_was_no_spare_makes_way_for_good() -> None:
    """Spares are as many as were asked for: whoever was started for a place is none."""
    members = table()
    name = members.join(request(1, 1), 0.0).worker_id
    members.begin(0, 1)
    members.join(request(2, 1), LATER)
    assert members.heartbeat(control_pb2.HeartbeatRequest(worker_id=name), LATER).leave
