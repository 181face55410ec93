"""Bodies of the REST requests: names and types. Ranges are `gateway.frontend.params`'s task,
because gRPC shares them.

Types are strict (no "1" for 1, no true for 1) and unknown fields are refused,
as with OpenAI. Fields that OpenAI knows and this service cannot honour are
refused by name, unless their value asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sized
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.frontend import limits
from gateway.frontend.prompts import Role

UNSUPPORTED = "unsupported_parameter"
"""Type of the validation error for a known field that cannot be honoured."""

UNKNOWN = "unknown_parameter"
"""Type of the validation error for a field that nobody knows."""

# Field -> values that ask for nothing. None (JSON null) always does.
_NEUTRAL_COMMON: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
_NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = {"prompt_embeds": (), "suffix": ()}
# Accepted with any value: they change nothing that a client could see in an answer.
_WITHOUT_EFFECT = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)


def _drop_neutral(values: Any, neutral: dict[str, tuple[object, ...]], known: Iterable[str]) -> Any:
    if not isinstance(values, dict):
        return values
    # The first one only: pydantic would make an error of each, and a body may hold a million.
    allowed = {*known, *neutral, *_WITHOUT_EFFECT}
    unknown = next((name for name in values if name not in allowed), None)
    if unknown is not None:
        raise PydanticCustomError(UNKNOWN, "unknown parameter", {"param": unknown})
    for name, harmless in neutral.items():
        value = values.get(name)
        if value is None or any(type(value) is type(one) and value == one for one in harmless):
            continue
        hint = f"; it may be {json.dumps(harmless[0])} or absent" if harmless else ""
        raise PydanticCustomError(UNSUPPORTED, f"'{name}' is not supported{hint}", {"param": name})
    return {
        name: value
        for name, value in values.items()
        if name not in neutral and name not in _WITHOUT_EFFECT
    }


# Lengths are looked at before elements: a list may be a whole body long, and what is done
# with each of its elements is done on the event loop.


def _check_length(values: Sized, most: int) -> None:
    if len(values) > most:
        raise PydanticCustomError(
            "too_many", "has {count} entries; at most {most} work",
            {"count": len(values), "most": most},
        )  # fmt: skip


def _at_most(most: int) -> BeforeValidator:
    """A list's length, checked before its elements."""

    def check(value: Any) -> Any:
        if isinstance(value, list):
            _check_length(value, most)
        return value

    return BeforeValidator(check)


def _is_id_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {str}


def _check_stop(value: Any) -> Any:
    if isinstance(value, list):
        _check_length(value, limits.MAX_STOP_STRINGS)
    if value is None or isinstance(value, str) or _is_text_list(value):
        return value
    raise PydanticCustomError("stop_type", "must be a string or a list of strings")


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str) or _is_id_list(value):
        return value
    if isinstance(value, list):
        _check_length(value, limits.MAX_PROMPTS_PER_REQUEST)
        if _is_text_list(value) or all(map(_is_id_list, value)):
            return value
    raise PydanticCustomError(
        "prompt_type",
        "must be a string, a list of strings, a list of token ids or a list of such lists",
    )


def _check_content(value: Any) -> Any:
    """Text, or OpenAI's list of parts, of which only text parts can be served."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    _check_length(value, limits.MAX_CONTENT_PARTS)
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "content_part",
                f"part {index} is not of type 'text'; this service takes text only",
            )
        text = part.get("text")
        if not isinstance(text, str) or set(part) != {"type", "text"}:
            raise PydanticCustomError(
                "content_part", f"part {index} must have exactly a 'type' and a string 'text'"
            )
        texts.append(text)
    return "\n".join(texts)


def _check_logit_bias(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias_type", "must be an object of token ids to numbers")
    _check_length(value, limits.MAX_LOGIT_BIAS_ENTRIES)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise PydanticCustomError("logit_bias_key", "has a key that is no token id")
        if type(bias) not in (int, float) or abs(bias) > 1e300:
            raise PydanticCustomError("logit_bias_value", "has a value that is no usable number")
        biases[int(key)] = float(bias)
    return biases


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": _TEXT}

Stop = Annotated[
    Any,
    BeforeValidator(_check_stop),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS, {"type": "null"}]}),
]
PromptField = Annotated[
    Any,
    BeforeValidator(_check_prompt),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
Content = Annotated[
    Any,
    BeforeValidator(_check_content),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}]}),
]
_BIASES = {"type": "object", "additionalProperties": {"type": "number"}}
LogitBias = Annotated[
    Any,
    BeforeValidator(_check_logit_bias),
    WithJsonSchema({"anyOf": [_BIASES, {"type": "null"}]}),
]
StopIds = Annotated[list[int] | None, FailFast(), _at_most(limits.MAX_STOP_TOKEN_IDS)]


class Body(BaseModel):
    """Strict in types, closed in names."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        return _drop_neutral(values, cls.neutral, cls.model_fields)


