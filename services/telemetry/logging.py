"""One line per log record, in key=value form, with the request id where there is one.

    2026-11-29T19:14:13.120Z INFO gateway.rest request_id=chatcmpl-1 msg="request done" status=200

The level comes from STAGEMESH_LOG_LEVEL (DEBUG, INFO, WARNING, ERROR; default
INFO). Prompt text is logged at DEBUG only; that is up to the callers, and none
of ours logs it at all. A stack trace stays on its line, with "\\n" written out.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

from services.errors import ConfigError

LOG_LEVEL_VARIABLE = "STAGEMESH_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FIELDS_ATTRIBUTE = "stagemesh_fields"

_request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "stagemesh_request_id", default=None
)


@contextlib.contextmanager
def request_id_scope(request_id: str) -> Iterator[None]:
    """Log lines inside carry the request id. Enter and leave in the same task."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def log_event(
    logger: logging.Logger,
    level: int,
    message: str,
    fields: Mapping[str, object] | None = None,
) -> None:
    """Logs a message with fields, each of which becomes key=value."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={_FIELDS_ATTRIBUTE: fields or {}})


class KeyValueFormatter(logging.Formatter):
    """Formats a record as one line; values with blanks or quotes are quoted as JSON.

    `process` says which process of a mesh speaks, where several share a terminal.
    """

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = time.gmtime(record.created)
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{int(record.msecs):03d}Z"
        pairs: list[tuple[str, object]] = []
        if self._process is not None:
            pairs.append(("process", self._process))
        request_id = _request_id.get()
        if request_id is not None:
            pairs.append(("request_id", request_id))
        pairs.append(("msg", record.getMessage()))
        pairs.extend(getattr(record, _FIELDS_ATTRIBUTE, {}).items())
        if record.exc_info:
            pairs.append(("trace", self.formatException(record.exc_info)))
        text = " ".join(f"{key}={_value(value)}" for key, value in pairs)
        return f"{stamp} {record.levelname} {record.name} {text}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text and text.isascii() and text.isprintable() and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text)


def log_level(environment: Mapping[str, str] | None = None) -> int:
    """The level that the environment names; raises `ConfigError` for an unknown one."""
    name = (environment if environment is not None else os.environ).get(LOG_LEVEL_VARIABLE, "INFO")
    if name.upper() not in LEVELS:
        raise ConfigError(
            f"{LOG_LEVEL_VARIABLE}={name!r} is no log level; use one of {', '.join(LEVELS)}",
            param=LOG_LEVEL_VARIABLE,
        )
    return int(getattr(logging, name.upper()))


def setup_logging(
    stream: TextIO | None = None, level: int | None = None, *, process: str | None = None
) -> None:
    """Sends all logs of this process to one stream (default: stderr), replacing other handlers.

    Chatty libraries stay at WARNING unless the level is DEBUG.
    """
    chosen = log_level() if level is None else level
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(chosen)
    for name in ("uvicorn", "asyncio", "grpc", "httpx", "httpcore", "ray"):
        logging.getLogger(name).setLevel(max(chosen, logging.WARNING))
