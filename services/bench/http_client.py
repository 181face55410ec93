"""A small HTTP/1.1 client for measuring: connections are kept, a body goes to its reader as it
comes, with the time at which it came.

Made for little CPU time per chunk, because client and server often share a machine: parsing is
httptools', there is one callback per read of the socket, and no task or queue in between.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_SECONDS = 30.0
MAX_BODY_BYTES = 64 << 20
"""Of an answer that is read whole."""


class ExchangeFailed(Exception):
    """No whole answer came; `kind` is one of the error kinds of `services.bench.outcome`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class BodyReader(Protocol):
    """Takes an answer's body. What it raises ends the exchange."""

    def begin(self, status: int) -> None:
        """The status has come."""

    def feed(self, data: bytes, at: float) -> None:
        """Bytes of the body, and when they came (`time.perf_counter`)."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where the connections go."""

    host: str
    port: int
    tls: bool
    path: str
    """What stands before every path; empty, or a path without a slash at its end."""

    @classmethod
    def from_url(cls, url: str) -> Server:
        """Raises `ValueError` with the rule for what is no HTTP address."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an address like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"))


class WholeBody:
    """A reader that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self._parts: list[bytes] = []
        self._size = 0

    def begin(self, status: int) -> None:
        self.status = status

    def feed(self, data: bytes, at: float) -> None:
        self._size += len(data)
        if self._size > MAX_BODY_BYTES:
            raise ExchangeFailed("malformed", f"an answer of more than {MAX_BODY_BYTES} bytes")
        self._parts.append(data)

    @property
    def data(self) -> bytes:
        return b"".join(self._parts)


class HttpClient:
    """Connections to one server; as many as there are exchanges at a time."""

    def __init__(self, server: Server, headers: Mapping[str, str] | None = None) -> None:
        """`headers` go with every request."""
        self._server = server
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if server.tls else None
        host = f"[{server.host}]" if ":" in server.host else server.host
        lines = [f"host: {host}:{server.port}", "accept: */*", "user-agent: stagemesh-bench"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._headers = "".join(f"{line}\r\n" for line in lines)

    async def exchange(
        self,
        method: str,
        path: str,
        reader: BodyReader,
        *,
        body: bytes | None = None,
        timeout_seconds: float,
    ) -> None:
        """Sends one request and feeds the whole answer to `reader`.

        Raises `ExchangeFailed`, and what the reader raises. A kept connection that the
        server has closed in the meantime is replaced, once.
        """
        head = f"{method} {self._server.path}{path} HTTP/1.1\r\n{self._headers}"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + (body or b"")
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    kept = bool(self._idle)
                    connection = self._idle.pop() if kept else await self._connect()
                    try:
                        await connection.exchange(message, reader)
                    except ExchangeFailed as error:
                        if kept and error.kind == "disconnected" and not connection.has_answered:
                            continue
                        raise
                    finally:
                        if connection.is_reusable:
                            self._idle.append(connection)
                        else:
                            connection.close()
                    return
        except TimeoutError:
            raise ExchangeFailed(
                "timeout", f"no whole answer within {timeout_seconds:g} s"
            ) from None

    async def _connect(self) -> _Connection:
        server = self._server
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                _, connection = await loop.create_connection(
                    _Connection, server.host, server.port, ssl=self._tls
                )
        except TimeoutError:
            reason = f"no connection within {CONNECT_TIMEOUT_SECONDS:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return connection
        raise ExchangeFailed("connect", f"{server.host}:{server.port}: {reason}")

    def close(self) -> None:
        """Closes the connections that are kept."""
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time. Its `on_*` methods are httptools' callbacks."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: BodyReader | None = None
        self._end: asyncio.Future[None] | None = None
        self._at = 0.0
        self._has_length = False
        self.has_answered = False
        self.is_reusable = False

    async def exchange(self, message: bytes, reader: BodyReader) -> None:
        """See `HttpClient.exchange`."""
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._has_length = self.has_answered = self.is_reusable = False
        self._end = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            raise ExchangeFailed("disconnected", "the server has closed the connection")
        self._transport.write(message)
        try:
            await self._end
        finally:
            self._reader = self._parser = self._end = None

    def close(self) -> None:
        """Drops the connection, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass of it, but have its methods.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        if self._parser is None:
            self.is_reusable = False
            self.close()  # nobody has asked
            return
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(ExchangeFailed("malformed", f"the answer is not HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.is_reusable = False
        if exc is None and self.has_answered and not self._has_length:
            self._finish()  # a body without a length ends with its connection
        else:
            reason = f": {exc}" if exc else ""
            self._fail(ExchangeFailed("disconnected", f"the connection was closed{reason}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        assert self._reader is not None and self._parser is not None
        self._reader.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        assert self._reader is not None
        self._reader.feed(body, self._at)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.is_reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self.is_reusable = False
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)
