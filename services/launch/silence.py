"""Notices a child that is there and does not run: stopped, or hung.

The child beats; whoever started it looks. It may also be the one who looks that did
not run, and the beats are yet to be read: so there is a second look after a silence,
and it must not be late itself.

A child that has only been started does not beat yet, and importing may take it minutes. Until
its first beat it counts as silent only where the kernel says that it is stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from services.launch.process import is_stopped

FROZEN_AFTER_SECONDS = 2.4
"""A child that beats every second and is silent for this long is stopped or hung. With the second
look it is known within 3 s."""
CONFIRM_SECONDS = 0.5
"""After a silence there is a second look: what came while this process did not run
itself is read until then."""
OWN_STALL_SECONDS = 0.25
"""A look that is later than this says that this process did not run."""
MOST_LATE_LOOKS = 2
"""After which another that is late counts as well: a process that is always late has deadlines
too."""


async def done_in_time(future: asyncio.Future[Any], seconds: float) -> bool:
    """Waits for `future`, which stays as it is, for so long at most; returns whether it is done.

    A deadline that has passed while this process did not run itself is no deadline: what came
    meanwhile is read first. For that there are `MOST_LATE_LOOKS` further looks at most.
    """
    for late_looks in range(MOST_LATE_LOOKS + 1):
        wait_seconds = CONFIRM_SECONDS if late_looks else seconds
        due = time.monotonic() + wait_seconds
        done, _ = await asyncio.wait((future,), timeout=wait_seconds)
        if done:
            return True
        if time.monotonic() - due <= OWN_STALL_SECONDS:
            break
    return False


class SilenceWatch:
    """Looks at one child at a time, from `start` until it is silent or `stop`."""

    def __init__(self, on_silent: Callable[[float], None]) -> None:
        """`on_silent` hears, once, for how many seconds the child has been silent."""
        self._on_silent = on_silent
        self._pid = 0
        self._has_beaten = False
        self._heard_at = 0.0
        self._suspected = False
        self._late_looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, pid: int) -> None:
        """The child has been started."""
        self.stop()
        self._pid = pid
        self._has_beaten = self._suspected = False
        self._late_looks = 0
        self._heard_at = time.monotonic()
        self._look_again(FROZEN_AFTER_SECONDS)

    def heard(self) -> None:
        """A sign of life."""
        self._has_beaten = True
        self._heard_at = time.monotonic()

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look, due)

    def _look(self, due: float) -> None:
        now = time.monotonic()
        if not self._is_silent(now):
            self._suspected, self._late_looks = False, 0
            heard_ago = now - self._heard_at if self._has_beaten else 0.0
            self._look_again(FROZEN_AFTER_SECONDS - heard_ago)
        elif not self._suspected or self._is_late(now, due):
            self._suspected = True
            self._look_again(CONFIRM_SECONDS)
        else:
            self._timer = None
            self._on_silent(now - self._heard_at)

    def _is_late(self, now: float, due: float) -> bool:
        """Whether a look says nothing, as it comes late."""
        self._late_looks += now - due > OWN_STALL_SECONDS
        return now - due > OWN_STALL_SECONDS and self._late_looks <= MOST_LATE_LOOKS

    def _is_silent(self, now: float) -> bool:
        if not self._has_beaten:
            return is_stopped(self._pid)
        return now - self._heard_at >= FROZEN_AFTER_SECONDS
