"""Who may join, who is missing, who has gone silent: the table without any I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.control.membership import MAX_EPOCH, MEMBER_TIMEOUT_SECONDS, Membership
from services.errors import FingerprintMismatch, JoinRefused
from services.topology.facts import MeshShape
from services.topology.fingerprint import digest
from services.topology.placement import NodeDevices, place
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2

SHAPE = MeshShape(dp_size=1, tp_size=2, pp_size=2, pp_layer_partition=(15, 15))


def fingerprint(**fields: str) -> topology_pb2.Fingerprint:
    pairs = tuple(fields.items())
    return topology_pb2.Fingerprint(
        digest=digest(pairs),
        fields=[topology_pb2.FingerprintField(name=name, value=value) for name, value in pairs],
    )


def membership() -> Membership:
    placements = place(SHAPE, [NodeDevices(0, "head", "npu", None)])
    return Membership(SHAPE, placements, fingerprint(stagemesh="0.1.0"), "npu", nodes_planned=False)


def request(
    port: int, pp_rank: int | None = None, num_devices: int = 4, version: str = "0.1.0"
) -> control_pb2.JoinRequest:
    message = control_pb2.JoinRequest(
        node="node-a",
        address=f"127.0.0.1:{port}",
        pid=port,
        device="npu",
        num_devices=num_devices,
        fingerprint=fingerprint(stagemesh=version),
    )
    if pp_rank is not None:
        message.wanted.CopyFrom(topology_pb2.Placement(pp_rank=pp_rank))
    return message


def test_workers_without_a_wish_fill_the_stages_in_order() -> None:
    table = membership()
    first = table.join(request(1), now=0.0)
    second = table.join(request(2), now=0.0)
    assert (first.placement.pp_rank, second.placement.pp_rank) == (0, 1)
    assert (second.placement.layer_start, second.placement.layer_end) == (15, 30)
    assert list(second.placement.tp_ranks) == [0, 1]
    assert table.complete
    assert table.missing() == ()


def test_a_wish_is_kept_and_the_missing_stage_is_named() -> None:
    table = membership()
    assert table.join(request(1, pp_rank=1), now=0.0).placement.pp_rank == 1
    assert not table.complete
    assert table.missing() == ("stage 0",)


def test_two_workers_for_one_stage_are_both_named() -> None:
    table = membership()
    table.join(request(1, pp_rank=1), now=0.0)
    with pytest.raises(JoinRefused) as refusal:
        table.join(request(2, pp_rank=1), now=0.0)
    assert "127.0.0.1:1" in refusal.value.message
    assert "127.0.0.1:2" in refusal.value.message
    assert "--pp-rank" in refusal.value.message
    assert [member.address for member in table.members] == ["127.0.0.1:1"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (request(3, pp_rank=7), "wants stage 7"),
        (request(3, pp_rank=0, num_devices=1), "needs device 1 of its node"),
        (control_pb2.JoinRequest(fingerprint=request(3).fingerprint, device="cpu"), "npu .* cpu"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(
    message: control_pb2.JoinRequest, expected: str
) -> None:
    table = membership()
    with pytest.raises(JoinRefused, match=expected):
        table.join(message, now=0.0)
    assert table.members == ()


def test_one_worker_too_many_is_refused() -> None:
    table = membership()
    for port in (1, 2):
        table.join(request(port), now=0.0)
    with pytest.raises(JoinRefused, match="one too many"):
        table.join(request(3), now=0.0)


def test_another_version_is_refused_with_both_values() -> None:
    table = membership()
    with pytest.raises(FingerprintMismatch, match=r"0\.1\.0.*0\.2\.0"):
        table.join(request(1, version="0.2.0"), now=0.0)
    assert table.members == ()


def test_a_silent_member_is_found_and_a_stranger_sent_away() -> None:
    table = membership()
    first = table.join(request(1), now=0.0)
    second = table.join(request(2), now=0.0)
    later = MEMBER_TIMEOUT_SECONDS + 0.5
    beat = control_pb2.HeartbeatRequest(
        worker_id=second.worker_id,
        status=stage_worker_pb2.StatusResponse(
            state=stage_worker_pb2.COMPONENT_STATE_READY, last_step_id=7
        ),
    )
    assert not table.heartbeat(beat, now=later).leave
    assert [member.worker_id for member in table.silent(later)] == [first.worker_id]
    assert table.members[1].status.last_step_id == 7
    stranger = control_pb2.HeartbeatRequest(worker_id="worker-99")
    assert table.heartbeat(stranger, now=later).leave


def test_devices_are_counted_on_the_node_that_a_worker_is_on() -> None:
    """The head may have none: each node's workers get its devices from 0 on."""
    table = membership()
    there = request(1)
    there.node = "node-b"
    assert list(table.join(request(2), now=0.0).placement.device_indices) == [0, 1]
    assert list(table.join(there, now=0.0).placement.device_indices) == [0, 1]
    same_node = membership()
    same_node.join(request(1), now=0.0)
    second = same_node.join(request(2, num_devices=4), now=0.0)
    assert list(second.placement.device_indices) == [2, 3]


