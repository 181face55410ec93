"""One examination: gathers what the checks need, runs all of them, and reports."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.config import DEFAULT_MASTER_PORT, ServeConfig
from services.control.diagnosis import progress_from_proto
from services.doctor.device_memory import device_memory
from services.doctor.facts import NodeFacts, PortFacts
from services.doctor.findings import Check, Finding, failed, ok, refused
from services.doctor.gather import MASTER_PORT_FLAG, gather_kv_ports, gather_node, gather_ports
from services.doctor.head import HeadFacts, ask_head
from services.doctor.kv_transfer_check import check_kv_transfer, handshaking
from services.doctor.layout_checks import LayoutChecks, NodeDevices, settings_findings
from services.doctor.memory_check import OneDevicePerRank, SharedByRanks, check_memory
from services.doctor.mesh_checks import check_head, check_silence
from services.doctor.node_checks import (
    check_disk,
    check_limits,
    check_ports,
    check_shared_memory,
    check_versions,
)
from services.doctor.report import MeshReport, Report
from services.doctor.request import DoctorRequest
from services.doctor.tls_check import check_doors, check_mesh_address, check_tls
from services.doctor.weights_check import check_weights_equal, check_weights_here
from services.errors import StagemeshError
from services.mesh_plan import MeshPlan
from services.models.content_hash import ContentHash
from services.rpc.addresses import check_master_address
from services.rpc.certificate import check_certificate
from services.rpc.reach import Unanswered
from services.rpc.roles import Role
from services.rpc.tls_files import tls_files
from services.topology.facts import MeshShape
from services.topology.fingerprint import stated_fingerprint
from services.topology.partition import PARTITION_FLAG
from stagemesh.v1 import topology_pb2


@dataclass(frozen=True, slots=True)
class Examination:
    """A report, and what another node's doctor would compare itself with."""

    report: Report
    fingerprint: topology_pb2.Fingerprint
    shape: MeshShape | None
    """None where no plan could be made."""
    device: str
    model_path: Path | None


def examine(request: DoctorRequest) -> Examination:
    """Looks at this node, and asks the head where there is one to ask. Raises nothing that a
    check should say."""
    config = request.config
    node = gather_node()
    findings = list(settings_findings(request.problems))
    findings += check_tls(config, asks_head=request.asks_head)
    findings += check_mesh_address(config)
    findings += check_doors(config)
    layout = LayoutChecks(config, socket.gethostname())
    devices = layout.devices()
    path, plan = _examine_model(request, layout, devices.kind)
    findings += layout.findings
    has_own_stages = plan is not None and bool(plan.placements_of(config.node_rank))
    if plan is not None and has_own_stages and not layout.is_on_cluster:
        findings += _memory(config, plan, node, devices)
    weights = None if path is None or not request.deep else ContentHash(path)
    ports = gather_ports(config)
    head, silence = _ask(request, weights, ports)
    findings += check_versions(node, config, devices.kind)
    findings += _ports(ports, config, node, head)
    for transfer in handshaking(config):
        findings += check_kv_transfer(config, transfer, gather_kv_ports(config, transfer))
    findings += check_limits(node.limits, device=devices.kind, config=config)
    findings += check_disk(node.disks)
    findings += check_shared_memory(node, device=devices.kind, num_ranks=devices.num_ranks)
    if silence is not None:
        findings.append(silence)
    fingerprint = _own_fingerprint(config, plan)
    if head is not None:
        # Somebody who looks at a mesh that runs brings no device to it.
        only_looks = not config.model and config.device == "auto"
        device = None if only_looks else devices.kind
        findings += check_head(head, config, node, fingerprint, device)
    if weights is not None:
        findings += _weights(weights, head)
    mesh = None if head is None else _mesh_report(head)
    # In the order of the checks, each with its findings in the order in which they were made.
    findings.sort(key=lambda finding: list(Check).index(finding.check))
    report = Report(config.node_rank, config.model or None, tuple(findings), node, mesh)
    shape = None if plan is None else plan.shape
    return Examination(report, fingerprint, shape, devices.kind, path)


