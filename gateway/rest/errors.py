"""Errors as OpenAI's JSON: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.frontend import limits
from gateway.rest.schemas import UNKNOWN, UNSUPPORTED
from services.errors import BodyTooLarge, InvalidRequest, NotAuthenticated, StagemeshError

CUSTOM_TYPES = frozenset(
    ("stop_type", "prompt_type", "content_type", "content_part",
     "logit_bias_type", "logit_bias_key", "logit_bias_value", "too_many")
)  # fmt: skip


def error_body(error: StagemeshError) -> bytes:
    """The JSON text of an error."""
    return _body(error.message, error.openai_type, error.param, error.reason.lower())


def error_event(error: StagemeshError) -> bytes:
    """The last event of a stream that fails after its first byte."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: StagemeshError) -> dict[str, str]:
    """What goes with an error: Retry-After, WWW-Authenticate, the end of the connection."""
    if isinstance(error, NotAuthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, BodyTooLarge):
        # The rest of the body may still be on its way.
        return {"connection": "close"}
    if error.retryable and error.http_status in (
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.SERVICE_UNAVAILABLE,
    ):
        seconds = error.retry_after_seconds or limits.RETRY_AFTER_SECONDS
        return {"retry-after": str(max(1, math.ceil(seconds)))}
    return {}


def error_response(error: StagemeshError) -> Response:
    """The whole answer to a request that failed before its first byte."""
    return Response(
        error_body(error),
        status_code=error.http_status,
        media_type="application/json",
        headers=error_headers(error),
    )


async def on_stagemesh_error(_: Request, error: Exception) -> Response:
    """Errors of the tree."""
    if not isinstance(error, StagemeshError):
        raise error
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown path, wrong method, unreadable body."""
    if not isinstance(error, HTTPException):
        raise error
    kind, code = "invalid_request_error", "invalid_request"
    message = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        kind, code = "not_found_error", "not_found"
        message = f"there is no {request.url.path}; /openapi.json lists what there is"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        code = "method_not_allowed"
        message = f"{request.url.path} does not take {request.method}"
    elif error.status_code == HTTPStatus.BAD_REQUEST:
        message = "the body is not valid JSON"
    return Response(
        _body(message, kind, None, code),
        status_code=error.status_code,
        media_type="application/json",
        headers=error.headers,
    )


async def on_validation_error(_: Request, error: Exception) -> Response:
    """Wrong names and types in a body."""
    if not isinstance(error, RequestValidationError):
        raise error
    return error_response(invalid_request(error.errors()))


def invalid_request(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first of pydantic's findings, in a sentence, with the path of the field."""
    first = errors[0]
    kind = first["type"]
    location = [part for part in first["loc"] if part != "body"]
    path = field_path(location)
    if kind == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "it cannot be parsed")
        return InvalidRequest(f"the body is not valid JSON: {reason}")
    if kind == UNKNOWN:
        path = field_path([*location, first["ctx"]["param"]])
        return InvalidRequest(f"unknown parameter '{path}'", param=path)
    if not location and kind != UNSUPPORTED:
        if kind == "missing" or first.get("input") in (None, b"", ""):
            return InvalidRequest("the body is missing; send a JSON object")
        return InvalidRequest(
            "the body must be a JSON object, sent with 'Content-Type: application/json'"
        )
    if kind == UNSUPPORTED:
        param = (f"{path}." if path else "") + first["ctx"]["param"]
        return InvalidRequest(first["msg"], param=param)
    if kind == "missing":
        return InvalidRequest(f"'{path}' is required", param=path)
    if kind in CUSTOM_TYPES:
        return InvalidRequest(f"'{path}' {first['msg']}", param=path)
    text = str(first["msg"]).removeprefix("Input should be ")
    text = text.replace("a valid dictionary or object to extract fields from", "an object")
    return InvalidRequest(f"'{path}' must be {text}{_got(first.get('input'))}", param=path)


def field_path(location: Sequence[str | int]) -> str:
    """For example messages[0].content."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + _printable(str(part))
    return path


def _got(value: object) -> str:
    # Texts may be prompts; they are named by their type only.
    if isinstance(value, (bool, float, int)) or value is None:
        return f"; it is {json.dumps(value)[:40]}"
    names: dict[type[object], str] = {str: "a string", list: "a list", dict: "an object"}
    return f"; it is {names.get(type(value), 'something else')}"


def _printable(text: str, most: int = 64) -> str:
    return text if len(text) <= most else text[:most] + "..."


def _body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code}
    # The standard library's encoder: a message may quote a field name that is no valid Unicode.
    return json.dumps({"error": error}).encode()
