"""Has the Ray cluster room for the mesh? From what Ray says of its nodes; nothing is asked for,
because the mesh may be running there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from services.config import ServeConfig
from services.doctor.findings import Check, Finding, failed, ok, refused, warning
from services.errors import StagemeshError
from services.launch.ray_bundles import (
    RayNode,
    Room,
    in_use,
    resource_of,
    rooms,
    seen,
    too_small_message,
    whose_bundle,
)
from services.launch.ray_cluster import ADDRESS_ENV, LOCAL, check_installed, connect
from services.topology.facts import MeshShape


def names_cluster(config: ServeConfig) -> bool:
    """Whether the mesh would run on a cluster that is there already, on nodes of Ray's choice."""
    return config.distributed_executor_backend == "ray" and _address() != LOCAL


def check_ray(config: ServeConfig, shape: MeshShape) -> tuple[Finding, str | None]:
    """What Ray says, and the kind of device that the mesh would use there; None where the
    cluster was not asked."""
    try:
        if not names_cluster(config):
            check_installed()
            words = f"{ADDRESS_ENV} names no cluster: serve starts one on this machine"
            return ok(Check.RAY, words), None
        with connect(config.cpu_devices) as cluster:
            device = cluster.choose_device(config.device)
            nodes = cluster.nodes()
    except StagemeshError as error:
        return refused(Check.RAY, error), None
    return room_finding(shape, resource_of(device), nodes, _address()), device


def room_finding(
    shape: MeshShape, resource: str, nodes: Sequence[RayNode], address: str
) -> Finding:
    """Whether the bundles of the mesh find room now, or when nobody uses the cluster.

    Ray places what it is asked for a little later, and may know of more: this is a forecast.
    """
    ways = rooms(shape, resource, nodes)
    sees = f"Ray at {address} sees {seen(resource, nodes)}"
    if ways[0].free >= ways[0].needed:
        return ok(Check.RAY, f"{sees}, and has room: {_bundles(ways[0], resource)}")
    if ways[-1].free >= ways[-1].needed:
        return warning(
            Check.RAY,
            f"{sees}, and has room, but not for {_bundles(ways[0], resource)}, on one node each: "
            "TP would cross nodes, which is slow",
            "use a smaller -tp, or free what others hold (ray status shows it)",
        )
    for room in ways:
        if room.total >= room.needed:
            return warning(
                Check.RAY,
                f"Ray at {address} has {in_use(resource, nodes)}, and room for {room.free} of "
                f"{_bundles(room, resource)}",
                "nothing where a mesh runs there, perhaps this one; else free what others hold "
                "(ray status shows it) before serve",
            )
    return failed(
        Check.RAY,
        too_small_message(shape, resource, ways[-1], nodes),
        "use smaller sizes, or add nodes to the cluster",
    )


def _bundles(room: Room, resource: str) -> str:
    plural = "" if room.needed == 1 else "s"
    return (
        f"{room.needed} bundle{plural} of {room.ranks_per_bundle} {resource}, one for each "
        f"{whose_bundle(room.ranks_per_bundle)}"
    )


def _address() -> str:
    return os.environ.get(ADDRESS_ENV) or LOCAL