class StreamOptions(Body):
    """What a stream says besides its pieces."""

    include_usage: bool | None = Field(None, description="Adds a last chunk with token counts.")


class SamplingBody(Body):
    """What chat and text completions share."""

    model: str | None = Field(None, description="Served model name; absent means the one served.")
    temperature: float | None = Field(None, description="0 is greedy; 0 to 2.")
    top_p: float | None = Field(None, description="Nucleus mass, above 0 and at most 1.")
    top_k: int | None = Field(None, description="Most likely tokens to keep; 0 or -1 keeps all.")
    min_p: float | None = Field(None, description="Least share of the best token's probability.")
    seed: int | None = Field(None, description="Makes the answer repeatable; 0 to 2^64 - 1.")
    presence_penalty: float | None = Field(None, description="-2 to 2.")
    frequency_penalty: float | None = Field(None, description="-2 to 2.")
    repetition_penalty: float | None = Field(None, description="Above 0; 1 is off.")
    logit_bias: LogitBias = Field(None, description="Token id to bias, -100 to 100.")
    max_tokens: int | None = Field(None, description="Most tokens to generate.")
    n: int | None = Field(None, description="Choices for each prompt.")
    stop: Stop = Field(None, description="Texts that end a choice; not part of the output.")
    stop_token_ids: StopIds = Field(None, description="Token ids that end a choice.")
    ignore_eos: bool | None = Field(None, description="Goes on past the end-of-sequence ids.")
    priority: int | None = Field(
        None, description="The lower is served earlier; needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Only requests with the same salt share cached prefixes."
    )
    timeout: float | None = Field(
        None, description="Seconds until the answer must be complete, queue included; else 504."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: str | None = Field(None, description="Accepted, without effect.")


class ChatMessageBody(Body):
    """One turn."""

    role: Role
    content: Content
    name: str | None = None
    tool_call_id: str | None = None
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": (),
        "tool_calls": ([],),
    }


class ChatCompletionRequest(SamplingBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessageBody], FailFast(), _at_most(limits.MAX_MESSAGES)] = Field(
        description="At least one turn."
    )
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Reports the tokens' log probabilities.")
    top_logprobs: int | None = Field(None, description="Alternatives to report; 0 to 20.")
    neutral: ClassVar[dict[str, tuple[object, ...]]] = _NEUTRAL_COMMON | _NEUTRAL_CHAT


class CompletionRequest(SamplingBody):
    """POST /v1/completions"""

    prompt: PromptField = Field(description="Text, texts, token ids, or lists of them.")
    echo: bool | None = Field(None, description="Puts the prompt before the text.")
    logprobs: int | None = Field(None, description="Alternatives to report; 0 to 20.")
    neutral: ClassVar[dict[str, tuple[object, ...]]] = _NEUTRAL_COMMON | _NEUTRAL_COMPLETION


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessageBody] | None, FailFast(), _at_most(limits.MAX_MESSAGES)] = (
        None
    )
    add_special_tokens: bool | None = Field(
        None, description="Absent means true for a prompt and false for messages."
    )
    add_generation_prompt: bool | None = Field(None, description="Absent means true.")
    return_token_strs: bool | None = Field(None, description="Adds the tokens as text.")
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "tools": ([],),
    }


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[int], FailFast(), _at_most(limits.MAX_DETOKENIZE_IDS)]
