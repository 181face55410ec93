"""A small OpenAI-like HTTP server that answers as a test says, down to how its bytes are cut.

    async with ScriptedEndpoint() as server:
        server.answer = chunked_stream(events, cut=1)

Knows HTTP/1.1 as far as the tests need it, and has nothing in common with the gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

Answer = Callable[[asyncio.StreamWriter, dict[str, object]], Awaitable[None]]
"""Writes a whole HTTP response to a request with this body."""


def event(**fields: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_events(texts: Sequence[str], prompt_tokens: int, *, usage: bool = True) -> list[bytes]:
    """The stream of a completion: a text for each token, usage, [DONE]."""
    events = [event(choices=[{"index": 0, "text": text}]) for text in texts]
    events.append(event(choices=[{"index": 0, "text": "", "finish_reason": "length"}]))
    if usage:
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
        events.append(event(choices=[], usage=counts))
    return [*events, b"data: [DONE]\n\n"]


def chunked_stream(
    events: Sequence[bytes], *, cut: int | None = None, delay_seconds: float = 0.0
) -> Answer:
    """Streams the events in HTTP chunks of one event each; `cut` cuts the response's bytes into
    writes of that size."""

    async def answer(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        pieces = [head + b"transfer-encoding: chunked\r\n\r\n"]
        pieces += [b"%x\r\n%s\r\n" % (len(one), one) for one in events]
        pieces.append(b"0\r\n\r\n")
        for number, piece in enumerate(pieces):
            await asyncio.sleep(delay_seconds if number else 0)
            size = cut or len(piece)
            for start in range(0, len(piece), size):
                writer.write(piece[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)

    return answer


def plain(status: int, body: object, *, close: bool = False, with_length: bool = True) -> Answer:
    """A whole JSON answer (or bytes as they are)."""

    async def answer(writer: asyncio.StreamWriter, request: dict[str, object]) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\n"
        head += f"content-length: {len(data)}\r\n" if with_length else ""
        head += "connection: close\r\n" if close or not with_length else ""
        writer.write(head.encode() + b"\r\n" + data)
        await writer.drain()
        if close or not with_length:
            writer.close()

    return answer


def closes(data: bytes = b"") -> Answer:
    """Writes these bytes and closes the connection."""

    async def answer(writer: asyncio.StreamWriter, request: dict[str, object]) -> None:
        writer.write(data)
        writer.close()

    return answer


class ScriptedEndpoint:
    """One server on a free port of the loopback address."""

    def __init__(self) -> None:
        self.answer: Answer = plain(500, {"error": {"message": "no script"}})
        """To completions; replaced by the tests."""
        self.answers: dict[str, Answer] = {
            "/v1/models": plain(200, {"data": [{"id": "scripted"}]}),
        }
        """To other paths; 404 for the rest."""
        self.requests: list[tuple[str, dict[str, str], dict[str, object]]] = []
        """Path, headers and body of all completions."""
        self.connections = 0
        self.running = 0
        self.most_running = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ScriptedEndpoint:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                request_line, *lines = head.strip().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                length = int(headers.get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self._answer(writer, request_line.split()[1], headers, body)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        path: str,
        headers: dict[str, str],
        body: dict[str, object],
    ) -> None:
        if not path.endswith("completions"):
            answer = self.answers.get(path, plain(404, {"detail": "Not Found"}))
            await answer(writer, body)
            return
        self.requests.append((path, headers, body))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.answer(writer, body)
        finally:
            self.running -= 1
