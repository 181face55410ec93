"""Keeps one worker's place filled, whoever starts it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from services.launch.launcher import GoesOn, IsMissed, WorkerExit
from services.launch.process import EXIT_HEAD_LOST
from services.launch.restarts import RestartBudget, RestartLimits

log = logging.getLogger("stagemesh.launch")


async def keep(
    ended: Callable[[], Awaitable[WorkerExit]],
    start: Callable[[], Awaitable[None]],
    goes_on: GoesOn,
    limits: RestartLimits,
) -> WorkerExit:
    """Starts another worker where the one that runs has `ended`, as long as `goes_on` says so and
    not too often. Returns the end after which there is no other. `start` may raise `OSError`."""
    budget = RestartBudget(limits)
    loop = asyncio.get_running_loop()
    while True:
        started_at = loop.time()
        end = await ended()
        if not goes_on(end):
            return end
        delay = budget.next_delay(loop.time() - started_at, loop.time())
        if delay is None:
            return replace(end, how=f"{end.how}, after {budget.used_up()}")
        log.warning("%s %s; another takes its place", end.name, end.how)
        await asyncio.sleep(delay)
        try:
            await start()
        except OSError as error:
            return replace(end, how=f"{end.how}, and no other could be started ({error})")


async def keep_all(
    keepers: Iterable[Coroutine[Any, Any, WorkerExit]], is_missed: IsMissed
) -> WorkerExit:
    """Runs `keep` for several workers. Returns the first end that `is_missed`, or the last one
    where none is; whoever is kept then is kept no more."""
    async with asyncio.TaskGroup() as tasks:
        running = {tasks.create_task(keeper) for keeper in keepers}
        while True:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ends = [keeper.result() for keeper in done]
            missed = next(filter(is_missed, ends), None)
            if missed is not None or not running:
                for keeper in running:
                    keeper.cancel()
                return missed or ends[-1]
            for end in ends:
                if not end.dismissed and end.code != EXIT_HEAD_LOST:
                    # Nobody waits for it, so it is told here.
                    log.error(
                        "%s %s, and no other is started; the others go on. Its log lines say why: "
                        "put that right and start stagemesh stage-worker --standby on this node, "
                        "which gives the mesh a spare again",
                        end.name,
                        end.how,
                    )
