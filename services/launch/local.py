"""Starts the stage workers of one node as child processes, and sees them out.

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

from services.launch.launcher import WorkerExit
from services.launch.process import child_environment, how_it_ended
from services.launch.worker_command import worker_command
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


class LocalLauncher:
    """The stage workers of this node. Implements `services.launch.launcher.Launcher`."""

    def __init__(self, workers: LocalWorkers) -> None:
        self._workers = workers
        self._processes: list[tuple[StagePlacement, asyncio.subprocess.Process]] = []
        # Held open for the launcher's life: when it closes, the workers leave.
        self._lifeline: tuple[int, int] | None = os.pipe()

    async def start(self, master_addr: str, master_port: int) -> None:
        """Starts every worker of this node. They join by themselves."""
        for placement in self._workers.placements:
            process = await self._start_worker(placement, master_addr, master_port)
            self._processes.append((placement, process))

    async def _start_worker(
        self, placement: StagePlacement, master_addr: str, master_port: int
    ) -> asyncio.subprocess.Process:
        if self._lifeline is None:
            raise RuntimeError("the launcher has been stopped")
        workers = self._workers
        command = worker_command(
            placement,
            master_addr=master_addr,
            master_port=master_port,
            host=workers.host,
            device=workers.device,
            num_devices=workers.num_devices,
            fingerprint=workers.fingerprint,
            lifeline_fd=self._lifeline[0],
            tls_dir=workers.tls_dir,
        )
        return await asyncio.create_subprocess_exec(
            *command,
            pass_fds=(self._lifeline[0],),
            stdin=asyncio.subprocess.DEVNULL,
            env=child_environment(),
            # Ctrl-C in a terminal reaches its whole process group; the workers
            # must not die under a gateway that still drains.
            start_new_session=True,
        )

    async def first_exit(self) -> WorkerExit:
        """Waits until one worker ends."""
        async with asyncio.TaskGroup() as tasks:
            waits = {
                tasks.create_task(process.wait()): placement
                for placement, process in self._processes
            }
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        first = done.pop()
        code = first.result()
        return WorkerExit(waits[first], how_it_ended(code), dismissed=code == 0)

    async def stop(self) -> None:
        """Closes the lifeline, gives the workers a moment, and kills what is left."""
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        running = [p for _, p in self._processes if p.returncode is None]
        if not running:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                for process in running:
                    await process.wait()
        for process in running:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
