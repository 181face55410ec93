"""Channel settings, error translation and the retry rule. Private to the SDK; the only
place of it, clients apart, that knows gRPC."""

from __future__ import annotations

import ipaddress
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from stagemesh.errors import (
    BodyTooLarge,
    ConfigError,
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
from stagemesh.types import TLSConfig

ERROR_DOMAIN = "stagemesh"
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_MAX_RETRIES = 2
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
"""A service that names a longer wait than this is left alone: the error goes to the caller."""

MAX_REQUEST_BYTES = 8 * 1024 * 1024
MAX_RESPONSE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MILLISECONDS = 10_000
KEEPALIVE_TIMEOUT_MILLISECONDS = 5_000

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
    # The SDK retries by its own rule; two rules on top of each other would multiply.
    ("grpc.enable_retries", 0),
)

_DETAILS_KEY = "grpc-status-details-bin"
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


def credentials(tls: TLSConfig) -> grpc.ChannelCredentials:
    """Reads the PEM files; raises `ConfigError` naming one that cannot be read."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca_file),
        private_key=_read(tls.key_file),
        certificate_chain=_read(tls.certificate_file),
    )


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def call_metadata(
    api_key: str | None, address: str, tls: TLSConfig | None
) -> tuple[tuple[str, str], ...]:
    """What goes with every call. Warns of a key that would be readable on its way."""
    if api_key is None:
        return ()
    if tls is None and not is_local(address):
        warnings.warn(
            f"the API key goes to {address} without TLS: whoever is on the way can read it; "
            "give tls=TLSConfig(...)",
            UserWarning,
            stacklevel=3,
        )
    return (("authorization", f"Bearer {api_key}"),)


def is_local(address: str) -> bool:
    """Whether "host:port" stays on this machine, as far as the text tells."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def translate(error: Any, address: str) -> StagemeshError:
    """A failed call (sync or asyncio) as an error of the tree."""
    code: grpc.StatusCode = error.code()
    text: str = error.details() or code.name
    status = _status(error.trailing_metadata() or ())
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_seconds: float | None = None
    reason: str | None = None
    for detail in status.details if status is not None else ():
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            reason = info.reason
        elif detail.Unpack(retry):
            retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    default = _CLASS_BY_CODE.get(code, StagemeshError)
    if reason is None:
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
            default = BodyTooLarge
        elif code is grpc.StatusCode.UNAVAILABLE:
            text = f"cannot reach {address}: {text}"
    found = next((one for one in all_errors() if one.reason == reason), default)
    return found(text, param=info.metadata.get("param"), retry_after_seconds=retry_after_seconds)


def _status(metadata: Sequence[tuple[str, Any]]) -> status_pb2.Status | None:
    for key, value in metadata:
        if key == _DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


@dataclass(slots=True)
class Attempts:
    """One call's deadline and retries. Only what has given nothing yet is tried again."""

    deadline: float
    """On the monotonic clock, seconds."""
    retries_left: int
    backoff_seconds: float = FIRST_BACKOFF_SECONDS

    @classmethod
    def start(cls, timeout_seconds: float, max_retries: int) -> Attempts:
        """The clock runs from now."""
        if not timeout_seconds > 0:
            raise InvalidRequest(
                f"'timeout' must be above 0 seconds; it is {timeout_seconds}", param="timeout"
            )
        return cls(time.monotonic() + timeout_seconds, max_retries)

    def remaining_seconds(self) -> float:
        """What a call may take now; at least a moment, so that the call itself reports."""
        return max(0.001, self.deadline - time.monotonic())

    def wait_before_retry(self, error: StagemeshError) -> float | None:
        """Seconds to wait before the next try; None where there is none."""
        if not isinstance(error, (Saturated, PipelineUnavailable)) or self.retries_left <= 0:
            return None
        wait = max(error.retry_after_seconds or 0.0, self.backoff_seconds)
        if wait > MAX_BACKOFF_SECONDS or time.monotonic() + wait >= self.deadline:
            return None
        self.retries_left -= 1
        self.backoff_seconds *= 2
        return wait
