"""Bodies as long as a body may be cost no more than their first mistake."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.frontend import limits
from gateway.rest.errors import invalid_request
from gateway.rest.schemas import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

TURN = {"role": "user", "content": "x"}
MANY = 20_000
ALMOST = limits.MAX_MESSAGES


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (DetokenizeRequest, {"tokens": ["a"] * MANY}, "'tokens[0]' must be a valid integer"),
        (
            DetokenizeRequest,
            {"tokens": [1] * (limits.MAX_DETOKENIZE_IDS + 1)},
            "'tokens' has 1048577 entries; at most 1048576 work",
        ),
        (ChatCompletionRequest, {"messages": [1] * ALMOST}, "'messages[0]' must be"),
        (ChatCompletionRequest, {"messages": [1] * MANY}, "'messages' has 20000 entries; at most"),
        (TokenizeRequest, {"messages": [1] * ALMOST}, "'messages[0]' must be"),
        (TokenizeRequest, {"messages": [1] * MANY}, "'messages' has 20000 entries; at most"),
        (
            ChatCompletionRequest,
            {"messages": [TURN], "stop_token_ids": ["a"] * limits.MAX_STOP_TOKEN_IDS},
            "'stop_token_ids[0]' must be a valid integer",
        ),
        (
            ChatCompletionRequest,
            {"messages": [TURN], "stop_token_ids": ["a"] * MANY},
            "'stop_token_ids' has 20000 entries; at most",
        ),
        (
            ChatCompletionRequest,
            {"messages": [TURN], "stop": [1] * MANY},
            "'stop' has 20000 entries; at most",
        ),
        (
            ChatCompletionRequest,
            {"messages": [TURN], "logit_bias": dict.fromkeys(map(str, range(MANY)), "a")},
            "'logit_bias' has 20000 entries; at most",
        ),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [1] * MANY}]},
            "'messages[0].content' has 20000 entries; at most",
        ),
        (CompletionRequest, {"prompt": [[]] * MANY}, "'prompt' has 20000 entries; at most"),
        (
            CompletionRequest,
            {"prompt": "x"} | dict.fromkeys(map(str, range(MANY)), 1),
            "unknown parameter '0'",
        ),
        (
            CompletionRequest,
            {"prompt": "x", "stream_options": dict.fromkeys(map(str, range(MANY)), 1)},
            "unknown parameter 'stream_options.0'",
        ),
    ],
)
def test_one_mistake_is_found_and_named(
    kind: type[Body], values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(values)
    assert caught.value.error_count() == 1
    assert invalid_request(caught.value.errors()).message.startswith(expected)


def test_what_is_long_enough_still_passes() -> None:
    body = ChatCompletionRequest.model_validate(
        {
            "messages": [TURN] * limits.MAX_MESSAGES,
            "stop_token_ids": [1] * limits.MAX_STOP_TOKEN_IDS,
            "stop": ["x"] * limits.MAX_STOP_STRINGS,
        }
    )
    assert len(body.messages) == limits.MAX_MESSAGES
    # Token ids of one prompt are as many as the context length allows.
    assert CompletionRequest.model_validate({"prompt": [1] * MANY}).prompt == [1] * MANY
