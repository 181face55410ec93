"""From REST bodies to what the frontend takes. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.frontend import limits
from gateway.frontend.chat_template import Message
from gateway.frontend.params import SamplingInput, StopInput, check_n
from gateway.frontend.prompts import (
    ChatPrompt,
    FieldNames,
    GenerationInput,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_message_count,
    template_role,
)
from gateway.rest.schemas import (
    ChatCompletionRequest,
    ChatMessageBody,
    CompletionRequest,
    SamplingBody,
    TokenizeRequest,
)
from services.errors import InvalidRequest


def chat_messages(bodies: Sequence[ChatMessageBody]) -> tuple[Message, ...]:
    """The turns as the template sees them."""
    check_message_count(len(bodies))
    return tuple(
        Message(
            role=template_role(body.role),
            content=body.content,
            name=body.name,
            tool_call_id=body.tool_call_id,
        )
        for body in bodies
    )


def chat_field_names(body: ChatCompletionRequest) -> FieldNames:
    """Names for errors: those that the client used."""
    newer = body.max_completion_tokens is not None
    return FieldNames(
        prompt="messages",
        max_tokens="max_completion_tokens" if newer else "max_tokens",
        logprobs="top_logprobs",
    )


def chat_input(body: ChatCompletionRequest) -> GenerationInput:
    """Everything but the messages."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            f"'max_completion_tokens' is {newer} and 'max_tokens' is {older}; give one of them",
            param="max_tokens",
        )
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _generation_input(body, newer if newer is not None else older, num_logprobs)


def completion_input(body: CompletionRequest) -> GenerationInput:
    """Everything but the prompts."""
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "'logprobs' with 'echo' would need those of the prompt, which are not computed",
            param="logprobs",
        )
    max_tokens = limits.DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _generation_input(body, max_tokens, body.logprobs)


def _generation_input(
    body: SamplingBody, max_tokens: int | None, num_logprobs: int | None
) -> GenerationInput:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options")
    stop: Any = body.stop
    return GenerationInput(
        sampling=SamplingInput(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=body.seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias or {},
            num_logprobs=num_logprobs,
        ),
        stop=StopInput(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
        ),
        n=check_n(1 if body.n is None else body.n),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def include_usage(body: SamplingBody) -> bool:
    """Whether a stream ends with token counts."""
    return bool(body.stream_options and body.stream_options.include_usage)


def completion_prompts(prompt: Any, n: int) -> list[Prompt]:
    """The prompts of a completions body, whose types and number are checked already."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequest("'prompt' is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [TokenPrompt(prompt)]
    if len(prompt) * n > limits.MAX_CHOICES_PER_REQUEST:
        raise InvalidRequest(
            f"{len(prompt)} prompts with 'n' {n} are {len(prompt) * n} choices; at most "
            f"{limits.MAX_CHOICES_PER_REQUEST} work",
            param="n",
        )
    if isinstance(prompt[0], str):
        return [TextPrompt(text) for text in prompt]
    return [TokenPrompt(token_ids) for token_ids in prompt]


def with_next_seed(asked: GenerationInput, index: int) -> GenerationInput:
    """Noise depends on seed and choice only: equal prompts of one call must not get the
    same noise, so the client's seed counts up with the prompts."""
    seed = asked.sampling.seed
    if seed is None:
        return asked
    return replace(asked, sampling=replace(asked.sampling, seed=(seed + index) & limits.MAX_SEED))


def tokenize_prompt(body: TokenizeRequest) -> tuple[TextPrompt | ChatPrompt, FieldNames]:
    """What /tokenize is to tokenize."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt")
    if body.messages is not None:
        return (
            ChatPrompt(
                chat_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
            ),
            FieldNames(prompt="messages"),
        )
    if body.add_generation_prompt is not None:
        raise InvalidRequest(
            "'add_generation_prompt' needs 'messages'", param="add_generation_prompt"
        )
    return (
        TextPrompt(str(body.prompt), add_special_tokens=body.add_special_tokens is not False),
        FieldNames(),
    )
