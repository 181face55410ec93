"""Has the Ray cluster room for the mesh? Asked of Ray itself, which alone places ranks.

The placement group that `serve` would ask for is asked for in the same way, and given back.
"""

from __future__ import annotations

import os
from collections import Counter

from services.config import ServeConfig
from services.doctor.findings import Check, Finding, ok, refused
from services.errors import StagemeshError
from services.launch.ray_bundles import RankPlace, RayNode, resource_of
from services.launch.ray_cluster import ADDRESS_ENV, LOCAL, check_installed, connect
from services.topology.facts import MeshShape


def names_cluster(config: ServeConfig) -> bool:
    """Whether the mesh would run on a cluster that is there already, on nodes of Ray's choice."""
    return config.distributed_executor_backend == "ray" and _address() != LOCAL


def check_ray(config: ServeConfig, shape: MeshShape) -> tuple[Finding, str | None]:
    """What Ray says, and the kind of device that the mesh would use there; None where the
    cluster was not asked. Waits for a placement as long as `serve` would."""
    try:
        if not names_cluster(config):
            check_installed()
            words = f"{ADDRESS_ENV} names no cluster: serve starts one on this machine"
            return ok(Check.RAY, words), None
        with connect(config.cpu_devices) as cluster:
            device = cluster.choose_device(config.device)
            places = cluster.place(shape, device)
            nodes = cluster.nodes()
    except StagemeshError as error:
        return refused(Check.RAY, error), None
    return ok(Check.RAY, _room(places, nodes, resource_of(device))), device


def _room(places: tuple[RankPlace, ...], nodes: tuple[RayNode, ...], resource: str) -> str:
    seen = ", ".join(f"{n.resources.get(resource, 0):g} {resource} on {n.address}" for n in nodes)
    placed = Counter((p.address, p.placement.dp_rank, p.placement.pp_rank) for p in places)
    several = any(dp_rank for _, dp_rank, _ in placed)
    stages = "; ".join(
        f"stage {pp_rank}{f' of replica {dp_rank}' if several else ''} on {address}"
        for address, dp_rank, pp_rank in placed
    )
    return f"Ray at {_address()} sees {seen}, and has room: {stages}"


def _address() -> str:
    return os.environ.get(ADDRESS_ENV) or LOCAL
