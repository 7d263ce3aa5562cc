"""docs/cases.md says which test shows which case: every test it names is there and carries the thread's name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "cases.md").read_text()
ROWS = [
    (thread, re.findall(r"`([^`]+)`", tests))
    for thread, _, tests in re.findall(r"^\| ([^|]*(?:#\d+|\(source\))) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
]


def function(test: str) -> str:
    """The text of a function that is named as `file::name`, from its `def` on."""
    file, name = test.split("::")
    text = (ROOT / "tests" / file).read_text()
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return "\n".join(text.splitlines()[found.lineno - 1 : found.end_lineno])


@pytest.mark.parametrize(("thread", "tests"), ROWS, ids=[thread for thread, _ in ROWS])
def test_the_tests_of_a_case_are_there_and_name_it(thread: str, tests: list[str]) -> None:
    assert tests, "no test"
    for test in tests:
        assert test.split("::")[1].startswith("test_")
        assert re.search(rf"(?<![\w-]){re.escape(thread)}(?!\d)", function(test)), f"{test} does not name {thread}"


def test_each_case_has_one_row_and_every_row_is_read() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("| thread", "| ---"))]
    assert len({thread for thread, _ in ROWS}) == len(ROWS) == len(lines) > 15


@pytest.mark.parametrize(("part", "least"), [("Engine", 16), ("Load and statistics", 16), ("Planner", 7)])
def test_no_case_is_forgotten(shared_data: Path, part: str, least: int) -> None:
    """Every thread of these tables of the list that this page answers to has a row here."""
    listed = shared_data.parent / "cases.md"
    if not listed.is_file():
        pytest.skip(f"no list of cases at {listed}")
    section = listed.read_text().split(f"## {part}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*(?:#\d+|\(source\))[^|]*) \|", section, re.MULTILINE)
    assert len(rows) >= least
    for row in rows:
        first, *others = row.split(", ")  # "vllm PR#1, PR#2"
        for thread in (first, *(f"{first.split()[0]} {other}" for other in others)):
            assert thread in dict(ROWS), f"{thread} has no row"
