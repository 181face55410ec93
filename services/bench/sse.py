"""Server-sent events, cut out of a stream of bytes. Pure.

Of the format (https://html.spec.whatwg.org/multipage/server-sent-events.html) an OpenAI
stream uses `data` lines and comments; other fields are passed over. Lines may end with
LF, CRLF or CR, and an event of several data lines is joined with LF.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20
"""An event that is longer is no token: the stream is refused."""


class SseParser:
    """Keeps what has not ended yet; a chunk may end anywhere, also inside CRLF."""

    __slots__ = ("_lines", "_pending", "_size", "_skip_lf")

    def __init__(self) -> None:
        self._pending = b""
        self._lines: list[bytes] = []
        self._size = 0
        self._skip_lf = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that these bytes complete.

        Raises `ValueError` for an event of more than MAX_EVENT_BYTES.
        """
        if self._skip_lf and data.startswith(b"\n"):
            data = data[1:]
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif data:
            self._skip_lf = False
        *lines, self._pending = (self._pending + data).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines, self._size = [], 0
        if len(self._pending) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: bytes) -> None:
        self._size += len(line)
        if self._size > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        self._lines.append(line)
