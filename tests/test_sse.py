"""Server-sent events: however the bytes are cut, the same events come out, and rubbish is a fault."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.workloads import sse
from kvbench.workloads.faults import Fault
from kvbench.workloads.sse import Events


def events(*chunks: bytes) -> list[bytes]:
    stream = Events()
    found = [event for chunk in chunks for event in stream.feed(chunk)]
    return [*found, *stream.close()]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\r\n\r\n", [b"a"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b": a comment\n\nevent: x\nid: 1\nretry: 5\ndata: a\n\n", [b"a"]),
        (b"event: x\n\n\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a", [b"a"]),
        (b"data: a\r\ndata: b\r", [b"a\nb"]),
        (b"", []),
    ],
)
def test_events_by_the_standard(text: bytes, found: list[bytes]) -> None:
    assert events(text) == found
    assert events(*(bytes([byte]) for byte in text)) == found


@given(
    st.lists(st.lists(st.text("ab: ", max_size=4), min_size=1, max_size=3), max_size=5),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_cuts_change_nothing(wanted: list[list[str]], end: bytes, cuts: list[int]) -> None:
    text = b"".join(b"".join(f"data: {line}".encode() + end for line in lines) + end for lines in wanted)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[first:last] for first, last in pairwise(edges)]
    assert events(*pieces) == ["\n".join(lines).encode() for lines in wanted]


@pytest.mark.parametrize("text", [b"oops\n", b"{}\n", b"datum: a\n", b"<html>\n"])
def test_rubbish_is_a_fault_after_what_came_before(text: bytes) -> None:
    stream = Events().feed(b"data: a\n\n" + text)
    assert next(stream) == b"a"
    with pytest.raises(Fault, match="malformed: a line that belongs to no event"):
        next(stream)


def test_an_event_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MOST_BYTES", 10)
    assert events(b"data:" + b"x" * 10 + b"\n\n") == [b"x" * 10]
    for text in (b"data:" + b"x" * 11 + b"\n\n", b"data:" + b"x" * 6, b"data:xxxxxx\ndata:xxxxxx\n"):
        with pytest.raises(Fault, match="oversized: an event of"):
            events(text)
