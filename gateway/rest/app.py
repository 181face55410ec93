"""The REST application: every path, and what each does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from gateway.engine.types import Engine
from gateway.frontend import limits
from gateway.frontend.api_keys import ApiKeys
from gateway.frontend.frontend import Frontend, new_request_id
from gateway.frontend.params import check_timeout
from gateway.frontend.prompts import ChatPrompt, FieldNames, Prompt, TextPrompt, TokenPrompt
from gateway.rest import requests
from gateway.rest.answers import ChatAnswer, CompletionAnswer
from gateway.rest.edge import RECORD_KEY, Edge, RequestRecord
from gateway.rest.errors import on_http_error, on_stagemesh_error, on_validation_error
from gateway.rest.generate import respond
from gateway.rest.openapi import describe_answers
from gateway.rest.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.errors import InvalidRequest, StagemeshError
from services.telemetry import Metrics

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWNER = "stagemesh"
CORS_SECONDS = 600
"""How long a browser remembers what it may ask."""


@dataclass(frozen=True, slots=True)
class RestConfig:
    """What the application needs besides the objects it calls."""

    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_origins: tuple[str, ...] = ()
    """Web pages whose scripts may read answers; "*" is all. Empty: none."""
    version: str = "0.0.0"


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def create_rest_app(
    frontend: Frontend,
    engine: Engine,
    mesh_view: Callable[[], Mapping[str, Any]],
    metrics: Metrics,
    config: RestConfig | None = None,
    *,
    not_ready_reason: Callable[[], str | None] | None = None,
) -> FastAPI:
    """Makes the application.

    `mesh_view` gives the JSON of /v1/mesh. `not_ready_reason` says why /ready is 503, or
    None when a complete pipeline is there; the default asks the engine.
    """
    config = config or RestConfig()
    app = FastAPI(
        title="Stagemesh",
        version=config.version,
        description="OpenAI-compatible REST API of a Stagemesh gateway.",
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(StagemeshError, on_stagemesh_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    _add_openai_routes(app, frontend)
    _add_token_routes(app, frontend)
    _add_state_routes(
        app, mesh_view, metrics, config.version, not_ready_reason or _engine_reason(engine)
    )
    describe_answers(app)
    app.add_middleware(Edge, keys=config.keys, metrics=metrics)
    if config.allowed_origins:
        # Outermost: a browser asks for leave without the key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-request-id"),
            expose_headers=("x-request-id", "retry-after"),
            max_age=CORS_SECONDS,
        )
    metrics.declare_endpoints(
        path for route in app.routes if "{" not in (path := getattr(route, "path", "{"))
    )
    return app


def _engine_reason(engine: Engine) -> Callable[[], str | None]:
    return lambda: None if engine.ready else "there is no complete pipeline yet"


def _add_openai_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Continues a conversation."""
        model = frontend.resolve_model(body.model)
        asked = requests.chat_input(body)
        prompt = ChatPrompt(requests.chat_messages(body.messages))
        record: RequestRecord = request.scope[RECORD_KEY]
        answer_id = new_request_id("chatcmpl", record.client_request_id)
        prepared = await frontend.prepare(
            prompt,
            asked,
            request_id=answer_id,
            names=requests.chat_field_names(body),
            deadline=record.arrived_at + check_timeout(body.timeout),
        )
        answer = ChatAnswer(
            answer_id,
            model,
            frontend.tokenizer,
            num_choices=asked.n,
            with_logprobs=asked.sampling.num_logprobs is not None,
            include_usage=requests.include_usage(body),
        )
        return await respond(frontend, request, [prepared], answer, stream=bool(body.stream))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several texts."""
        model = frontend.resolve_model(body.model)
        asked = requests.completion_input(body)
        prompts = requests.completion_prompts(body.prompt, asked.n)
        record: RequestRecord = request.scope[RECORD_KEY]
        answer_id = new_request_id("cmpl", record.client_request_id)
        deadline = record.arrived_at + check_timeout(body.timeout)
        prepared = [
            await frontend.prepare(
                prompt,
                asked if index == 0 else requests.with_next_seed(asked, index),
                request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{index}",
                names=FieldNames(prompt="prompt" if len(prompts) == 1 else f"prompt[{index}]"),
                deadline=deadline,
            )
            for index, prompt in enumerate(prompts)
        ]
        echoes = [await _echo(frontend, prompt) if body.echo else "" for prompt in prompts]
        answer = CompletionAnswer(
            answer_id,
            model,
            frontend.tokenizer,
            num_choices=len(prompts) * asked.n,
            with_logprobs=asked.sampling.num_logprobs is not None,
            include_usage=requests.include_usage(body),
            echoes=[echo for echo in echoes for _ in range(asked.n)],
        )
        return await respond(frontend, request, prepared, answer, stream=bool(body.stream))

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The served names."""
        data = [_model(frontend, name) for name in frontend.model_names]
        return _Json({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One served name."""
        return _Json(_model(frontend, frontend.resolve_model(name)))


async def _echo(frontend: Frontend, prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, TokenPrompt):
        return await frontend.detokenize(prompt.token_ids, "prompt")
    raise InvalidRequest("a conversation cannot be echoed", param="echo")


def _model(frontend: Frontend, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": frontend.created,
        "owned_by": OWNER,
        "root": frontend.model_names[0],
        "parent": None,
        "max_model_len": frontend.max_model_len,
    }


def _add_token_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt or a conversation."""
        frontend.resolve_model(body.model)
        prompt, names = requests.tokenize_prompt(body)
        token_ids = await frontend.tokenize_alone(prompt, names)
        texts = None
        if body.return_token_strs:
            texts = await frontend.token_strs(token_ids, "return_token_strs")
        return _Json(
            {
                "count": len(token_ids),
                "max_model_len": frontend.max_model_len,
                "tokens": token_ids,
                "token_strs": texts,
            }
        )

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, special tokens included."""
        frontend.resolve_model(body.model)
        return _Json({"prompt": await frontend.detokenize(body.tokens)})


def _add_state_routes(
    app: FastAPI,
    mesh_view: Callable[[], Mapping[str, Any]],
    metrics: Metrics,
    version: str,
    not_ready_reason: Callable[[], str | None],
) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Liveness: the gateway's event loop answers. Says nothing of the pipeline."""
        return _Json({"status": "ok"})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Readiness: 200 when a complete pipeline takes requests, else 503 and why."""
        reason = not_ready_reason()
        if reason is None:
            return _Json({"ready": True, "reason": None})
        headers = {"retry-after": str(int(limits.RETRY_AFTER_SECONDS))}
        return _Json({"ready": False, "reason": reason}, status_code=503, headers=headers)

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(metrics.render(), media_type=METRICS_MEDIA_TYPE)

    @app.get("/version", response_model=None)
    async def version_() -> Response:
        """The gateway's version."""
        return _Json({"version": version})

    @app.get("/v1/mesh", response_model=None)
    async def mesh() -> Response:
        """Epoch, stages and ranks."""
        return _Json(dict(mesh_view()))
