"""The Ray cluster that a mesh runs on, and its placement group. The only place that imports ray.

`RAY_ADDRESS` names the cluster; without it one is started on this machine, reachable from
here only, and stopped with us. Ray is imported when a mesh asks for it: that takes a second.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.errors import ConfigError, StageFailed, StagemeshError
from services.launch.ray_bundles import (
    CPU_RESOURCE,
    RESOURCES,
    RankPlace,
    RayNode,
    bundle_sizes,
    choose_device,
    number_ranks,
    resource_of,
    unmet_message,
)
from services.launch.ray_rank import RankActor, RankEnd, RankOrder
from services.ranges import MAX_PORT
from services.topology.facts import MeshShape

log = logging.getLogger("stagemesh.ray")

ADDRESS_ENV = "RAY_ADDRESS"
LOCAL = "local"
"""What `RAY_ADDRESS` says to start a cluster here, as without it."""
AUTO = "auto"
"""What it says for the cluster that runs on this machine: Ray looks its address up."""
DIAL_TIMEOUT_SECONDS = 5.0
"""For a first connection to the named cluster, without Ray."""
JOIN_TIMEOUT_SECONDS = 25.0
"""For Ray to join it: seconds on a healthy one. Both, and importing Ray, end within 30 s."""
PLACEMENT_TIMEOUT_SECONDS = 30.0
"""For the placement group, over all ways to ask for it: others may leave the cluster, and
nodes come."""
OWN_PLACEMENT_TIMEOUT_SECONDS = 5.0
"""The same on a cluster of our own, where nothing changes: Ray places in milliseconds."""
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Of a cluster of our own. Nothing of ours goes through it; Ray wants 75 MiB at least."""
_POLL_SECONDS = 0.5
_SHOWN_CHARACTERS = 300

_QUIET = {
    # Ours has a time and a stage in each line already; equal lines of two ranks are two lines.
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a notice at every start
    "RAY_COLOR_PREFIX": "0",
}
_PRIVATE = {
    # Ray's one way to an address that only this machine has (services.get_node_ip_address);
    # given 127.0.0.1 as such, it takes the machine's outward address instead.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Other users of this machine can reach loopback too. The token is this cluster's alone
    # and is not written to the home directory.
    "RAY_AUTH_MODE": "token",
}


@dataclass(slots=True)
class RankRun:
    """A rank's actor at work."""

    actor: Any
    end: concurrent.futures.Future[RankEnd]


