"""InferenceService: the frontend's abilities over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator

import grpc

from gateway.engine.types import ChoiceDelta
from gateway.frontend.frontend import Frontend, check_request_id, new_request_id
from gateway.grpc_server import convert
from services.errors import RequestAborted, StagemeshError
from services.telemetry import log_event, request_id_scope
from stagemesh.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
METHODS = ("Generate", "Tokenize", "Detokenize", "ListModels")


def endpoint_label(method: str) -> str:
    """How a method is called in the metrics."""
    return f"grpc/{method}"


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """One per gateway. Errors are raised as they are; the server's edge sends them."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        frontend.metrics.declare_endpoints(map(endpoint_label, METHODS))

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams choices, interleaved; usage comes with the last message."""
        client_id = check_request_id(request.request_id, "request_id") or None
        request_id = client_id or new_request_id("gen")
        with self._observed("Generate", request_id) as counts:
            self._frontend.resolve_model(request.model)
            remaining: float | None = context.time_remaining()
            prepared = await self._frontend.prepare(
                convert.prompt_of(request),
                convert.input_of(request),
                request_id=new_request_id("gen", client_id) if client_id else request_id,
                names=convert.field_names(request),
                deadline=(
                    None if remaining is None else asyncio.get_running_loop().time() + remaining
                ),
            )
            counts.prompt_tokens = len(prepared.prompt_token_ids)
            unfinished = prepared.n
            (admitted,) = await self._frontend.admit((prepared,))
            async with contextlib.aclosing(admitted) as deltas:
                async for delta in deltas:
                    counts.completion_tokens += len(delta.token_ids)
                    counts.cached_prompt_tokens += delta.num_cached_tokens
                    unfinished -= delta.finish_reason is not None
                    if unfinished and _is_empty(delta):
                        continue
                    response = convert.response_of(delta, request_id)
                    if not unfinished:
                        response.usage.CopyFrom(counts)
                    yield response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        with self._observed("Tokenize", new_request_id("tok")):
            self._frontend.resolve_model(request.model)
            prompt, names = convert.tokenize_prompt_of(request)
            token_ids = await self._frontend.tokenize_alone(prompt, names)
            return inference_pb2.TokenizeResponse(
                token_ids=token_ids,
                max_model_len=self._frontend.max_model_len,
                token_strs=(
                    await self._frontend.token_strs(token_ids, "return_token_strs")
                    if request.return_token_strs
                    else ()
                ),
            )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        with self._observed("Detokenize", new_request_id("tok")):
            self._frontend.resolve_model(request.model)
            text = await self._frontend.detokenize(request.token_ids, "token_ids")
            return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        """The served names."""
        with self._observed("ListModels", new_request_id("mod")):
            return inference_pb2.ListModelsResponse(
                models=[
                    inference_pb2.Model(
                        id=name,
                        max_model_len=self._frontend.max_model_len,
                        created=self._frontend.created,
                    )
                    for name in self._frontend.model_names
                ]
            )

    @contextlib.contextmanager
    def _observed(self, method: str, request_id: str) -> Iterator[inference_pb2.Usage]:
        """One log line and one count per call; gives the token counts to fill in."""
        counts = inference_pb2.Usage()
        started = time.monotonic()
        status = 200
        with request_id_scope(request_id):
            try:
                yield counts
            except StagemeshError as error:
                status = error.http_status
                raise
            except (asyncio.CancelledError, GeneratorExit):
                status = RequestAborted.http_status
                raise
            except BaseException:
                status = StagemeshError.http_status
                raise
            finally:
                seconds = time.monotonic() - started
                label = endpoint_label(method)
                self._frontend.metrics.observe_request(label, status, seconds)
                log_event(
                    logger,
                    logging.INFO,
                    "request done",
                    {
                        "path": label,
                        "status": status,
                        "seconds": seconds,
                        "prompt_tokens": counts.prompt_tokens,
                        "completion_tokens": counts.completion_tokens,
                    },
                )


def _is_empty(delta: ChoiceDelta) -> bool:
    return not delta.token_ids and not delta.text and delta.finish_reason is None
