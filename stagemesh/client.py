"""The client for ordinary, blocking code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class ChunkStream:
    """The pieces of one generation. Iterate once; close it to end the request early."""

    def __init__(self, open_call: Callable[[float], Any], attempts: Attempts, address: str) -> None:
        self._open_call = open_call
        self._attempts = attempts
        self._address = address
        self._call: Any = open_call(attempts.remaining_seconds())
        self._begun = False
        self._over = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._over:
            try:
                response = next(self._call)
            except StopIteration:
                self._over = True
                raise
            except grpc.RpcError as error:
                failure = translate(error, self._address)
            else:
                self._begun = True
                return chunk_of(response)
            wait = None if self._begun else self._attempts.wait_before_retry(failure)
            if wait is None:
                self._over = True
                raise failure
            time.sleep(wait)
            self._call = self._open_call(self._attempts.remaining_seconds())
        raise StopIteration

    def close(self) -> None:
        """Ends the request, if it is not over; the service frees what it held."""
        self._over = True
        self._call.cancel()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Client:
    """Talks to one service. Thread-safe; use it as a context manager or close it."""

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
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(address, credentials(tls), options=CHANNEL_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
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
        with self._stream(prompt, messages, token_ids, options, timeout) as chunks:
            for chunk in chunks:
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
    ) -> ChunkStream:
        """Generates and gives the pieces as they come; the arguments are those of `generate`.

        Use it as a context manager, or close it: leaving it early ends the request.
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

    def tokenize(
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
        response: inference_pb2.TokenizeResponse = self._unary(
            self._stub.Tokenize, request, timeout
        )
        return tuple(response.token_ids)

    def tokenize_with_strs(
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
        response: inference_pb2.TokenizeResponse = self._unary(
            self._stub.Tokenize, request, timeout
        )
        return tokenization_of(response)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids, special tokens included."""
        request = detokenize_request(token_ids, model)
        response: inference_pb2.DetokenizeResponse = self._unary(
            self._stub.Detokenize, request, timeout
        )
        return response.text

    def models(self, *, timeout: float | None = None) -> tuple[ModelInfo, ...]:
        """The names that the service answers to, the main one first."""
        response: inference_pb2.ListModelsResponse = self._unary(
            self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout
        )
        return models_of(response)

    def close(self) -> None:
        """Ends all calls and the connection. May be called twice."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(
        self,
        prompt: str | None,
        messages: Messages | None,
        token_ids: Sequence[int] | None,
        options: Options,
        timeout: float | None,
    ) -> ChunkStream:
        request = generate_request(prompt, messages, token_ids, options)
        attempts = self._start(timeout)
        return ChunkStream(
            lambda seconds: self._stub.Generate(request, timeout=seconds, metadata=self._metadata),
            attempts,
            self._address,
        )

    def _start(self, timeout: float | None) -> Attempts:
        if self._closed:
            raise RequestAborted("the client is closed")
        return Attempts.start(self._timeout if timeout is None else timeout, self._max_retries)

    def _unary(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        attempts = self._start(timeout)
        while True:
            try:
                return method(
                    request, timeout=attempts.remaining_seconds(), metadata=self._metadata
                )
            except grpc.RpcError as error:
                failure = translate(error, self._address)
            wait = attempts.wait_before_retry(failure)
            if wait is None:
                raise failure
            time.sleep(wait)