class RayCluster:
    """A connection to Ray, with at most one placement group of ours."""

    def __init__(self, ray: Any, *, is_ours: bool) -> None:
        self._ray = ray
        self._is_ours = is_ours
        self._group: Any = None

    @property
    def address(self) -> str:
        """This machine's address as the other nodes of the cluster know it."""
        return str(self._ray.util.get_node_ip_address())

    def nodes(self) -> tuple[RayNode, ...]:
        """The nodes that are alive."""
        # Ray has no public call for what is free on each node; its own libraries use this one.
        free = self._ray._private.state.available_resources_per_node()
        return tuple(
            RayNode(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"],
                free.get(node["NodeID"], {}),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        )

    def choose_device(self, asked: str) -> str:
        """The device kind of the mesh, from what the cluster has."""
        return choose_device(asked, self.nodes())

    def place(self, shape: MeshShape, device: str) -> tuple[RankPlace, ...]:
        """Has Ray place a bundle for each TP group or, where no node holds one, for each rank.

        Raises `StageFailed` after `PLACEMENT_TIMEOUT_SECONDS`, and on a cluster of our own
        `ConfigError` after `OWN_PLACEMENT_TIMEOUT_SECONDS`: the message has the unmet bundles
        and what Ray sees.
        """
        sizes = bundle_sizes(shape.tp_size)
        resource = resource_of(device)
        started = time.monotonic()
        whole = OWN_PLACEMENT_TIMEOUT_SECONDS if self._is_ours else PLACEMENT_TIMEOUT_SECONDS
        for size in sizes:
            self._remove_group()
            bundles = [{resource: size}] * (shape.world_size * shape.dp_size // size)
            self._group = self._ray.util.placement_group(bundles, strategy="PACK")
            if self._wait_for_group(whole / len(sizes)):
                if size < shape.tp_size:
                    log.warning(
                        "no node has room for a whole TP group (%d %s): TP crosses nodes, which "
                        "is slow",
                        shape.tp_size,
                        resource,
                    )
                return self._number_ranks(shape)
        message = unmet_message(
            shape,
            resource,
            self._bundle_node_ids(),
            self.nodes(),
            time.monotonic() - started,
        )
        if self._is_ours:
            raise ConfigError(f"{message}. {_remedy_here(resource)}", param=ADDRESS_ENV)
        raise StageFailed(
            f"{message}. Use smaller sizes, free what others hold (ray status shows it), or add "
            "nodes to the cluster"
        )

    def _wait_for_group(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not self._group.wait(_POLL_SECONDS):
            state = self._table()["stats"]["scheduling_state"]
            # A cluster of our own gets no node that could change Ray's mind.
            if time.monotonic() > deadline or (self._is_ours and state == "INFEASIBLE"):
                return False
        return True

    def _table(self) -> dict[str, Any]:
        table: dict[str, Any] = self._ray.util.placement_group_table(self._group)
        return table

    def _bundle_node_ids(self) -> list[str | None]:
        """By bundle; None for one that is not placed."""
        placed: dict[int, str] = self._table()["bundles_to_node_id"]
        return [placed[index] or None for index in sorted(placed)]

    def _number_ranks(self, shape: MeshShape) -> tuple[RankPlace, ...]:
        nodes = {node.node_id: node for node in self.nodes()}
        placed = self._bundle_node_ids()
        if not all(node_id in nodes for node_id in placed):
            raise StageFailed("a node has left the Ray cluster while the mesh was placed on it")
        head = self._ray.get_runtime_context().get_node_id()
        return number_ranks(shape, [nodes[node_id] for node_id in placed if node_id], head)

    def run_rank(self, place: RankPlace, order: RankOrder, start: int) -> RankRun:
        """Starts a rank's actor in its bundle, for the `start`-th time from 1. Its future ends
        with its worker, or raises one of `errors`."""
        device = RESOURCES.get(order.config.device)
        placement = place.placement
        actor = (
            self._ray.remote(RankActor)
            .options(
                name=f"replica-{placement.dp_rank}/stage-{placement.pp_rank}"
                f"/rank-{placement.tp_ranks[0]}" + (f"/start-{start}" if start > 1 else ""),
                # Ray gives a name back some time after the end of its actor.
                num_cpus=0 if device else 1,
                num_gpus=1 if device == "GPU" else 0,
                resources={device: 1} if device and device != "GPU" else None,
                max_restarts=0,
                scheduling_strategy=self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=place.bundle
                ),
            )
            .remote()
        )
        return RankRun(actor, actor.run.remote(order).future())

    @property
    def errors(self) -> type[Exception]:
        """What Ray raises for an actor that is gone."""
        error: type[Exception] = self._ray.exceptions.RayError
        return error

    def kill(self, run: RankRun) -> None:
        """Ends an actor, and with it its worker."""
        self._ray.kill(run.actor)

    def _remove_group(self) -> None:
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None

    def close(self) -> None:
        """Removes the placement group and leaves the cluster; stops it where it is our own."""
        with contextlib.suppress(self.errors):
            self._remove_group()
        self._ray.shutdown()


@contextlib.contextmanager
def connect(cpu_devices: int | None) -> Iterator[RayCluster]:
    """Connects to the cluster that `RAY_ADDRESS` names, or starts one here with
    `cpu_devices` CPUs, and leaves or stops it at the end.

    Raises `ConfigError` for what cannot work, `StageFailed` where no cluster answers.
    """
    address = os.environ.get(ADDRESS_ENV) or LOCAL
    is_ours = address == LOCAL
    check_installed()
    _check_address(address, cpu_devices)
    if address not in (LOCAL, AUTO):
        _dial(address)
    for name, value in {**_QUIET, **(_PRIVATE if is_ours else {})}.items():
        os.environ.setdefault(name, value)
    if is_ours:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = _import_ray()
    options: dict[str, Any] = {"configure_logging": False, "log_to_driver": True}
    if is_ours:
        options |= {
            "num_cpus": cpu_devices or os.cpu_count(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    log.info("starting a Ray cluster on this machine" if is_ours else f"joining Ray at {address}")
    started = time.monotonic()
    try:
        # What Ray starts here for us has limits of its own; at an address it may wait for ever.
        with contextlib.nullcontext() if is_ours else _ends_the_process(address):
            ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _no_cluster(address, error) from None
    cluster = RayCluster(ray, is_ours=is_ours)
    try:
        log.info(
            "Ray %s has %d nodes (%.1f s)",
            ray.__version__,
            len(cluster.nodes()),
            time.monotonic() - started,
        )
        yield cluster
    finally:
        cluster.close()


def check_installed() -> None:
    """Raises `ConfigError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--distributed-executor-backend ray needs Ray, which is not installed; "
            "pip install 'stagemesh[ray]'",
            param="--distributed-executor-backend",
        )


def _check_address(address: str, cpu_devices: int | None) -> None:
    if "://" in address:
        raise ConfigError(
            f"{ADDRESS_ENV}={address} is the address of a Ray client's server, behind which "
            "workers could not reach this gateway; run it on a node of the cluster, with the "
            "address that ray start has printed there (host:port), or auto",
            param=ADDRESS_ENV,
        )
    if address != LOCAL and cpu_devices is not None:
        raise ConfigError(
            f"--cpu-devices {cpu_devices} has no effect on the cluster at {ADDRESS_ENV}={address}: "
            "Ray counts the CPUs of its nodes (ray start --num-cpus); leave the flag out",
            param="--cpu-devices",
        )
    host, _, port = address.rpartition(":")
    is_dialled = bool(host) and port.isdecimal() and 0 < int(port) <= MAX_PORT
    if address not in (LOCAL, AUTO) and not is_dialled:
        raise ConfigError(
            f"{ADDRESS_ENV}={address} is no host:port; give the address that ray start has "
            f"printed on the cluster's head, {AUTO} for the cluster of this machine, or leave it "
            "unset for one of the mesh's own",
            param=ADDRESS_ENV,
        )


def _dial(address: str) -> None:
    """Raises `StageFailed` where nobody takes a connection: Ray would try it for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_TIMEOUT_SECONDS).close()
    except TimeoutError as error:
        silence = TimeoutError(f"nobody answers in {DIAL_TIMEOUT_SECONDS:g} s")
        raise _no_cluster(address, silence) from error
    except (OSError, UnicodeError) as error:
        raise _no_cluster(address, error) from error


@contextlib.contextmanager
def _ends_the_process(address: str) -> Iterator[None]:
    """Ends this process with the reason where the block outlasts `JOIN_TIMEOUT_SECONDS`.

    `ray.init` waits in C++, where no exception and no Python signal handler reaches it. Nothing
    has to be given back: what Ray has of a process ends with it, however it ends.
    """

    def end() -> None:
        reason = TimeoutError(f"Ray has not joined it in {JOIN_TIMEOUT_SECONDS:g} s")
        sys.stderr.write(f"stagemesh: error: {_no_cluster(address, reason)}\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(JOIN_TIMEOUT_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _import_ray() -> Any:
    """With the variables that it reads while it is imported set already."""
    import ray
    import ray.exceptions
    import ray.util.scheduling_strategies

    return ray


def _no_cluster(address: str, error: Exception) -> StagemeshError:
    reason = one_line(error)
    if address == LOCAL:
        return StageFailed(f"Ray could not be started on this machine: {reason}")
    return StageFailed(
        f"the Ray cluster at {ADDRESS_ENV}={address} cannot be used: {reason}. Check the address "
        "(ray status there), that this machine is a node of it, and that both run the same "
        "versions of Python and Ray"
    )


def one_line(error: Exception) -> str:
    """The end of an error of Ray's, where the cause is."""
    text = " ".join(str(error).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"... {text[-_SHOWN_CHARACTERS:]}"


def _remedy_here(resource: str) -> str:
    more = "raise --cpu-devices" if resource == CPU_RESOURCE else "make more devices visible"
    return (
        f"This is a cluster of this machine alone, because {ADDRESS_ENV} is not set: name a larger "
        f"one with it, use smaller sizes, or {more}"
    )
