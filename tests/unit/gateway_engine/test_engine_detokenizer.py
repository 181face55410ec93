"""Text in pieces is the text of the whole, and ends in front of a stop string."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tiny_tokenizers import byte_level, sentence_piece
from tokenizers import Tokenizer

from gateway.engine.detokenizer import Detokenizer, StopStringFilter

BYTE_LEVEL = byte_level()
SENTENCE_PIECE = sentence_piece()
END_ID = len(BYTE_LEVEL.get_vocab()) - 1


def ids(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text).ids


def piece_id(piece: str) -> int:
    token_id = SENTENCE_PIECE.token_to_id(piece)
    assert token_id is not None
    return token_id


def pieces(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, tuple(prompt))
    texts = [detokenizer.push(token_id).text for token_id in token_ids]
    return [*texts, detokenizer.flush().text]


def test_an_incomplete_character_is_held_back() -> None:
    assert pieces(BYTE_LEVEL, ids("hi"), ids("aé€b")) == ["a", "", "é", "", "", "€", "b", ""]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    assert pieces(BYTE_LEVEL, ids("hi"), ids("a€")[:-1]) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text() -> None:
    assert "".join(pieces(BYTE_LEVEL, ids("hi"), [*ids("ab"), END_ID, *ids("c")])) == "abc"


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    assert pieces(SENTENCE_PIECE, [piece_id("▁the")], [piece_id("▁Paris")]) == [" Paris", ""]


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 256), max_size=9),
    text=st.text(max_size=12),
    noise=st.lists(st.integers(0, 256), max_size=12),
)
def test_pieces_make_the_whole_byte_level(prompt: list[int], text: str, noise: list[int]) -> None:
    prompt = [*prompt, *ids(".")]
    token_ids = [*ids(text), *noise]
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces(BYTE_LEVEL, prompt, token_ids)) == whole


def byte_ids(data: bytes) -> list[int]:
    return [piece_id(f"<0x{byte:02X}>") for byte in data]


PIECE_IDS = st.integers(257, 266)
BYTE_IDS = st.binary(max_size=4).filter(lambda data: b"!" not in data).map(byte_ids)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(PIECE_IDS, max_size=8),
    parts=st.lists(
        st.text(min_size=1, max_size=3).map(lambda text: byte_ids(text.encode()))
        | PIECE_IDS.map(lambda piece: [piece]),
        max_size=8,
    ),
)
def test_pieces_make_the_whole_sentence_piece(prompt: list[int], parts: list[list[int]]) -> None:
    prompt = [*prompt, piece_id("a")]
    token_ids = [token_id for part in parts for token_id in part]
    before = SENTENCE_PIECE.decode(prompt, skip_special_tokens=True)
    whole = SENTENCE_PIECE.decode([*prompt, *token_ids], skip_special_tokens=True)
    assert before + "".join(pieces(SENTENCE_PIECE, prompt, token_ids)) == whole


def test_a_broken_run_of_bytes_does_not_take_text_back() -> None:
    """The library's stream raises here: "Invalid prefix encountered while decoding stream"."""
    token_ids = [*byte_ids(b"\n\xf0\x9f"), piece_id("s")]
    assert pieces(SENTENCE_PIECE, [258], token_ids) == ["\n", "", "", "\ufffd\ufffds", ""]
    assert pieces(SENTENCE_PIECE, [258], token_ids[:-1]) == ["\n", "", "", "\ufffd\ufffd"]
    token_ids = byte_ids("é".encode() + b"\xf0")
    assert pieces(SENTENCE_PIECE, [258], token_ids) == ["", "é", "", "\ufffd"]


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(BYTE_IDS | PIECE_IDS.map(lambda piece: [piece]), max_size=10))
def test_no_token_is_lost_between_broken_bytes(parts: list[list[int]]) -> None:
    mark = piece_id("!")
    token_ids = [token_id for part in parts for token_id in [*part, mark]]
    text = "".join(pieces(SENTENCE_PIECE, [mark], token_ids))
    assert text.count("!") == token_ids.count(mark)
    assert text.endswith("!") or not parts


def run_filter(stops: tuple[str, ...], parts: list[str]) -> tuple[list[str], str | None]:
    stop_filter = StopStringFilter(stops)
    texts = []
    for part in parts:
        delta = stop_filter.push(part)
        texts.append(delta.text)
        if delta.stop_string is not None:
            return texts, delta.stop_string
    return [*texts, stop_filter.flush()], None


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (("END",), ["a", "E", "N", "D", "x"], (["a", "", "", ""], "END")),
        (("END",), ["aE", "N", "x"], (["a", "", "ENx", ""], None)),
        (("END",), ["aEN"], (["a", "EN"], None)),
        (("aab",), ["aa", "ab"], (["", "a"], "aab")),
        (("\n\n", "\n"), ["x\n\ny"], (["x"], "\n")),
        (("cd", "bcde"), ["abcde"], (["ab"], "cd")),
        (("bcd", "cd"), ["abcd"], (["a"], "bcd")),
        ((), ["a", "b"], (["a", "b", ""], None)),
    ],
)
def test_stop_strings(
    stops: tuple[str, ...], parts: list[str], expected: tuple[list[str], str | None]
) -> None:
    assert run_filter(stops, parts) == expected


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Letter by letter: the first stop string that is complete cuts, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    parts=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_the_cut_does_not_depend_on_the_parts(stops: tuple[str, ...], parts: list[str]) -> None:
    texts, stop = run_filter(stops, parts)
    assert ("".join(texts), stop) == first_stop("".join(parts), stops)


def test_a_stop_string_across_tokens_and_characters() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, tuple(ids("hi")), ("é!",))
    deltas = [detokenizer.push(token_id) for token_id in ids("aé!")]
    assert [delta.text for delta in deltas] == ["a", "", "", ""]
    assert deltas[-1].stop_string == "é!"


def test_held_text_comes_at_the_end() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, tuple(ids("hi")), ("END",))
    texts = [detokenizer.push(token_id).text for token_id in ids("aEN")]
    assert texts == ["a", "", ""]
    assert detokenizer.flush().text == "EN"
