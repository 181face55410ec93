"""What the head's answer means: which of address, port, node count, model, sizes or rank differs,
which stage holds a step, and what links and clocks are like."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from services.config import ServeConfig
from services.doctor.findings import Check, Finding, Outcome
from services.doctor.head import HeadFacts, LinkFacts, PeerFacts
from services.doctor.mesh_checks import (
    check_clock,
    check_head,
    check_join,
    check_members,
    check_network,
    check_progress,
    check_silence,
    check_versions_equal,
)
from services.rpc.reach import Obstacle, Unanswered
from services.software import Version
from services.topology.fingerprint import digest
from stagemesh.v1 import control_pb2, stage_worker_pb2, step_pb2, topology_pb2
from tests.unit.doctor.node_facts import INSTALLED, node

WORKER = ServeConfig(model="m", nnodes=2, node_rank=1, headless=True, master_addr="10.0.0.1")
HEAD = ServeConfig(model="m", nnodes=2, master_addr="10.0.0.1")
READY = stage_worker_pb2.StatusResponse(state=stage_worker_pb2.COMPONENT_STATE_READY)
AGREED = {"config": "c1", "weights": "w1", "tp_size": "2", "pp_size": "2", "nnodes": "2"}


def fingerprint(**changes: str) -> topology_pb2.Fingerprint:
    pairs = tuple({**AGREED, **changes}.items())
    return topology_pb2.Fingerprint(
        digest=digest(pairs),
        fields=[topology_pb2.FingerprintField(name=name, value=value) for name, value in pairs],
    )


def member(pp_rank: int, name: str, status: bool = True, **fields: object) -> object:
    report = control_pb2.MemberReport(
        node=name,
        node_rank=pp_rank,
        address=f"10.0.0.{pp_rank + 1}:7000",
        pid=41,
        placement=topology_pb2.Placement(pp_rank=pp_rank, tp_ranks=[0]),
        silent_seconds=0.4,
        **fields,
    )
    if status:
        report.status.CopyFrom(READY)
    return report


def answer(**fields: object) -> control_pb2.DiagnoseResponse:
    members = fields.pop("members", [member(0, "head-host"), member(1, "node-a")])
    return control_pb2.DiagnoseResponse(
        node="head-host", device="cpu", fingerprint=fingerprint(), members=members, **fields
    )


def join(said: control_pb2.DiagnoseResponse, device: str = "cpu", **changes: str) -> list[Finding]:
    return list(check_join(said, WORKER, node(), fingerprint(**changes), device))


def failures(findings: Iterable[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.outcome is Outcome.FAILED]


@pytest.mark.parametrize(
    ("obstacle", "what", "remedy"),
    [
        (Obstacle.NAME, "the name in head:29550 does not resolve", "--master-addr"),
        (Obstacle.ROUTE, "no way leads to head:29550", "--master-addr"),
        (Obstacle.SILENCE, "nobody answers at head:29550", "firewall"),
        (Obstacle.REFUSED, "nothing listens at head:29550", "--master-port"),
        (Obstacle.NOT_GRPC, "is no gRPC server", "--port is the REST"),
        (Obstacle.OTHER_SERVICE, "has no control service", "not --grpc-port"),
        (Obstacle.HUNG, "takes connections and does not answer", "stopped or overloaded"),
        (Obstacle.ERROR, "head:29550 answers with an error: why", "log of the head"),
    ],
)
def test_which_of_address_and_port_is_wrong(obstacle: Obstacle, what: str, remedy: str) -> None:
    finding = check_silence(Unanswered("head:29550", obstacle, "why"), WORKER)
    assert finding.outcome is Outcome.FAILED
    assert what in finding.what
    assert remedy in finding.remedy


def test_a_head_that_is_not_started_yet_is_no_failure_on_its_own_node() -> None:
    finding = check_silence(Unanswered("head:29550", Obstacle.REFUSED, "why"), HEAD)
    assert finding.outcome is Outcome.WARNING
    assert "no mesh runs here" in finding.what


def test_a_node_that_would_be_taken() -> None:
    (finding,) = join(answer(members=[]))
    assert finding.outcome is Outcome.OK
    assert finding.what.endswith("config, weights, tp_size, pp_size, nnodes")


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("tp_size", "4", "--tensor-parallel-size"),
        ("pp_size", "3", "--pipeline-parallel-size"),
        ("nnodes", "3", "--nnodes"),
    ],
)
def test_what_differs_is_named_with_both_values(field: str, value: str, remedy: str) -> None:
    (finding,) = join(answer(members=[]), **{field: value})
    assert finding.outcome is Outcome.FAILED
    assert finding.what == (
        f"{field} differs: the head has {AGREED[field]} and node 1 (node-a) has {value}"
    )
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("config", "the head's config.json has values of SHA-256 abababababab"),
        ("weights", "the head's safetensors files (names, sizes, headers) have SHA-256 abababab"),
    ],
)
def test_digests_are_short_and_said_of_what(field: str, words: str) -> None:
    said = answer(members=[])
    next(f for f in said.fingerprint.fields if f.name == field).value = "ab" * 32
    (finding,) = join(said, **{field: "cd" * 32})
    assert finding.what.startswith(f"{field} differs: {words}")
    assert finding.what.endswith(" and those of node 1 (node-a) cdcdcdcdcdcd")
    assert "the head's model directory" in finding.remedy


def test_all_differences_are_named_not_only_the_first() -> None:
    found = failures(join(answer(members=[]), device="npu", tp_size="1", nnodes="4", config="x"))
    assert [what.partition(" differs")[0] for what in found] == [
        "config",
        "tp_size",
        "nnodes",
        "device",
    ]


def test_who_only_looks_brings_no_device() -> None:
    (finding,) = join(answer(members=[]), device=None)
    assert finding.outcome is Outcome.OK


def test_a_node_rank_that_another_host_holds() -> None:
    (finding,) = join(answer(members=[member(0, "head-host"), member(1, "node-z")]))
    assert finding.outcome is Outcome.FAILED
    assert "node rank 1 is held by node-z (worker 10.0.0.2:7000, pid 41)" in finding.what
    assert "this is node-a" in finding.what
    assert "--headless" in finding.remedy


def test_this_nodes_own_workers_are_no_clash() -> None:
    (finding,) = join(answer())
    assert finding.outcome is Outcome.OK


def test_drivers_must_be_equal_and_libraries_had_better_be() -> None:
    ours = (*INSTALLED, Version("cann", "8.3.RC1"), Version("grpcio", "1.85.3"))
    theirs = {"cann": "8.2.RC1", "grpcio": "1.85.0", "python": "3.11.1", "ray": "2.60.0"}
    said = control_pb2.DiagnoseResponse(
        node="head-host",
        versions=[topology_pb2.FingerprintField(name=n, value=v) for n, v in theirs.items()],
    )
    found = list(check_versions_equal(said, WORKER, node(ours)))
    assert [(f.outcome, f.what.partition(" differs")[0]) for f in found] == [
        (Outcome.FAILED, "cann"),
        (Outcome.WARNING, "grpcio"),
    ]
    assert "head-host has 8.2.RC1 and node 1 (node-a) has 8.3.RC1" in found[0].what
    said.versions[2].value = "3.12.1"
    assert len(list(check_versions_equal(said, WORKER, node(ours)))) == 3


@pytest.mark.parametrize(
    ("offset", "doubt", "outcome"),
    [
        (0.2, 0.001, Outcome.OK),
        (1.2, 0.5, Outcome.OK),
        (3.0, 0.5, Outcome.WARNING),
        (-3.0, 0.5, Outcome.WARNING),
    ],
)
def test_clocks(offset: float, doubt: float, outcome: Outcome) -> None:
    (finding,) = check_clock(LinkFacts(2 * doubt, 1e9, offset, doubt), "head-host")
    assert finding.outcome is outcome
    if outcome is Outcome.WARNING:
        assert ("ahead of" if offset > 0 else "behind") in finding.what
        assert "chrony" in finding.remedy


def head(said: control_pb2.DiagnoseResponse, *round_trips: float | None) -> HeadFacts:
    peers = tuple(
        PeerFacts(each.address, seconds)
        for each, seconds in zip(said.members, round_trips, strict=True)
    )
    return HeadFacts("10.0.0.1:29550", said, LinkFacts(0.0005, 1 << 30, 0.0, 0.00025), peers)


def test_every_hop_is_measured_and_named() -> None:
    said = answer(members=[member(0, "head-host", round_trip_seconds=0.0004), member(1, "node-a")])
    to_head, first, second = check_network(head(said, 0.0006, None))
    assert to_head.what.startswith("to the head: round trip 0.50 ms, 1.0 GiB/s (gRPC;")
    assert first.what == ("to stage 0 at 10.0.0.1:7000: round trip 0.60 ms, from the head 0.40 ms")
    assert second.outcome is Outcome.FAILED
    assert second.what == "stage 1 at 10.0.0.2:7000 cannot be reached from this node"
    assert "VLLM_HOST_IP on node-a" in second.remedy


def test_who_is_missing_is_named() -> None:
    said = answer(members=[member(0, "head-host")], missing=["stage 1"], not_ready_reason="waits")
    (finding,) = check_members(said)
    assert finding.outcome is Outcome.WARNING
    assert finding.what == "stage 1 has not joined; joined: stage 0 from head-host"


def test_a_worker_that_failed_or_is_silent() -> None:
    failed = member(0, "head-host")
    failed.status.error.CopyFrom(step_pb2.StageError(message="rank process 5 was ended by SIGKILL"))
    mute = member(1, "node-a", status=False)
    slow = member(1, "node-b")
    slow.silent_seconds = 2.9
    found = failures(check_members(answer(members=[failed, mute, slow])))
    assert "stage 0 on head-host (10.0.0.1:7000) has failed: rank process 5" in found[0]
    assert "stage 1 on node-a (10.0.0.2:7000) does not answer the head" in found[1]
    assert "stage 1 on node-b (10.0.0.2:7000) has sent no heartbeat for 2.9 s" in found[2]


def test_a_mesh_that_loads_and_one_that_serves() -> None:
    (finding,) = check_members(answer(not_ready_reason="stages are loading weights"))
    assert finding.outcome is Outcome.WARNING
    assert "2 workers joined; no requests are taken yet: stages are loading weights" in finding.what
    (finding,) = check_members(answer())
    assert (finding.outcome, finding.what) == (
        Outcome.OK,
        "2 workers joined, and requests are taken",
    )


def progress(
    *done: int, sent: int, silent: float, dp_rank: int = 0
) -> list[control_pb2.StageProgress]:
    return [
        control_pb2.StageProgress(
            dp_rank=dp_rank,
            pp_rank=pp_rank,
            sent_step_id=sent,
            done_step_id=each,
            silent_seconds=silent,
        )
        for pp_rank, each in enumerate(done)
    ]


def test_a_request_that_hangs_names_the_stage_and_what_waits_on_it() -> None:
    (finding,) = check_progress(answer(progress=progress(42, 41, 41, sent=43, silent=12.34)))
    assert finding.outcome is Outcome.FAILED
    assert finding.what.startswith("stage 1 has been silent for 12.3 s: it has done step 41")
    assert "stage 2 waits for activations of step 42 from stage 1" in finding.what
    assert "stage 1" in finding.remedy


def test_what_the_ranks_of_the_stage_said_is_told() -> None:
    members = [member(pp_rank, "node-a") for pp_rank in range(3)]
    waits = stage_worker_pb2.RANK_PHASE_RECEIVE
    for pp_rank, phase in enumerate((1, waits, waits)):
        members[pp_rank].status.ranks.add(tp_rank=0, phase=phase, phase_seconds=11.96)
        members[pp_rank].status.ranks.add(tp_rank=1, phase=phase, phase_seconds=11.9)
    said = answer(members=members, progress=progress(42, 41, 41, sent=43, silent=12.34))
    (finding,) = check_progress(said)
    assert (
        "TP rank 0 has waited for activations for 12.0 s, TP rank 1 has waited for activations for "
        "11.9 s; stage 2 waits"
    ) in finding.what


def test_progress_of_a_mesh_that_moves_or_rests() -> None:
    (moving,) = check_progress(answer(progress=progress(42, 41, sent=43, silent=0.2)))
    assert (moving.outcome, moving.what) == (
        Outcome.OK,
        "stage 0 at step 42, stage 1 at step 41; step 43 was given last",
    )
    later_stages_get_steps_later = progress(42, 41, sent=43, silent=0.2)
    later_stages_get_steps_later[0].sent_step_id = 45
    (moving,) = check_progress(answer(progress=later_stages_get_steps_later))
    assert moving.what.endswith("; step 45 was given last")
    (rests,) = check_progress(answer(progress=progress(43, 43, sent=43, silent=600.0)))
    assert rests.what == "nothing is in flight; all stages have done step 43"
    (new,) = check_progress(answer(progress=progress(0, 0, sent=0, silent=600.0)))
    assert new.what == "nothing is in flight; no step was run yet"
    assert list(check_progress(answer())) == []


def test_replicas_are_judged_one_by_one() -> None:
    second = progress(3, 2, sent=3, silent=30.0, dp_rank=1)
    said = answer(progress=[*second, *progress(9, 9, sent=9, silent=30.0)])
    first, stuck = check_progress(said)
    assert (first.outcome, stuck.outcome) == (Outcome.OK, Outcome.FAILED)
    assert stuck.what.startswith("replica 1: stage 1 has been silent for 30.0 s")


def test_a_listening_doctor_has_no_mesh_to_judge() -> None:
    said = control_pb2.DiagnoseResponse(node="head-host", is_doctor=True)
    found = list(check_head(head(said), WORKER, node(), fingerprint(), "cpu"))
    assert {finding.check for finding in found} == {
        Check.HEAD,
        Check.JOIN,
        Check.CLOCK,
        Check.NETWORK,
    }
    assert not failures(found)
