"""Work that ends when its client leaves, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.errors import RequestAborted, failure_of
from services.rpc import settings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _ClientGone(Exception):
    """The connection is closed."""


async def _watch(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Awaits `work()`, and cancels it when the client leaves (`RequestAborted`)."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive))
            try:
                return await work()
            finally:
                watcher.cancel()
    except BaseExceptionGroup as group_error:
        if (failure := failure_of(group_error)) is not None:
            raise failure from failure.__cause__
        if group_error.subgroup(_ClientGone) is not None:
            raise RequestAborted("the client left before its answer was complete") from None
        # The group holds the one exception of `work`; its own type belongs in the log.
        raise group_error.exceptions[0] from None


class EventStream(Response):
    """A 200 answer of server-sent events, first one known already.

    The events are closed, and so their request aborted, when the client leaves;
    `on_abort` is called then. `deadline` is on the event loop's clock.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        deadline: float | None,
        on_abort: Callable[[], None],
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            # Proxies that collect answers (nginx) would undo the streaming.
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._deadline = deadline
        self._on_abort = on_abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        # Who reads nothing is cut off by the system sooner; this is for who reads in drops.
        latest = None if self._deadline is None else self._deadline + settings.SLOW_READER_SECONDS
        async with contextlib.aclosing(self._events):
            try:
                async with asyncio.timeout_at(latest):
                    await while_connected(receive, write)
            except (RequestAborted, TimeoutError):
                # Nobody is left to be told: the client has gone, or does not read.
                self._on_abort()
