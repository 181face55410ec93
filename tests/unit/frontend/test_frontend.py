"""The frontend without an engine behind it: preparing requests and its own limits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from gateway.engine.types import ADMITTED, ChoiceDelta, EngineStats, FinishReason, GenerationRequest
from gateway.frontend import limits
from gateway.frontend.chat_template import Message
from gateway.frontend.frontend import (
    Frontend,
    ModelAssets,
    check_request_id,
    new_request_id,
    output_length,
)
from gateway.frontend.generation_defaults import GenerationDefaults
from gateway.frontend.prompts import (
    ChatPrompt,
    FieldNames,
    GenerationInput,
    TextPrompt,
    TokenPrompt,
)
from gateway.frontend.tokenizer import Tokenizer
from services.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Saturated,
)
from services.telemetry import Metrics

WORDS = {"<unk>": 0, "one": 1, "two": 2, "three": 3}
MAX_REQUESTS = 1024


class OneTokenEngine:
    """Gives one token and then waits until it is closed."""

    ready = True

    def __init__(self) -> None:
        self.closed = 0

    def stats(self) -> EngineStats:
        return EngineStats(1, 1, 0, 0, 0, 0)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            yield ADMITTED
            yield ChoiceDelta(0, "one", (1,))
            await asyncio.Event().wait()
        finally:
            self.closed += 1


def make(
    engine: OneTokenEngine,
    seed: int | None = None,
    *,
    backend: Backend | None = None,
    vocab_size: int = 10,
    num_replicas: int = 1,
) -> Frontend:
    if backend is None:
        backend = Backend(models.WordLevel(WORDS, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assets = ModelAssets(Tokenizer(backend), None, GenerationDefaults(temperature=0.5))
    return Frontend(
        engine,
        assets,
        model_names=("main", "other"),
        max_model_len=8,
        vocab_size=vocab_size,
        metrics=Metrics(),
        max_requests=MAX_REQUESTS,
        num_replicas=num_replicas,
        seed=seed,
    )


@pytest.fixture
def engine() -> OneTokenEngine:
    return OneTokenEngine()


@pytest.fixture
def frontend(engine: OneTokenEngine) -> Iterator[Frontend]:
    frontend = make(engine)
    yield frontend
    frontend.close()


async def prepare(frontend: Frontend, prompt: Any, **fields: Any) -> GenerationRequest:
    return await frontend.prepare(prompt, GenerationInput(), request_id="r", **fields)


async def test_prompts_become_ids(frontend: Frontend) -> None:
    request = await prepare(frontend, TextPrompt("one two three"))
    assert request.prompt_token_ids == (1, 2, 3)
    assert request.stop.max_tokens == 5 and request.sampling.temperature == 0.5
    assert (await prepare(frontend, TokenPrompt((9,)))).prompt_token_ids == (9,)


async def test_what_cannot_fit_is_refused(frontend: Frontend) -> None:
    with pytest.raises(ContextTooLong, match=r"8.*9"):
        await prepare(frontend, TextPrompt("one " * 9))
    with pytest.raises(ContextTooLong, match=r"8.*1000000"):
        await prepare(frontend, TokenPrompt((10**9,) * 1_000_000))
    with pytest.raises(InvalidRequest, match=r"\[1\].*10"):
        await prepare(frontend, TokenPrompt((9, 10)))


async def test_a_model_without_a_template_refuses_chat_only(frontend: Frontend) -> None:
    with pytest.raises(InvalidRequest, match="--chat-template"):
        await prepare(frontend, ChatPrompt((Message("user", "one"),)))
    await prepare(frontend, TextPrompt("one"))


async def test_drawn_seeds_differ_and_can_be_repeated(engine: OneTokenEngine) -> None:
    first, second, unseeded = make(engine, 7), make(engine, 7), make(engine)
    drawn = [[(await prepare(f, TextPrompt("one"))).sampling.seed for _ in range(3)]
             for f in (first, second, unseeded)]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 3
    for one in (first, second, unseeded):
        one.close()


async def test_every_request_has_a_deadline(frontend: Frontend) -> None:
    now = asyncio.get_running_loop().time()
    request = await prepare(frontend, TextPrompt("one"))
    assert request.deadline is not None
    assert now < request.deadline <= now + limits.MAX_REQUEST_SECONDS + 5
    assert (await prepare(frontend, TextPrompt("one"), deadline=now + 3)).deadline == now + 3
    far = await prepare(frontend, TextPrompt("one"), deadline=now + 1e9)
    assert far.deadline is not None and far.deadline < now + 1e6


async def test_waiting_for_the_tokenizer_counts_against_the_deadline(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INLINE_TEXT_CHARS", 1)
    busy = asyncio.ensure_future(frontend.tokenize(TextPrompt("one " * 200_000)))
    await asyncio.sleep(0)
    soon = asyncio.get_running_loop().time() + 0.001
    with pytest.raises(DeadlineExceeded, match="tokenized"):
        await prepare(frontend, TextPrompt("one two"), deadline=soon)
    await busy


async def test_closing_reaches_the_engine_and_frees_the_place(
    frontend: Frontend, engine: OneTokenEngine
) -> None:
    frontend.max_requests = 1
    request = await prepare(frontend, TextPrompt("one"))
    (running,) = await frontend.admit([request])
    await anext(running)
    with pytest.raises(Saturated) as caught:
        await frontend.admit([request])
    assert caught.value.retry_after_seconds
    await running.aclose()
    assert engine.closed == 1
    (again,) = await frontend.admit([request])
    await anext(again)
    await again.aclose()


class TakesTwo(OneTokenEngine):
    """And refuses the third request; counts the tokens that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.tokens = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        if self.open == 2:
            raise Saturated("full")
        self.open += 1
        try:
            yield ADMITTED
            self.tokens += 1
            yield ChoiceDelta(0, "one", (1,))
        finally:
            self.open -= 1


