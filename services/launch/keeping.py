"""Keeps one worker's place filled, whoever starts it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from services.launch.launcher import GoesOn, WorkerExit
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