def _ask(
    request: DoctorRequest, weights: ContentHash | None, ports: Sequence[PortFacts]
) -> tuple[HeadFacts | None, Finding | None]:
    """What the head says, or the finding that it says nothing; neither where none is asked."""
    config = request.config
    try:
        # Also where nobody is asked: `serve` and `--listen` would take this address.
        has_tls = config.tls_dir is not None
        check_master_address(config.master_addr, insecure=config.insecure, tls=has_tls)
    except StagemeshError as error:
        return None, refused(Check.HEAD, error)
    # Nobody has asked about a mesh, and something is where this node's would be.
    is_curious = not request.listen and any(
        port.flag == MASTER_PORT_FLAG and port.error == errno.EADDRINUSE for port in ports
    )
    if not request.asks_head and not is_curious:
        return None, None
    tls = None
    if config.tls_dir is not None:
        try:
            check_certificate(config.tls_dir, Role.OPERATOR)
        except StagemeshError:
            return None, _not_asked(config.tls_dir)
        tls = tls_files(config.tls_dir, Role.OPERATOR)
    answer = asyncio.run(
        ask_head(
            config.master_addr,
            DEFAULT_MASTER_PORT if config.master_port is None else config.master_port,
            config.node_rank,
            request.timeout_seconds,
            weights,
            tls,
        )
    )
    if isinstance(answer, Unanswered):
        if not request.asks_head:
            return None, None  # The port is another process's, and its check says so.
        return None, check_silence(answer, config)
    return answer, None


def _not_asked(tls_dir: str) -> Finding:
    """The check of TLS says what is wrong with the certificate."""
    certificate = tls_files(tls_dir, Role.OPERATOR).certificate
    return failed(
        Check.HEAD,
        f"the head was not asked: a doctor shows {certificate}, which cannot be used",
        "stagemesh certs issue --role operator makes one",
    )


def _ports(
    ports: Sequence[PortFacts], config: ServeConfig, node: NodeFacts, head: HeadFacts | None
) -> Iterator[Finding]:
    """This node's ports, by what answers at the head's address."""
    if head is None:
        return check_ports(ports, own_mesh_runs=False)
    is_mesh = not head.answer.is_doctor
    is_here = head.answer.node == node.host
    if is_mesh and not is_here and not config.model:
        return iter((ok(Check.PORTS, "looking at another node's mesh takes no port here"),))
    return check_ports(
        ports,
        own_mesh_runs=is_mesh and is_here and config.node_rank == 0,
        answering="the mesh" if is_mesh else "the doctor",
    )


def _weights(weights: ContentHash, head: HeadFacts | None) -> Iterator[Finding]:
    ours = weights.finish()
    if head is None:
        return check_weights_here(ours)
    return check_weights_equal(ours, head.answer.content_hash, head.answer.node)


def _own_fingerprint(config: ServeConfig, plan: MeshPlan | None) -> topology_pb2.Fingerprint:
    """What this node would bring to a join; without a plan, what its command line states."""
    if plan is not None:
        return plan.fingerprint
    partition = config.pp_layer_partition or ()
    if not config.model:
        # Somebody looks at a mesh that runs: the sizes are not theirs.
        return stated_fingerprint(partition)
    return stated_fingerprint(
        partition,
        dp_size=config.data_parallel_size,
        tp_size=config.tensor_parallel_size,
        pp_size=config.pipeline_parallel_size,
        block_size=config.block_size,
        nnodes=config.nnodes,
    )


def _mesh_report(head: HeadFacts) -> MeshReport:
    progress = tuple(map(progress_from_proto, head.answer.progress))
    return MeshReport(head.address, head.answer.node, head.link, head.peers, progress)


def _examine_model(
    request: DoctorRequest, layout: LayoutChecks, device: str
) -> tuple[Path | None, MeshPlan | None]:
    path = layout.model() if request.config.model else None
    facts = None if path is None else layout.files(path)
    # A partition that was refused before is not judged again as the even one in its place.
    refused_before = any(problem.param == PARTITION_FLAG for problem in request.problems)
    if facts is not None and not refused_before:
        layout.partition(facts, device)
    layout.compatibility(facts, device)
    return path, None if path is None or facts is None else layout.plan(path, facts)


def _memory(
    config: ServeConfig, plan: MeshPlan, node: NodeFacts, devices: NodeDevices
) -> Iterator[Finding]:
    memory: OneDevicePerRank | SharedByRanks | None = None
    if devices.kind == "cpu":
        if node.available_memory_bytes is not None:
            memory = SharedByRanks(node.available_memory_bytes)
    elif (each := device_memory(devices.kind, devices.num_devices)) is not None:
        memory = OneDevicePerRank(each, config.gpu_memory_utilization)
    own = plan.placements_of(config.node_rank)
    others = [place for place in plan.placements if place.node_rank != config.node_rank]
    return check_memory(plan.facts, plan.shape, plan.demand, own, memory, others)
