"""The one place where the error tree meets gRPC, in both directions.

On the wire an error is a `google.rpc.Status` (in the trailing metadata
"grpc-status-details-bin") with an `ErrorInfo` (domain "stagemesh", reason of
the class, metadata "param") and, where a retry makes sense, a `RetryInfo`.
"""

from __future__ import annotations

import asyncio

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
)

STATUS_DETAILS_KEY = "grpc-status-details-bin"
DEFAULT_RETRY_SECONDS = 1.0
"""Told to the caller of a retryable error that names no time of its own."""

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
    for it as long as the connection stays (`services.rpc.calls` ends it).
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