async def test_all_requests_of_a_call_are_admitted_or_none() -> None:
    engine = TakesTwo()
    frontend = make(engine)
    request = await prepare(frontend, TextPrompt("one"))
    with pytest.raises(Saturated, match="full"):
        await frontend.admit([request] * 3)
    assert (engine.open, engine.tokens, frontend.num_requests) == (0, 0, 0)
    both = await frontend.admit([request] * 2)
    assert [(await anext(deltas)).text for deltas in both] == ["one", "one"]
    for deltas in both:
        await deltas.aclose()
    assert (engine.open, frontend.num_requests) == (0, 0)
    frontend.max_requests = 2
    with pytest.raises(InvalidRequest, match=r"3 prompts ask for 3 choices.*2 at most with n 1"):
        await frontend.admit([request] * 3)
    frontend.close()


@pytest.mark.parametrize(
    ("num_prompts", "n", "refused"), [(4, 2, False), (5, 2, True), (10, 1, False), (2, 6, False)]
)
async def test_choices_of_one_prompt_are_not_divided_between_replicas(
    num_prompts: int, n: int, refused: bool
) -> None:
    """Two replicas take five sequences each. An n that fits into neither is the engine's to
    refuse."""
    frontend = make(OneTokenEngine(), num_replicas=2)
    frontend.max_requests = 10
    request = replace(await prepare(frontend, TextPrompt("one")), n=n)
    if refused:
        with pytest.raises(InvalidRequest, match=r"5 prompts ask for 10 choices.*8 at most"):
            await frontend.admit([request] * num_prompts)
    else:
        for deltas in await frontend.admit([request] * num_prompts):
            await deltas.aclose()
    frontend.close()


