"""The findings of `kvbench doctor`: for people a sign, a topic and a sentence each, for programs flat rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.reports.plain import as_markdown
from kvbench.reports.tables import to_csv

SIGNS = {"ok": "✓", "note": "•", "wrong": "✗"}


def render(findings: Sequence[Mapping[str, Any]], fmt: str, width: int) -> str:
    """`table`, `markdown`, `csv` or `json` of rows with `topic`, `state`, `said` and `mend`."""
    if fmt == "json":
        return json.dumps(list(findings), indent=2, ensure_ascii=False) + "\n"
    if fmt == "csv":
        return to_csv([dict(one) for one in findings])
    if fmt == "markdown":
        head = ("topic", "state", "finding", "what to do")
        return as_markdown(
            [head, *(tuple(str(one[key]) for key in ("topic", "state", "said", "mend")) for one in findings)], range(4)
        )
    findings = [{key: _inert(str(text)) for key, text in one.items()} for one in findings]
    return "".join(_lines(one, max(len(one["topic"]) for one in findings), width) for one in findings)


def _lines(finding: Mapping[str, Any], topics: int, width: int) -> str:
    """One finding; what to do about it stands below, behind an arrow."""
    import textwrap

    start, room = f"{SIGNS[finding['state']]} {finding['topic'].ljust(topics)}  ", max(width, 60)
    below = " " * len(start)
    said = textwrap.fill(finding["said"], room, initial_indent=start, subsequent_indent=below, break_on_hyphens=False)
    if not finding["mend"]:
        return f"{said}\n"
    # a command must not be broken where it is copied from
    return f"{said}\n{below}→ {finding['mend']}\n"


def _inert(text: str) -> str:
    """Without what would move a terminal's cursor or its colours: names come from drivers and processes."""
    return "".join(char if char.isprintable() else "?" for char in text)
