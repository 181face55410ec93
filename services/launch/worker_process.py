"""One stage worker as a child process: its start, its pulse, its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from services.launch.launcher import WorkerExit, worker_name
from services.launch.process import child_environment, how_it_ended, kill
from services.launch.pulse import JOINED
from services.launch.silence import SilenceWatch
from services.topology.placement import StagePlacement

log = logging.getLogger("stagemesh.launch")

READ_BYTES = 4096


class WorkerProcess:
    """A worker that beats over a pipe. One that is silent is ended: it is stopped or hung, and
    its ranks die with it."""

    def __init__(
        self,
        placement: StagePlacement | None,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str] | None = None,
        *,
        node_rank: int = 0,
    ) -> None:
        """`command` starts the worker, given the write end of the pipe; `environment` is what it
        has besides this process's variables. A spare has no placement."""
        self.placement = placement
        self._node_rank = node_rank if placement is None else placement.node_rank
        self.has_joined = False
        self._command = command
        self._environment = environment or {}
        self._silence = SilenceWatch(self._end_silent)
        self._silent_seconds: float | None = None
        self._pulse: int | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *inherited_fds: int) -> None:
        """Starts the process. Raises `OSError`."""
        self._silent_seconds = None
        self._pulse, theirs = os.pipe()
        os.set_blocking(self._pulse, False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(theirs),
                pass_fds=(theirs, *inherited_fds),
                stdin=asyncio.subprocess.DEVNULL,
                env={**child_environment(), **self._environment},
                # Ctrl-C in a terminal reaches its whole process group; the workers
                # must not die under a gateway that still drains.
                start_new_session=True,
            )
        except OSError:
            self._stop_listening()
            raise
        finally:
            os.close(theirs)
        self._silence.start(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pulse, self._hear)

    def _hear(self) -> None:
        if self._pulse is None:
            return
        try:
            beats = os.read(self._pulse, READ_BYTES)
        except BlockingIOError:
            return
        if not beats:  # Its last thread is gone.
            self._stop_listening()
        else:
            self._silence.heard()
        self.has_joined |= JOINED in beats

    def _end_silent(self, seconds: float) -> None:
        self._silent_seconds = seconds
        log.error(
            "%s has been silent for %.0f s; it is ended",
            worker_name(self.placement),
            seconds,
        )
        self.kill()

    async def ended(self) -> WorkerExit:
        """Waits for the process to end."""
        if self._process is None:
            raise RuntimeError("a worker was waited for before it was started")
        code = await self._process.wait()
        self._stop_listening()
        how = how_it_ended(code)
        if self._silent_seconds is not None:
            how = f"was stopped or hung: silent for {self._silent_seconds:.0f} s, it was ended"
        return WorkerExit(
            self.placement,
            self._node_rank,
            how,
            code=code,
            pid=self._process.pid,
            had_joined=self.has_joined,
        )

    async def exited(self) -> None:
        """Waits until the process that was last started runs no more."""
        if self._process is not None:
            await self._process.wait()

    def _stop_listening(self) -> None:
        self._silence.stop()
        if self._pulse is not None:
            asyncio.get_running_loop().remove_reader(self._pulse)
            os.close(self._pulse)
            self._pulse = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def kill(self) -> None:
        """Ends it at once, and with it its ranks."""
        kill(self._process)

    def close(self) -> None:
        """Listens no more."""
        self._stop_listening()
