"""docs/why-paged.md is what the commands in it say, and its words say no more than its numbers."""

from __future__ import annotations

import shlex

import shown
import why


def test_the_page_is_what_its_commands_say() -> None:
    assert why.doubts() == []
    text = why.page()
    assert text == why.PAGE.read_text(encoding="utf-8"), "make pages writes it again"
    for command in (
        why.FITS,
        why.FITS_GROUPED,
        why.FITS_GROUPED_LONG,
        *(c for s in why.SWEEPS.values() for c in s.commands),
    ):
        assert shown.block(command)[4:-4] in text


def test_a_command_over_several_lines_is_the_same_command() -> None:
    command = why.SWEEPS["chats"].commands[0]
    told = shown.block(command).removeprefix("```\n").removesuffix("\n```")
    assert "\n" in told
    assert shlex.split(told.replace("\\\n", "")) == shlex.split(command)
    assert max(map(len, told.split("\n"))) <= 116


def test_a_verdict_needs_the_whole_interval() -> None:
    def gain(low: float, high: float) -> str:
        return why._held({"low": low, "high": high})

    assert [gain(2.0, 4.0), gain(1.2, 1.9), gain(4.1, 5.0)] == ["holds", "less", "more"]
    assert [gain(1.9, 2.1), gain(3.0, 4.1), gain(1.0, 5.0)] == ["on the edge"] * 3
