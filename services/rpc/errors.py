"""The one place where the error tree meets gRPC, in both directions.

On the wire an error is a `google.rpc.Status` (in the trailing metadata
"grpc-status-details-bin") with an `ErrorInfo` (domain "stagemesh", reason of
the class, metadata "param") and, where a retry makes sense, a `RetryInfo`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from services.errors import (
    ERROR_DOMAIN,
    BodyTooLarge,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotAuthenticated,
    NotPermitted,
    PipelineUnavailable,
    RequestAborted,
    Saturated,
    StagemeshError,
    all_errors,
    failure_of,
)
from services.rpc import settings

logger = logging.getLogger(__name__)

STATUS_DETAILS_KEY = "grpc-status-details-bin"
DEFAULT_RETRY_SECONDS = 1.0
"""Told to the caller of a retryable error that names no time of its own."""

CallerCheck = Callable[[str, Mapping[str, Iterable[bytes]]], None]

_CLASS_BY_CODE: dict[grpc.StatusCode, type[StagemeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Saturated,
    grpc.StatusCode.UNAVAILABLE: PipelineUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestAborted,
}


def rpc_status(error: StagemeshError) -> status_pb2.Status:
    """The error as it goes over the wire."""
    code = grpc.StatusCode[error.grpc_code]
    status = status_pb2.Status(code=code.value[0], message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    if error.param is not None:
        info.metadata["param"] = error.param
    status.details.add().Pack(info)
    if error.retryable:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(
            int((error.retry_after_seconds or DEFAULT_RETRY_SECONDS) * 1e9)
        )
        status.details.add().Pack(retry)
    return status


def error_from_wire(
    reason: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_seconds: float | None = None,
    default: type[StagemeshError] = StagemeshError,
) -> StagemeshError:
    """Rebuilds an error from its reason; a reason of a newer peer becomes `default`."""
    for error_class in all_errors():
        if error_class.reason == reason:
            return error_class(message, param=param, retry_after_seconds=retry_after_seconds)
    return default(message, param=param, retry_after_seconds=retry_after_seconds)


def error_from_rpc(error: grpc.aio.AioRpcError) -> StagemeshError:
    """What a failed call means, as an error of the tree.

    The class comes from the `ErrorInfo` where the peer sent one, else from the
    status code (a peer that is not there is `PipelineUnavailable`).
    """
    code: grpc.StatusCode = error.code()
    text: str = error.details() or code.name
    default = _CLASS_BY_CODE.get(code, StagemeshError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        default = BodyTooLarge
    status = _status_details(error)
    if status is None:
        return default(text)
    info, retry_after_seconds = _unpack(status)
    if info is None:
        return default(status.message or text, retry_after_seconds=retry_after_seconds)
    return error_from_wire(
        info.reason,
        status.message,
        param=info.metadata.get("param"),
        retry_after_seconds=retry_after_seconds,
        default=default,
    )


def _status_details(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpack(
    status: status_pb2.Status,
) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    found: error_details_pb2.ErrorInfo | None = None
    retry_after_seconds: float | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            found = info
        elif detail.Unpack(retry):
            retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return found, retry_after_seconds


async def abort(context: grpc.aio.ServicerContext, error: StagemeshError) -> None:
    """Ends the call with the error; raises gRPC's own `AbortError`.

    To a caller that does not read, the error comes behind what it has not read, and this waits
    for it as long as the caller stays.
    """
    try:
        await context.abort(
            grpc.StatusCode[error.grpc_code],
            error.message,
            ((STATUS_DETAILS_KEY, rpc_status(error).SerializeToString()),),
        )
    except grpc.aio.InternalError:
        # It has left meanwhile, which ends a call as if it had been cancelled.
        raise asyncio.CancelledError from None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """The edge of every service: errors of the tree go to the caller as they are,
    anything else becomes INTERNAL with a log line. Cancellation passes through.

    Handlers that are async generators are closed when their caller goes away,
    before the call is over, so that what they hold is freed at once.
    """

    def __init__(self) -> None:
        self.check_caller: CallerCheck | None = None
        """Raises an error of the tree for a caller who may not call the method; called with
        the full method name and gRPC's authentication context, before a request is read."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        try:
            handler = await continuation(handler_call_details)
        except StagemeshError as error:
            logger.info("%s refused: %s", handler_call_details.method, error.message)
            return _refusal(error)
        if handler is None:
            return None
        method: str = handler_call_details.method
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        # gRPC answers UNKNOWN, with a trace in our log, to a request that is no message: so a
        # single one is parsed inside the guard. Streams parse their own.
        parse = handler.request_deserializer or bytes
        single = {"response_serializer": handler.response_serializer}
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guard(handler.unary_unary, method, self.check_caller, parse), **single
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guard(handler.unary_stream, method, self.check_caller, parse), **single
            )
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                _guard(handler.stream_unary, method, self.check_caller), **codecs
            )
        return grpc.stream_stream_rpc_method_handler(
            _guard(handler.stream_stream, method, self.check_caller), **codecs
        )


def _refusal(error: StagemeshError) -> grpc.RpcMethodHandler:
    """Answers a call with an error, whatever kind of method it asked for."""

    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)


def _parsed(raw: bytes, parse: Callable[[bytes], Any], method: str) -> Any:
    try:
        return parse(raw)
    except DecodeError:
        raise InvalidRequest(
            f"the request of {method} ({len(raw)} bytes) is no message of its type; check that "
            "client and service have the same protos"
        ) from None


async def _write(context: grpc.aio.ServicerContext, response: Any) -> None:
    """Waits for the caller to make room, up to a deadline: what the handler holds for it is
    others' to use."""
    try:
        async with asyncio.timeout(settings.SLOW_READER_SECONDS):
            await context.write(response)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the caller has not read its stream for {settings.SLOW_READER_SECONDS:g} s"
        ) from None


def _guard(
    handler: Callable[..., Any],
    method: str,
    check_caller: CallerCheck | None,
    parse: Callable[[bytes], Any] | None = None,
) -> Callable[..., Awaitable[Any]]:
    """`parse` makes the request from its bytes; None takes it as it comes."""

    async def run(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if check_caller is not None:
            try:
                check_caller(method, context.auth_context())
            except StagemeshError as error:
                logger.warning("refused %s: %s", context.peer(), error.message)
                raise
        if parse is not None:
            request = _parsed(request, parse, method)
        if not inspect.isasyncgenfunction(handler):
            return await handler(request, context)
        async with contextlib.aclosing(handler(request, context)) as responses:
            async for response in responses:
                await _write(context, response)
        return None

    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await run(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except StagemeshError as error:
            await abort(context, error)
        except Exception as error:
            unimplemented = grpc.StatusCode.UNIMPLEMENTED
            if isinstance(error, NotImplementedError) and context.code() is unimplemented:
                # What generated code does for a method that nobody has written; no fault of ours.
                await context.abort(unimplemented, f"{method} is not implemented here")
            # A task group of the handler wraps the error of its task.
            known = failure_of(error)
            if known is not None:
                await abort(context, known)
                return None
            # The edge: the caller gets the kind of the fault, the log its trace.
            logger.exception("%s failed", method)
            await abort(
                context,
                StagemeshError(
                    f"{method} failed inside the service ({type(error).__name__}); its log has more"
                ),
            )
        return None

    return guarded
