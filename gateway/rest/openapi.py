"""What /openapi.json says of answers. Requests describe themselves (`gateway.rest.schemas`);
answers are written by hand for speed, so their description is, too."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NULLABLE_TEXT: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
IDS: Schema = {"type": "array", "items": COUNT}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
_FINISH: Schema = {"enum": ["stop", "length", "abort", None]}
_LOGPROBS: Schema = {"type": ["object", "null"], "description": "OpenAI's, where asked for."}
_HEAD = {"id": TEXT, "object": TEXT, "created": COUNT, "model": TEXT}
_MODEL = _object(id=TEXT, object=TEXT, created=COUNT, owned_by=TEXT, max_model_len=COUNT)
_RANK = _object(tp_rank=COUNT, device=TEXT, pid=COUNT, state=TEXT)

ERROR = _object(error=_object(message=TEXT, type=TEXT, param=NULLABLE_TEXT, code=NULLABLE_TEXT))

ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": _object(
        **_HEAD,
        choices=_list(
            _object(
                index=COUNT,
                message=_object(role=TEXT, content=TEXT),
                logprobs=_LOGPROBS,
                finish_reason=_FINISH,
            )
        ),
        usage=_USAGE,
    ),
    "/v1/completions": _object(
        **_HEAD,
        choices=_list(_object(index=COUNT, text=TEXT, logprobs=_LOGPROBS, finish_reason=_FINISH)),
        usage=_USAGE,
    ),
    "/v1/models": _object(object=TEXT, data=_list(_MODEL)),
    "/v1/models/{name}": _MODEL,
    "/tokenize": _object(
        count=COUNT,
        max_model_len=COUNT,
        tokens=IDS,
        token_strs={"type": ["array", "null"], "items": TEXT},
    ),
    "/detokenize": _object(prompt=TEXT),
    "/health": _object(status=TEXT),
    "/ready": _object(ready={"type": "boolean"}, reason=NULLABLE_TEXT),
    "/version": _object(version=TEXT),
    "/v1/mesh": _object(
        epoch=COUNT,
        stages=_list(
            _object(
                pp_rank=COUNT,
                layer_start=COUNT,
                layer_end=COUNT,
                tp_size=COUNT,
                node=TEXT,
                state=TEXT,
                last_step_id=COUNT,
                stalled_seconds={"type": "number", "minimum": 0},
                ranks=_list(_RANK),
            )
        ),
    ),
}
STREAMING = frozenset(("/v1/chat/completions", "/v1/completions"))
EVENTS: Schema = {
    **TEXT,
    "description": "With stream: server-sent events, each a chunk in OpenAI's form; the last "
    "is [DONE], or an error.",
}


def describe_answers(app: FastAPI) -> None:
    """Completes the application's schema: whole answers, streams, and errors in OpenAI's form
    (never FastAPI's own 422). Called after the last route is there."""
    error = {
        "description": "What went wrong.",
        "content": {"application/json": {"schema": ERROR}},
    }
    for path, operations in app.openapi()["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = error
            responses["200"]["content"] = _content(path)


def _content(path: str) -> Schema:
    if path not in ANSWERS:
        return {"text/plain": {"schema": TEXT}}
    content: Schema = {"application/json": {"schema": ANSWERS[path]}}
    if path in STREAMING:
        content["text/event-stream"] = {"schema": EVENTS}
    return content
