"""How a stream becomes times and counts."""

from __future__ import annotations

import json

import pytest

from services.bench.outcome import AnswerReader, Outcome, StreamFailed, error_message


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": finish_reason}])


def delta(**fields: object) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13})
DONE = b"data: [DONE]\n\n"


def read(*chunks: tuple[float, bytes]) -> Outcome:
    outcome = Outcome(sent_at=10.0)
    reader = AnswerReader(outcome)
    for at, data in chunks:
        reader.feed(data, at)
    reader.end()
    return outcome


def test_times_and_counts_of_a_completion() -> None:
    outcome = read(
        (10.5, text("a")),
        (10.7, text("b") + text("c")),
        (11.2, text("", "length") + USAGE + DONE),
    )
    assert (outcome.prompt_tokens, outcome.output_tokens) == (5, 8)
    assert outcome.finish_reason == "length"
    assert outcome.ttft_seconds == pytest.approx(0.5)
    assert outcome.e2el_seconds == pytest.approx(1.2)
    assert outcome.itl_seconds == pytest.approx([0.2, 0.0])
    assert outcome.tpot_seconds == pytest.approx(0.7 / 7)


def test_a_role_is_no_token_and_reasoning_is_one() -> None:
    outcome = read(
        (10.1, delta(role="assistant", content="")),
        (10.4, delta(reasoning_content="hm")),
        (10.6, delta(content="yes")),
        (10.7, DONE),
    )
    assert outcome.ttft_seconds == pytest.approx(0.4)
    assert outcome.output_tokens == 2  # no usage came: one for each event with text


def test_an_answer_without_text_has_its_first_token_at_the_end() -> None:
    outcome = read((11.0, text("", "stop") + DONE))
    assert outcome.ttft_seconds == outcome.e2el_seconds == pytest.approx(1.0)
    assert outcome.tpot_seconds is None


def test_a_stream_that_stops_in_the_middle_has_failed() -> None:
    with pytest.raises(StreamFailed, match="before the answer") as caught:
        read((10.5, text("a")))
    assert caught.value.kind == "disconnected"


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (event(error={"message": "stage 1 failed"}), "stream_error", "stage 1 failed"),
        (b"data: {oops\n\n", "malformed", "not JSON"),
        (b"data: [1]\n\n", "malformed", "not an object"),
    ],
)
def test_what_is_no_token_ends_the_stream(data: bytes, kind: str, words: str) -> None:
    with pytest.raises(StreamFailed, match=words) as caught:
        read((10.5, data))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "too\nlong", "code": 400}}, "too long"),
        ({"error": "no"}, "no"),
        ({"detail": "x"}, "{'detail': 'x'}"),
        ("<html>", "<html>"),
    ],
)
def test_the_words_of_an_error(body: object, words: str) -> None:
    assert error_message(body) == words
