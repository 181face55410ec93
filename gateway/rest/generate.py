"""Runs prepared requests and writes their answer: streamed, or whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from gateway.engine.types import ChoiceDelta, GenerationRequest
from gateway.frontend.frontend import Frontend
from gateway.rest.answers import DONE_EVENT, Answer, Choice, TokenCounts
from gateway.rest.connection import EventStream, while_connected
from gateway.rest.edge import RECORD_KEY, RequestRecord
from gateway.rest.errors import error_event
from gateway.rest.merge import Indexed, merged
from services.errors import StagemeshError

logger = logging.getLogger(__name__)


async def respond(
    frontend: Frontend,
    request: Request,
    prepared: Sequence[GenerationRequest],
    answer: Answer,
    *,
    stream: bool,
) -> Response:
    """Generates for all prepared prompts. Errors before the first token are raised, so that
    they get an HTTP status; later ones end the stream with an error event."""
    record: RequestRecord = request.scope[RECORD_KEY]
    run = _Run(frontend, prepared, answer, record)
    if not stream:
        body = await while_connected(request.receive, run.whole)
        return Response(body, media_type="application/json")
    events = run.events()
    try:
        first = await while_connected(request.receive, lambda: anext(events))
    except BaseException:
        # Cancellation counts too: the request must not outlive its reader.
        await events.aclose()
        raise
    return EventStream(first, events, deadline=prepared[0].deadline, on_abort=record.note_abort)


class _Run:
    """One HTTP request's generations."""

    def __init__(
        self,
        frontend: Frontend,
        prepared: Sequence[GenerationRequest],
        answer: Answer,
        record: RequestRecord,
    ) -> None:
        self._frontend = frontend
        self._prepared = prepared
        self._answer = answer
        self._record = record
        self._n = prepared[0].n
        record.prompt_tokens = sum(len(one.prompt_token_ids) for one in prepared)

    async def _deltas(self) -> AsyncGenerator[Indexed, None]:
        """All prompts are admitted, or the call is refused. To be read from at once: what is
        admitted is closed by whoever reads."""
        return merged(await self._frontend.admit(self._prepared))

    def _counts(self) -> TokenCounts:
        return TokenCounts(
            self._record.prompt_tokens,
            self._record.completion_tokens,
            self._record.cached_prompt_tokens,
        )

    def _count(self, delta: ChoiceDelta) -> None:
        self._record.completion_tokens += len(delta.token_ids)
        self._record.cached_prompt_tokens += delta.num_cached_tokens

    async def whole(self) -> bytes:
        choices = [Choice(index) for index in range(self._answer.num_choices)]
        async with contextlib.aclosing(await self._deltas()) as deltas:
            async for prompt_index, delta in deltas:
                self._count(delta)
                choices[prompt_index * self._n + delta.choice_index].take(delta)
        return self._answer.whole(choices, self._counts())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; the first comes with the first token."""
        answer, n = self._answer, self._n
        begun: set[int] = set()
        try:
            async with contextlib.aclosing(await self._deltas()) as deltas:
                async for prompt_index, delta in deltas:
                    self._count(delta)
                    index = prompt_index * n + delta.choice_index
                    event = answer.event(index, delta)
                    if index not in begun:
                        begun.add(index)
                        event = answer.first_event(index) + event
                    if event:
                        yield event
            if answer.include_usage:
                yield answer.usage_event(self._counts())
            yield DONE_EVENT
        except StagemeshError as error:
            if not begun:
                raise
            yield error_event(error)
        except Exception:
            if not begun:
                raise
            # The edge of a stream that has begun: its status is sent, so this is all there is.
            logger.exception("a stream failed")
            yield error_event(
                StagemeshError("the request failed inside the service; its log has more")
            )
