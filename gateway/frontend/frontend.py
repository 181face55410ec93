"""The front doors' common half: from a prompt to a metered stream of deltas.

A door parses its own wire form into `Prompt` and `GenerationInput`, calls
`prepare` and then `admit`, and writes what comes in its own wire form.
Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.engine.router import most_sequences
from gateway.engine.types import ChoiceDelta, Engine, GenerationRequest
from gateway.frontend import limits
from gateway.frontend.chat_template import ChatTemplate, template_source
from gateway.frontend.generation_defaults import GenerationDefaults, load_generation_defaults
from gateway.frontend.meter import Meter
from gateway.frontend.params import (
    check_cache_salt,
    check_count,
    check_n,
    check_priority,
    check_token_ids,
    prompt_too_long,
    resolve_sampling,
    resolve_stop,
)
from gateway.frontend.prompts import (
    ChatPrompt,
    FieldNames,
    GenerationInput,
    Prompt,
    TextPrompt,
    TokenPrompt,
    content_chars,
    text_chars,
)
from gateway.frontend.tokenizer import Tokenizer
from services.config import ServeConfig
from services.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Saturated
from services.models.resolve import resolve_tokenizer
from services.telemetry import Metrics

T = TypeVar("T")
Deltas = AsyncGenerator[ChoiceDelta, None]


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """What the gateway reads from a model directory, weights apart."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults


def load_assets(config: ServeConfig, model_path: Path) -> ModelAssets:
    """Reads tokenizer, chat template and defaults as the flags say.

    Raises `ModelError` or `ConfigError`, naming file and flag.
    """
    directory = resolve_tokenizer(config.tokenizer) if config.tokenizer else model_path
    tokenizer = Tokenizer.from_directory(directory)
    source = template_source(directory, config.chat_template)
    return ModelAssets(
        tokenizer=tokenizer,
        chat_template=(None if source is None else ChatTemplate(source, tokenizer.special_tokens)),
        defaults=load_generation_defaults(model_path, config.generation_config),
    )


