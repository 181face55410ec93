"""Starts the stage workers of one node as child processes, and sees them out.

`stagemesh serve` is the gateway plus this. Under systemd or Ray the workers are
started by those instead, with the same command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

STOP_TIMEOUT_SECONDS = 2.0
"""A worker that is told to leave does so in well under a second."""


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """What every local worker is told."""

    host: str
    """Address that workers and their ranks listen on."""
    pp_ranks: Sequence[int]
    device: str


class LocalLauncher:
    """The stage workers of this node."""

    def __init__(self, workers: LocalWorkers) -> None:
        self._workers = workers
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        # Held open for the launcher's life: when it closes, the workers leave.
        self._lifeline_read, self._lifeline_write = os.pipe()

    async def start(self, master_addr: str, master_port: int) -> None:
        """Starts one worker for each stage. They join by themselves."""
        for pp_rank in self._workers.pp_ranks:
            self._processes[pp_rank] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.cli",
                "stage-worker",
                f"--master-addr={master_addr}",
                f"--master-port={master_port}",
                f"--host={self._workers.host}",
                "--port=0",
                f"--pp-rank={pp_rank}",
                f"--device={self._workers.device}",
                f"--lifeline-fd={self._lifeline_read}",
                pass_fds=(self._lifeline_read,),
                stdin=asyncio.subprocess.DEVNULL,
                # Ctrl-C in a terminal reaches its whole process group; the workers
                # must not die under a gateway that still drains.
                start_new_session=True,
            )

    async def first_exit(self) -> tuple[int, int]:
        """Waits until one worker ends: (stage, exit code; negative for a signal)."""
        waits = {
            asyncio.ensure_future(process.wait()): pp_rank
            for pp_rank, process in self._processes.items()
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        first = done.pop()
        return waits[first], first.result()

    async def stop(self) -> None:
        """Closes the lifeline, gives the workers a moment, and kills what is left."""
        for fd in (self._lifeline_write, self._lifeline_read):
            with contextlib.suppress(OSError):
                os.close(fd)
        running = [p for p in self._processes.values() if p.returncode is None]
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
