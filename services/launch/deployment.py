"""From what a user asked for to a mesh that can be started: plan, places, and who starts
the workers.

Everything that can be refused is refused here, before a port is bound; what it costs is
undone by the caller's exit stack.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from services.config import DEFAULT_HOST, ServeConfig
from services.errors import ConfigError
from services.launch.launcher import Launcher
from services.launch.local import LocalLauncher, LocalWorkers
from services.launch.ray_bundles import HEAD_NODE_RANK
from services.launch.ray_cluster import connect
from services.launch.ray_launcher import RayLauncher
from services.mesh_plan import MeshPlan, check_memory, make_plan
from services.models.resolve import resolve_model
from services.rpc.addresses import (
    MASTER_ADDR_FLAG,
    check_door_address,
    check_mesh_addresses,
    gateway_names,
)
from services.rpc.certificate import own_identity
from services.rpc.roles import Role
from services.rpc.tls_files import TlsFiles

log = logging.getLogger("stagemesh.gateway")

RAY_TLS_ENV = "RAY_USE_TLS"
"""Ray's own switch; RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT name its files."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A mesh that can be started from this process."""

    config: ServeConfig
    """With the address that workers dial, and the kind of device."""
    model_path: Path
    plan: MeshPlan
    launcher: Launcher | None
    """None where others start the workers."""
    tls: TlsFiles | None = None
    """The gateway's; None without TLS."""


def deploy(config: ServeConfig, stack: contextlib.ExitStack, *, launch_workers: bool) -> Deployment:
    """Resolves a configuration against model, devices and, where it asks for Ray, the cluster.

    Leaving `stack` leaves the cluster. Raises `ConfigError` for what cannot be started, and
    `StageFailed` where a cluster has no room now.
    """
    if config.distributed_executor_backend == "ray":
        return _on_ray(config, stack)
    tls = _check_security(config, launch_workers=launch_workers)
    if config.trust_remote_code:
        log.info("--trust-remote-code changes nothing: no code of a checkpoint is ever run")
    model_path = resolve_model(config.model)
    node = socket.gethostname()
    plan = make_plan(config, model_path, node, own_devices=launch_workers)
    launcher: Launcher | None = None
    if launch_workers:
        check_memory(plan, config.node_rank, node)
        launcher = LocalLauncher(
            LocalWorkers(
                config.master_addr,
                plan.placements_of(config.node_rank),
                plan.device,
                plan.num_devices,
                plan.fingerprint,
                config.tls_dir,
                num_spares=config.standby,
                node_rank=config.node_rank,
            )
        )
    return Deployment(config, model_path, plan, launcher, tls)


def _on_ray(config: ServeConfig, stack: contextlib.ExitStack) -> Deployment:
    if config.require_tls and os.environ.get(RAY_TLS_ENV) != "1":
        raise ConfigError(
            f"--require-tls with Ray needs {RAY_TLS_ENV}=1 and Ray's certificates in the "
            "environment of every node: Ray's own connections start the ranks",
            param="--require-tls",
        )
    node = socket.gethostname()
    model_path = resolve_model(config.model)
    # What is wrong with model or sizes is said before a cluster is started for it.
    make_plan(config, model_path, node, own_devices=False)
    cluster = stack.enter_context(connect(config.cpu_devices))
    if config.master_addr == DEFAULT_HOST:
        config = replace(config, master_addr=cluster.address)
    config = replace(config, device=cluster.choose_device(config.device))
    plan = make_plan(config, model_path, node, own_devices=False)
    places = cluster.place(plan.shape, plan.device)
    # Workers listen elsewhere, too, and have certificates of their own there.
    tls = _check_security(config, [place.address for place in places], launch_workers=False)
    plan = replace(plan, placements=tuple(place.placement for place in places))
    check_memory(plan, HEAD_NODE_RANK, node)
    launcher = RayLauncher(cluster, config, model_path, places)
    return Deployment(config, model_path, plan, launcher, tls)


def _check_security(
    config: ServeConfig, ray_addresses: Iterable[str] = (), *, launch_workers: bool
) -> TlsFiles | None:
    """Addresses and certificates; what the gateway shows. Raises `ConfigError`."""
    has_tls = config.tls_dir is not None
    others = dict.fromkeys(address for address in ray_addresses if address != config.master_addr)
    warning = check_mesh_addresses(
        (
            (MASTER_ADDR_FLAG, config.master_addr),
            *(("the Ray node's address", address) for address in others),
        ),
        insecure=config.insecure,
        tls=has_tls,
    )
    doors = check_door_address(
        config.host,
        insecure=config.insecure,
        rest_tls=config.ssl_certfile is not None,
        grpc_tls=has_tls,
        keys=bool(config.api_key) or config.api_key_file is not None,
    )
    for line in (warning, doors):
        if line is not None:
            log.warning("%s", line)
    if launch_workers:
        own_identity(config.tls_dir, Role.STAGE_WORKER, (config.master_addr,))
    names = gateway_names(config.master_addr, config.host)
    return own_identity(config.tls_dir, Role.GATEWAY, names)
