"""One examination: gathers what the checks need, runs all of them, and reports."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from services.config import ServeConfig
from services.doctor.device_memory import device_memory
from services.doctor.facts import NodeFacts
from services.doctor.findings import Finding
from services.doctor.gather import gather_node, gather_ports
from services.doctor.layout_checks import LayoutChecks, NodeDevices, settings_findings
from services.doctor.memory_check import OneDevicePerRank, SharedByRanks, check_memory
from services.doctor.node_checks import (
    check_disk,
    check_limits,
    check_ports,
    check_shared_memory,
    check_versions,
)
from services.doctor.report import Report
from services.doctor.request import DoctorRequest
from services.mesh_plan import MeshPlan
from services.topology.partition import PARTITION_FLAG


def examine(request: DoctorRequest) -> Report:
    """Looks at this node. Raises nothing that a check should say."""
    config = request.config
    node = gather_node()
    findings = list(settings_findings(request.problems))
    layout = LayoutChecks(config, socket.gethostname())
    devices = layout.devices()
    plan = _examine_model(request, layout, devices.kind)
    findings += layout.findings
    if plan is not None and plan.placements_of(config.node_rank):
        findings += _memory(config, plan, node, devices)
    findings += check_versions(node, config, devices.kind)
    findings += check_ports(gather_ports(config), own_mesh_runs=False)
    findings += check_limits(node.limits, device=devices.kind, config=config)
    findings += check_disk(node.disks)
    findings += check_shared_memory(node, device=devices.kind, num_ranks=devices.num_ranks)
    return Report(config.node_rank, config.model or None, tuple(findings), node)


def _examine_model(request: DoctorRequest, layout: LayoutChecks, device: str) -> MeshPlan | None:
    path = layout.model() if request.config.model else None
    facts = None if path is None else layout.files(path)
    # A partition that was refused before is not judged again as the even one in its place.
    refused_before = any(problem.param == PARTITION_FLAG for problem in request.problems)
    if facts is not None and not refused_before:
        layout.partition(facts)
    layout.compatibility(facts, device)
    return None if path is None or facts is None else layout.plan(path, facts)


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
