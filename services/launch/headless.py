"""`stagemesh serve --headless`: the stage workers of a node that is not the head."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from functools import partial

import uvloop

from services.config import DEFAULT_MASTER_PORT, ServeConfig
from services.errors import ConfigError, StageFailed, for_good
from services.launch.launcher import WorkerExit
from services.launch.local import LocalLauncher, LocalWorkers
from services.launch.process import EXIT_HEAD_LOST, TIMER_SLACK_SECONDS, allow_late_timers
from services.mesh_plan import MeshPlan, check_memory, make_plan
from services.models.resolve import resolve_model
from services.rpc.addresses import (
    MASTER_ADDR_FLAG,
    OWN_ADDRESS,
    check_mesh_addresses,
    own_address_towards,
)
from services.rpc.certificate import own_identity
from services.rpc.roles import Role
from services.telemetry.logging import setup_logging

log = logging.getLogger("stagemesh.node")

TOGETHER_SECONDS = 5.0
"""The workers of a node end within so long of each other when their head sends all away."""


def run(config: ServeConfig) -> int:
    """Runs this node's workers until they leave or a signal. Returns the exit code.

    0 after a signal or when the head has dismissed the workers; raises
    `StageFailed` when one of them ends for another reason: its log says why, and
    `UsageError` for a configuration that cannot be started.
    """
    setup_logging(process=f"node-{config.node_rank}")
    allow_late_timers(TIMER_SLACK_SECONDS)
    own_address = own_address_towards(config.master_addr)
    warning = check_mesh_addresses(
        ((MASTER_ADDR_FLAG, config.master_addr), (OWN_ADDRESS, own_address)),
        insecure=config.insecure,
        tls=config.tls_dir is not None,
    )
    if warning is not None:
        log.warning("%s", warning)
    try:
        node = socket.gethostname()
        plan = make_plan(config, resolve_model(config.model), node)
        check_memory(plan, config.node_rank, node)
        own_identity(config.tls_dir, Role.STAGE_WORKER, (own_address,))
    except ConfigError as error:
        # As at the head: what is wrong here stays wrong, and the exit code says so.
        raise for_good(error) from error
    return uvloop.run(_run(config, plan, own_address))


async def _run(config: ServeConfig, plan: MeshPlan, host: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stop.set)
    placements = plan.placements_of(config.node_rank)
    launcher = LocalLauncher(
        LocalWorkers(
            host,
            placements,
            plan.device,
            plan.num_devices,
            plan.fingerprint,
            config.tls_dir,
            config.wait_for_head,
            config.standby,
            config.node_rank,
        ),
        together_seconds=TOGETHER_SECONDS,
    )
    try:
        port = DEFAULT_MASTER_PORT if config.master_port is None else config.master_port
        await launcher.start(config.master_addr, port)
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(stop.wait())
            ending = tasks.create_task(
                launcher.watch(partial(_goes_on, launcher), partial(_is_missed, launcher))
            )
            await asyncio.wait((stopping, ending), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            ending.cancel()  # Without effect where it has ended.
        if ending.cancelled():
            return 0
        ended = ending.result()
        if ended.dismissed:
            log.info("the head has dismissed this node")
            return 0
        raise StageFailed(
            f"{ended.name} on node rank {config.node_rank} {ended.how}; its log lines above say why"
        )
    finally:
        await launcher.stop()


def _goes_on(launcher: LocalLauncher, ended: WorkerExit) -> bool:
    """Whether the head may still want a worker here: it has had one, and is not gone itself; and
    where it has sent this one away, not all of the node, such as one that another has replaced
    while nothing was heard of it."""
    if not ended.had_joined or ended.code == EXIT_HEAD_LOST:
        return False
    return not ended.dismissed or launcher.is_in_mesh


def _is_missed(launcher: LocalLauncher, ended: WorkerExit) -> bool:
    """Whether the node ends with a worker while others are kept. Not with one that the head has
    had and that cannot be kept here: whether its place is another's is for the head to know."""
    if ended.is_spare:
        return False
    if not ended.had_joined or ended.code == EXIT_HEAD_LOST:
        return True
    return ended.dismissed and not launcher.is_in_mesh
