"""The client for asyncio: the same methods as `stagemesh.client.Client`."""

# ruff: noqa: ASYNC109
# `timeout` is the call's deadline, which gRPC carries to the service; cancelling from
# outside, as asyncio.timeout does, would not tell it.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from stagemesh._transport import (
    CHANNEL_OPTIONS,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_SECONDS,
    Attempts,
    call_metadata,
    credentials,
    translate,
)
from stagemesh._wire import (
    GenerationBuilder,
    Messages,
    Options,
    chunk_of,
    detokenize_request,
    generate_request,
    models_of,
    tokenization_of,
    tokenize_request,
)
from stagemesh.errors import RequestAborted
from stagemesh.types import Chunk, Generation, ModelInfo, TLSConfig, Tokenization
from stagemesh.v1 import inference_pb2, inference_pb2_grpc


class AsyncChunkStream:
    """The pieces of one generation. Iterate once; close it to end the request early."""

    def __init__(self, open_call: Callable[[float], Any], attempts: Attempts, address: str) -> None:
        self._open_call = open_call
        self._attempts = attempts
        self._address = address
        self._call: Any = open_call(attempts.remaining_seconds())
        self._begun = False
        self._over = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._over:
            try:
                response = await self._call.read()
            except grpc.RpcError as error:
                failure = translate(error, self._address)
            else:
                if response is grpc.aio.EOF:
                    break
                self._begun = True
                return chunk_of(response)
            wait = None if self._begun else self._attempts.wait_before_retry(failure)
            if wait is None:
                self._over = True
                raise failure
            await asyncio.sleep(wait)
            self._call = self._open_call(self._attempts.remaining_seconds())
        self._over = True
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the request, if it is not over; the service frees what it held."""
        self._over = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncChunkStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class AsyncClient:
    """Talks to one service from one event loop; made inside it."""

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        api_key: str | None = None,
        tls: TLSConfig | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        """Nothing is sent before the first call.

        `address` is "host:port" of the service's gRPC door. `timeout` is the deadline of each
        call in seconds, where the call names none. A call that finds the service full or
        not there is tried again up to `max_retries` times, if it has given nothing yet.
        Raises `ConfigError` where a TLS file cannot be read; warns where `api_key` would go to
        another machine without `tls`.
        """
        self._address = address
        self._timeout = timeout
        self._max_retries = max_retries
        self._metadata = call_metadata(api_key, address, tls)
        self._closed = False
        self._channel = (
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, credentials(tls), options=CHANNEL_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        n: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Generation:
        """Generates and returns the whole answer.

        Give exactly one of `prompt` (text, continued as it stands), `messages` (a conversation:
        `ChatMessage`s, or mappings with their fields) and `token_ids`. What is None takes the
        model's default. `logprobs` is how many alternatives to report with each token (0: the
        token's own only). The lower `priority` is served earlier, where the service schedules by
        priority. Only requests with the same `cache_salt` share cached prefixes. `timeout` is the
        deadline in seconds. Raises `StagemeshError`s.
        """
        options = Options(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
            logprobs=logprobs,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            n=n,
            priority=priority,
            cache_salt=cache_salt,
            request_id=request_id,
        )
        builder = GenerationBuilder(n)
        async with self._stream(prompt, messages, token_ids, options, timeout) as chunks:
            async for chunk in chunks:
                builder.take(chunk)
        return builder.build()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        n: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncChunkStream:
        """Generates and gives the pieces as they come; the arguments are those of `generate`.

        Use it as an async context manager, or close it: leaving it early ends the request.
        """
        options = Options(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
            logprobs=logprobs,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            n=n,
            priority=priority,
            cache_salt=cache_salt,
            request_id=request_id,
        )
        return self._stream(prompt, messages, token_ids, options, timeout)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation as the model would see it.

        `add_special_tokens` None means yes for text and no for messages, whose template
        writes them. `add_generation_prompt`, for messages only, ends them with the start of
        an assistant's turn; None means yes.
        """
        request = tokenize_request(
            prompt, messages, add_special_tokens, add_generation_prompt, model
        )
        response: inference_pb2.TokenizeResponse = await self._unary(
            self._stub.Tokenize, request, timeout
        )
        return tuple(response.token_ids)

    async def tokenize_with_strs(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> Tokenization:
        """As `tokenize`, with the text of each token."""
        request = tokenize_request(
            prompt, messages, add_special_tokens, add_generation_prompt, model, with_strs=True
        )
        response: inference_pb2.TokenizeResponse = await self._unary(
            self._stub.Tokenize, request, timeout
        )
        return tokenization_of(response)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids, special tokens included."""
        request = detokenize_request(token_ids, model)
        response: inference_pb2.DetokenizeResponse = await self._unary(
            self._stub.Detokenize, request, timeout
        )
        return response.text

    async def models(self, *, timeout: float | None = None) -> tuple[ModelInfo, ...]:
        """The names that the service answers to, the main one first."""
        response: inference_pb2.ListModelsResponse = await self._unary(
            self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout
        )
        return models_of(response)

    async def close(self) -> None:
        """Ends all calls and the connection. May be called twice."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _stream(
        self,
        prompt: str | None,
        messages: Messages | None,
        token_ids: Sequence[int] | None,
        options: Options,
        timeout: float | None,
    ) -> AsyncChunkStream:
        request = generate_request(prompt, messages, token_ids, options)
        attempts = self._start(timeout)
        return AsyncChunkStream(
            lambda seconds: self._stub.Generate(request, timeout=seconds, metadata=self._metadata),
            attempts,
            self._address,
        )

    def _start(self, timeout: float | None) -> Attempts:
        if self._closed:
            raise RequestAborted("the client is closed")
        return Attempts.start(self._timeout if timeout is None else timeout, self._max_retries)

    async def _unary(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        attempts = self._start(timeout)
        while True:
            try:
                return await method(
                    request, timeout=attempts.remaining_seconds(), metadata=self._metadata
                )
            except grpc.RpcError as error:
                failure = translate(error, self._address)
            wait = attempts.wait_before_retry(failure)
            if wait is None:
                raise failure
            await asyncio.sleep(wait)
