"""Starts the stage workers of one node as child processes, starts them again, sees them out.

`stagemesh serve` is the gateway plus this; with `--headless` it is this alone.
Under systemd or Ray the workers are started by those instead, with the same
command (`worker_command`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.launch.keeping import keep, keep_all
from services.launch.launcher import GoesOn, IsMissed, WorkerExit
from services.launch.restarts import DEFAULT_LIMITS, RestartLimits
from services.launch.worker_command import worker_command
from services.launch.worker_process import WorkerProcess
from services.topology.placement import StagePlacement
from stagemesh.v1 import topology_pb2

STOP_TIMEOUT_SECONDS = 2.0
"""A worker that is told to leave does so in well under a second."""


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """What the workers of this node are told."""

    host: str
    """Address that workers and their ranks listen on."""
    placements: Sequence[StagePlacement]
    device: str
    num_devices: int
    fingerprint: topology_pb2.Fingerprint
    """Of the plan, from this node's copy of the model: compared with the head's at join."""
    tls_dir: str | None = None
    """Where this node's certificates are; None without TLS."""
    wait_for_head: bool = False
    """They wait for a head without limit, and outlive it."""
    num_spares: int = 0
    """Workers besides those of `placements`, that take over a place which is lost."""
    node_rank: int = 0


class LocalLauncher:
    """The stage workers of this node. Implements `services.launch.launcher.Launcher`."""

    def __init__(
        self,
        workers: LocalWorkers,
        limits: RestartLimits = DEFAULT_LIMITS,
        *,
        together_seconds: float = 0.0,
    ) -> None:
        """The end of a worker that was sent away is told only when all others have ended or
        `together_seconds` are over: by then it is known whether all were."""
        self._workers = workers
        self._limits = limits
        self._together_seconds = together_seconds
        self._processes: list[WorkerProcess] = []
        # Held open for the launcher's life: when it closes, the workers leave.
        self._lifeline: tuple[int, int] | None = os.pipe()

    async def start(self, master_addr: str, master_port: int) -> None:
        """Starts every worker of this node. They join by themselves."""
        workers = self._workers
        for placement in (*workers.placements, *(None,) * workers.num_spares):
            process = WorkerProcess(
                placement,
                partial(self._command, placement, master_addr, master_port),
                node_rank=workers.node_rank,
            )
            self._processes.append(process)
            await process.start(self._lifeline_fd())

    def _lifeline_fd(self) -> int:
        if self._lifeline is None:
            raise RuntimeError("the launcher has been stopped")
        return self._lifeline[0]

    def _command(
        self, placement: StagePlacement | None, master_addr: str, master_port: int, pulse_fd: int
    ) -> list[str]:
        workers = self._workers
        return worker_command(
            placement,
            node_rank=workers.node_rank,
            master_addr=master_addr,
            master_port=master_port,
            host=workers.host,
            device=workers.device,
            num_devices=workers.num_devices,
            fingerprint=workers.fingerprint,
            lifeline_fd=self._lifeline_fd(),
            pulse_fd=pulse_fd,
            tls_dir=workers.tls_dir,
            wait_for_head=workers.wait_for_head,
        )

    @property
    def is_in_mesh(self) -> bool:
        """Whether a worker runs that has been in the mesh."""
        return any(process.is_running and process.has_joined for process in self._processes)

    async def watch(self, goes_on: GoesOn, is_missed: IsMissed) -> WorkerExit:
        """Starts another worker where one has ended; see `Launcher.watch`."""
        return await keep_all((self._keep(p, goes_on) for p in self._processes), is_missed)

    async def _keep(self, process: WorkerProcess, goes_on: GoesOn) -> WorkerExit:
        async def start() -> None:
            await process.start(self._lifeline_fd())

        return await keep(partial(self._ended, process), start, goes_on, self._limits)

    async def _ended(self, process: WorkerProcess) -> WorkerExit:
        end = await process.ended()
        if end.dismissed and self._together_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._together_seconds):
                    for other in self._processes:
                        if other.has_joined:
                            await other.exited()
        return end

    async def stop(self) -> None:
        """Closes the lifeline, gives the workers a moment, and kills what is left."""
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        running = [process for process in self._processes if process.is_running]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                for process in running:
                    await process.ended()
        for process in running:
            process.kill()
            await process.ended()
        for process in self._processes:
            process.close()
