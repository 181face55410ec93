"""Before any stage loads: will all of them fit the memory that their ranks have reported?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.control.membership import Member
from services.mesh_plan import MeshPlan
from services.topology.fit import (
    DeviceMemory,
    MemoryPool,
    check_fit,
    device_pool,
    host_pool,
)

WITH_OWN_MEMORY = ("npu", "cuda")
"""Kinds whose ranks have a device's memory to themselves; ranks on a CPU share the node's."""


def check_reported_memory(plan: MeshPlan, members: Sequence[Member]) -> None:
    """Raises `ConfigError` with stage, predicted and free memory, and a partition that would fit.

    `members` are all workers of the mesh, with what their ranks had free when they started.
    Whose memory is not known is not judged.
    """
    if plan.device in WITH_OWN_MEMORY:
        pools = list(_devices(members, plan.stage_plan.gpu_memory_utilization))
    elif plan.device == "cpu":
        pools = list(_hosts(members))
    else:
        return
    if pools:
        check_fit(plan.facts, plan.shape, plan.demand, pools)


def _devices(members: Sequence[Member], utilization: float) -> Iterator[MemoryPool]:
    for member in members:
        for rank in member.status.ranks:
            if rank.HasField("memory_at_start"):
                memory = DeviceMemory(
                    rank.memory_at_start.total_bytes, rank.memory_at_start.free_bytes
                )
                where = f"{rank.device} of {_node(member)}"
                yield device_pool(where, memory, utilization, member.placement.pp_rank)


def _hosts(members: Sequence[Member]) -> Iterator[MemoryPool]:
    nodes: dict[tuple[int, str], list[Member]] = {}
    for member in members:
        nodes.setdefault((member.node_rank, member.node), []).append(member)
    for on_node in nodes.values():
        # Ranks that start later see less; the least is what is there for all.
        free = [
            rank.memory_at_start.free_bytes
            for member in on_node
            for rank in member.status.ranks
            if rank.HasField("memory_at_start")
        ]
        if free:
            yield host_pool(_node(on_node[0]), min(free), [m.placement for m in on_node])


def _node(member: Member) -> str:
    return f"node {member.node_rank} ({member.node})"
