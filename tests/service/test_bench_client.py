"""`stagemesh bench serve` against real servers: a scripted one, and the gateway's own door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from front_doors import Rest
from scripted_endpoint import (
    Answer,
    ScriptedEndpoint,
    chunked_stream,
    closes,
    event,
    plain,
    text_events,
)

from services.bench.report import BenchResult
from services.bench.serve import measure
from services.bench.settings import BenchSettings
from services.errors import StagemeshError

TEXTS = ["The", " café", "", " on", " the", " Seine"]
"""One token has no text yet."""


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEndpoint]:
    async with ScriptedEndpoint() as running:
        yield running


def settings(server: ScriptedEndpoint, **fields: object) -> BenchSettings:
    some = BenchSettings(base_url=server.url, num_prompts=3, request_timeout_seconds=5.0)
    return replace(some, random_input_len=8, random_output_len=6, **fields)  # type: ignore[arg-type]


async def result_of(settings: BenchSettings) -> BenchResult:
    _, result = await measure(settings)
    return result


@pytest.mark.parametrize("cut", [None, 1, 7])
async def test_a_stream_is_read_however_its_bytes_are_cut(
    server: ScriptedEndpoint, cut: int | None
) -> None:
    server.answer = chunked_stream(text_events(TEXTS, 11), cut=cut)
    load, result = await measure(settings(server, max_concurrency=1))
    assert (result.completed, result.failed, result.model) == (3, 0, "scripted")
    assert (result.total_input_tokens, result.total_output_tokens) == (33, 18)
    assert result.has_usage
    assert [len(outcome.delivered_at) for outcome in load.outcomes] == [5, 5, 5]
    assert server.connections == 1, "connections are kept"


async def test_times_are_those_of_the_deliveries(server: ScriptedEndpoint) -> None:
    server.answer = chunked_stream(text_events(["a", "b", "c"], 1), delay_seconds=0.05)
    result = await result_of(settings(server, max_concurrency=1))
    # The head goes out first, then an event every 50 ms.
    assert result.latencies["ttft"].median_ms == pytest.approx(50, abs=30)
    assert result.latencies["itl"].median_ms == pytest.approx(50, abs=15)
    assert result.latencies["e2el"].median_ms >= 300


async def test_what_is_sent(server: ScriptedEndpoint) -> None:
    server.answer = chunked_stream(text_events(TEXTS, 8))
    server.answers["/tokenize"] = plain(200, {"tokens": [7, 8, 9], "count": 3})
    result = await result_of(
        settings(
            server,
            api_key="secret",
            ignore_eos=True,
            random_prefix_len=2,
            extra_body={"top_p": 0.5},
            num_warmups=1,
        )
    )
    assert result.exact_prompts
    assert result.completed == 3
    assert len(server.requests) == 4
    prefixes = set()
    for path, headers, body in server.requests:
        assert path == "/v1/completions"
        assert headers["authorization"] == "bearer secret"
        prompt = body.pop("prompt")
        assert isinstance(prompt, list)
        assert len(prompt) == 8 + 2
        assert set(prompt) <= {7, 8, 9}
        prefixes.add(tuple(prompt[:2]))
        assert body == {
            "model": "scripted",
            "max_tokens": 6,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_p": 0.5,
        }
    assert len(prefixes) == 1


async def test_the_same_seed_sends_the_same(server: ScriptedEndpoint) -> None:
    server.answer = chunked_stream(text_events(TEXTS, 8))
    for seed in (1, 1, 2):
        await result_of(settings(server, seed=seed, max_concurrency=1))
    sent = [json.dumps(body) for _, _, body in server.requests]
    assert sent[0:3] == sent[3:6] != sent[6:9]


async def test_without_usage_events_are_counted(server: ScriptedEndpoint) -> None:
    server.answer = chunked_stream(text_events(TEXTS, 8, usage=False))
    result = await result_of(settings(server))
    assert not result.has_usage
    assert result.total_output_tokens == 3 * 5


async def test_chat_sends_messages(server: ScriptedEndpoint) -> None:
    events = [
        event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
        event(choices=[{"index": 0, "delta": {"content": "Paris"}, "finish_reason": "stop"}]),
        event(choices=[], usage={"prompt_tokens": 20, "completion_tokens": 2}),
        b"data: [DONE]\n\n",
    ]
    server.answer = chunked_stream(events)
    result = await result_of(settings(server, endpoint="/v1/chat/completions"))
    assert (result.completed, result.total_output_tokens) == (3, 6)
    assert not result.exact_prompts
    path, _, body = server.requests[0]
    assert path == "/v1/chat/completions"
    (message,) = body["messages"]  # type: ignore[misc]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 8


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (plain(429, {"error": {"message": "too many"}}), "http_429", "too many"),
        (plain(503, b"<html>no</html>", close=True), "http_503", "<html>"),
        (closes(), "disconnected", "closed"),
        (closes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata"), "disconnected", "closed"),
        (closes(b"SSH-2.0-OpenSSH\r\n\r\n"), "malformed", "not HTTP"),
        (chunked_stream(text_events(TEXTS, 8)[:2]), "disconnected", "before the answer"),
        (chunked_stream([event(error={"message": "lost"})]), "stream_error", "lost"),
        (chunked_stream([b"data: nonsense\n\n"]), "malformed", "not JSON"),
        (chunked_stream([b""] * 3, delay_seconds=5.0), "timeout", "0.5 s"),
    ],
)
async def test_failures_are_counted_by_kind(
    server: ScriptedEndpoint, answer: Answer, kind: str, words: str
) -> None:
    server.answer = answer
    result = await result_of(settings(server, request_timeout_seconds=0.5))
    assert (result.completed, result.failed) == (0, 3)
    assert result.errors == {kind: 3}
    assert words in result.first_errors[kind]


async def test_one_failure_does_not_stop_the_others(server: ScriptedEndpoint) -> None:
    good = chunked_stream(text_events(TEXTS, 8))
    bad = plain(500, {"error": {"message": "once"}})

    async def answer(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        await (bad if len(server.requests) == 2 else good)(writer, body)

    server.answer = answer
    result = await result_of(settings(server))
    assert (result.completed, result.errors) == (2, {"http_500": 1})


async def test_a_kept_connection_that_the_server_has_closed_is_replaced(
    server: ScriptedEndpoint,
) -> None:
    stream = b"".join(text_events(TEXTS, 8))

    async def answer(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        await plain(200, stream)(writer, body)
        writer.close()  # without having said so

    server.answer = answer
    result = await result_of(settings(server, max_concurrency=1))
    assert (result.completed, result.errors) == (3, {})


async def test_a_body_without_length_ends_with_its_connection(server: ScriptedEndpoint) -> None:
    server.answer = plain(200, b"".join(text_events(TEXTS, 8)), with_length=False)
    result = await result_of(settings(server))
    assert (result.completed, result.errors) == (3, {})


async def test_the_concurrency_that_was_asked_for(server: ScriptedEndpoint) -> None:
    server.answer = chunked_stream(text_events(TEXTS, 8), delay_seconds=0.01)
    result = await result_of(settings(server, num_prompts=8, max_concurrency=3))
    assert server.most_running == result.max_concurrent_requests == 3
    assert 2 < result.mean_concurrency <= 3


async def test_conversations_of_a_sharegpt_file(server: ScriptedEndpoint, tmp_path: Path) -> None:
    def said(*texts: str) -> dict[str, object]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    entries = [
        said("a question of some length", "an answer of some length, too"),
        said("short", "an answer of some length"),
        said("a question without an answer"),
        {"id": 1},
    ]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(entries))
    server.answer = chunked_stream(text_events(TEXTS, 8))
    some = settings(server, dataset_name="sharegpt", dataset_path=str(file))
    await result_of(some)
    for _, _, body in server.requests:
        assert body["prompt"] == "a question of some length"
        assert body["max_tokens"] == len("an answer of some length, too") // 4
    file.write_text("[]")
    with pytest.raises(StagemeshError, match="no conversation"):
        await result_of(some)


async def test_an_endpoint_without_models_needs_a_name(server: ScriptedEndpoint) -> None:
    server.answers.clear()
    server.answer = chunked_stream(text_events(TEXTS, 8))
    with pytest.raises(StagemeshError, match="answered 404: "):
        await result_of(settings(server))
    assert (await result_of(settings(server, model="m"))).model == "m"


async def test_the_gateways_own_door(rest: Rest) -> None:
    """Exact prompts by its /tokenize, the counts of its usage, and its stages."""
    some = BenchSettings(
        base_url=f"{rest.url}/v1",
        num_prompts=6,
        max_concurrency=2,
        random_input_len=20,
        random_output_len=9,
        random_range_ratio=0.3,
        ignore_eos=True,
    )
    load, result = await measure(some)
    assert (result.completed, result.errors) == (6, {})
    assert result.exact_prompts
    seen = rest.gateway.engine.seen
    assert result.total_input_tokens == sum(len(one.prompt_token_ids) for one in seen)
    assert {len(one.prompt_token_ids) for one in seen} <= set(range(14, 27))
    assert [outcome.output_tokens for outcome in load.outcomes] == [
        outcome.requested_output_tokens for outcome in load.outcomes
    ]
    assert result.pipeline is not None
    assert result.pipeline.size.pp_size == 1


async def test_counts_and_deliveries_are_those_of_the_openai_client(rest: Rest) -> None:
    some = BenchSettings(
        base_url=rest.url,
        endpoint="/v1/chat/completions",
        num_prompts=1,
        random_input_len=5,
        random_output_len=8,
    )
    load, _ = await measure(some)
    (outcome,) = load.outcomes
    stream = await rest.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None
    assert outcome.completion_tokens == usage.completion_tokens
    with_text = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(outcome.delivered_at) == len(with_text)
