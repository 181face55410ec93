"""Whose ranks hold a step that does not end: known, or suspected until it is looked at again.

A step is held as well while its worker is cut off or does not run; then the ranks are as good as
before. Or they hang all the same: one that takes every core delays its worker's heartbeats. So
ranks whose worker was not heard of are told to leave their groups, which those that are well do at
once, and have their step's limit once more for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine

from gateway.pipeline.stuck_step import HeldStep
from services.control.member import Member
from services.control.membership import Membership
from services.control.service import describe
from services.errors import StageFailed
from services.launch.silence import done_in_time

log = logging.getLogger("stagemesh.gateway")

MOST_LOOKS = 2
"""The second where the worker was not heard of for a part of the first."""


class StuckRanks:
    """Those of one replica, by the names of their workers, from a failure until ranks are freed."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._limit_seconds = 0.0
        self.known: frozenset[str] = frozenset()
        """The next epoch must not take their ranks over."""
        self.suspected: frozenset[str] = frozenset()

    def begin(
        self, stuck: HeldStep | None, held: HeldStep | None, members: Collection[Member]
    ) -> None:
        """A replica has failed: on a step that is stuck, or otherwise while one was held, since a
        worker that is not heard of may count as lost before its step counts as stuck. `members`
        are those of the epoch."""
        self.clear()
        step = stuck or held
        if step is None:
            return
        now = asyncio.get_running_loop().time()
        found = [member for member in members if member.placement.pp_rank == step.pp_rank]
        names = frozenset(member.worker_id for member in found)
        self._limit_seconds = step.limit_seconds
        late = [member for member in found if not _was_heard(member, step.since, now)]
        if not late:
            self.known = frozenset() if stuck is None else names
        else:
            self.suspected = names
            log.warning(
                "%s was not heard of for a part of the time that its step was held: its ranks are "
                "replaced where they do not leave their groups in %.1f s",
                describe(late[0]),
                step.limit_seconds,
            )

    def clear(self) -> None:
        """No ranks hold a step."""
        self.known = self.suspected = frozenset()

    def doubt_unless(self, present: Collection[str]) -> None:
        """Where one that looked stuck is not heard of, or has gone, the others may have waited for
        it, and its own ranks be well."""
        if not self.known <= set(present):
            self.known, self.suspected = frozenset(), self.suspected | self.known

    def have_lost_places(self, names: Collection[str]) -> None:
        """Their ranks are another's to look after."""
        self.known -= set(names)
        self.suspected -= set(names)

    async def until_freed(self, worker_id: str, reset: Coroutine[None, None, None]) -> None:
        """Waits for `reset`, which brings a worker's ranks out of their groups. Raises what it
        raises, and `StageFailed` for suspected ranks that take longer: then they are known."""
        if worker_id not in self.suspected:
            await reset
            return
        async with asyncio.TaskGroup() as tasks:
            freeing = tasks.create_task(reset)
            holder = await self._held_by(worker_id, freeing)
            if holder is not None:
                self.suspected -= {worker_id}
                self.known |= {worker_id}
                raise StageFailed(
                    f"{describe(holder)} was told that its ranks leave their groups, and they hold "
                    f"a step for more than another {self._limit_seconds:.1f} s"
                )

    async def _held_by(self, worker_id: str, freeing: asyncio.Task[None]) -> Member | None:
        """Who holds its step for longer than it may; None where it has been freed, and where
        nothing is heard of it: that ends an attempt by itself."""
        loop = asyncio.get_running_loop()
        began, seconds = loop.time(), self._limit_seconds
        member: Member | None = None
        for _ in range(MOST_LOOKS):
            if await done_in_time(freeing, seconds):
                return None
            now = loop.time()
            member = self._membership.member(worker_id)
            if member is None or member.is_silent(now):
                return None
            if _was_heard(member, began, now):
                return member
            # Counted from when it is heard of again.
            heard_since = now if member.has_missed(now) else member.back_at
            began, seconds = now, max(0.0, heard_since + self._limit_seconds - now)
        return member


def _was_heard(member: Member, since: float, now: float) -> bool:
    """Whether no heartbeat was late."""
    return not member.has_missed(now) and member.back_at <= since
