"""HTTP/1.1 of uvicorn, and what it lacks against clients that only hold connections."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.frontend import limits
from gateway.rest.errors import error_body
from services.errors import Saturated

_RESERVED_FILES = 256
"""Of the process's open files, for everything but connections of this door."""


def most_connections() -> int:
    """Connections that may be open at a time: by our limit and that of the process's files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.MAX_CONNECTIONS
    return max(1, min(limits.MAX_CONNECTIONS, soft - _RESERVED_FILES))


class Protocol(HttpToolsProtocol):
    """One connection. Ends it where a request's head does not come in time; with too many open
    already, answers 429 and closes."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(_full())
            transport.close()
            return
        self._await_head()

    def on_message_begin(self) -> None:
        """See httptools: the first byte of a request, later ones of a connection too."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._end_wait()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._end_wait()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(limits.HEAD_TIMEOUT_SECONDS, self._give_up)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        # With a request of before still being answered, its answer goes out first.
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


def _full() -> bytes:
    body = error_body(Saturated("as many connections as may be are open here; try again"))
    head = (
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
