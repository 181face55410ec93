"""`stagemesh stage-worker`: one stage worker, from join to exit.

Binds its port, joins the mesh, starts the ranks that its place asks for, and
then answers the gateway until it is told to leave, the head is gone, its
launcher is gone, or it gets a signal.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import signal
import socket
from functools import partial

import uvloop

from services.config import StageWorkerConfig
from services.control.client import ControlClient
from services.errors import (
    ConfigError,
    HeadLost,
    PartitionError,
    StagemeshError,
    UsageError,
    failure_of,
    for_good,
)
from services.launch.devices import resolve_device, threads_per_rank
from services.launch.process import (
    EXIT_HEAD_LOST,
    TIMER_SLACK_SECONDS,
    allow_late_timers,
    die_with_parent,
)
from services.launch.pulse import Pulse
from services.rpc.addresses import MASTER_ADDR_FLAG, check_mesh_addresses, join_host_port
from services.rpc.certificate import own_identity
from services.rpc.roles import Role
from services.rpc.server import RpcServer
from services.rpc.tls_files import tls_files
from services.telemetry.logging import setup_logging
from services.topology.fingerprint import environment_fingerprint
from services.topology.partition import PARTITION_ENV
from stage_worker.place import hold_place
from stage_worker.rank_arguments import (
    NO_STAGE,
    STEP_TIMEOUT_SECONDS,
    RankArguments,
    RankPlace,
)
from stage_worker.rank_process import RankProcess
from stage_worker.rank_supervisor import RankSupervisor
from stage_worker.service import MAX_WORKER_RPCS, SERVICE_NAME, StageWorker, add_to_server
from stage_worker.standing import rank_places
from stagemesh.v1 import control_pb2, topology_pb2

log = logging.getLogger("stagemesh.stage_worker")

STOP_GRACE_SECONDS = 1.0


class Left(Exception):
    """The worker has been told to leave; ends its task group."""


def run(config: StageWorkerConfig) -> int:
    """Runs one stage worker. Returns the exit code: 0 when it was told to leave, `EXIT_HEAD_LOST`
    when its head is gone.

    Raises `UsageError` for what cannot be started, before a port is bound or anybody asked.
    """
    if config.lifeline_fd is not None:
        # Were the launcher gone before this call, the lifeline would say so.
        die_with_parent(os.getppid())
    # Nothing here is due to the millisecond, and gRPC's threads wake often for nothing.
    allow_late_timers(TIMER_SLACK_SECONDS)
    stage = "?" if config.pp_rank is None else config.pp_rank
    setup_logging(process="spare" if config.standby else f"stage-{stage}")
    _check_addresses(config)
    fingerprint = _fingerprint(config)
    try:
        own_identity(config.tls_dir, Role.STAGE_WORKER, (config.host,))
    except ConfigError as error:
        raise for_good(error) from None
    code = 0
    try:
        uvloop.run(_serve(config, fingerprint))
    except* Left:
        code = 0
    except* StagemeshError as errors:
        failure = failure_of(errors)
        log.error("%s", failure.message if failure is not None else errors)
        code = EXIT_HEAD_LOST if isinstance(failure, HeadLost) else 1
    except* Exception as errors:
        log.exception("the stage worker failed unexpectedly", exc_info=errors)
        code = 1
    return code


def _check_addresses(config: StageWorkerConfig) -> None:
    """The rules of `serve`, which has applied them and warned where it launches this worker."""
    if config.lifeline_fd is not None:
        return
    warning = check_mesh_addresses(
        ((MASTER_ADDR_FLAG, config.master_addr), ("--host", config.host)),
        insecure=config.insecure,
        tls=config.tls_dir is not None,
    )
    if warning is not None:
        log.warning("%s", warning)


async def _serve(config: StageWorkerConfig, fingerprint: topology_pb2.Fingerprint) -> None:
    device, num_devices = resolve_device(config.device, config.cpu_devices)
    worker = StageWorker(waits_for_head=config.wait_for_head)
    server = RpcServer([SERVICE_NAME], max_calls=MAX_WORKER_RPCS)
    try:
        add_to_server(worker, server.grpc_server)
        await _run_worker(config, fingerprint, worker, server, (device, num_devices))
    finally:
        # Also where it could not listen: a server that is not stopped complains at exit.
        await server.stop(grace_seconds=STOP_GRACE_SECONDS)


async def _run_worker(
    config: StageWorkerConfig,
    fingerprint: topology_pb2.Fingerprint,
    worker: StageWorker,
    server: RpcServer,
    devices: tuple[str, int],
) -> None:
    device, num_devices = devices
    tls = None if config.tls_dir is None else tls_files(config.tls_dir, Role.STAGE_WORKER)
    port = server.bind(config.host, config.port, tls=tls)
    await server.start()
    head = join_host_port(config.master_addr, config.master_port)
    log.info("listening on %s, asking the head at %s", join_host_port(config.host, port), head)
    control = ControlClient(config.master_addr, config.master_port, tls)
    request = control_pb2.JoinRequest(
        node=socket.gethostname(),
        node_rank=config.node_rank,
        address=join_host_port(config.host, port),
        pid=os.getpid(),
        fingerprint=fingerprint,
        device=device,
        num_devices=num_devices,
        standby=config.standby,
    )
    if config.pp_rank is not None:
        request.wanted.CopyFrom(
            topology_pb2.Placement(
                dp_rank=config.dp_rank, pp_rank=config.pp_rank, tp_ranks=[config.tp_rank_start]
            )
        )
    try:
        async with asyncio.TaskGroup() as tasks:
            pulse = Pulse(config.pulse_fd)
            tasks.create_task(pulse.run())
            tasks.create_task(_until_left(worker, config))

            def on_joined(joined: control_pb2.JoinResponse) -> None:
                pulse.joined()
                _start_ranks(worker, tasks, config, joined, device)

            def on_place_lost() -> None:
                tasks.create_task(worker.become_spare())

            timeout_seconds = None if config.wait_for_head else config.join_timeout_seconds
            await hold_place(control, request, worker, on_joined, on_place_lost, timeout_seconds)
            raise Left
    finally:
        await worker.stop_ranks()
        await control.close()


def _fingerprint(config: StageWorkerConfig) -> topology_pb2.Fingerprint:
    """What this worker brings to the comparison at join: the plan as its node made it, or
    without a launcher its versions and the partition that its environment asks for."""
    if config.fingerprint is not None:
        return topology_pb2.Fingerprint.FromString(base64.b64decode(config.fingerprint))
    try:
        return environment_fingerprint(partition=os.environ.get(PARTITION_ENV))
    except PartitionError as error:
        raise UsageError(error.message, param=error.param) from None


def _start_ranks(
    worker: StageWorker,
    tasks: asyncio.TaskGroup,
    config: StageWorkerConfig,
    joined: control_pb2.JoinResponse,
    device: str,
) -> None:
    placement, topology = joined.placement, joined.topology
    devices = placement.device_indices
    if joined.standby:
        places = [RankPlace(NO_STAGE, tp_rank) for tp_rank in range(len(devices))]
        log.info("joined as a spare with devices %s", ", ".join(map(str, devices)))
    else:
        places = rank_places(placement)
        log.info(
            "joined as stage %d: layers %d to %d, TP ranks %s",
            placement.pp_rank,
            placement.layer_start,
            placement.layer_end - 1,
            ", ".join(map(str, placement.tp_ranks)),
        )
    num_ranks = topology.tp_size * topology.pp_size * topology.dp_size
    for place, device_index in zip(places, devices, strict=True):
        arguments = RankArguments(
            fd=-1,
            parent_pid=os.getpid(),
            host=config.host,
            device=device,
            device_index=device_index,
            num_threads=threads_per_rank(num_ranks),
            pp_rank=place.pp_rank,
            tp_rank=place.tp_rank,
            step_timeout_seconds=STEP_TIMEOUT_SECONDS,
        )
        rank = RankSupervisor(partial(RankProcess, arguments, worker.on_result, worker.on_failure))
        worker.ranks.append(rank)
        tasks.create_task(rank.run())
    worker.placed.set()


async def _until_left(worker: StageWorker, config: StageWorkerConfig) -> None:
    """Ends the worker's task group on a signal, on Drain, or with its launcher."""
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, worker.leave.set)
    if config.lifeline_fd is not None:
        # Nothing is ever written to it: it becomes readable when the launcher is gone.
        loop.add_reader(config.lifeline_fd, worker.leave.set)
    await worker.leave.wait()
    if config.lifeline_fd is not None:
        loop.remove_reader(config.lifeline_fd)
    log.info("leaving")
    await worker.stop_ranks()
    raise Left
