"""The official OpenAI client against the REST door."""

from __future__ import annotations

import openai
import pytest
from front_doors import MODEL, REPLY, Rest, until

from services.errors import PipelineUnavailable, Saturated, StageFailed

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def test_chat_whole(rest: Rest) -> None:
    answer = await rest.client.chat.completions.create(model=MODEL, messages=QUESTION)
    choice = answer.choices[0]
    assert choice.message.content == REPLY
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    request = rest.gateway.engine.seen[0]
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    # The token that stops is counted, and is no part of the answer.
    assert answer.usage.completion_tokens == len(rest.gateway.tokenizer.encode(REPLY).ids) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    rendered = rest.gateway.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert rendered == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_chat_streamed(rest: Rest) -> None:
    stream = await rest.client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 10
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 10


async def test_chat_stream_without_usage_has_none(rest: Rest) -> None:
    stream = await rest.client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_several_choices_are_kept_apart(rest: Rest) -> None:
    answer = await rest.client.chat.completions.create(model=MODEL, messages=QUESTION, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content == REPLY for choice in answer.choices)
    stream = await rest.client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=2, stream=True
    )
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [REPLY, REPLY]


async def test_chat_logprobs(rest: Rest) -> None:
    answer = await rest.client.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert "".join(bytes(b for one in content for b in one.bytes).decode()) == REPLY
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert content[0].top_logprobs[0].token == content[0].token
    assert content[0].logprob == -0.5


async def test_chat_logprobs_streamed_are_the_same(rest: Rest) -> None:
    stream = await rest.client.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, stream=True
    )
    raw = b""
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            raw += b"".join(bytes(one.bytes) for one in chunk.choices[0].logprobs.content)
            assert all(one.top_logprobs == [] for one in chunk.choices[0].logprobs.content)
    assert raw.decode() == REPLY


async def test_stop_and_max_tokens(rest: Rest) -> None:
    answer = await rest.client.chat.completions.create(
        model=MODEL, messages=QUESTION, stop=["Paris"], seed=7, temperature=0
    )
    assert answer.choices[0].message.content == "The capital of France is "
    assert answer.choices[0].finish_reason == "stop"
    answer = await rest.client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


