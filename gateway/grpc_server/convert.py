"""Between InferenceService's messages and the frontend's facts. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gateway.engine.types import ChoiceDelta, FinishReason, TokenLogprob
from gateway.frontend.chat_template import Message
from gateway.frontend.frontend import output_length
from gateway.frontend.params import SamplingInput, StopInput, check_n
from gateway.frontend.prompts import (
    ROLES,
    ChatPrompt,
    FieldNames,
    GenerationInput,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_message_count,
    template_role,
)
from services.errors import InvalidRequest
from stagemesh.v1 import inference_pb2, step_pb2

T = TypeVar("T")

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}


def field_names(request: inference_pb2.GenerateRequest) -> FieldNames:
    """Names for errors: those of the message."""
    return FieldNames(prompt=_prompt_field(request), logprobs="num_logprobs")


def _prompt_field(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
) -> str:
    return {"text": "text", "chat": "messages", "tokens": "token_ids"}.get(
        request.WhichOneof("prompt") or "", "prompt"
    )


def prompt_of(request: inference_pb2.GenerateRequest) -> Prompt:
    """The prompt; raises `InvalidRequest` where there is none."""
    which = request.WhichOneof("prompt")
    if which == "text":
        return TextPrompt(request.text)
    if which == "chat":
        return ChatPrompt(_messages(request.chat))
    if which == "tokens":
        return TokenPrompt(request.tokens.token_ids)
    raise InvalidRequest("the request has no prompt: set text, chat or tokens", param="prompt")


def tokenize_prompt_of(
    request: inference_pb2.TokenizeRequest,
) -> tuple[TextPrompt | ChatPrompt, FieldNames]:
    """The prompt to tokenize; raises `InvalidRequest` where there is none."""
    names = FieldNames(prompt=_prompt_field(request))
    special = request.add_special_tokens if request.HasField("add_special_tokens") else None
    which = request.WhichOneof("prompt")
    if which == "text":
        if request.HasField("add_generation_prompt"):
            raise InvalidRequest(
                "'add_generation_prompt' needs 'chat'", param="add_generation_prompt"
            )
        return TextPrompt(request.text, add_special_tokens=special is not False), names
    if which == "chat":
        prompt = ChatPrompt(
            _messages(request.chat),
            add_generation_prompt=(
                request.add_generation_prompt or not request.HasField("add_generation_prompt")
            ),
            add_special_tokens=bool(special),
        )
        return prompt, names
    raise InvalidRequest("the request has no prompt: set text or chat", param="prompt")


def _messages(chat: inference_pb2.ChatPrompt) -> tuple[Message, ...]:
    check_message_count(len(chat.messages))
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"'messages[{index}].role' must be one of {', '.join(sorted(ROLES))}",
                param=f"messages[{index}].role",
            )
    return tuple(
        Message(
            role=template_role(one.role),
            content=one.content,
            name=_given(one.name, one.HasField("name")),
            tool_call_id=_given(one.tool_call_id, one.HasField("tool_call_id")),
        )
        for one in chat.messages
    )


def _given(value: T, present: bool) -> T | None:
    return value if present else None


def input_of(request: inference_pb2.GenerateRequest) -> GenerationInput:
    """Everything but the prompt."""
    # Lists go on as they are: their lengths are checked before anything is done with them.
    sampling, stop = request.sampling, request.stop
    has = sampling.HasField
    return GenerationInput(
        sampling=SamplingInput(
            temperature=_given(sampling.temperature, has("temperature")),
            top_p=_given(sampling.top_p, has("top_p")),
            top_k=_given(sampling.top_k, has("top_k")),
            min_p=_given(sampling.min_p, has("min_p")),
            seed=_given(sampling.seed, has("seed")),
            presence_penalty=_given(sampling.presence_penalty, has("presence_penalty")),
            frequency_penalty=_given(sampling.frequency_penalty, has("frequency_penalty")),
            repetition_penalty=_given(sampling.repetition_penalty, has("repetition_penalty")),
            logit_bias=sampling.logit_bias,
            num_logprobs=_given(sampling.num_logprobs, has("num_logprobs")),
        ),
        stop=StopInput(
            max_tokens=_given(stop.max_tokens, stop.HasField("max_tokens")),
            stop=stop.stop,
            stop_token_ids=stop.stop_token_ids,
            ignore_eos=stop.ignore_eos,
        ),
        n=check_n(request.n or 1),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def response_of(delta: ChoiceDelta, request_id: str) -> inference_pb2.GenerateResponse:
    """One piece."""
    length = output_length(delta)
    response = inference_pb2.GenerateResponse(
        choice_index=delta.choice_index,
        text=delta.text,
        token_ids=delta.token_ids[:length],
        request_id=request_id,
    )
    if delta.logprobs:
        response.logprobs.extend(_logprobs(delta.logprobs[:length]))
    if delta.finish_reason is not None:
        response.finish_reason = _FINISH[delta.finish_reason]
        if isinstance(delta.stop_reason, str):
            response.stop_text = delta.stop_reason
        elif delta.stop_reason is not None:
            response.stop_token_id = delta.stop_reason
    return response


def _logprobs(logprobs: Sequence[TokenLogprob]) -> list[step_pb2.TokenLogprobs]:
    return [
        step_pb2.TokenLogprobs(
            logprob=one.logprob,
            top_token_ids=[token_id for token_id, _ in one.top],
            top_logprobs=[logprob for _, logprob in one.top],
        )
        for one in logprobs
    ]
