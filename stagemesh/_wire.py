"""Between the SDK's types and the wire's messages. Pure functions; private to the SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stagemesh.errors import InvalidRequest, StagemeshError
from stagemesh.types import (
    ChatMessage,
    Choice,
    Chunk,
    FinishReason,
    Generation,
    ModelInfo,
    Tokenization,
    TokenLogprob,
    Usage,
)
from stagemesh.v1 import inference_pb2, step_pb2

Messages = Sequence[ChatMessage | Mapping[str, str]]

_FINISH: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
}
_NEEDED = frozenset(("role", "content"))
_KNOWN = _NEEDED | {"name", "tool_call_id"}


@dataclass(frozen=True, slots=True)
class Options:
    """What `generate` and `stream` take besides the prompt; None leaves it to the model."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None


def generate_request(
    prompt: str | None,
    messages: Messages | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> inference_pb2.GenerateRequest:
    """The message; raises `InvalidRequest` for what it cannot hold (negative ids, wrong types)."""
    if sum(one is not None for one in (prompt, messages, token_ids)) != 1:
        raise InvalidRequest("give exactly one of prompt, messages and token_ids", param="prompt")
    if options.n < 1:
        raise InvalidRequest(f"'n' must be at least 1; it is {options.n}", param="n")
    stop = (options.stop,) if isinstance(options.stop, str) else options.stop
    try:
        request = inference_pb2.GenerateRequest(
            model=options.model or "",
            n=options.n,
            priority=options.priority,
            cache_salt=options.cache_salt or "",
            request_id=options.request_id or "",
            sampling=step_pb2.SamplingParams(
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                min_p=options.min_p,
                seed=options.seed,
                presence_penalty=options.presence_penalty,
                frequency_penalty=options.frequency_penalty,
                repetition_penalty=options.repetition_penalty,
                logit_bias=options.logit_bias,
                num_logprobs=options.logprobs,
            ),
            stop=inference_pb2.StopConditions(
                max_tokens=options.max_tokens,
                stop=stop,
                stop_token_ids=options.stop_token_ids,
                ignore_eos=options.ignore_eos,
            ),
        )
        if prompt is not None:
            request.text = prompt
        elif messages is not None:
            request.chat.CopyFrom(_chat(messages))
        else:
            request.tokens.CopyFrom(inference_pb2.TokenPrompt(token_ids=token_ids))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    return request


def tokenize_request(
    prompt: str | None,
    messages: Messages | None,
    add_special_tokens: bool | None,
    add_generation_prompt: bool | None,
    model: str | None,
    *,
    with_strs: bool = False,
) -> inference_pb2.TokenizeRequest:
    """The message; raises `InvalidRequest` where it cannot hold the arguments."""
    if (prompt is None) == (messages is None):
        raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
    try:
        request = inference_pb2.TokenizeRequest(
            model=model or "",
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            return_token_strs=with_strs,
        )
        if prompt is not None:
            request.text = prompt
        elif messages is not None:
            request.chat.CopyFrom(_chat(messages))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str | None
) -> inference_pb2.DetokenizeRequest:
    """The message; raises `InvalidRequest` where it cannot hold the arguments."""
    try:
        return inference_pb2.DetokenizeRequest(model=model or "", token_ids=token_ids)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}", param="token_ids") from error


def _chat(messages: Messages) -> inference_pb2.ChatPrompt:
    chat = inference_pb2.ChatPrompt()
    for index, message in enumerate(messages):
        if isinstance(message, ChatMessage):
            chat.messages.add(
                role=message.role,
                content=message.content,
                name=message.name,
                tool_call_id=message.tool_call_id,
            )
        elif isinstance(message, Mapping) and _NEEDED <= message.keys() <= _KNOWN:
            chat.messages.add(**message)
        else:
            raise InvalidRequest(
                f"messages[{index}] must be a ChatMessage or have 'role', 'content', and "
                "nothing else but 'name' and 'tool_call_id'",
                param="messages",
            )
    return chat


def chunk_of(response: inference_pb2.GenerateResponse) -> Chunk:
    """One piece of a stream."""
    usage = None
    if response.HasField("usage"):
        usage = Usage(
            response.usage.prompt_tokens,
            response.usage.completion_tokens,
            response.usage.cached_prompt_tokens,
        )
    token_ids = tuple(response.token_ids)
    return Chunk(
        choice_index=response.choice_index,
        text=response.text,
        token_ids=token_ids,
        logprobs=tuple(
            TokenLogprob(
                token_id, one.logprob, tuple(zip(one.top_token_ids, one.top_logprobs, strict=True))
            )
            for token_id, one in zip(token_ids, response.logprobs, strict=False)
        ),
        finish_reason=_FINISH.get(response.finish_reason),
        usage=usage,
        request_id=response.request_id,
        stop_reason=_stop_reason(response),
    )


def _stop_reason(response: inference_pb2.GenerateResponse) -> str | int | None:
    which = response.WhichOneof("stop_reason")
    if which is None:
        return None
    return response.stop_text if which == "stop_text" else response.stop_token_id


def tokenization_of(response: inference_pb2.TokenizeResponse) -> Tokenization:
    """Ids and their texts."""
    return Tokenization(
        tuple(response.token_ids), tuple(response.token_strs), response.max_model_len
    )


def models_of(response: inference_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """The served names."""
    return tuple(ModelInfo(one.id, one.max_model_len, one.created) for one in response.models)


@dataclass(slots=True)
class _GrowingChoice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class GenerationBuilder:
    """Puts the chunks of a stream together."""

    def __init__(self, n: int) -> None:
        self._choices = [_GrowingChoice() for _ in range(n)]
        self._usage: Usage | None = None
        self._request_id = ""

    def take(self, chunk: Chunk) -> None:
        """Adds one chunk."""
        choice = self._choices[chunk.choice_index]
        choice.texts.append(chunk.text)
        choice.token_ids.extend(chunk.token_ids)
        choice.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            choice.finish_reason = chunk.finish_reason
            choice.stop_reason = chunk.stop_reason
        self._usage = chunk.usage or self._usage
        self._request_id = chunk.request_id

    def build(self) -> Generation:
        """The whole; raises `StagemeshError` where the stream ended before its end."""
        choices: list[Choice] = []
        for choice in self._choices:
            if choice.finish_reason is None or self._usage is None:
                raise StagemeshError("the service ended the stream before the answer was complete")
            choices.append(
                Choice(
                    "".join(choice.texts),
                    tuple(choice.token_ids),
                    tuple(choice.logprobs),
                    choice.finish_reason,
                    choice.stop_reason,
                )
            )
        return Generation(tuple(choices), self._usage or Usage(0, 0), self._request_id)
