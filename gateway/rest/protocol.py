"""HTTP/1.1 of uvicorn, and what it lacks against clients that only hold connections."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.frontend import limits
from gateway.rest.errors import error_body
from services.errors import InvalidRequest, Saturated, StagemeshError

_RESERVED_FILES = 256
"""Of the process's open files, for everything but this door."""


def most_connections(*, with_tls: bool) -> int:
    """Connections that may be open at a time: by our limit and that of the process's files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.MAX_CONNECTIONS
    reserved = _RESERVED_FILES + (limits.MAX_TLS_HANDSHAKES if with_tls else 0)
    return max(1, min(limits.MAX_CONNECTIONS, soft - reserved))


class Protocol(HttpToolsProtocol):
    """One connection. Ends it where a request's head does not come in time or is too large (431);
    with too many open already, answers 429 and closes.

    With TLS all this begins after the handshake, which `TlsListener` bounds.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _raw_bytes: int = 0
    """Received since the last end of a head, a message or a piece of body: what httptools may
    be holding of a field that has not ended."""
    _field_bytes: int = 0
    """Of the fields that have ended, of one head or of its trailers."""
    _head_too_large: bool = False

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        super().connection_made(transport)
        if len(self.connections) > most_connections(with_tls=self.config.ssl is not None):
            transport.write(_full())
            transport.close()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self.transport.is_closing():
            return
        self._raw_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._raw_bytes > limits.MAX_HEAD_BYTES:
            self._refuse_head()
        elif not self._answering and self.timeout_keep_alive_task is None:
            # Bytes that are no request ended the keep-alive time; they buy no other.
            self._await_head()

    def on_message_begin(self) -> None:
        """See httptools: the first byte of a request, later ones of a connection too."""
        super().on_message_begin()
        self._field_bytes = 0
        self._unset_keepalive_if_required()
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """See httptools: a piece of it."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools: of the head, or of the trailers after a chunked body."""
        self._count_field(len(name) + len(value) + len(b":\r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._end_wait()
        self._raw_bytes = self._field_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._raw_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._raw_bytes = 0
        super().on_message_complete()
        if not self._answering and not self.transport.is_closing():
            # The rest of a body that was answered before its end: idle from here.
            self.cycle.more_body = False
            self._end_wait()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """See uvicorn."""
        unread = not self.pipeline and self.cycle.more_body
        super().on_response_complete()
        if unread and not self.transport.is_closing():
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn: what httptools cannot read, or what a callback of ours refused."""
        if self._head_too_large:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._end_wait()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count_field(self, num_bytes: int) -> None:
        self._field_bytes += num_bytes
        if self._field_bytes > limits.MAX_HEAD_BYTES:
            self._head_too_large = True
            # httptools stops at it, and uvicorn calls `send_400_response`.
            raise InvalidRequest("the head is too large")

    def _refuse_head(self) -> None:
        # 431 must not stand in for the answer to a request of before, nor inside or behind one
        # to the same request, whose trailers these are.
        cycle = self.cycle
        if not self._answering:
            may_answer = cycle is None or not cycle.more_body
        else:
            may_answer = cycle.more_body and not cycle.response_started and not self.pipeline
        if may_answer:
            self.transport.write(_too_large())
        self.transport.close()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(limits.HEAD_TIMEOUT_SECONDS, self._give_up)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._answering:
            # The answer to a request of before goes out first.
            self._await_head()
        else:
            self.transport.close()


def _full() -> bytes:
    error = Saturated("as many connections as may be are open here; try again")
    return _last_answer("429 Too Many Requests", error, "retry-after: 1\r\n")


def _too_large() -> bytes:
    error = InvalidRequest(
        f"the request's head or trailers have more than {limits.MAX_HEAD_BYTES} bytes: send less "
        "in the URL and the headers"
    )
    return _last_answer("431 Request Header Fields Too Large", error)


def _last_answer(status: str, error: StagemeshError, headers: str = "") -> bytes:
    body = error_body(error)
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{headers}connection: close\r\n\r\n"
    )
    return head.encode() + body
