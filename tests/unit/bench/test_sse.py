"""Server-sent events, however their bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench import sse
from services.bench.sse import SseParser


def parse(*chunks: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_the_kinds_of_line_ends(end: bytes) -> None:
    stream = end.join((b"data: one", b"", b"data:two", b"", b"data: [DONE]", b"", b"x"))
    assert parse(stream) == [b"one", b"two", b"[DONE]"]


def test_comments_other_fields_and_empty_lines_are_no_events() -> None:
    assert parse(b": ping\n\nevent: x\nid: 1\ndata: one\n\n\n\n") == [b"one"]


def test_several_data_lines_are_one_event() -> None:
    assert parse(b"data: a\ndata:\ndata: b\n\n") == [b"a\n\nb"]


def test_an_event_without_its_empty_line_has_not_ended() -> None:
    assert parse(b"data: one\n") == []


@given(
    events=st.lists(
        st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1), max_size=8
    ),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    data=st.data(),
)
def test_where_chunks_end_does_not_matter(
    events: list[str], end: bytes, data: st.DataObject
) -> None:
    lines = b"".join(b"data: " + event.encode() + end + end for event in events)
    stream = lines + b": bye" + end
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(*chunks) == [event.encode() for event in events]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    for chunks in ([b"data: " + b"x" * 200], [b"data: 123456789\n"] * 20):
        with pytest.raises(ValueError, match="100 bytes"):
            parse(*chunks)
