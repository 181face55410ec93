"""What a REST connection may send, and how long it may stay, without asking for anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from front_doors import Rest

from gateway.frontend import limits
from gateway.rest import server

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
MOST = limits.MAX_HEAD_BYTES

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def opened(rest: Rest) -> AsyncIterator[Connection]:
    port = int(rest.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def to_the_end(reader: asyncio.StreamReader, seconds: float = 2.0) -> bytes:
    """Everything up to the server's end of the connection, which has to come in time."""
    return await asyncio.wait_for(reader.read(), seconds)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * MOST + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        GET + b"a: " + b"x" * MOST + b"\r\n\r\n",
        GET + b"a:b\r\n" * (MOST // 5) + b"\r\n",
        GET + b"a: " + b"x" * MOST,
        GET + b"x" * MOST,
        CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a:b\r\n" * (MOST // 4),
    ],
    ids=["url", "header", "headers", "endless value", "endless name", "trailers"],
)
async def test_a_large_head_is_refused(rest: Rest, sent: bytes) -> None:
    async with opened(rest) as (reader, writer):
        writer.write(sent)
        head, _, body = (await to_the_end(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
        assert str(MOST) in json.loads(body)["error"]["message"]
        assert (await rest.http.get("/health")).status_code == 200


async def test_a_trailer_without_end_is_refused(rest: Rest) -> None:
    async with opened(rest) as (reader, writer):
        writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"a: " + b"x" * MOST)
        assert (await to_the_end(reader)).startswith(b"HTTP/1.1 431 ")


async def test_a_head_below_the_limit_is_served_in_pieces_too(rest: Rest) -> None:
    async with opened(rest) as (reader, writer):
        for _ in range(3):
            head = GET + b"a: " + b"x" * (MOST - 200)
            for start in range(0, len(head), MOST // 2):
                writer.write(head[start : start + MOST // 2])
                await asyncio.sleep(0.01)
            writer.write(b"\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), 2)


async def test_a_body_is_no_head(rest: Rest) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * (4 * MOST)}).encode()

    async def pieces() -> object:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    headers = {"content-type": "application/json"}
    for content in (body, pieces()):
        answer = await rest.http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200, answer.text


async def test_a_large_head_behind_a_running_request_is_no_answer_to_it(rest: Rest) -> None:
    rest.gateway.engine.delay_seconds = 0.1
    body = b'{"prompt": "x", "max_tokens": 20}'
    async with opened(rest) as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(0.1)
        writer.write(GET + b"a: " + b"x" * MOST)
        assert await to_the_end(reader) == b""


async def test_bytes_between_requests_buy_no_time(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.3)
    async with opened(rest) as (reader, writer):
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(reader.readuntil(b"}"), 2)
        writer.write(b"\r\n")
        assert await to_the_end(reader) == b""


@pytest.mark.parametrize("sent", [b"", b"x"], ids=["nothing", "a byte"])
async def test_a_body_that_goes_on_after_its_answer_has_to_end(
    rest: Rest, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.3)
    async with opened(rest) as (reader, writer):
        writer.write(GET + b"content-length: 100\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"}"), 2)
        writer.write(sent)
        assert await to_the_end(reader) == b""


async def test_whoever_ends_such_a_body_keeps_the_connection(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.3)
    async with opened(rest) as (reader, writer):
        writer.write(GET + b"content-length: 100\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"}"), 2)
        writer.write(b"x" * 100)
        await asyncio.sleep(0.5)
        writer.write(GET + b"\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), 2)


async def test_half_a_head_behind_a_long_answer_is_given_up_after_it(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.2)
    rest.gateway.engine.delay_seconds = 0.03
    body = b'{"prompt": "x", "max_tokens": 20}'
    async with opened(rest) as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body + GET)
        assert (await to_the_end(reader, 4)).startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def short_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.2)


@pytest.mark.usefixtures("short_keep_alive")
async def test_idle_time_ends_with_the_next_request(rest: Rest) -> None:
    rest.gateway.engine.delay_seconds = 0.03
    body = b'{"prompt": "x", "max_tokens": 20}'
    async with opened(rest) as (reader, writer):
        writer.write(GET + b"content-length: 100\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"}"), 2)
        # The end of the body that nobody waits for, and a request, in one read.
        writer.write(b"x" * 100 + POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = await to_the_end(reader, 4)
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"usage"' in answer
