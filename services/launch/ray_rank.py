"""The actor that holds one rank: on whatever node Ray has put it, it runs that rank's stage
worker by exec, and with it the rank process.

This module is all that a Ray worker process imports of ours. Children die with their
actor: by the kernel's parent-death signal, and because their lifeline closes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.config import ServeConfig
from services.errors import StagemeshError
from services.launch.devices import KINDS
from services.launch.ray_bundles import RESOURCES
from services.launch.worker_command import worker_command
from services.launch.worker_process import WorkerProcess
from services.mesh_plan import make_plan
from services.topology.partition import PARTITION_ENV, parse_partition
from services.topology.placement import StagePlacement
from stagemesh.v1 import topology_pb2


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What an actor is told."""

    placement: StagePlacement
    """Of one rank."""
    config: ServeConfig
    """The head's, with the kind of device and without its keys."""
    model_path: str
    """The same on every node."""
    master_addr: str
    master_port: int
    host: str
    """Address of the actor's node, for the worker and its rank to listen on."""
    environment: Mapping[str, str]
    """Variables that the workers have from the head and not from their node."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How an actor's worker has ended."""

    code: int | None
    """Exit code, negative for a signal; None where it was not started."""
    why: str = ""
    """Why it was not started."""


class RankActor:
    """Made an actor by `ray.remote` at the head."""

    def run(self, order: RankOrder) -> RankEnd:
        """Runs the worker until it ends. Blocks: the actor has no other work, and is killed
        where the worker must end before."""
        try:
            fingerprint = fingerprint_here(order, os.environ.get(PARTITION_ENV))
        except StagemeshError as error:
            return RankEnd(None, error.message)
        visible = visible_device(order.config.device, _accelerator_ids())
        # From the actor's main thread, whose end is that of the process.
        return asyncio.run(_run_worker(order, fingerprint, visible))


async def _run_worker(
    order: RankOrder, fingerprint: topology_pb2.Fingerprint, visible: Mapping[str, str]
) -> RankEnd:
    """Runs the worker until it ends, and ends one that is stopped or hangs."""
    lifeline, held_open = os.pipe()

    def command(pulse_fd: int) -> list[str]:
        return worker_command(
            order.placement,
            master_addr=order.master_addr,
            master_port=order.master_port,
            host=order.host,
            device=order.config.device,
            num_devices=1,
            fingerprint=fingerprint,
            lifeline_fd=lifeline,
            pulse_fd=pulse_fd,
            tls_dir=order.config.tls_dir,
        )

    worker = WorkerProcess(order.placement, command, {**order.environment, **visible})
    try:
        await worker.start(lifeline)
        return RankEnd((await worker.ended()).code)
    finally:
        worker.close()
        os.close(lifeline)
        os.close(held_open)


def fingerprint_here(order: RankOrder, own_partition: str | None) -> topology_pb2.Fingerprint:
    """The plan's fingerprint from this node's copy of the model, its packages and the layer
    partition that its environment names, if any; the head compares it at join.

    Raises `ModelError` where the model is not here, `PartitionError` for a partition that
    does not fit it.
    """
    config = order.config
    if own_partition:
        config = replace(config, pp_layer_partition=parse_partition(own_partition))
    node = socket.gethostname()
    return make_plan(config, Path(order.model_path), node, own_devices=False).fingerprint


def visible_device(device: str, accelerator_ids: Mapping[str, list[str]]) -> dict[str, str]:
    """The variable that shows a rank the device that Ray has given it, and no other.

    Ray sets it for the actor by itself, unless RAY_EXPERIMENTAL_NOSET_... says that it must
    not, which some clusters do.
    """
    for kind in KINDS:
        if kind.name == device and (ids := accelerator_ids.get(RESOURCES[device])):
            return {kind.visible_env: ",".join(ids)}
    return {}


def _accelerator_ids() -> dict[str, list[str]]:
    import ray

    ids: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return ids
