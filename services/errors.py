"""Every error that Stagemesh shows to anyone, in one tree.

    StagemeshError                INTERNAL            500  server_error
    ├── InvalidRequest            INVALID_ARGUMENT    400  invalid_request_error
    │   ├── ContextTooLong        INVALID_ARGUMENT    400  invalid_request_error
    │   └── BodyTooLarge          RESOURCE_EXHAUSTED  413  invalid_request_error
    ├── ModelNotFound             NOT_FOUND           404  not_found_error
    ├── NotAuthenticated          UNAUTHENTICATED     401  authentication_error
    ├── NotPermitted              PERMISSION_DENIED   403  permission_error
    ├── Saturated                 RESOURCE_EXHAUSTED  429  rate_limit_error     (retryable)
    ├── PipelineUnavailable       UNAVAILABLE         503  service_unavailable  (retryable)
    │   └── StageFailed           UNAVAILABLE         503  service_unavailable  (retryable)
    ├── DeadlineExceeded          DEADLINE_EXCEEDED   504  timeout_error        (retryable)
    ├── RequestAborted            CANCELLED           499  request_aborted
    ├── ConfigError               INVALID_ARGUMENT    400  invalid_request_error
    │   ├── ModelError            INVALID_ARGUMENT    400  invalid_request_error
    │   ├── PartitionError        INVALID_ARGUMENT    400  invalid_request_error
    │   └── UsageError            INVALID_ARGUMENT    400  invalid_request_error
    ├── JoinRefused               FAILED_PRECONDITION 400  invalid_request_error
    │   └── FingerprintMismatch   FAILED_PRECONDITION 400  invalid_request_error
    └── HeadLost                  INTERNAL            500  server_error

A message says what happened, which field or stage, both values where two
differ, and what to do. It never holds a stack trace or prompt text.
Knows nothing of gRPC or HTTP libraries: codes are numbers and names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

ERROR_DOMAIN = "stagemesh"
ECHO_REASON = "PEER_LOST"
"""A stage's reason: a neighbour is gone. Rarely the first cause; who has failed says so itself."""


class StagemeshError(Exception):
    """The root: something went wrong that nobody foresaw.

    `param` names the field of a request or the flag of a command that is at
    fault, `retry_after_seconds` is set where trying again makes sense.
    """

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(StagemeshError):
    """The request cannot be served as it is; nothing was changed by it."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "INVALID_REQUEST"


class ContextTooLong(InvalidRequest):
    """Prompt and requested output do not fit the context length."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class BodyTooLarge(InvalidRequest):
    """The request's body or message is over the limit."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 413
    reason = "BODY_TOO_LARGE"


class ModelNotFound(StagemeshError):
    """The named model is not the one that is served here."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    openai_type = "not_found_error"
    reason = "MODEL_NOT_FOUND"


class NotAuthenticated(StagemeshError):
    """The API key or the role in a certificate is missing or wrong."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"
    reason = "NOT_AUTHENTICATED"


class NotPermitted(StagemeshError):
    """The caller is known, and its role may not do this."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403
    openai_type = "permission_error"
    reason = "NOT_PERMITTED"


class Saturated(StagemeshError):
    """The service is up and full; the same request can succeed a little later."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"
    reason = "SATURATED"
    retryable = True


class PipelineUnavailable(StagemeshError):
    """There is no complete pipeline at the moment."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    openai_type = "service_unavailable"
    reason = "PIPELINE_UNAVAILABLE"
    retryable = True


class StageFailed(PipelineUnavailable):
    """A stage or one of its ranks failed; the message carries the first cause."""

    reason = "STAGE_FAILED"


class DeadlineExceeded(StagemeshError):
    """The request's deadline passed before it was done."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"
    reason = "DEADLINE_EXCEEDED"
    retryable = True


class RequestAborted(StagemeshError):
    """The request was ended from outside."""

    grpc_code = "CANCELLED"
    http_status = 499
    openai_type = "request_aborted"
    reason = "REQUEST_ABORTED"


class ConfigError(StagemeshError):
    """A flag, a configuration file or the environment is wrong."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "CONFIG_ERROR"


class ModelError(ConfigError):
    """The model directory is missing, incomplete or of a family that is not supported."""

    reason = "MODEL_ERROR"


class PartitionError(ConfigError):
    """The layers cannot be cut that way; the message names the rule."""

    reason = "PARTITION_ERROR"


class UsageError(ConfigError):
    """The command line, its YAML file or its environment is wrong: exit code 2."""

    reason = "USAGE_ERROR"


class JoinRefused(StagemeshError):
    """The head does not take this worker into the mesh."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "JOIN_REFUSED"


class FingerprintMismatch(JoinRefused):
    """Two sides differ in a fact that they must share; both values are named."""

    reason = "FINGERPRINT_MISMATCH"


class HeadLost(StagemeshError):
    """The head has not answered a worker for its time-out; or another one is there in its place."""

    reason = "HEAD_LOST"


def for_good(error: ConfigError) -> ConfigError:
    """As a process that cannot start raises it: `UsageError`, whose exit code tells a supervisor
    not to start it again, unless the error says itself that time may heal it."""
    if error.retry_after_seconds is not None:
        return error
    return UsageError(error.message, param=error.param)


def all_errors(root: type[StagemeshError] = StagemeshError) -> Iterator[type[StagemeshError]]:
    """Yields the whole tree, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)


def failure_of(error: BaseException) -> StagemeshError | None:
    """The first of our own errors in an exception or group of exceptions."""
    if isinstance(error, StagemeshError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            if (found := failure_of(inner)) is not None:
                return found
    return None
