"""The commands that a rank has not answered yet.

A rank answers commands other than steps in their order, each once: so a reply belongs
to the oldest command that has none, also where its caller has left.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from services.errors import ConfigError, StageFailed, StagemeshError
from services.rpc.errors import error_from_wire
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2

MAX_UNANSWERED_COMMANDS = 16
"""Callers come one by one; what is above that are commands whose callers have left."""

_REPLIES = {
    "open_store": "store_opened",
    "form_group": "group_formed",
    "load": "loaded",
    "leave_group": "group_left",
    "take_place": "place_taken",
}
"""The event that answers each command."""

_T = TypeVar("_T")
OnProgress = Callable[[stage_worker_pb2.LoadProgress], None]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A command without a reply yet."""

    kind: str
    reply: asyncio.Future[rank_pb2.RankEvent]
    """Comes also where the caller has left."""
    due: float
    """When the rank has to have answered, by `time.monotonic()`."""
    on_progress: OnProgress | None


class RankCalls:
    """The calls of one rank, oldest first."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def is_full(self) -> bool:
        """Whether the rank has too much to answer before another command."""
        return len(self._calls) >= MAX_UNANSWERED_COMMANDS

    @property
    def last_due(self) -> float:
        """When all of them have to be answered, by `time.monotonic()`; now where there is none."""
        return max((call.due for call in self._calls), default=time.monotonic())

    def has(self, *kinds: str) -> bool:
        """Whether a command of one of these kinds is without a reply."""
        return any(call.kind in kinds for call in self._calls)

    def add(self, kind: str, timeout_seconds: float, on_progress: OnProgress | None) -> Call:
        """A command is sent."""
        due = time.monotonic() + timeout_seconds
        call = Call(kind, asyncio.get_running_loop().create_future(), due, on_progress)
        self._calls.append(call)
        return call

    def progress(self, progress: stage_worker_pb2.LoadProgress) -> None:
        """The oldest command gets on."""
        if self._calls and (report := self._calls[0].on_progress) is not None:
            report(progress)

    def answered(self, event: rank_pb2.RankEvent) -> Call | None:
        """An event has come; returns the command that it answers, if it is an answer."""
        if not self._calls or event.WhichOneof("event") != _REPLIES[self._calls[0].kind]:
            return None
        call = self._calls.popleft()
        call.reply.set_result(event)
        return call

    def refused(self, error: step_pb2.StageError) -> None:
        """The oldest command has failed."""
        if self._calls:
            fail(self._calls.popleft().reply, error)

    def give_up(self, error: step_pb2.StageError) -> None:
        """None of them will be answered."""
        while self._calls:
            fail(self._calls.popleft().reply, error)


def fail(waiting: asyncio.Future[_T], error: step_pb2.StageError) -> None:
    """Ends a wait with an error. What is wrong with a plan stays wrong, and its class says so."""
    if waiting.done():
        return
    exception: StagemeshError = error_from_wire(error.reason, error.message, default=StageFailed)
    if not isinstance(exception, ConfigError):
        exception = StageFailed(error.message)
    waiting.set_exception(exception)
    waiting.exception()  # read here too: nobody may be waiting for it
