"""Calls whose end is on its way, and an end to the connections of those who do not take it.

A call cannot be ended past what its caller has not read (decision 016), so its connection is
closed. To find one means to look at every open file of the process, inside the event loop: that is
done once for all that are due, and not again for a while.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from services.rpc import settings
from services.rpc.peers import close_connections

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Between two looks at the process's open files."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ending:
    peer: str
    due: float
    """By the event loop's clock."""


class Endings:
    """Those of one server, used inside its event loop."""

    def __init__(self) -> None:
        self.ports: set[int] = set()
        """Where the server listens."""
        self._endings: dict[_Ending, None] = {}  # In the order in which they are due.
        self._timer: asyncio.TimerHandle | None = None
        self._told: frozenset[str] = frozenset()
        """Peers that were due the last time, each of them in the log."""

    def begin(self, task: asyncio.Task[object], peer: str) -> None:
        """The handler of a call is done; the task that runs it is done when the end is taken."""
        due = asyncio.get_running_loop().time() + settings.SLOW_READER_SECONDS
        ending = _Ending(peer, due)
        self._endings[ending] = None
        task.add_done_callback(lambda _: self._endings.pop(ending))
        if self._timer is None:
            self._look_at(due)

    def _look_at(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        """Closes the connections of those who are due, and comes again for who is left: it may be
        that there was no file descriptor to look with, or that the call has not ended yet."""
        now = asyncio.get_running_loop().time()
        due = frozenset(one.peer for one in self._endings if one.due <= now)
        for peer in sorted(due - self._told):
            log.warning("%s does not take the end of its call; its connection is closed", peer)
        closed = close_connections(due, self.ports) if due else frozenset()
        for peer in sorted(due - closed - self._told):
            log.warning("the connection of %s cannot be closed from here, or not yet", peer)
        self._told = due
        self._timer = None
        if self._endings:
            first = next(iter(self._endings)).due
            self._look_at(max(first, now + PAUSE_SECONDS))
