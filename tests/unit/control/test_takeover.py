"""Which spare takes over which place: the pure rule, and the table of who is where over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.control.member import MEMBER_TIMEOUT_SECONDS, Spare, place_of
from services.control.membership import Membership
from services.control.takeover import Readiness, Seat, readiness, takeovers, to_hold
from services.errors import JoinRefused
from services.topology.facts import MeshShape
from services.topology.fingerprint import digest
from services.topology.placement import NodeDevices, StagePlacement, place
from services.topology.wire import placement_to_proto
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2

SHAPE = MeshShape(dp_size=1, tp_size=1, pp_size=3, pp_layer_partition=(2, 2, 2))
PLACEMENTS = place(SHAPE, [NodeDevices(0, "head", "cpu", None)])
WIDE = place(
    MeshShape(dp_size=1, tp_size=2, pp_size=1, pp_layer_partition=(6,)),
    [NodeDevices(0, "head", "cpu", None)],
)
FINGERPRINT = topology_pb2.Fingerprint(digest=digest(()))
STANDBY = stage_worker_pb2.COMPONENT_STATE_STANDBY
STARTING = stage_worker_pb2.COMPONENT_STATE_STARTING


def status(
    state: stage_worker_pb2.ComponentState = STANDBY,
    holds: StagePlacement | None = None,
    num_ranks: int = 1,
    *,
    started: bool = True,
) -> stage_worker_pb2.StatusResponse:
    return stage_worker_pb2.StatusResponse(
        state=state,
        ranks=[stage_worker_pb2.RankStatus(started=started)] * num_ranks,
        holds=None if holds is None else placement_to_proto(holds),
    )


def spare(
    name: str,
    holds: StagePlacement | None = None,
    state: stage_worker_pb2.ComponentState = STANDBY,
    node_rank: int = 0,
    devices: tuple[int, ...] = (9,),
) -> Spare:
    said = status(state, holds, len(devices))
    return Spare(name, "node", node_rank, name, 1, 0.0, devices, status=said)


def chosen(seats: dict[int, Readiness], *spares: Spare) -> dict[int, str]:
    made = takeovers([Seat(PLACEMENTS[stage], far) for stage, far in seats.items()], spares)
    return {takeover.placement.pp_rank: takeover.spare.worker_id for takeover in made}


def test_a_lost_place_goes_to_whoever_holds_its_weights() -> None:
    others = (spare("a"), spare("b", PLACEMENTS[0]), spare("c", PLACEMENTS[1]))
    assert chosen({1: Readiness.GONE}, *others) == {1: "c"}
    assert chosen({1: Readiness.GONE, 2: Readiness.GONE}, *others) == {1: "c", 2: "a"}


def test_a_spare_without_weights_is_better_than_one_that_has_to_drop_others() -> None:
    assert chosen({2: Readiness.GONE}, spare("a", PLACEMENTS[0]), spare("b")) == {2: "b"}
    assert chosen({2: Readiness.GONE}, spare("a", PLACEMENTS[0])) == {2: "a"}


@pytest.mark.parametrize(
    ("holder", "empty", "held"),
    [
        (Readiness.GONE, True, True),
        (Readiness.STARTING, True, True),
        (Readiness.STARTED, False, True),
        (Readiness.HOLDS, False, False),
    ],
)
def test_only_who_is_further_takes_over(holder: Readiness, empty: bool, held: bool) -> None:
    assert bool(chosen({0: holder}, spare("a"))) is empty
    assert bool(chosen({0: holder}, spare("a", PLACEMENTS[0]))) is held


def test_a_spare_that_is_not_ready_takes_nothing_over() -> None:
    assert chosen({0: Readiness.GONE}, spare("a", state=STARTING)) == {}


def test_a_spare_has_as_many_ranks_as_the_place() -> None:
    seat = Seat(WIDE[0], Readiness.GONE)
    assert takeovers([seat], [spare("a")]) == []
    assert [t.spare.worker_id for t in takeovers([seat], [spare("b", devices=(1, 2))])] == ["b"]


def test_a_spare_of_the_same_node_is_nearer() -> None:
    there, here = spare("a", node_rank=1), spare("b", node_rank=0)
    assert chosen({0: Readiness.GONE}, there, here) == {0: "b"}


def test_how_far_a_worker_is() -> None:
    first, second = PLACEMENTS[:2]
    assert readiness(status(started=False), first) is Readiness.STARTING
    assert readiness(stage_worker_pb2.StatusResponse(), first) is Readiness.STARTING
    assert readiness(status(), first) is Readiness.STARTED
    assert readiness(status(holds=second), first) is Readiness.STARTED
    assert readiness(status(holds=first), first) is Readiness.HOLDS


def test_each_named_stage_is_held_once_for_each_time_it_is_named() -> None:
    first, second = PLACEMENTS[:2]
    wanted = [first, second, first]
    spares = [spare("a"), spare("b", second), spare("c"), spare("d")]
    held: list[tuple[str, int]] = []
    while (found := to_hold(wanted, spares)) is not None:
        loading, placement = found
        held.append((loading.worker_id, placement.pp_rank))
        loading.status.CopyFrom(status(holds=placement))
    assert held == [("a", 0), ("c", 0)]
    assert to_hold(wanted, spares[:2]) is None


def test_who_has_failed_has_a_rank_to_start_and_comes_last_as_a_spare() -> None:
    spares = [spare("a", PLACEMENTS[0]), spare("b")]

    def taken(far: Readiness, *failed: str) -> list[str]:
        found = takeovers([Seat(PLACEMENTS[0], far)], spares, failed)
        return [takeover.spare.worker_id for takeover in found]

    assert taken(Readiness.STARTING) == ["a"]
    assert taken(Readiness.STARTING, "a") == ["b"]
    assert taken(Readiness.STARTED, "a") == [], "that it says it holds weights is not enough"
    assert taken(Readiness.STARTING, "a", "b") == ["b"], "in turn, where all have failed"


def test_a_spare_that_could_not_load_keeps_none_from_it() -> None:
    first, second = PLACEMENTS[:2]
    spares = [spare("a"), spare("b")]
    failed = {("a", place_of(first))}
    assert to_hold([first, second], spares, failed) == (spares[1], first)
    failed.add(("b", place_of(first)))
    assert to_hold([first, second], spares, failed) == (spares[0], second)
    assert to_hold([first], spares, failed) is None


def test_a_spare_that_loads_in_advance_is_given_nothing_else() -> None:
    busy = spare("a")
    busy.loads_in_advance = True
    assert chosen({0: Readiness.GONE}, busy) == {}
    assert to_hold(PLACEMENTS[:1], [busy]) is None


def request(pid: int, *, standby: bool = True) -> control_pb2.JoinRequest:
    return control_pb2.JoinRequest(
        node="head",
        address=f"127.0.0.1:{pid}",
        pid=pid,
        device="cpu",
        num_devices=4,
        fingerprint=FINGERPRINT,
        standby=standby,
    )


def planned() -> Membership:
    """Three stages and room for a spare."""
    placements = place(SHAPE, [NodeDevices(0, "head", "cpu", 4)])
    return Membership(SHAPE, placements, FINGERPRINT, "cpu", nodes_planned=True)


def devices(answer: control_pb2.JoinResponse) -> list[int]:
    return list(answer.placement.device_indices)


def test_a_spare_that_joins_first_leaves_the_stages_their_devices() -> None:
    table = planned()
    assert devices(table.join(request(1), 0.0)) == [3]
    given = [devices(table.join(request(pid, standby=False), 0.0)) for pid in (2, 3, 4)]
    assert given == [[0], [1], [2]]
    with pytest.raises(JoinRefused, match="is a spare and needs 1 free devices of its node"):
        table.join(request(5), 0.0)


def test_planned_devices_go_to_a_spare_where_there_are_no_others() -> None:
    table = planned()
    assert devices(table.join(request(1), 0.0)) == [3]
    assert devices(table.join(request(2), 0.0)) == [0]
    assert devices(table.join(request(3, standby=False), 0.0)) == [1]


def test_a_silent_spare_whose_device_is_needed_is_one_no_more() -> None:
    later = MEMBER_TIMEOUT_SECONDS + 0.5
    for standby in (True, False):
        table = planned()
        old = table.join(request(1), 0.0).worker_id
        for pid in (2, 3, 4):
            table.join(request(pid), 0.0)
        for silent in table.spares[1:]:
            silent.heard_at = later
        assert devices(table.join(request(5, standby=standby), later)) == [3]
        assert table.heartbeat(control_pb2.HeartbeatRequest(worker_id=old), later).leave


_READINESS = st.sampled_from(Readiness)
_SPARES = st.lists(
    st.tuples(
        st.sampled_from((STANDBY, STARTING)),
        st.sampled_from((None, *PLACEMENTS)),
        st.integers(0, 1),
    ),
    max_size=4,
)


@given(st.tuples(_READINESS, _READINESS, _READINESS), _SPARES)
def test_takeovers_are_few_and_worth_it(
    seats: tuple[Readiness, ...], made: list[tuple[stage_worker_pb2.ComponentState, None, int]]
) -> None:
    spares = [spare(str(i), holds, state, node) for i, (state, holds, node) in enumerate(made)]
    table = [Seat(p, r) for p, r in zip(PLACEMENTS, seats, strict=True)]
    found = takeovers(table, spares)
    names = [takeover.spare.worker_id for takeover in found]
    stages = [takeover.placement.pp_rank for takeover in found]
    assert len(set(names)) == len(names)
    assert len(set(stages)) == len(stages)
    for takeover in found:
        assert takeover.spare.is_ready
        far = readiness(takeover.spare.status, takeover.placement)
        assert far > seats[takeover.placement.pp_rank]
    # Who is lost stays so only where nobody is left.
    lost = sum(r < Readiness.STARTED for r in seats)
    ready = sum(s.is_ready for s in spares)
    assert sum(seats[stage] < Readiness.STARTED for stage in stages) >= min(
        lost, ready - (len(found) - sum(seats[stage] < Readiness.STARTED for stage in stages))
    )


@dataclass
class Process:
    """A worker process: what it was started for, and what it knows."""

    slot: int
    pid: int
    worker_id: str = ""
    devices: tuple[int, ...] = ()
    place: int | None = None
    place_epoch: int = 0
    was_silent: bool = False
    may_share: bool = False
    """A device was given while it was silent: its own, where there are no others."""
    said: stage_worker_pb2.StatusResponse = field(default_factory=status)


NUM_SPARES = 2
NUM_DEVICES = SHAPE.pp_size + NUM_SPARES


class Node(RuleBasedStateMachine):
    """One node whose launcher starts three stages and two spares again and again, in any order of
    deaths, ends of ranks, silences and takeovers."""

    def __init__(self) -> None:
        super().__init__()
        placements = place(SHAPE, [NodeDevices(0, "head", "cpu", NUM_DEVICES)])
        self.table = Membership(SHAPE, placements, FINGERPRINT, "cpu", nodes_planned=True)
        self.running: dict[int, Process] = {}
        self.now = 0.0
        self.epoch = 0
        self.pids = 0

    def living(self) -> list[Process]:
        return list(self.running.values())

    @precondition(lambda self: len(self.running) < NUM_DEVICES)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        free = sorted({*range(NUM_DEVICES)} - self.running.keys())
        slot = data.draw(st.sampled_from(free))
        self.pids += 1
        for process in self.living():
            process.may_share |= process.was_silent
        request = control_pb2.JoinRequest(
            node="head",
            address=f"127.0.0.1:{self.pids}",
            pid=self.pids,
            device="cpu",
            num_devices=NUM_DEVICES,
            fingerprint=FINGERPRINT,
            standby=slot >= SHAPE.pp_size,
        )
        if slot < SHAPE.pp_size:
            request.wanted.pp_rank = slot
        # The head asks who is in the way; whoever does not live is not there.
        for holder in self.table.in_the_way(request, self.now):
            if holder.worker_id not in {p.worker_id for p in self.living()}:
                self.table.forget(holder.worker_id)
        answer = self.table.join(request, self.now)
        place_now = None if answer.standby else int(answer.placement.pp_rank)
        assert answer.standby or place_now == slot
        devices = tuple(answer.placement.device_indices)
        self.running[slot] = Process(slot, self.pids, answer.worker_id, devices, place_now)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), known=st.booleans())
    def die(self, data: st.DataObject, known: bool) -> None:
        process = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        if known:
            self.table.forget(process.worker_id)

    @rule()
    def beat(self) -> None:
        self.now += 1.0
        for process in self.living():
            process.said.state = STANDBY if process.place is None else STARTING
            beat = control_pb2.HeartbeatRequest(worker_id=process.worker_id, status=process.said)
            answer = self.table.heartbeat(beat, self.now)
            if answer.leave:
                # It was silent, and its device was needed.
                assert process.was_silent
                del self.running[process.slot]
                continue
            process.was_silent = False
            lost = answer.place_lost_epoch
            if process.place is not None and lost and lost >= process.place_epoch:
                process.place = None

    @rule()
    def cut_off(self) -> None:
        self.now += MEMBER_TIMEOUT_SECONDS + 0.1
        for process in self.living():
            process.was_silent = True

    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        known = {
            process.worker_id: data.draw(_READINESS)
            for process in self.living()
            if process.place is not None
        }
        for member, _ in self.table.take_over(0, self.epoch, self.now, known):
            process = next((p for p in self.living() if p.worker_id == member.worker_id), None)
            if process is not None:
                assert process.place is None
                process.place = member.placement.pp_rank
                process.place_epoch = self.epoch + 1
                assert process.devices == member.placement.device_indices
                process.said = status(STARTING)
        self.epoch += 1
        self.table.begin(0, self.epoch)
        # Whoever has just taken over is no worse than before: nothing more is to do.
        gone = {m.worker_id: Readiness.HOLDS for m in self.table.members}
        assert all(
            old is None or old.is_silent(self.now)
            for _, old in self.table.take_over(0, self.epoch, self.now, gone)
        ) or not self.table.ready_spares(self.now)

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        members, spares = self.table.members, self.table.spares
        names = [worker.worker_id for worker in (*members, *spares)]
        assert len(set(names)) == len(names)

    @invariant()
    def nobody_who_is_heard_of_shares_a_device(self) -> None:
        living = {p.worker_id for p in self.living() if not p.may_share}
        workers = [w for w in (*self.table.members, *self.table.spares) if w.worker_id in living]
        devices = [index for worker in workers for index in worker.device_indices]
        assert len(set(devices)) == len(devices)
        assert not devices or max(devices) < NUM_DEVICES


Node.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestNode = Node.TestCase
