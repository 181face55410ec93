"""docs/doctor.md: a section for each check, and its examples are what the checks say."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

from services.config import ServeConfig
from services.doctor import tls_check
from services.doctor.facts import LimitFacts, PortFacts
from services.doctor.findings import Check, Finding, Outcome, ok, refused, warning
from services.doctor.head import HeadFacts, LinkFacts, PeerFacts
from services.doctor.kv_transfer_check import check_kv_transfer
from services.doctor.memory_check import OneDevicePerRank, check_memory
from services.doctor.mesh_checks import (
    check_clock,
    check_join,
    check_members,
    check_network,
    check_progress,
    check_silence,
)
from services.doctor.node_checks import (
    check_disk,
    check_limits,
    check_ports,
    check_shared_memory,
    check_versions,
)
from services.doctor.ray_check import room_finding
from services.doctor.report import Report, finding_lines, render
from services.doctor.weights_check import check_weights_equal
from services.errors import StagemeshError
from services.launch.ray_bundles import RayNode
from services.models.content_hash import FileHash, HashProgress
from services.rpc.certificate import CertificateFacts, wrong_host
from services.rpc.reach import Obstacle, Unanswered
from services.rpc.roles import Role
from services.rpc.tls_files import tls_files
from services.software import Version
from services.topology.compatibility import broken_rules
from services.topology.facts import MeshShape
from services.topology.families import resolve_max_model_len
from services.topology.fingerprint import stated_fingerprint
from services.topology.fit import DeviceMemory
from services.topology.kv_transfer import KvTransferConfig, SideSizes
from services.topology.layouts import Demand
from services.topology.partition import resolve_partition
from services.topology.placement import NodeDevices, check_devices, place
from services.topology.planfacts import read_planned_model
from services.topology.rule import MeshRequest
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2
from tests.unit.doctor.node_facts import GIB, INSTALLED, node
from tests.unit.topology.published_configs import DEEPSEEK_V3, write_config

DOCUMENT = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text("utf-8")
HEAD = ServeConfig(model="m")
TWO_NODES = ServeConfig(model="m", nnodes=2, node_rank=1, headless=True)


def sections() -> dict[str, str]:
    """Text of each section on a check, by the check's name."""
    parts = re.split(r"^### (.+)$", DOCUMENT.partition("## Checks")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def examples(section: str) -> list[str]:
    return re.findall(r"```text\n(.*?)```", section, re.DOTALL)


def test_every_check_has_a_section_in_its_order() -> None:
    assert list(sections()) == [check.value for check in Check]


def devices() -> list[Finding]:
    shape = MeshShape(1, 4, 4, (1,) * 4)
    with pytest.raises(StagemeshError) as error:
        check_devices(shape, 8, "npu", 4, "node 1 (node-a)")
    hidden = warning(
        Check.DEVICES,
        "ASCEND_RT_VISIBLE_DEVICES leaves 4 of 8 devices visible",
        "unset ASCEND_RT_VISIBLE_DEVICES, or list more devices in it",
    )
    return [refused(Check.DEVICES, error.value), hidden]


def ray() -> list[Finding]:
    shape = MeshShape(1, 8, 2, (1, 1))

    def npus(name: str, total: float, free: float) -> RayNode:
        return RayNode(name, name, {"NPU": total}, {"NPU": free})

    def found(*nodes: RayNode) -> Finding:
        return room_finding(shape, "NPU", nodes, "10.0.0.1:6379")

    busy = found(npus("10.0.0.1", 8, 0), npus("10.0.0.2", 8, 0))
    small = found(npus("10.0.0.1", 8, 0), npus("10.0.0.2", 4, 4))
    return [busy, small]


def compatibility() -> list[Finding]:
    request = MeshRequest(pp_size=4, prefill_context_parallel_size=2)
    return [
        Finding(Check.COMPATIBILITY, Outcome.FAILED, each.message) for each in broken_rules(request)
    ]


def layout(tmp_path: Path) -> list[Finding]:
    facts = replace(
        read_planned_model(write_config(tmp_path / "m", DEEPSEEK_V3)).facts,
        path=Path("/models/deepseek-v3"),
    )
    with pytest.raises(StagemeshError) as error:
        resolve_max_model_len(1_000_000, facts)
    return [refused(Check.LAYOUT, error.value)]


def partition() -> list[Finding]:
    with pytest.raises(StagemeshError) as error:
        resolve_partition(61, 2, (32, 30))
    return [refused(Check.PARTITION, error.value)]


def memory(tmp_path: Path) -> list[Finding]:
    facts = read_planned_model(write_config(tmp_path / "m", DEEPSEEK_V3)).facts
    shape = MeshShape(1, 8, 4, (13, 14, 14, 20))
    demand = Demand("bfloat16", 16, 32768, 64, 512, None, None)
    placements = place(shape, [NodeDevices(rank, "n", "npu", 8) for rank in range(4)])
    last = [place for place in placements if place.node_rank == 3]
    others = [place for place in placements if place.node_rank != 3]
    memory = OneDevicePerRank((DeviceMemory(32 * GIB, 30 * GIB),) * 8, 0.9)
    return list(check_memory(facts, shape, demand, last, memory, others))


def versions() -> list[Finding]:
    there = (*INSTALLED, Version("torch-npu", "2.12.0"), Version("cann", "8.3.RC1"))
    found = check_versions(node(there), TWO_NODES, "npu")
    return [finding for finding in found if finding.outcome is Outcome.FAILED]


def ports() -> list[Finding]:
    taken = PortFacts("--port", "127.0.0.1", 8000, errno.EADDRINUSE)
    foreign = PortFacts("--master-port", "10.0.0.1", 29550, errno.EADDRNOTAVAIL)
    return list(check_ports((taken, foreign), own_mesh_runs=False))


def kv_transfer() -> list[Finding]:
    asked = KvTransferConfig(
        kv_connector="MooncakeConnectorV1",
        kv_role="kv_consumer",
        kv_port=65530,
        prefill=SideSizes(tp_size=8, pp_size=2),
        decode=SideSizes(tp_size=16),
    )
    config = ServeConfig(model="m", tensor_parallel_size=8, kv_transfer_config=asked)
    return list(check_kv_transfer(config, asked, ()))


def limits() -> list[Finding]:
    few = LimitFacts(1024, 1_048_576, 8 << 20)
    return list(check_limits(few, device="npu", config=TWO_NODES))


def tls() -> list[Finding]:
    directory = Path("/etc/stagemesh/tls")
    facts = CertificateFacts(
        "O=Stagemesh, CN=stage-worker 10.0.0.2",
        frozenset((Role.STAGE_WORKER,)),
        ("10.0.0.2", "localhost", "127.0.0.1"),
        datetime(2126, 3, 1, 12, 0, tzinfo=UTC),
    )
    refusal = wrong_host(tls_files(directory, Role.STAGE_WORKER), facts, "10.0.0.3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls_check, "check_certificate", Mock(side_effect=[facts, refusal]))
        return [tls_check.check_role(str(directory), Role.STAGE_WORKER, ()) for _ in range(2)]


def head() -> list[Finding]:
    firewall = Unanswered("10.0.0.1:29550", Obstacle.SILENCE, "no answer in 5 s")
    rest_port = Unanswered("10.0.0.1:8000", Obstacle.NOT_GRPC, "it does not speak HTTP/2")
    return [check_silence(each, TWO_NODES) for each in (firewall, rest_port)]


def join() -> list[Finding]:
    ours = stated_fingerprint((31, 30), tp_size=8, pp_size=2, nnodes=2)
    theirs = stated_fingerprint((30, 31), tp_size=8, pp_size=2, nnodes=4)
    answer = control_pb2.DiagnoseResponse(
        node="head-host",
        fingerprint=theirs,
        members=[
            control_pb2.MemberReport(node="node-z", node_rank=1, address="10.0.0.3:40117", pid=4711)
        ],
    )
    return list(check_join(answer, TWO_NODES, node(), ours, "npu"))


def weights() -> list[Finding]:
    ours = HashProgress(10, 10, (FileHash("model.safetensors", "5af571cbf074" + "0" * 52),), "")
    file = control_pb2.FileHash(name="model.safetensors", sha256="b7e28f1a66c3" + "0" * 52)
    return list(check_weights_equal(ours, control_pb2.ContentHash(files=[file]), "head-host"))


def clock() -> list[Finding]:
    return list(check_clock(LinkFacts(0.0004, 1e9, -37.2, 0.0002), "head-host"))


def mesh_answer() -> control_pb2.DiagnoseResponse:
    def member(pp_rank: int, name: str, round_trip: float) -> control_pb2.MemberReport:
        return control_pb2.MemberReport(
            node=name,
            node_rank=pp_rank,
            address=f"10.0.0.{pp_rank + 1}:40117",
            placement=topology_pb2.Placement(pp_rank=pp_rank, tp_ranks=[0]),
            round_trip_seconds=round_trip,
        )

    def stage(pp_rank: int, done: int) -> control_pb2.StageProgress:
        return control_pb2.StageProgress(
            pp_rank=pp_rank, sent_step_id=43, done_step_id=done, silent_seconds=12.34
        )

    return control_pb2.DiagnoseResponse(
        node="head-host",
        members=[member(0, "head-host", 0.0002), member(1, "node-a", 0.0005)],
        missing=["stage 2"],
        progress=[stage(0, 42), stage(1, 41), stage(2, 41)],
    )


def network() -> list[Finding]:
    link = LinkFacts(0.0004, 1.1e9, 0.0, 0.0002)
    peers = (PeerFacts("10.0.0.1:40117", 0.0005), PeerFacts("10.0.0.2:40117", None))
    return list(check_network(HeadFacts("10.0.0.1:29550", mesh_answer(), link, peers)))


def mesh() -> list[Finding]:
    answer = mesh_answer()
    for member in answer.members:
        member.status.state = stage_worker_pb2.COMPONENT_STATE_READY
    answer.members[
        1
    ].status.error.message = "rank process 4711 (stage 1, TP rank 0) was ended by SIGKILL"
    return list(check_members(answer))


def progress() -> list[Finding]:
    answer = mesh_answer()
    answer.members[1].status.ranks.add(
        tp_rank=0, phase=stage_worker_pb2.RANK_PHASE_RECEIVE, phase_seconds=11.96
    )
    return list(check_progress(answer))


def test_the_examples_are_what_the_checks_say(tmp_path: Path) -> None:
    made = {
        Check.DEVICES: devices(),
        Check.RAY: ray(),
        Check.PARTITION: partition(),
        Check.COMPATIBILITY: compatibility(),
        Check.LAYOUT: layout(tmp_path),
        Check.MEMORY: memory(tmp_path),
        Check.VERSIONS: versions(),
        Check.PORTS: ports(),
        Check.KV_TRANSFER: kv_transfer(),
        Check.LIMITS: limits(),
        Check.DISK: list(check_disk(node(disk_free_bytes=GIB // 4).disks)),
        Check.SHARED_MEMORY: list(
            check_shared_memory(node(shared_memory_bytes=64 << 20), device="npu", num_ranks=8)
        ),
        Check.TLS: tls(),
        Check.HEAD: head(),
        Check.JOIN: join(),
        Check.WEIGHTS: weights(),
        Check.CLOCK: clock(),
        Check.NETWORK: network(),
        Check.MESH: mesh(),
        Check.PROGRESS: progress(),
    }
    found = sections()
    for check, findings in made.items():
        text = "\n".join(line for finding in findings for line in finding_lines(finding)) + "\n"
        assert examples(found[check.value]) == [text], f"docs/doctor.md says otherwise:\n{text}"


def test_the_first_example_is_a_report() -> None:
    findings = (
        ok(Check.SETTINGS, "the flags go together"),
        ok(Check.DEVICES, "TP 2 x PP 2 x DP 1 needs 4 devices; node 0 (node-a) has 8 (npu)"),
        *ports()[:1],
    )
    text = render(Report(0, None, findings, node()))
    assert examples(DOCUMENT)[0] == text, text
