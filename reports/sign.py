"""One sign of trust or of warning, as the page and the terminal show it."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, WARNING = "ok", "warn"


@dataclass(frozen=True, slots=True)
class Check:
    """`kind` is GOOD or WARNING."""

    kind: str
    text: str