async def test_long_texts_queue_up_to_a_limit(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PENDING_TOKENIZATIONS", 2)
    text = "one " * 100_000
    results = await asyncio.gather(
        *(frontend.tokenize(TextPrompt(text)) for _ in range(3)), return_exceptions=True
    )
    assert [type(one) for one in results].count(Saturated) == 1
    assert len(await frontend.tokenize(TextPrompt(text))) == 100_000


def byte_level() -> Backend:
    """Every byte is a token: the most ids and the most work for a text."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


async def longest_pause(work: Awaitable[object]) -> tuple[float, float]:
    """Seconds that the event loop stood still at most while `work` went on, and that it took."""
    worst, begun = 0.0, time.monotonic()
    task = asyncio.ensure_future(work)
    before = begun
    while not task.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        worst, before = max(worst, now - before), now
    await task
    return worst, time.monotonic() - begun


async def test_two_megabytes_do_not_stop_the_event_loop(engine: OneTokenEngine) -> None:
    frontend = make(engine, backend=byte_level(), vocab_size=256)
    text = "one two three " * 149_000
    assert len(text) > 2_000_000
    names = FieldNames()
    pause, seconds = await longest_pause(frontend.tokenize_alone(TextPrompt(text), names))
    assert pause < seconds / 3, f"stopped for {pause:.2f} s of {seconds:.2f} s"
    frontend.close()


async def test_a_text_for_its_ids_alone_has_a_limit(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TOKENIZE_CHARS", 10)
    names = FieldNames(prompt="text")
    assert await frontend.tokenize_alone(TextPrompt("one two 10"), names)
    with pytest.raises(InvalidRequest, match=r"'text' has 11 characters; at most 10"):
        await frontend.tokenize_alone(TextPrompt("one two 101"), names)
    for message in (Message("user", "a" * 11), Message("user", "a", name="a" * 10)):
        with pytest.raises(InvalidRequest, match="11 characters"):
            await frontend.tokenize_alone(ChatPrompt((message,)), names)


async def test_texts_of_many_tokens_come_from_the_tokenizers_thread(
    engine: OneTokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"<unk>": 0} | {f"word{i}": i for i in range(1, 10_000)}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    frontend = make(engine, backend=backend, vocab_size=10_000)
    threads: set[str] = set()
    token_text = Tokenizer.token_text

    def noting(tokenizer: Tokenizer, token_id: int) -> str:
        threads.add(threading.current_thread().name)
        return token_text(tokenizer, token_id)

    monkeypatch.setattr(Tokenizer, "token_text", noting)
    ids = [*range(10_000), 5, 5]
    texts = await frontend.token_strs(ids, "return_token_strs")
    assert texts == ["<unk>", *(f"word{i}" for i in range(1, 10_000)), "word5", "word5"]
    assert threads and all(name.startswith("tokenizer") for name in threads)
    monkeypatch.setattr(limits, "MAX_TOKEN_STRS", 10_001)
    with pytest.raises(InvalidRequest, match=r"'return_token_strs'.*10001.*10002"):
        await frontend.token_strs(ids, "return_token_strs")
    frontend.close()


async def test_detokenizing_has_a_limit(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_DETOKENIZE_IDS", 3)
    assert await frontend.detokenize([1, 2, 3])
    with pytest.raises(InvalidRequest, match="'tokens' has 4 entries; at most 3"):
        await frontend.detokenize([1, 2, 3, 1])


class RefusingEngine(OneTokenEngine):
    """Is full."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        raise Saturated("full")
        yield ChoiceDelta(0, "", ())


async def test_prompt_tokens_are_counted_when_the_engine_takes_them() -> None:
    for engine, expected in ((RefusingEngine(), 0.0), (OneTokenEngine(), 3.0)):
        frontend = make(engine)
        request = await prepare(frontend, TextPrompt("one two three"))
        with contextlib.suppress(Saturated):
            (deltas,) = await frontend.admit([request])
            await anext(deltas)
            await deltas.aclose()
        counted = frontend.metrics.registry.get_sample_value("stagemesh_prompt_tokens_total")
        assert counted == expected
        frontend.close()


async def test_leaving_does_not_make_place_for_more(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PENDING_TOKENIZATIONS", 1)
    text = "one " * 100_000
    leaving = asyncio.ensure_future(frontend.tokenize(TextPrompt(text)))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    with pytest.raises(Saturated):
        await frontend.tokenize(TextPrompt(text))
    async with asyncio.timeout(10):
        while True:
            try:
                assert await frontend.tokenize(TextPrompt(text))
                break
            except Saturated:
                await asyncio.sleep(0.01)


def test_model_names(frontend: Frontend) -> None:
    assert frontend.resolve_model(None) == frontend.resolve_model("") == "main"
    assert frontend.resolve_model("other") == "other"
    with pytest.raises(ModelNotFound, match="main, other"):
        frontend.resolve_model("third")


def test_request_ids() -> None:
    assert new_request_id("a") != new_request_id("a")
    assert new_request_id("a", "mine").startswith("a-mine-")
    assert check_request_id("mine", "request_id") == "mine"
    for bad in ("x" * (limits.MAX_REQUEST_ID_CHARS + 1), "a\nb", "é"):
        with pytest.raises(InvalidRequest, match="request_id"):
            check_request_id(bad, "request_id")


@pytest.mark.parametrize(
    ("token_ids", "finish_reason", "stop_reason", "expected"),
    [
        ((5, 2), FinishReason.STOP, 2, 1),
        ((2,), FinishReason.STOP, 2, 0),
        ((5, 2), FinishReason.STOP, "text", 2),
        ((5, 2), FinishReason.LENGTH, None, 2),
        ((5, 2), None, None, 2),
        ((), FinishReason.STOP, 2, 0),
    ],
)
def test_the_token_that_stops_is_no_output(
    token_ids: tuple[int, ...],
    finish_reason: FinishReason | None,
    stop_reason: int | str | None,
    expected: int,
) -> None:
    delta = ChoiceDelta(0, "", token_ids, (), finish_reason, stop_reason)
    assert output_length(delta) == expected
