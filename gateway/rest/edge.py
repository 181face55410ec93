"""The outermost layer of the REST door: request id, API key, body limit, log line, metrics.

Plain ASGI, so that streams pass through without another layer of tasks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.frontend import limits
from gateway.frontend.api_keys import ApiKeys
from gateway.frontend.frontend import check_request_id, new_request_id
from gateway.rest.errors import error_response
from services.errors import (
    BodyTooLarge,
    InvalidRequest,
    RequestAborted,
    StagemeshError,
)
from services.telemetry import Metrics, log_event, request_id_scope

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
"""Answered without a key, and logged at DEBUG: probes call them all the time."""

METHODS_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
RECORD_KEY = "stagemesh.record"
DRAIN_BYTES = 8 * limits.MAX_BODY_BYTES
DRAIN_SECONDS = 5.0
"""How much of an oversized body is still taken, and thrown away, so that a client that
only sends sees the 413 and not a broken connection."""


@dataclass(slots=True)
class RequestRecord:
    """What the log line says of a request; the handlers fill in the tokens."""

    request_id: str
    client_request_id: str | None
    arrived_at: float
    """On the event loop's clock, when its head had been read."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    aborted: bool = False
    """The client left, or stopped reading, after its stream had begun."""

    def note_abort(self) -> None:
        """The stream did not reach its end."""
        self.aborted = True


class Edge:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        record = _record_of(headers)
        scope[RECORD_KEY] = record
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        with request_id_scope(record.request_id):
            try:
                await self._handle(scope, headers, receive, send_noting)
            except RequestAborted as error:
                status = error.http_status
            except StagemeshError as error:
                if status == 0:
                    await error_response(error)(scope, receive, send_noting)
            except Exception:
                # The edge: the client gets a typed error, the log gets the trace.
                logger.exception("%s %s failed", scope["method"], scope["path"])
                if status == 0:
                    failure = StagemeshError(
                        "the request failed inside the service; its log has more, under "
                        f"request id {record.request_id}"
                    )
                    await error_response(failure)(scope, receive, send_noting)
            finally:
                self._note(scope["path"], status, time.monotonic() - started, record)

    async def _handle(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            # Headers arrive as bytes and are read as Latin-1; keys may be any UTF-8.
            shown = headers.get("authorization", "").encode("latin-1")
            self._keys.check(shown, "'Authorization: Bearer KEY'")
        if scope["method"] in METHODS_WITH_BODY:
            body = await read_body(headers, receive)
            receive = _replay(body, receive)
        await self._app(scope, receive, send)

    def _note(self, path: str, status: int, seconds: float, record: RequestRecord) -> None:
        # 0: the connection ended before an answer began.
        if status == 0 or record.aborted:
            status = RequestAborted.http_status
        self._metrics.observe_request(path, status, seconds)
        level = logging.DEBUG if path in OPEN_PATHS else logging.INFO
        log_event(
            logger,
            level,
            "request done",
            {
                "path": path,
                "status": status,
                "seconds": seconds,
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
            },
        )


def _record_of(headers: Headers) -> RequestRecord:
    asked = headers.get("x-request-id")
    try:
        client_id = check_request_id(asked, "x-request-id") if asked else None
    except InvalidRequest:
        # A proxy's odd id must not cost its client the answer; it gets one of ours.
        client_id = None
    now = asyncio.get_running_loop().time()
    return RequestRecord(client_id or new_request_id("req"), client_id, now)


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """The whole body, counted while it arrives.

    Raises `BodyTooLarge` above `MAX_BODY_BYTES`, `InvalidRequest` where it does not
    arrive in time, `RequestAborted` where the client leaves.
    """
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limits.MAX_BODY_BYTES:
        if "expect" not in headers:  # else the client waits for leave to send, and sends nothing
            await _drain(receive)
        raise _too_large(f"{announced} bytes")
    try:
        async with asyncio.timeout(limits.BODY_TIMEOUT_SECONDS):
            chunks: list[bytes] = []
            size, more = 0, True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestAborted("the client left before its body was complete")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size <= limits.MAX_BODY_BYTES:
                    chunks.append(chunk)
                more = message.get("more_body", False)
                if size > limits.MAX_BODY_BYTES:
                    chunks.clear()
                    if more:
                        await _drain(receive)
                    raise _too_large(f"more than {limits.MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise InvalidRequest(
            f"the body did not arrive within {limits.BODY_TIMEOUT_SECONDS:g} s"
        ) from error
    return b"".join(chunks)


def _too_large(size: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size}; at most {limits.MAX_BODY_BYTES} bytes work")


async def _drain(receive: Receive) -> None:
    size, more = 0, True
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while more and size < DRAIN_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then what the connection says."""
    given = False

    async def replaying() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying
