"""A gRPC client that gives no window: it takes nothing of any answer, which no client library
offers. Frames by RFC 9113, headers by RFC 7541 (literals without an index)."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

_DATA, HEADERS, RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(method: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )


async def _read_frame(reader: asyncio.StreamReader) -> int:
    """Its type."""
    head = await reader.readexactly(9)
    await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3]


class TakesNothing:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._stream = -1

    def call(self, method: str, message: bytes = b"") -> None:
        """A call with one message, complete."""
        self._stream += 2
        data = struct.pack(">BI", 0, len(message)) + message
        self._writer.write(_frame(HEADERS, _END_HEADERS, self._stream, _headers(method)))
        self._writer.write(_frame(_DATA, _END_STREAM, self._stream, data))

    async def ends_of_calls(self, count: int) -> list[int]:
        """Types of the frames that end so many calls: HEADERS, or RST_STREAM from gRPC itself."""
        ends: list[int] = []
        while len(ends) < count:
            kind = await _read_frame(self._reader)
            if kind in (HEADERS, RST_STREAM):
                ends.append(kind)
        return ends

    async def closed(self) -> None:
        """Waits until the server closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while await self._reader.read(65536):
                pass


@contextlib.asynccontextmanager
async def takes_nothing(host: str, port: int) -> AsyncIterator[TakesNothing]:
    """Connects."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        writer.write(_frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)))
        await _read_frame(reader)  # The server's own settings.
        writer.write(_frame(_SETTINGS, _ACK, 0))
        yield TakesNothing(reader, writer)
    finally:
        writer.close()