def test_before_the_mesh_runs_a_gone_worker_s_place_is_free_again() -> None:
    table = membership()
    table.join(request(1, pp_rank=1), now=0.0)
    later = MEMBER_TIMEOUT_SECONDS + 0.5
    assert table.join(request(9, pp_rank=1), now=later).placement.pp_rank == 1
    # One that did not hear the answer may ask again.
    assert table.join(request(9, pp_rank=1), now=later).placement.pp_rank == 1
    assert [member.address for member in table.members] == ["127.0.0.1:9"]


def test_what_this_side_slept_through_is_forgiven() -> None:
    table = membership()
    table.join(request(1), now=0.0)
    table.forgive(now=10.0)
    assert table.silent(10.0) == ()
    assert table.silent(10.0 + MEMBER_TIMEOUT_SECONDS + 0.5) != ()


def test_where_the_nodes_are_planned_a_worker_keeps_its_device() -> None:
    placements = place(SHAPE, [NodeDevices(0, "head", "npu", 4)])
    table = Membership(SHAPE, placements, fingerprint(stagemesh="0.1.0"), "npu", nodes_planned=True)
    # Whoever joins first.
    assert list(table.join(request(1, pp_rank=1), now=0.0).placement.device_indices) == [2, 3]
    assert list(table.join(request(2, pp_rank=0), now=0.0).placement.device_indices) == [0, 1]


def test_workers_that_each_see_one_device_all_have_the_first() -> None:
    """As on Ray, which shows every actor only its own."""
    shape = MeshShape(dp_size=1, tp_size=1, pp_size=2, pp_layer_partition=(15, 15))
    planned = [
        replace(each, device_indices=(0,))
        for each in place(shape, [NodeDevices(0, "head", "npu", 2)])
    ]
    stated = fingerprint(stagemesh="0.1.0")
    table = Membership(shape, planned, stated, "npu", nodes_planned=True)
    for port, pp_rank in ((1, 0), (2, 1)):
        joined = table.join(request(port, pp_rank, num_devices=1), now=0.0)
        assert list(joined.placement.device_indices) == [0]
    again = table.join(held(2, 1, 0, last_epoch=3), now=1.0)
    assert list(again.placement.device_indices) == [0]
    assert table.complete


def test_a_worker_that_comes_back_takes_the_place_of_one_that_is_gone() -> None:
    """The old one is sent away should it wake up."""
    table = membership()
    old = table.join(request(1, pp_rank=0), now=0.0)
    table.join(request(2, pp_rank=1), now=0.0)
    (holder,) = table.in_the_way(request(3, pp_rank=0), now=1.0)
    assert holder.worker_id == old.worker_id
    # Nobody knows yet that it is gone.
    with pytest.raises(JoinRefused, match="is held by"):
        table.join(request(3, pp_rank=0), now=1.0)
    assert table.forget(old.worker_id) is holder
    assert table.missing() == ("stage 0",)
    new = table.join(request(3, pp_rank=0), now=1.0)
    assert new.worker_id != old.worker_id
    assert table.complete
    assert table.heartbeat(control_pb2.HeartbeatRequest(worker_id=old.worker_id), now=1.1).leave
    assert not table.heartbeat(control_pb2.HeartbeatRequest(worker_id=new.worker_id), now=1.1).leave


def test_whoever_is_silent_is_in_nobody_s_way() -> None:
    table = membership()
    table.join(request(1, pp_rank=0), now=0.0)
    other = table.join(request(2, pp_rank=1), now=0.0)
    later = MEMBER_TIMEOUT_SECONDS + 0.5
    table.heartbeat(control_pb2.HeartbeatRequest(worker_id=other.worker_id), now=later)
    assert table.absent(0, later) == ("stage 0",)
    assert table.in_the_way(request(3, pp_rank=0), now=later) == ()
    assert table.join(request(3), now=later).placement.pp_rank == 0
    assert table.absent(0, later) == ()


def test_one_that_was_silent_and_is_heard_again_keeps_its_place() -> None:
    """It has its weights; nobody had asked for its place."""
    table = membership()
    joined = table.join(request(1, pp_rank=0), now=0.0)
    later = MEMBER_TIMEOUT_SECONDS + 0.5
    assert "stage 0" in table.absent(0, later)
    assert not table.heartbeat(
        control_pb2.HeartbeatRequest(worker_id=joined.worker_id), now=later
    ).leave
    assert "stage 0" not in table.absent(0, later)


def test_a_worker_without_a_wish_asks_for_everybody_s_place() -> None:
    table = membership()
    for port in (1, 2):
        table.join(request(port), now=0.0)
    assert len(table.in_the_way(request(3), now=0.0)) == 2
    table.forget(table.members[1].worker_id)
    assert table.in_the_way(request(3), now=0.0) == ()