class Frontend:
    """Validates, tokenizes, and generates through the engine. One per gateway."""

    def __init__(
        self,
        engine: Engine,
        assets: ModelAssets,
        *,
        model_names: Sequence[str],
        max_model_len: int,
        vocab_size: int,
        metrics: Metrics,
        max_requests: int,
        num_replicas: int = 1,
        seed: int | None = None,
        by_priority: bool = False,
    ) -> None:
        """`vocab_size` is the model's (rows of its embedding). `max_requests` is how many may
        run and wait at a time, over both doors; an equal part of them in each replica. `seed`
        makes the seeds that are drawn for requests without one repeatable. `by_priority` says
        that the engine heeds priorities."""
        self.engine = engine
        self.tokenizer = assets.tokenizer
        self.chat_template = assets.chat_template
        self.defaults = assets.defaults
        self.model_names = tuple(model_names)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.metrics = metrics
        self.max_requests = max_requests
        self._num_replicas = num_replicas
        self.created = int(time.time())
        """When serving began, seconds since 1970."""
        self._by_priority = by_priority
        self._random = random.Random(seed)
        self._running = 0
        self._tokenizing = 0
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def num_requests(self) -> int:
        """Generations that run, wait, or are being read."""
        return self._running

    def close(self) -> None:
        """Ends the tokenizer's thread. No call may follow."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    def resolve_model(self, name: str | None) -> str:
        """The served name that a request means; raises `ModelNotFound`."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFound(
                f"the model {_shortened(name)!r} is not served here; this service has "
                f"{', '.join(self.model_names)}",
                param="model",
            )
        return name

    async def tokenize(self, prompt: Prompt, names: FieldNames | None = None) -> tuple[int, ...]:
        """Ids of a prompt; raises `InvalidRequest` for an empty or unusable one."""
        param = (names or FieldNames()).prompt
        if isinstance(prompt, TokenPrompt):
            if not prompt.token_ids:
                raise InvalidRequest(f"'{param}' is empty", param=param)
            check_token_ids(param, prompt.token_ids, self.vocab_size)
            return tuple(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            return await self._off_loop(
                text_chars(prompt), lambda: self._encode_chat(prompt, param)
            )
        if not prompt.text:
            raise InvalidRequest(f"'{param}' is empty", param=param)
        return await self._off_loop(
            len(prompt.text),
            lambda: tuple(
                self.tokenizer.encode(
                    prompt.text, add_special_tokens=prompt.add_special_tokens, param=param
                )
            ),
        )

    async def tokenize_alone(
        self, prompt: TextPrompt | ChatPrompt, names: FieldNames
    ) -> tuple[int, ...]:
        """`tokenize` for its own sake: no context length bounds the text, so a limit does."""
        chars = text_chars(prompt)
        if chars > limits.MAX_TOKENIZE_CHARS:
            raise InvalidRequest(
                f"'{names.prompt}' has {chars} characters; at most {limits.MAX_TOKENIZE_CHARS} "
                "are tokenized in one call",
                param=names.prompt,
            )
        return await self.tokenize(prompt, names)

    async def token_strs(self, token_ids: Sequence[int], param: str) -> list[str]:
        """Text of each id; `param` names the field that asked for it."""
        if len(token_ids) > limits.MAX_TOKEN_STRS:
            raise InvalidRequest(
                f"'{param}' works for at most {limits.MAX_TOKEN_STRS} tokens; these are "
                f"{len(token_ids)}",
                param=param,
            )
        texts: dict[int, str] = {}
        # In slices, so that other callers of the tokenizer's thread get their turn.
        distinct = list(set(token_ids))
        for start in range(0, len(distinct), limits.INLINE_TEXT_CHARS):
            part = distinct[start : start + limits.INLINE_TEXT_CHARS]
            texts |= await self._off_loop(len(distinct), partial(self._texts_of, part))
        return [texts[token_id] for token_id in token_ids]

    def _texts_of(self, token_ids: Iterable[int]) -> dict[int, str]:
        return {token_id: self.tokenizer.token_text(token_id) for token_id in token_ids}

    async def detokenize(self, token_ids: Sequence[int], param: str = "tokens") -> str:
        """Text of ids, special tokens included."""
        check_count(param, len(token_ids), limits.MAX_DETOKENIZE_IDS)
        check_token_ids(param, token_ids, self.vocab_size)
        return await self._off_loop(len(token_ids), lambda: self.tokenizer.decode(token_ids))

    async def prepare(
        self,
        prompt: Prompt,
        asked: GenerationInput,
        *,
        request_id: str,
        names: FieldNames | None = None,
        deadline: float | None = None,
    ) -> GenerationRequest:
        """A request that the engine can take: everything checked, every default filled in.

        `deadline` is on the event loop's clock; absent means `MAX_REQUEST_SECONDS` from now.
        Waiting for the tokenizer counts: raises `DeadlineExceeded` where it is over by then.
        """
        latest = asyncio.get_running_loop().time() + limits.MAX_REQUEST_SECONDS
        deadline = latest if deadline is None else min(deadline, latest)
        names = names or FieldNames()
        n = check_n(asked.n)
        priority = check_priority(asked.priority, by_priority=self._by_priority)
        cache_salt = check_cache_salt(asked.cache_salt)
        # Cheap checks first: nobody waits for a tokenizer to learn of a negative top_k.
        sampling = resolve_sampling(
            asked.sampling,
            self.defaults,
            self.vocab_size,
            self._draw_seed,
            logprobs_field=names.logprobs,
        )
        self._refuse_surely_too_long(prompt, names.prompt)
        try:
            async with asyncio.timeout_at(deadline):
                token_ids = await self.tokenize(prompt, names)
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed before its prompt was tokenized"
            ) from None
        stop = resolve_stop(
            asked.stop,
            self.defaults.eos_token_ids,
            prompt_tokens=len(token_ids),
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_tokens_field=names.max_tokens,
            prompt_field=names.prompt,
        )
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            stop=stop,
            n=n,
            deadline=deadline,
            priority=priority,
            cache_salt=cache_salt,
        )

    async def admit(self, requests: Sequence[GenerationRequest]) -> list[Deltas]:
        """Takes all requests of one call, or none: gives their deltas, counted, in the same order.
        Close each to abort its request.

        Never waits, so no other call comes between. Raises `Saturated` above `max_requests`,
        `InvalidRequest` for more than could ever be taken, and what the engine raises.
        """
        self._refuse_surely_too_many(requests)
        admitted: list[Deltas] = []
        try:
            for request in requests:
                admitted.append(self._generate(request))
                await anext(admitted[-1])
        except BaseException:
            for deltas in admitted:
                await deltas.aclose()
            raise
        return admitted

    def _refuse_surely_too_many(self, requests: Sequence[GenerationRequest]) -> None:
        n = max(request.n for request in requests)
        most = most_sequences(self._num_replicas, self.max_requests // self._num_replicas, n)
        num_sequences = sum(request.n for request in requests)
        # An n that fits into no replica is the engine's to refuse, which names it.
        if len(requests) > 1 and num_sequences > most > 0:
            raise InvalidRequest(
                f"{len(requests)} prompts ask for {num_sequences} choices, and this service runs "
                f"and queues {most} at most with n {n}: send the prompts in several calls",
                param="prompt",
            )

    async def _generate(self, request: GenerationRequest) -> Deltas:
        """The engine's deltas, counted; the first is `ADMITTED`."""
        if self._running >= self.max_requests:
            raise Saturated(
                f"{self._running} requests are running or queued, which is the limit; "
                "try again later",
                retry_after_seconds=limits.RETRY_AFTER_SECONDS,
            )
        self._running += 1
        try:
            deltas = self.engine.generate(request)
            try:
                yield await anext(deltas)
                meter = Meter(self.metrics, len(request.prompt_token_ids))
                async for delta in deltas:
                    meter.count(delta)
                    yield delta
            finally:
                if isinstance(deltas, AsyncGenerator):
                    await deltas.aclose()
        finally:
            self._running -= 1

    def _encode_chat(self, prompt: ChatPrompt, param: str) -> tuple[int, ...]:
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; use completions, or start the service with "
                "--chat-template FILE",
                param=param,
            )
        if not prompt.messages:
            raise InvalidRequest(f"'{param}' is empty", param=param)
        text = self.chat_template.render(
            prompt.messages, add_generation_prompt=prompt.add_generation_prompt
        )
        ids = self.tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens, param=param)
        if not ids:
            raise InvalidRequest(f"'{param}' renders to an empty prompt", param=param)
        return tuple(ids)

    def _refuse_surely_too_long(self, prompt: Prompt, param: str) -> None:
        """What cannot fit is refused before it costs much: ids are not looked at one by one,
        and a text that is too long even for the longest tokens is not tokenized."""
        if isinstance(prompt, TokenPrompt):
            if len(prompt.token_ids) >= self.max_model_len:
                raise prompt_too_long(str(len(prompt.token_ids)), self.max_model_len, param)
            return
        chars = content_chars(prompt)
        longest = self.tokenizer.longest_piece_chars
        if longest is not None and chars > self.max_model_len * longest:
            raise prompt_too_long(
                f"at least {math.ceil(chars / longest)}", self.max_model_len, param
            )

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Runs short work here and long work in the tokenizer's thread."""
        if size <= limits.INLINE_TEXT_CHARS:
            return work()
        if self._tokenizing >= limits.MAX_PENDING_TOKENIZATIONS:
            raise Saturated(
                f"{self._tokenizing} long texts wait for the tokenizer, which is the limit; "
                "try again later",
                retry_after_seconds=limits.RETRY_AFTER_SECONDS,
            )
        future = asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work)
        self._tokenizing += 1
        future.add_done_callback(self._tokenized)
        # A caller that leaves does not take its text out of the queue: its place counts
        # until the thread is through with it, else leaving would be a way around the limit.
        return await asyncio.shield(future)

    def _tokenized(self, _: asyncio.Future[T]) -> None:
        self._tokenizing -= 1

    def _draw_seed(self) -> int:
        return self._random.getrandbits(64)


def output_length(delta: ChoiceDelta) -> int:
    """How many of a delta's tokens are output: a stop token id ends a choice, is counted,
    and is no part of the answer (nor are its logprobs)."""
    count = len(delta.token_ids)
    stopped_by_id = isinstance(delta.stop_reason, int) and delta.finish_reason is not None
    if stopped_by_id and count and delta.token_ids[-1] == delta.stop_reason:
        return count - 1
    return count


def new_request_id(prefix: str, client_id: str | None = None) -> str:
    """A unique name; it starts with the client's own where there is one, so that a log of
    either side finds it."""
    unique = uuid.uuid4().hex
    return f"{prefix}-{client_id}-{unique[:8]}" if client_id else f"{prefix}-{unique}"


def check_request_id(value: str, param: str) -> str:
    """A client's name for its request, fit for a header and a log line."""
    if len(value) > limits.MAX_REQUEST_ID_CHARS or not (value.isascii() and value.isprintable()):
        raise InvalidRequest(
            f"'{param}' must be at most {limits.MAX_REQUEST_ID_CHARS} printable ASCII characters",
            param=param,
        )
    return value


def _shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[:most] + "..."
