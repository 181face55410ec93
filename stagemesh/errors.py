"""Every error that a client can meet, in one tree.

    StagemeshError
    ├── InvalidRequest            the request cannot be served as it is
    │   ├── ContextTooLong        prompt and output do not fit the context length
    │   └── BodyTooLarge          the message is over the limit
    ├── ModelNotFound             another model is served
    ├── NotAuthenticated          the API key is missing or wrong
    ├── NotPermitted              the certificate's role may not do this
    ├── Saturated                 full; the same request can succeed later     (retryable)
    ├── PipelineUnavailable       no complete pipeline, or no service there    (retryable)
    │   └── StageFailed           a stage failed while it worked               (retryable)
    ├── DeadlineExceeded          the deadline passed                          (retryable)
    ├── RequestAborted            ended from outside, or the client is closed
    ├── ConfigError               a setting is wrong
    │   ├── ModelError
    │   ├── PartitionError
    │   └── UsageError            on the servers' command line only
    ├── JoinRefused               between servers only
    │   └── FingerprintMismatch
    └── HeadLost                  between servers only

The same tree as the servers have (`services.errors`), by name and reason; a
test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class StagemeshError(Exception):
    """The root: something went wrong that nobody foresaw.

    `message` is for people, `param` names the field at fault, and
    `retry_after_seconds` is set where trying again makes sense.
    """

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

    reason = "INVALID_REQUEST"


class ContextTooLong(InvalidRequest):
    """Prompt and requested output do not fit the context length."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class BodyTooLarge(InvalidRequest):
    """The request's message is over the limit."""

    reason = "BODY_TOO_LARGE"


class ModelNotFound(StagemeshError):
    """The named model is not the one that is served."""

    reason = "MODEL_NOT_FOUND"


class NotAuthenticated(StagemeshError):
    """The API key is missing or wrong."""

    reason = "NOT_AUTHENTICATED"


class NotPermitted(StagemeshError):
    """The caller is known, and its role may not do this."""

    reason = "NOT_PERMITTED"


class Saturated(StagemeshError):
    """The service is up and full; the same request can succeed a little later."""

    reason = "SATURATED"
    retryable = True


class PipelineUnavailable(StagemeshError):
    """There is no complete pipeline at the moment, or no service at the address."""

    reason = "PIPELINE_UNAVAILABLE"
    retryable = True


class StageFailed(PipelineUnavailable):
    """A stage or one of its ranks failed; the message carries the first cause."""

    reason = "STAGE_FAILED"


class DeadlineExceeded(StagemeshError):
    """The request's deadline passed before it was done."""

    reason = "DEADLINE_EXCEEDED"
    retryable = True


class RequestAborted(StagemeshError):
    """The request was ended from outside, or its client is closed."""

    reason = "REQUEST_ABORTED"


class ConfigError(StagemeshError):
    """A setting is wrong."""

    reason = "CONFIG_ERROR"


class ModelError(ConfigError):
    """The server's model directory is missing, incomplete or not supported."""

    reason = "MODEL_ERROR"


class PartitionError(ConfigError):
    """The layers cannot be cut that way."""

    reason = "PARTITION_ERROR"


class UsageError(ConfigError):
    """A server's command line, its YAML file or its environment is wrong."""

    reason = "USAGE_ERROR"


class JoinRefused(StagemeshError):
    """A head does not take a worker into its mesh."""

    reason = "JOIN_REFUSED"


class FingerprintMismatch(JoinRefused):
    """Two servers differ in a fact that they must share."""

    reason = "FINGERPRINT_MISMATCH"


class HeadLost(StagemeshError):
    """The head has not answered a worker for its time-out."""

    reason = "HEAD_LOST"


def all_errors(root: type[StagemeshError] = StagemeshError) -> Iterator[type[StagemeshError]]:
    """Yields the whole tree, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)
