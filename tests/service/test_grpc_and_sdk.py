"""The gRPC door through the SDK, blocking and asyncio."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import pytest
from front_doors import MODEL, REPLY, FakeGateway, until

import services.errors
import stagemesh
import stagemesh.errors
from gateway.frontend.api_keys import ApiKeys
from gateway.frontend.chat_template import Message
from gateway.frontend.prompts import ChatPrompt
from gateway.grpc_server.convert import prompt_of
from gateway.grpc_server.server import create_inference_server
from services.errors import PipelineUnavailable, Saturated, StageFailed
from services.rpc import RpcServer
from stagemesh import AsyncClient, ChatMessage, Client, TLSConfig, Usage
from stagemesh._wire import Options, generate_request

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Door:
    gateway: FakeGateway
    server: RpcServer
    address: str
    client: AsyncClient


@pytest.fixture
async def door(gateway: FakeGateway, api_keys: tuple[str, ...]) -> AsyncIterator[Door]:
    server = create_inference_server(gateway.frontend, keys=ApiKeys(api_keys))
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    async with AsyncClient(address, timeout=10, max_retries=0) as client:
        yield Door(gateway, server, address, client)
    await server.stop(grace_seconds=0)


async def test_generate_from_messages(door: Door) -> None:
    answer = await door.client.generate(messages=QUESTION, model=MODEL)
    assert answer.text == REPLY
    assert answer.finish_reason == "stop"
    request = door.gateway.engine.seen[0]
    assert answer.token_ids == tuple(door.gateway.tokenizer.encode(REPLY).ids)
    # The token that stops is counted, and is no part of the answer.
    assert answer.usage == Usage(len(request.prompt_token_ids), len(answer.token_ids) + 1)
    assert request.sampling.temperature == 0.5  # the model's own default
    assert request.stop.max_tokens == 128 - len(request.prompt_token_ids)
    same = await door.client.generate(messages=[ChatMessage("user", QUESTION[0]["content"])])
    assert same.text == REPLY
    assert door.gateway.engine.seen[1].prompt_token_ids == request.prompt_token_ids


async def test_every_option_reaches_the_engine(door: Door) -> None:
    await door.client.generate(
        token_ids=[5, 6],
        max_tokens=4,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.125,
        seed=2**64 - 1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={5: -100},
        logprobs=0,
        stop=["Paris"],
        stop_token_ids=[9],
        ignore_eos=True,
        n=2,
        priority=-7,
        cache_salt="mine",
        request_id="mine",
    )
    request = door.gateway.engine.seen[0]
    sampling, stop = request.sampling, request.stop
    assert request.prompt_token_ids == (5, 6) and request.n == 2
    assert request.request_id.startswith("gen-mine-")
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.25, 0.5, 0.125)
    assert (sampling.top_k, sampling.seed, sampling.num_logprobs) == (7, 2**64 - 1, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, {5: -100.0})
    assert (stop.max_tokens, stop.stop_strings, stop.stop_token_ids) == (4, ("Paris",), {9})
    assert (request.priority, request.cache_salt) == (-7, "mine")


async def test_stream_choices_logprobs_and_usage(door: Door) -> None:
    door.gateway.engine.num_cached_tokens = 2
    chunks = [
        chunk
        async for chunk in door.client.stream(
            "stop here", n=2, logprobs=2, request_id="mine", max_tokens=50
        )
    ]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk.choice_index == index]
        assert "".join(chunk.text for chunk in own) == REPLY
        assert own[-1].finish_reason == "stop"
        assert all(len(c.logprobs) == len(c.token_ids) == 1 for c in own)
        assert own[0].logprobs[0].logprob == -0.5 and len(own[0].logprobs[0].top) == 2
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.cached_prompt_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.request_id for chunk in chunks} == {"mine"}


async def test_tokenize_detokenize_models(door: Door) -> None:
    ids = await door.client.tokenize("stop here")
    assert ids == tuple(door.gateway.tokenizer.encode("stop here").ids)
    assert await door.client.detokenize(ids) == "stop here"
    chat = await door.client.tokenize(messages=QUESTION)
    assert (await door.client.detokenize(chat)).startswith("<|im_start|>user\n")
    models = await door.client.models()
    assert [model.id for model in models] == [MODEL, "tiny-alias"]
    assert models[0].max_model_len == 128


async def test_tokenize_has_what_rest_has(door: Door) -> None:
    client, tokenizer = door.client, door.gateway.tokenizer
    opened = await client.tokenize(messages=QUESTION)
    assert await client.tokenize(messages=QUESTION, add_generation_prompt=True) == opened
    closed = await client.tokenize(messages=QUESTION, add_generation_prompt=False)
    assert tokenizer.decode(opened, skip_special_tokens=False) == (
        tokenizer.decode(closed, skip_special_tokens=False) + "<|im_start|>assistant\n"
    )
    with pytest.raises(stagemesh.InvalidRequest) as caught:
        await client.tokenize("stop", add_generation_prompt=True)
    assert caught.value.param == "add_generation_prompt"
    found = await client.tokenize_with_strs("stop here é")
    assert found.token_ids == await client.tokenize("stop here é")
    assert "".join(found.token_strs).startswith("stop here ")
    assert len(found.token_strs) == len(found.token_ids) and found.max_model_len == 128
    with pytest.raises(stagemesh.InvalidRequest, match="2097153 characters"):
        await client.tokenize("x" * 2_097_153)
    with pytest.raises(stagemesh.InvalidRequest, match="1048577 entries"):
        await client.detokenize([1] * 1_048_577)


async def test_the_stop_that_ended_a_choice_is_named(door: Door) -> None:
    client, eos = door.client, door.gateway.tokenizer.token_to_id("<|im_end|>")
    assert (await client.generate(messages=QUESTION)).stop_reason == eos
    answer = await client.generate(messages=QUESTION, stop=["Paris"])
    assert answer.stop_reason == "Paris" and answer.choices[0].finish_reason == "stop"
    assert (await client.generate(messages=QUESTION, max_tokens=2)).stop_reason is None
    chunks = [chunk async for chunk in client.stream(messages=QUESTION, stop=["Paris"])]
    assert [chunk.stop_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["Paris"]


async def test_names_of_speakers_reach_the_template(door: Door) -> None:
    turn = {"role": "tool", "content": "4", "name": "sum", "tool_call_id": "call-1"}
    for message in (turn, ChatMessage(**turn)):
        prompt = prompt_of(generate_request(None, [message], None, Options()))
        assert prompt == ChatPrompt((Message("tool", "4", "sum", "call-1"),))
    plain = prompt_of(generate_request(None, [ChatMessage("user", "x")], None, Options()))
    assert plain == ChatPrompt((Message("user", "x"),))
    with pytest.raises(stagemesh.InvalidRequest, match=r"messages\[0\]"):
        await door.client.generate(messages=[{"role": "user", "content": "x", "mood": "good"}])


async def test_numbers_that_break_the_sampler_are_refused(door: Door) -> None:
    for value in (1e-38, 1e-320, 1e300):
        with pytest.raises(stagemesh.InvalidRequest) as caught:
            await door.client.generate("stop", repetition_penalty=value)
        assert caught.value.param == "repetition_penalty"


async def test_errors_are_typed(door: Door) -> None:
    client, engine = door.client, door.gateway.engine
    with pytest.raises(stagemesh.ModelNotFound, match="gpt-4"):
        await client.generate("x", model="gpt-4")
    with pytest.raises(stagemesh.ContextTooLong, match=r"128.*4000"):
        await client.generate("x", max_tokens=4000)
    with pytest.raises(stagemesh.InvalidRequest) as caught:
        await client.generate("x", temperature=float("nan"))
    assert caught.value.param == "temperature"
    with pytest.raises(stagemesh.InvalidRequest, match="vocabulary"):
        await client.generate(token_ids=[600])
    with pytest.raises(stagemesh.InvalidRequest, match="exactly one"):
        await client.generate("x", token_ids=[1])
    with pytest.raises(stagemesh.InvalidRequest):
        await client.generate("x", max_tokens=-1)
    with pytest.raises(stagemesh.InvalidRequest, match="role"):
        await client.generate(messages=[{"role": "robot", "content": "x"}])
    with pytest.raises(stagemesh.BodyTooLarge):
        await client.generate("x" * (9 * 1024 * 1024))
    engine.fail_with = Saturated("full", retry_after_seconds=3)
    with pytest.raises(stagemesh.Saturated) as busy:
        await client.generate("x", max_tokens=8)
    assert busy.value.retry_after_seconds == 3
    engine.fail_with = ZeroDivisionError("prompt text")
    with pytest.raises(stagemesh.StagemeshError) as unforeseen:
        await client.generate("x", max_tokens=8)
    assert "prompt text" not in str(unforeseen.value)
    engine.fail_with = None
    assert (await client.generate(messages=QUESTION)).text == REPLY


async def test_an_error_in_the_middle_is_not_retried(door: Door) -> None:
    engine = door.gateway.engine
    engine.fail_with, engine.fail_after_tokens = StageFailed("stage 1 died"), 2
    async with AsyncClient(door.address, max_retries=5) as client:
        texts = []
        with pytest.raises(stagemesh.StageFailed, match="stage 1 died"):
            async for chunk in client.stream("stop", max_tokens=50):
                texts.append(chunk.text)
    assert len(texts) == 2 and len(engine.seen) == 1


async def test_before_the_first_token_a_retry_is_safe_and_bounded(door: Door) -> None:
    engine = door.gateway.engine
    engine.fail_with = PipelineUnavailable("not yet", retry_after_seconds=0.05)
    async with AsyncClient(door.address, max_retries=2) as client:
        with pytest.raises(stagemesh.PipelineUnavailable, match="not yet"):
            await client.generate("stop", max_tokens=50)
        assert len(engine.seen) == 3
        stream = client.stream("stop", max_tokens=50)
        engine.fail_with = None
        assert "".join([chunk.text async for chunk in stream]) == REPLY
    engine.fail_with = Saturated("full", retry_after_seconds=60)
    async with AsyncClient(door.address, max_retries=2, timeout=5) as client:
        with pytest.raises(stagemesh.Saturated):
            await client.generate("stop", max_tokens=50)


async def test_a_deadline_is_typed_and_aborts(door: Door) -> None:
    engine = door.gateway.engine
    engine.delay_seconds = 0.05
    with pytest.raises(stagemesh.DeadlineExceeded):
        await door.client.generate("stop", max_tokens=50, timeout=0.2)
    await until(lambda: engine.aborted)
    with pytest.raises(stagemesh.InvalidRequest, match="timeout"):
        await door.client.generate("stop", timeout=0)


async def test_the_deadline_reaches_the_engine(door: Door) -> None:
    before = asyncio.get_running_loop().time()
    await door.client.generate("stop", max_tokens=50, timeout=7)
    deadline = door.gateway.engine.seen[0].deadline
    assert deadline is not None and before + 5 < deadline < before + 9


async def test_closing_a_stream_aborts_the_request(door: Door) -> None:
    engine = door.gateway.engine
    engine.delay_seconds = 0.02
    async with door.client.stream("stop", max_tokens=50) as stream:
        async for _ in stream:
            break
    await until(lambda: engine.aborted)
    assert [chunk async for chunk in stream] == []


async def test_cancelling_the_task_aborts_the_request(door: Door) -> None:
    engine = door.gateway.engine
    engine.delay_seconds = 0.02
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await door.client.generate("stop", max_tokens=50)
    await until(lambda: engine.aborted)


async def test_nobody_at_the_address() -> None:
    async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(stagemesh.PipelineUnavailable, match=r"127\.0\.0\.1:1"):
            await client.models()


async def test_a_closed_client_says_so(door: Door) -> None:
    client = AsyncClient(door.address)
    await client.close()
    with pytest.raises(stagemesh.RequestAborted, match="closed"):
        await client.models()


class TestWithKeys:
    @pytest.fixture
    def api_keys(self) -> tuple[str, ...]:
        return ("one", "two")

    async def test_keys(self, door: Door) -> None:
        for key in (None, "three", ""):
            async with AsyncClient(door.address, api_key=key) as client:
                with pytest.raises(stagemesh.NotAuthenticated):
                    await client.models()
                with pytest.raises(stagemesh.NotAuthenticated):
                    await client.generate("stop")
        async with AsyncClient(door.address, api_key="two") as client:
            assert (await client.generate("stop", max_tokens=50)).text == REPLY


async def test_the_blocking_client(door: Door) -> None:
    def use() -> None:
        with Client(door.address, timeout=10, max_retries=0) as client:
            assert client.generate(messages=QUESTION).text == REPLY
            assert "".join(c.text for c in client.stream("stop", max_tokens=50)) == REPLY
            assert client.detokenize(client.tokenize("stop here")) == "stop here"
            assert client.models()[0].id == MODEL
            with pytest.raises(stagemesh.ModelNotFound):
                client.generate("x", model="gpt-4")
            door.gateway.engine.delay_seconds = 0.02
            with pytest.raises(stagemesh.DeadlineExceeded):
                client.generate("stop", max_tokens=50, timeout=0.1)
            with client.stream("stop", max_tokens=50) as stream:
                next(stream)
            assert list(stream) == []
        with pytest.raises(stagemesh.RequestAborted):
            client.models()

    await asyncio.to_thread(use)
    await until(lambda: len(door.gateway.engine.aborted) == 2)


async def test_the_blocking_client_retries(door: Door) -> None:
    engine = door.gateway.engine
    engine.fail_with = PipelineUnavailable("not yet", retry_after_seconds=0.1)
    recover = threading.Timer(0.3, setattr, (engine, "fail_with", None))
    recover.start()

    def use() -> str:
        with Client(door.address, timeout=10, max_retries=5) as client:
            return client.generate("stop", max_tokens=50).text

    assert await asyncio.to_thread(use) == REPLY
    recover.join()
    assert len(engine.seen) > 1


def test_both_error_trees_are_one() -> None:
    def tree(classes: Iterable[type]) -> dict[str, tuple[object, ...]]:
        return {one.__name__: (one.reason, one.retryable, one.__base__.__name__) for one in classes}

    assert tree(stagemesh.errors.all_errors()) == tree(services.errors.all_errors())


def test_both_clients_have_the_same_methods() -> None:
    def methods(client: type) -> dict[str, list[str]]:
        return {
            name: [
                f"{p.name}: {p.annotation} = {p.default}"
                for p in inspect.signature(function).parameters.values()
            ]
            for name, function in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert methods(Client) == methods(AsyncClient)


def test_every_public_name_can_be_imported() -> None:
    for name in stagemesh.__all__:
        assert getattr(stagemesh, name) is not None
    with pytest.raises(AttributeError):
        _ = stagemesh.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:8001", True),
        ("localhost:8001", True),
        ("[::1]:8001", True),
        ("unix:/run/x", True),
        ("10.0.0.1:8001", False),
        ("localhost.example:8001", False),
    ],
)
async def test_a_key_that_would_be_readable_on_its_way_is_warned_of(
    address: str, local: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with AsyncClient(address, api_key="k"):
            pass
        async with AsyncClient(address, api_key="k", tls=TLSConfig()):
            pass
        async with AsyncClient(address):
            pass
    said = [str(each.message) for each in caught]
    assert all("without TLS" in line and '"k"' not in line for line in said)
    assert len(said) == (0 if local else 1)
