"""The edge of every gRPC service: who may call, how many, and what they are told.

Errors of the tree go to the caller as they are, anything else becomes INTERNAL with a log line.
Cancellation passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.errors import DeadlineExceeded, InvalidRequest, StagemeshError, failure_of
from services.rpc import settings
from services.rpc.calls import Calls
from services.rpc.errors import abort

log = logging.getLogger(__name__)

_call: ContextVar[tuple[str, str]] = ContextVar("_call", default=("a call", "somebody"))
"""The method that is answered and its peer, for the log: one whose call gRPC has ended has no
name any more."""

CallerCheck = Callable[[str, Mapping[str, Iterable[bytes]]], None]


async def write(context: grpc.aio.ServicerContext, response: Any) -> None:
    """Waits for the caller to make room, up to a deadline: what the handler holds for it is
    others' to use. Raises `DeadlineExceeded`."""
    await _in_time(context.write(response))


async def _open(context: grpc.aio.ServicerContext) -> None:
    """Sends the headers of a stream. With the first message instead, a call whose caller does
    not take that one could not be ended: its error would want to send them again."""
    await _in_time(context.send_initial_metadata(()))


async def _in_time(sending: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(settings.SLOW_READER_SECONDS):
            await sending
    except TimeoutError:
        raise DeadlineExceeded(
            f"the caller has not read its stream for {settings.SLOW_READER_SECONDS:g} s"
        ) from None
    except grpc.aio.InternalError as error:
        # gRPC has ended the call, which is as if it had been cancelled. It cancels the calls of
        # those who leave, mostly before their next message fails; a caller of whom we refuse to
        # send a message hears why, and nobody here would.
        log.warning(
            "%s to %s ended: a message was not sent; it has more bytes than this server sends in "
            "one, or the caller has just left (%s)",
            *_call.get(),
            error,
        )
        raise asyncio.CancelledError from None


class Edge(grpc.aio.ServerInterceptor):
    """Stands around every method of a server.

    To gRPC the requests of each method are a stream, whatever they are to its caller: gRPC would
    read a single one before it asks us anything. So the caller's role is checked before a
    message is waited for.

    Handlers that are async generators are closed when their caller goes away,
    before the call is over, so that what they hold is freed at once.
    """

    def __init__(self, max_calls: int) -> None:
        self.check_caller: CallerCheck | None = None
        """Raises an error of the tree for a caller who may not call the method; called with
        the full method name and gRPC's authentication context, before a request is read."""
        self._calls = Calls(max_calls)

    def listens_on(self, port: int) -> None:
        """The server takes calls there."""
        self._calls.listens_on(port)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method: str = handler_call_details.method
        try:
            handler = await continuation(handler_call_details)
        except StagemeshError as error:
            log.info("%s refused: %s", method, error.message)
            return grpc.stream_stream_rpc_method_handler(self._refusing(error))
        if handler is None:
            return None
        as_stream = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return as_stream(
            self._guarding(handler, method),
            # A single request is parsed inside the guard: gRPC answers UNKNOWN, with a trace in
            # our log, to one that is no message. Streams parse their own.
            request_deserializer=handler.request_deserializer
            if handler.request_streaming
            else None,
            response_serializer=handler.response_serializer,
        )

    def _refusing(self, error: StagemeshError) -> Callable[..., Awaitable[None]]:
        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            self._calls.ends(context)
            await abort(context, error)

        return refuse

    def _guarding(
        self, handler: grpc.RpcMethodHandler, method: str
    ) -> Callable[..., Awaitable[Any]]:
        async def guarded(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            response: Any = None
            failure: StagemeshError | None = None
            _call.set((method, context.peer()))
            try:
                response = await self._answer(handler, method, requests, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except StagemeshError as error:
                failure = error
            except Exception as error:
                unimplemented = grpc.StatusCode.UNIMPLEMENTED
                if isinstance(error, NotImplementedError) and context.code() is unimplemented:
                    # Generated code, for a method that nobody has written; no fault of ours.
                    await context.abort(unimplemented, f"{method} is not implemented here")
                failure = _unforeseen(method, error)
            self._calls.ends(context)
            if failure is not None:
                await abort(context, failure)
            return response

        return guarded

    async def _answer(
        self,
        handler: grpc.RpcMethodHandler,
        method: str,
        requests: Any,
        context: grpc.aio.ServicerContext,
    ) -> Any:
        """The response, where there is one; those of a stream are written."""
        self._check(method, context)
        request = requests
        if not handler.request_streaming:
            raw = await self._calls.message_of(context, method)
            request = _parsed(raw, handler.request_deserializer or bytes, method)
        return await self._calls.answer(context, method, _run(handler, request, context))

    def _check(self, method: str, context: grpc.aio.ServicerContext) -> None:
        if self.check_caller is None:
            return
        try:
            self.check_caller(method, context.auth_context())
        except StagemeshError as error:
            log.warning("refused %s: %s", context.peer(), error.message)
            raise


async def _run(
    handler: grpc.RpcMethodHandler, request: Any, context: grpc.aio.ServicerContext
) -> Any:
    """Runs a handler of whatever kind; returns its response, or writes those of a stream."""
    if not handler.response_streaming:
        unary = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return await unary(request, context)
    stream = handler.stream_stream if handler.request_streaming else handler.unary_stream
    if not inspect.isasyncgenfunction(stream):
        await _open(context)
        return await stream(request, context)  # It writes itself.
    opened = False
    async with contextlib.aclosing(stream(request, context)) as responses:
        async for response in responses:
            if not opened:
                await _open(context)
                opened = True
            await write(context, response)
    return None


def _parsed(raw: bytes, parse: Callable[[bytes], Any], method: str) -> Any:
    try:
        return parse(raw)
    except DecodeError:
        raise InvalidRequest(
            f"the request of {method} ({len(raw)} bytes) is no message of its type; check that "
            "client and service have the same protos"
        ) from None


def _unforeseen(method: str, error: Exception) -> StagemeshError:
    """What the caller is told of an exception that a handler has raised."""
    # A task group of the handler wraps the error of its task.
    known = failure_of(error)
    if known is not None:
        return known
    # The edge: the caller gets the kind of the fault, the log its trace.
    log.error("%s failed", method, exc_info=error)
    return StagemeshError(
        f"{method} failed inside the service ({type(error).__name__}); its log has more"
    )
