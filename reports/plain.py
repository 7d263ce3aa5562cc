"""Plain tables of texts: a line of heads first, words to the left and numbers to the right."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Sequence

Lines = Sequence[Sequence[str]]
FIRST = (0,)


def as_markdown(lines: Lines, left: Container[int] = FIRST) -> str:
    """`left`: the columns of words."""
    head, *rest = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = [":---" if place in left else "---:" for place in range(len(head))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rest))


def as_text(lines: Lines, left: Container[int] = FIRST) -> str:
    """`left`: the columns of words."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for line in lines:
        cells = enumerate(zip(line, widths, strict=True))
        drawn = [cell.ljust(width) if place in left else cell.rjust(width) for place, (cell, width) in cells]
        text += "  ".join(drawn).rstrip() + "\n"
    return text


def wrapped(text: str, width: int, bullet: str = "") -> str:
    """A paragraph; further lines stand under its first word."""
    lines = textwrap.wrap(
        text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False
    )
    return "".join(f"{line}\n" for line in lines)
