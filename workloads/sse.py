"""Server-sent events out of the bytes of a response, however the network cut them.

After the WHATWG's definition: lines end with LF, CR or CRLF, `data:` lines of one event are joined, a blank line ends
it, and what begins with a colon is a comment. Stricter in two things, since a benchmark must not pass over rubbish: a
line that is no field of the standard and an event beyond `MOST_BYTES` are faults.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.workloads.faults import MALFORMED, OVERSIZED, Fault

MOST_BYTES = 4 * 2**20
"""No chunk of a token stream is nearly as large; it keeps a broken server from filling the client's memory."""

_FIELDS = (b"data", b"event", b"id", b"retry")


class Events:
    """The events of one response. Feed it bytes as they come; each call gives the data of the events now complete, all
    that came before a fault first."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Raises Fault where the stream is no event stream."""
        *lines, self._rest = _lines(self._rest + chunk)
        for line in lines:
            if line:
                self._line(line)
            elif self._data:
                yield self._take()
        if self._size + len(self._rest) > MOST_BYTES:
            raise Fault(OVERSIZED, f"an event of more than {MOST_BYTES:,} bytes")

    def close(self) -> Iterator[bytes]:
        """What was left when the stream ended: some servers spare the last blank line."""
        yield from self.feed(b"\n\n")

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if not name:
            return  # a comment, which keeps the connection open
        if name.removeprefix(b"\xef\xbb\xbf") not in _FIELDS:
            raise Fault(MALFORMED, f"a line that belongs to no event: {line[:80].decode(errors='replace')!r}")
        if name.endswith(b"data"):
            self._size += len(value)
            self._data.append(value.removeprefix(b" "))

    def _take(self) -> bytes:
        data, self._data, self._size = b"\n".join(self._data), [], 0
        if len(data) > MOST_BYTES:
            raise Fault(OVERSIZED, f"an event of {len(data):,} bytes, more than {MOST_BYTES:,}")
        return data


def _lines(data: bytes) -> list[bytes]:
    """The lines of `data`, the last one unfinished. A CR at the very end waits: an LF may follow."""
    if b"\r" not in data:
        return data.split(b"\n")
    held = data.endswith(b"\r")
    lines = (data[:-1] if held else data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    if held:
        lines[-1] += b"\r"
    return lines