async def test_completion_whole_with_echo_and_logprobs(rest: Rest) -> None:
    answer = await rest.client.completions.create(
        model=MODEL, prompt="stop here", echo=True, max_tokens=64
    )
    assert answer.choices[0].text == "stop here" + REPLY
    answer = await rest.client.completions.create(
        model=MODEL, prompt="stop here", logprobs=2, max_tokens=64
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    assert logprobs.tokens[0] in logprobs.top_logprobs[0]


async def test_cached_prompt_tokens_are_reported(rest: Rest) -> None:
    rest.gateway.engine.num_cached_tokens = 3
    answer = await rest.client.chat.completions.create(model=MODEL, messages=QUESTION, n=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    stream = await rest.client.completions.create(
        model=MODEL,
        prompt=["stop here", "stop now"],
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage async for chunk in stream][-1]
    assert usage.prompt_tokens_details.cached_tokens == 6


async def test_priority_and_cache_salt_reach_the_engine(rest: Rest) -> None:
    await rest.client.chat.completions.create(
        model=MODEL, messages=QUESTION, extra_body={"priority": -3, "cache_salt": "mine"}
    )
    request = rest.gateway.engine.seen[0]
    assert (request.priority, request.cache_salt) == (-3, "mine")
    for wrong in ({"priority": 2**31}, {"cache_salt": ""}, {"cache_salt": "x" * 129}):
        with pytest.raises(openai.BadRequestError) as caught:
            await rest.client.chat.completions.create(
                model=MODEL, messages=QUESTION, extra_body=wrong
            )
        assert caught.value.param == next(iter(wrong))


async def test_completion_defaults_to_sixteen_tokens(rest: Rest) -> None:
    rest.gateway.engine.reply = REPLY * 2
    answer = await rest.client.completions.create(model=MODEL, prompt="stop")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


async def test_completion_of_several_prompts(rest: Rest) -> None:
    prompts = ["stop", "here", "now"]
    answer = await rest.client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=40, seed=5
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert all(choice.text == REPLY for choice in answer.choices)
    assert [request.sampling.seed for request in rest.gateway.engine.seen] == [5, 6, 7]
    assert answer.usage.prompt_tokens == sum(
        len(rest.gateway.tokenizer.encode(prompt).ids) for prompt in prompts
    )
    stream = await rest.client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=40, stream=True, echo=True
    )
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [prompt + REPLY for prompt in prompts]


async def test_completion_of_token_ids(rest: Rest) -> None:
    ids = rest.gateway.tokenizer.encode("stop here").ids
    answer = await rest.client.completions.create(model=MODEL, prompt=ids, max_tokens=40, echo=True)
    assert answer.choices[0].text == "stop here" + REPLY
    await rest.client.completions.create(model=MODEL, prompt=[ids, ids[:1]], max_tokens=4)
    assert [len(r.prompt_token_ids) for r in rest.gateway.engine.seen] == [len(ids)] * 2 + [1]


async def test_sampling_reaches_the_engine(rest: Rest) -> None:
    await rest.client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0.25,
        top_p=0.5,
        seed=11,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100},
        extra_body={
            "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "stop_token_ids": [9],
            "ignore_eos": True,
        },
    )  # fmt: skip
    request = rest.gateway.engine.seen[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.25, 0.5, 11)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 0.125, 1.5)
    assert sampling.logit_bias == {5: -100.0}
    assert request.stop.stop_token_ids == {9}


async def test_the_model_s_defaults_fill_the_gaps(rest: Rest) -> None:
    await rest.client.chat.completions.create(model=MODEL, messages=QUESTION)
    request = rest.gateway.engine.seen[0]
    assert request.sampling.temperature == 0.5
    assert request.stop.stop_token_ids == {rest.gateway.tokenizer.token_to_id("<|im_end|>")}
    assert request.stop.max_tokens == 128 - len(request.prompt_token_ids)
    assert request.deadline is not None


async def test_models(rest: Rest) -> None:
    page = await rest.client.models.list()
    assert [model.id for model in page.data] == [MODEL, "tiny-alias"]
    assert (await rest.client.models.retrieve("tiny-alias")).id == "tiny-alias"
    with pytest.raises(openai.NotFoundError):
        await rest.client.models.retrieve("gpt-4")


async def test_typed_errors(rest: Rest) -> None:
    create = rest.client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4", messages=QUESTION)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        await create(model=MODEL, messages=QUESTION, max_tokens=4000)
    assert long.value.code == "context_length_exceeded" and "128" in long.value.message
    rest.gateway.engine.fail_with = Saturated("full", retry_after_seconds=7.2)
    with pytest.raises(openai.RateLimitError) as busy:
        await create(model=MODEL, messages=QUESTION)
    assert busy.value.response.headers["retry-after"] == "8"
    rest.gateway.engine.fail_with = PipelineUnavailable("no pipeline")
    with pytest.raises(openai.InternalServerError) as down:
        await create(model=MODEL, messages=QUESTION, stream=True)
    assert down.value.status_code == 503


async def test_an_error_in_the_middle_of_a_stream(rest: Rest) -> None:
    engine = rest.gateway.engine
    engine.fail_with, engine.fail_after_tokens = StageFailed("stage 1: rank 0 died"), 3
    stream = await rest.client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="rank 0 died"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text and REPLY.startswith(text)


async def test_a_client_that_closes_its_stream_aborts_the_request(rest: Rest) -> None:
    engine = rest.gateway.engine
    engine.delay_seconds = 0.02
    stream = await rest.client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: engine.aborted)
    assert not engine.open_requests