def held(port: int, pp_rank: int, *devices: int, last_epoch: int = 0) -> control_pb2.JoinRequest:
    """From a worker whose ranks run."""
    message = request(port, pp_rank)
    message.wanted.device_indices.extend(devices)
    message.last_epoch = last_epoch
    return message


def test_a_name_of_another_head_is_told_from_one_that_is_gone() -> None:
    """The first name of each head; the earlier one's would be taken for this one's."""
    earlier, table = membership(), membership()
    old = earlier.join(request(1), now=0.0).worker_id
    own = table.join(request(1), now=0.0).worker_id
    answer = table.heartbeat(control_pb2.HeartbeatRequest(worker_id=old), now=0.0)
    assert (answer.leave, answer.other_head) == (True, True)
    table.forget(own)
    answer = table.heartbeat(control_pb2.HeartbeatRequest(worker_id=own), now=0.0)
    assert (answer.leave, answer.other_head) == (True, False)


def test_the_highest_epoch_that_a_worker_has_been_in_is_known() -> None:
    table = membership()
    assert table.last_epoch == 0
    table.join(held(1, 0, 0, 1, last_epoch=7), now=0.0)
    table.join(held(2, 1, 2, 3, last_epoch=5), now=0.0)
    assert table.last_epoch == 7
    with pytest.raises(JoinRefused, match="restart the worker"):
        membership().join(held(1, 0, last_epoch=MAX_EPOCH + 1), now=0.0)


def test_ranks_that_run_keep_their_devices() -> None:
    """Whichever of a node's workers is back first."""
    table = membership()
    assert list(table.join(held(2, 1, 2, 3), now=0.0).placement.device_indices) == [2, 3]
    assert list(table.join(held(1, 0, 0, 1), now=0.0).placement.device_indices) == [0, 1]


@pytest.mark.parametrize("devices", [(0, 2), (2, 2), (2,)])
def test_devices_that_a_place_cannot_have_are_refused(devices: tuple[int, ...]) -> None:
    """One that another worker was given meanwhile, one twice, and one too few."""
    table = membership()
    table.join(request(1, pp_rank=0), now=0.0)
    with pytest.raises(JoinRefused, match=r"run on devices .* 0, 1 are taken; restart the worker"):
        table.join(held(2, 1, *devices), now=0.0)
    assert len(table.members) == 1


LATER = MEMBER_TIMEOUT_SECONDS + 0.5


def cut_off_beside(table: Membership) -> tuple[str, str]:
    """Two workers, of which that of stage 0 is silent: their names."""
    silent = table.join(request(1, pp_rank=0), now=0.0).worker_id
    heard = table.join(request(2, pp_rank=1), now=0.0).worker_id
    table.heartbeat(control_pb2.HeartbeatRequest(worker_id=heard), now=LATER)
    return silent, heard


@pytest.mark.parametrize("asks", [request(9, pp_rank=1), request(2, pp_rank=1)])
def test_whoever_asks_for_another_place_throws_out_nobody_who_is_silent(
    asks: control_pb2.JoinRequest,
) -> None:
    """Whether it is refused or let in: the silent one may be cut off, and holds weights."""
    table = membership()
    silent, heard = cut_off_beside(table)
    table.in_the_way(asks, LATER)
    if asks.pid == 9:
        with pytest.raises(JoinRefused, match="is held by"):
            table.join(asks, LATER)
    else:
        assert [member.worker_id for member in table.making_way(asks, LATER)] == [heard]
        table.join(asks, LATER)
    assert len(table.members) == 2
    beat = control_pb2.HeartbeatRequest(worker_id=silent)
    assert not table.heartbeat(beat, now=LATER).leave


def test_one_that_is_refused_takes_no_silent_one_s_place() -> None:
    table = membership()
    silent, _ = cut_off_beside(table)
    for refused in (request(9, 0, version="0.2.0"), request(9, 0, num_devices=1)):
        with pytest.raises(JoinRefused):
            table.join(refused, LATER)
    assert table.member(silent) is not None


def test_without_a_wish_one_silent_worker_at_most_makes_way() -> None:
    table = membership()
    table.join(request(1), now=0.0)
    # There is a free place.
    assert table.making_way(request(9), LATER) == ()
    table.join(request(2), now=0.0)
    (gone,) = table.making_way(request(9), LATER)
    assert table.join(request(9), LATER).placement.pp_rank == gone.placement.pp_rank == 0
    assert [member.pid for member in table.members] == [9, 2]


def test_devices_of_a_silent_worker_are_given_where_there_are_no_others() -> None:
    """It may wake up, or have been started again with other devices than before."""
    for num_devices, expected in ((4, [2, 3]), (2, [0, 1])):
        table = membership()
        table.join(request(1, pp_rank=0), now=0.0)
        new = table.join(request(9, pp_rank=1, num_devices=num_devices), LATER)
        assert list(new.placement.device_indices) == expected
    table = membership()
    table.join(request(1, pp_rank=0), now=0.0)
    assert list(table.join(held(2, 1, 0, 1), LATER).placement.device_indices) == [0, 1]
