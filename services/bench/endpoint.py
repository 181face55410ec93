"""One OpenAI endpoint: finds its model, counts its tokens, and sends it a request."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.bench.http_client import ExchangeFailed, HttpClient, Server, WholeBody
from services.bench.outcome import AnswerReader, Outcome, StreamFailed, error_message
from services.bench.settings import BenchSettings
from services.errors import StagemeshError, UsageError

QUESTION_TIMEOUT_SECONDS = 60.0
"""For everything but the requests that are measured."""
API_PREFIX = "/v1"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, ready to be sent."""

    body: bytes
    output_tokens: int
    """That it asks for."""


class Endpoint:
    """Knows the address and the paths; nothing of prompts or statistics."""

    def __init__(self, settings: BenchSettings) -> None:
        """Raises `UsageError` where the address is none."""
        try:
            server = Server.from_url(settings.base_url.rstrip("/").removesuffix(API_PREFIX))
        except ValueError as error:
            raise UsageError(f"--base-url {error}, got {settings.base_url!r}") from None
        headers = {}
        if settings.api_key is not None:
            headers["authorization"] = f"Bearer {settings.api_key}"
        self._client = HttpClient(server, headers)
        self._settings = settings
        self._path = "/" + settings.endpoint.lstrip("/")
        self.address = f"{settings.base_url.rstrip('/').removesuffix(API_PREFIX)}{self._path}"

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    async def model(self) -> str:
        """The model that was asked for, else the first that the endpoint names.

        Raises `StagemeshError` where there is no endpoint.
        """
        if self._settings.model is not None:
            return self._settings.model
        answer = await self.ask("GET", f"{API_PREFIX}/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise StagemeshError(
                f"{self._settings.base_url} names no model under {API_PREFIX}/models; give --model"
            ) from None

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        """Token ids of a text without special tokens; None where there is no /tokenize.

        vLLM and Stagemesh have it.
        """
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = await self.try_to_ask("POST", "/tokenize", body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if _is_token_list(tokens) else None

    async def text(self, path: str) -> str | None:
        """A page of text; None where there is none."""
        reader = WholeBody()
        try:
            await self._client.exchange(
                "GET", path, reader, timeout_seconds=QUESTION_TIMEOUT_SECONDS
            )
        except ExchangeFailed:
            return None
        return reader.data.decode("utf-8", "replace") if reader.status == 200 else None

    async def try_to_ask(self, method: str, path: str, body: object = None) -> Any:
        """JSON of a path; None where the endpoint has none."""
        try:
            return await self.ask(method, path, body)
        except StagemeshError:
            return None

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """JSON of a path. Raises `StagemeshError`."""
        reader = WholeBody()
        try:
            await self._client.exchange(
                method,
                path,
                reader,
                body=None if body is None else json.dumps(body).encode(),
                timeout_seconds=QUESTION_TIMEOUT_SECONDS,
            )
        except ExchangeFailed as error:
            raise StagemeshError(
                f"no answer from {self._settings.base_url} ({error.kind}: {error}); is the server "
                f"up, and --base-url right?"
            ) from None
        try:
            answer = json.loads(reader.data)
        except ValueError:
            answer = None
        if reader.status != 200 or answer is None:
            words = error_message(answer) if answer else "no JSON"
            raise StagemeshError(
                f"{self._settings.base_url}{path} answered {reader.status}: {words}"
            )
        return answer

    async def send(self, request: BenchRequest, planned_at: float) -> Outcome:
        """Sends one request and reads its stream to the end. Never raises for what the
        endpoint or the network does: that is the outcome."""
        outcome = Outcome(planned_at=planned_at, requested_output_tokens=request.output_tokens)
        reader = _StreamReader(outcome)
        outcome.sent_at = time.perf_counter()
        try:
            await self._client.exchange(
                "POST",
                self._path,
                reader,
                body=request.body,
                timeout_seconds=self._settings.request_timeout_seconds,
            )
            reader.end()
        except (ExchangeFailed, StreamFailed) as error:
            outcome.error_kind, outcome.error = error.kind, str(error)
            outcome.ended_at = time.perf_counter()
        return outcome


class _StreamReader:
    """A streamed answer, or the error that came in its place."""

    def __init__(self, outcome: Outcome) -> None:
        self._answer = AnswerReader(outcome)
        self._whole: WholeBody | None = None

    def begin(self, status: int) -> None:
        if status != 200:
            self._whole = WholeBody()
            self._whole.begin(status)

    def feed(self, data: bytes, at: float) -> None:
        if self._whole is None:
            self._answer.feed(data, at)
        else:
            self._whole.feed(data, at)

    def end(self) -> None:
        """Raises `StreamFailed` where this was no whole answer."""
        if self._whole is None:
            self._answer.end()
            return
        try:
            body: object = json.loads(self._whole.data)
        except ValueError:
            body = self._whole.data.decode("utf-8", "replace")
        raise StreamFailed(f"http_{self._whole.status}", error_message(body))


def _is_token_list(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(token, int) for token in value)
    )
