"""How a request to a server can go wrong: one word or two for each kind, with which the reason of its record begins."""

from __future__ import annotations

REFUSED = "refused"
"""No connection: nobody listens, the name is unknown, the way is blocked."""
TLS = "tls"
"""A connection, but no trust: the certificate is not what it should be."""
RESET = "reset"
"""The connection broke before the answer was whole."""
CUT = "cut"
"""The answer ended in good order, but neither with a finish reason nor with [DONE]."""
MALFORMED = "malformed"
"""Bytes that are no HTTP, no event stream or no chunk of an answer."""
OVERSIZED = "oversized"
"""An event larger than any chunk of an answer can be."""
ERROR = "error"
"""The stream itself carries an error."""
EMPTY = "empty"
"""An answer that is whole and has no token."""
TIMEOUT = "timeout"
"""Not finished in the time a request has."""
CLIENT = "client"
"""The fault is this machine's: no more open files, say."""


def http(status: int) -> str:
    """An answer of another status than 200."""
    return f"http {status}"


class Fault(Exception):
    """What ended a request, by its kind and in words."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
