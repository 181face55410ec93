"""Bad input gets a clear error that names the field, and changes nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from front_doors import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Rest

CHAT, TEXT, TOKENIZE, DETOKENIZE = (
    "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize",
)  # fmt: skip
USER = [{"role": "user", "content": "Hello"}]
NAN, INFINITY = float("nan"), float("inf")


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": USER} | fields


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": MODEL, "prompt": "Hello"} | fields


# (path and body), status, param
BAD_BODIES: list[tuple[tuple[str, Any], int, str | None]] = [
    # Wrong types
    ((CHAT, []), 400, None),
    ((CHAT, "text"), 400, None),
    ((CHAT, None), 400, None),
    ((CHAT, 7), 400, None),
    (chat(messages="Hello"), 400, "messages"),
    (chat(messages=["Hello"]), 400, "messages[0]"),
    (chat(messages={}), 400, "messages"),
    (chat(temperature="hot"), 400, "temperature"),
    (chat(temperature=True), 400, "temperature"),
    (chat(max_tokens=1.5), 400, "max_tokens"),
    (chat(max_tokens="5"), 400, "max_tokens"),
    (chat(n="2"), 400, "n"),
    (chat(stream="yes"), 400, "stream"),
    (chat(stream=1), 400, "stream"),
    (chat(stop=5), 400, "stop"),
    (chat(stop=["a", 5]), 400, "stop"),
    (chat(stop_token_ids="1"), 400, "stop_token_ids"),
    (chat(stop_token_ids=[1.5]), 400, "stop_token_ids[0]"),
    (chat(logit_bias=[1]), 400, "logit_bias"),
    (chat(logit_bias={"x": 1}), 400, "logit_bias"),
    (chat(logit_bias={"1": "x"}), 400, "logit_bias"),
    (chat(logprobs=3), 400, "logprobs"),
    (chat(seed=1.5), 400, "seed"),
    (chat(model=7), 400, "model"),
    (chat(user=7), 400, "user"),
    (chat(stream=True, stream_options=True), 400, "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), 400, "stream_options.include_usage"),
    # Missing and unknown
    ((CHAT, {}), 400, "messages"),
    ((CHAT, {"model": MODEL}), 400, "messages"),
    ((TEXT, {"model": MODEL}), 400, "prompt"),
    (chat(temprature=1), 400, "temprature"),
    (chat(stream=True, stream_options={"usage": True}), 400, "stream_options.usage"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (chat(messages=[{"content": "Hello"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user", "content": "x", "mood": 1}]), 400, "messages[0].mood"),
    (chat(model="gpt-4"), 404, "model"),
    (text(model="gpt-4"), 404, "model"),
    # Known and not supported
    (chat(tools=[{"type": "function"}]), 400, "tools"),
    (chat(tool_choice="required"), 400, "tool_choice"),
    (chat(functions=[{}]), 400, "functions"),
    (chat(response_format={"type": "json_object"}), 400, "response_format"),
    (chat(modalities=["audio"]), 400, "modalities"),
    (chat(audio={"voice": "x"}), 400, "audio"),
    (chat(store=True), 400, "store"),
    (chat(prediction={}), 400, "prediction"),
    (text(suffix="end"), 400, "suffix"),
    (text(best_of=2), 400, "best_of"),
    (chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [1]}]), 400,
     "messages[0].tool_calls"),
    # Messages and prompts
    (chat(messages=[]), 400, "messages"),
    (chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user", "content": None}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400,
     "messages[0].content"),
    (chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]), 400,
     "messages[0].content"),
    (chat(messages=[{"role": "user", "content": "\ud800"}]), 400, "messages"),
    (chat(messages=USER * 3000), 400, "messages"),
    (text(prompt=""), 400, "prompt"),
    (text(prompt=[]), 400, "prompt"),
    (text(prompt=[""]), 400, "prompt"),
    (text(prompt=["a", ""]), 400, "prompt[1]"),
    (text(prompt=[[]]), 400, "prompt"),
    (text(prompt=None), 400, "prompt"),
    (text(prompt=7), 400, "prompt"),
    (text(prompt=["a", 1]), 400, "prompt"),
    (text(prompt=[[1], "a"]), 400, "prompt"),
    (text(prompt=[1.5]), 400, "prompt"),
    (text(prompt=[True]), 400, "prompt"),
    (text(prompt={"text": "a"}), 400, "prompt"),
    (text(prompt="\udfff"), 400, "prompt"),
    (text(prompt=["a"] * 65), 400, "prompt"),
    (text(prompt=["a"] * 64, n=3), 400, "n"),
    (text(prompt=[VOCAB_SIZE]), 400, "prompt"),
    (text(prompt=[-1]), 400, "prompt"),
    (text(prompt=[2**70]), 400, "prompt"),
    (text(prompt=[[1], [VOCAB_SIZE]]), 400, "prompt[1]"),
    # Lengths
    (text(prompt=[1] * MAX_MODEL_LEN), 400, "prompt"),
    (text(prompt="capital of France " * 100_000), 400, "prompt"),
    (chat(messages=[{"role": "user", "content": "capital " * 500}]), 400, "messages"),
    (chat(max_tokens=MAX_MODEL_LEN), 400, "max_tokens"),
    (chat(max_completion_tokens=10**30), 400, "max_completion_tokens"),
    (chat(max_tokens=5, max_completion_tokens=6), 400, "max_tokens"),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(max_tokens=-1), 400, "max_tokens"),
    (text(max_tokens=0), 400, "max_tokens"),
    # Ranges
    (chat(temperature=-0.1), 400, "temperature"),
    (chat(temperature=2.1), 400, "temperature"),
    (chat(temperature=NAN), 400, "temperature"),
    (chat(temperature=INFINITY), 400, "temperature"),
    (chat(temperature=10**400), 400, "temperature"),
    (chat(top_p=0), 400, "top_p"),
    (chat(top_p=1.01), 400, "top_p"),
    (chat(top_p=NAN), 400, "top_p"),
    (chat(top_k=-2), 400, "top_k"),
    (chat(min_p=-0.1), 400, "min_p"),
    (chat(min_p=1.1), 400, "min_p"),
    (chat(presence_penalty=2.1), 400, "presence_penalty"),
    (chat(presence_penalty=NAN), 400, "presence_penalty"),
    (chat(frequency_penalty=-2.1), 400, "frequency_penalty"),
    (chat(repetition_penalty=0), 400, "repetition_penalty"),
    (chat(repetition_penalty=INFINITY), 400, "repetition_penalty"),
    (chat(repetition_penalty=1e-38), 400, "repetition_penalty"),
    (chat(repetition_penalty=1e-320), 400, "repetition_penalty"),
    (chat(repetition_penalty=1e300), 400, "repetition_penalty"),
    (chat(top_p=1e-320), 400, "top_p"),
    (chat(seed=-1), 400, "seed"),
    (chat(seed=2**64), 400, "seed"),
    (chat(n=0), 400, "n"),
    (chat(n=17), 400, "n"),
    (chat(n=-1), 400, "n"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs"),
    (chat(top_logprobs=2), 400, "top_logprobs"),
    (text(logprobs=21), 400, "logprobs"),
    (text(logprobs=-1), 400, "logprobs"),
    (text(logprobs=True), 400, "logprobs"),
    (text(echo=True, logprobs=1), 400, "logprobs"),
    (chat(logit_bias={str(VOCAB_SIZE): 1}), 400, "logit_bias"),
    (chat(logit_bias={"-1": 1}), 400, "logit_bias"),
    (chat(logit_bias={"1": 101}), 400, "logit_bias"),
    (chat(logit_bias={"1": NAN}), 400, "logit_bias"),
    (chat(logit_bias={"1": 10**400}), 400, "logit_bias"),
    (chat(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias"),
    (chat(stop=""), 400, "stop"),
    (chat(stop=["x" * 257]), 400, "stop"),
    (chat(stop=["x"] * 17), 400, "stop"),
    (chat(stop_token_ids=[VOCAB_SIZE]), 400, "stop_token_ids"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (chat(stop_token_ids=[1] * 65), 400, "stop_token_ids"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    # The tokenizer's routes
    ((TOKENIZE, {}), 400, "prompt"),
    ((TOKENIZE, {"prompt": "a", "messages": USER}), 400, "prompt"),
    ((TOKENIZE, {"prompt": ""}), 400, "prompt"),
    ((TOKENIZE, {"prompt": 5}), 400, "prompt"),
    ((TOKENIZE, {"messages": []}), 400, "messages"),
    ((TOKENIZE, {"prompt": "a", "add_generation_prompt": True}), 400, "add_generation_prompt"),
    ((TOKENIZE, {"model": "gpt-4", "prompt": "a"}), 404, "model"),
    ((DETOKENIZE, {}), 400, "tokens"),
    ((DETOKENIZE, {"tokens": [VOCAB_SIZE]}), 400, "tokens"),
    ((DETOKENIZE, {"tokens": [-1]}), 400, "tokens"),
    ((DETOKENIZE, {"tokens": "1"}), 400, "tokens"),
    ((DETOKENIZE, {"tokens": ["1"]}), 400, "tokens[0]"),
    ((DETOKENIZE, {"tokens": ["a"] * 400_000}), 400, "tokens[0]"),
    ((DETOKENIZE, {"tokens": [1] * 1_048_577}), 400, "tokens"),
    ((TOKENIZE, {"prompt": "x" * 2_097_153}), 400, "prompt"),
    ((TOKENIZE, {"messages": [{"role": "user", "content": "x", "name": "y" * 2_097_153}]}), 400,
     "messages"),
    ((TOKENIZE, {"prompt": "\x00" * 262_145, "return_token_strs": True}), 400,
     "return_token_strs"),
    (chat(messages=[1] * 200_000), 400, "messages"),
]  # fmt: skip

ERROR_KEYS = {"message", "type", "param", "code"}


async def good_request_works(rest: Rest) -> None:
    path, body = chat(max_tokens=3)
    assert (await rest.http.post(path, json=body)).status_code == 200


def post_body(body: Any) -> bytes:
    # The standard library writes NaN and Infinity, as OpenAI's own client does.
    return json.dumps(body).encode()


async def test_bad_bodies(rest: Rest) -> None:
    """All in one server, so that each also shows that the ones before did no harm."""
    assert len(BAD_BODIES) >= 60
    wrong = []
    for (path, body), status, param in BAD_BODIES:
        response = await rest.http.post(
            path, content=post_body(body), headers={"content-type": "application/json"}
        )
        error = response.json().get("error", {})
        got = (response.status_code, error.get("param"))
        if got != (status, param) or set(error) != ERROR_KEYS or not error["message"]:
            wrong.append((path, str(body)[:100], got, (status, param), error))
        if "Traceback" in response.text or "pydantic" in response.text:
            wrong.append((path, str(body)[:100], response.text))
    assert not wrong, "\n".join(map(str, wrong))
    assert rest.gateway.engine.seen == []
    await good_request_works(rest)


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"messages": [}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"n": ' + b"9" * 5000 + b"}", "application/json"),
        (b'{"model": "tiny"}', "text/plain"),
        (b"model=tiny", "application/x-www-form-urlencoded"),
    ],
)
async def test_bodies_that_are_no_json_object(
    rest: Rest, content: bytes, content_type: str
) -> None:
    response = await rest.http.post(CHAT, content=content, headers={"content-type": content_type})
    assert response.status_code == 400
    assert set(response.json()["error"]) == ERROR_KEYS
    assert response.json()["error"]["type"] == "invalid_request_error"
    await good_request_works(rest)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/gpt-4", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_paths_and_methods(rest: Rest, method: str, path: str, status: int) -> None:
    response = await rest.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == ERROR_KEYS


async def test_messages_name_both_numbers_and_no_prompt(rest: Rest) -> None:
    prompt = "capital of France and a secret " * 20
    _, body = text(prompt=prompt)
    message = (await rest.http.post(TEXT, json=body)).json()["error"]["message"]
    count = len(rest.gateway.tokenizer.encode(prompt).ids)
    assert str(MAX_MODEL_LEN) in message and str(count) in message
    assert "secret" not in message
    _, body = chat(messages=[{"role": "user", "content": {"secret": "x"}}])
    assert "secret" not in (await rest.http.post(CHAT, json=body)).text


def mutated(generator: random.Random, value: Any, depth: int = 0) -> Any:
    """A value that is like the given one, except where it is not."""
    odd = [None, True, 0, -1, 1.5, NAN, 2**65, "", "x", "\ud800", [], {}, [None], {"a": 1}, [[1]]]
    if generator.random() < (0.15 if depth else 0.0):
        return generator.choice(odd)
    if isinstance(value, dict):
        return {key: mutated(generator, one, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [mutated(generator, one, depth + 1) for one in value]
    return value


async def test_mutated_bodies_never_fail_inside(rest: Rest) -> None:
    rest.gateway.engine.reply = "x"
    full = {
        "model": MODEL, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
        "logit_bias": {"1": 1}, "max_tokens": 2, "n": 1, "stop": ["x"], "stop_token_ids": [1],
        "ignore_eos": False, "stream": False, "user": "me", "tools": [], "metadata": {},
    }  # fmt: skip
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "me"}]
    bodies = [
        (CHAT, full | {"messages": messages, "logprobs": True, "top_logprobs": 1}),
        (TEXT, full | {"prompt": ["Hello", "you"], "logprobs": 1, "echo": False}),
        (TOKENIZE, {"messages": messages, "add_special_tokens": True}),
        (DETOKENIZE, {"model": MODEL, "tokens": [1, 2]}),
    ]
    generator = random.Random(0)
    statuses = set()
    for _ in range(60):
        for path, body in bodies:
            content = post_body(mutated(generator, body))
            response = await rest.http.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code in (200, 400, 404), (content, response.text)
            statuses.add(response.status_code)
            if response.status_code != 200:
                assert set(response.json()["error"]) == ERROR_KEYS
    assert statuses == {200, 400, 404}


async def test_neutral_values_of_unsupported_fields_pass(rest: Rest) -> None:
    path, body = chat(
        tools=None, tool_choice="none", response_format={"type": "text"}, modalities=["text"],
        store=False, metadata={"a": "b"}, parallel_tool_calls=True, user="me", logprobs=None,
        service_tier="auto", best_of=1, stream=False, max_tokens=3, n=None, stop=None,
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "a"},
                                         {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
            {"role": "tool", "content": "y", "tool_call_id": "1"},
        ],
    )  # fmt: skip
    response = await rest.http.post(path, json=body)
    assert response.status_code == 200, response.text
    ids = rest.gateway.engine.seen[0].prompt_token_ids
    rendered = rest.gateway.tokenizer.decode(ids, skip_special_tokens=False)
    assert rendered.startswith("<|im_start|>system\nBe short.<|im_end|>\n")
    assert "<|im_start|>user\na\nb<|im_end|>" in rendered
