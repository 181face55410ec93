"""Keeps one rank's place filled: when its process ends unasked, another is started.

What the old process held is gone; the gateway sees to it that the new one gets its
weights and joins the others in a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from services.errors import StageFailed, StagemeshError, failure_of
from services.launch.restarts import DEFAULT_LIMITS, RestartBudget, RestartLimits
from stage_worker.rank_arguments import RankPlace
from stage_worker.rank_process import STOP_TIMEOUT_SECONDS, RankProcess

log = logging.getLogger("stagemesh.stage_worker")


class RankSupervisor:
    """One rank's processes, one after the other."""

    def __init__(
        self, start: Callable[[], RankProcess], limits: RestartLimits = DEFAULT_LIMITS
    ) -> None:
        """`start` makes a process that is yet to be run."""
        self._start = start
        self._place: RankPlace | None = None
        self._budget = RestartBudget(limits)
        self._tasks: asyncio.TaskGroup | None = None
        """While it runs."""
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self.process = start()
        """The present one; it may not have been started yet."""

    async def run(self) -> None:
        """Runs one process after the other until `stop`. Raises `StageFailed` where they end too
        often."""
        failure: StagemeshError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._run_processes()
                finally:
                    self._tasks = None
        except* StageFailed as errors:
            failure = failure_of(errors)
        if failure is not None:
            raise failure

    async def _run_processes(self) -> None:
        while True:
            process, started_at = self.process, time.monotonic()
            await process.run()
            if self._stopping.is_set():
                return
            now = time.monotonic()
            delay = self._budget.next_delay(now - started_at, now)
            if delay is None:
                raise StageFailed(
                    f"the rank process of TP rank {process.tp_rank} has used up its "
                    f"{self._budget.used_up()}; the log lines above say why it ends"
                )
            self.process = self._start()
            if self._place is not None:
                self.process.starts_at(self._place)
            self._changed.set()
            log.warning("a new process takes the place of TP rank %d", process.tp_rank)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            if self._stopping.is_set():
                return

    async def reset(self, *, replace: bool) -> None:
        """Brings the rank to where it can join a new epoch: started, and in no group.

        With `replace`, or where it does not leave its groups, by a new process. One that is in no
        group holds no step, and stays.
        Raises `StageFailed` where that cannot be started.
        """
        process = self.process
        if replace and process.is_in_group:
            process.replace("holds a step that does not end, and is replaced")
        elif not process.is_ending:
            # Where it ends while it is asked, another takes its place all the same.
            with contextlib.suppress(StageFailed):
                if not await process.leave_group():
                    process.replace("does not leave its groups, and is replaced")
        await self._started()

    def begin_reset(self, *, replace: bool) -> asyncio.Task[None] | None:
        """`reset`, which ends also where nobody waits for it; what prevents it is in the log, and
        ends `run` where it stays so. None where no process runs, which is in no group then."""
        if self._tasks is None:
            return None
        return self._tasks.create_task(self._reset_if_possible(replace=replace))

    async def _reset_if_possible(self, *, replace: bool) -> None:
        try:
            await self.reset(replace=replace)
        except StageFailed as failure:
            log.warning("not yet out of its groups: %s", failure.message)

    async def take_place(self, place: RankPlace) -> None:
        """The rank stands there from now on, and so does every process after this one. Raises
        `StageFailed` where the present one cannot be told."""
        self._place = place
        await self.process.take_place(place)

    async def leave_group(self) -> None:
        """Tells the rank to leave its groups; no harm comes to one that cannot now."""
        if not self.process.is_ending:
            with contextlib.suppress(StageFailed):
                await self.process.leave_group()

    async def _started(self) -> None:
        while True:
            process = self.process
            if self._stopping.is_set():
                raise StageFailed("this stage worker is leaving the mesh")
            if not process.is_ending:
                await process.started()
                return
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """Lets the rank finish what is queued, up to a deadline; no other takes its place."""
        self._stopping.set()
        self._changed.set()
        await self.process.stop(timeout_seconds)
