"""The page of every kind of run: well-formed, self-contained, safe with any name, and the same twice."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_reports_runs import add, both, make, refused, serve

from kvbench.errors import KvbenchError
from kvbench.metrics.store import RunFolder
from kvbench.reports import charts
from kvbench.reports.charts import figures
from kvbench.reports.figure import apart
from kvbench.reports.groups import Results
from kvbench.reports.html import render_report, write_report
from kvbench.reports.svg import DARK, LIGHT
from kvbench.reports.terminal import closing

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = '<script>alert("x")</script> $x$ & 中文'
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Holds a page against what all pages are: every tag closed in its turn, ids unique, headings in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.levels: list[int] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open
        assert len(self.ids) == len(set(self.ids))
        assert self.levels[0] == 1
        assert self.levels.count(1) == 1
        assert all(after <= before + 1 for before, after in zip(self.levels, self.levels[1:], strict=False))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def hostile(path: Path) -> RunFolder:
    folder = make(path, model={"name": HOSTILE}, device={"name": HOSTILE}, command=["kvbench", HOSTILE])
    for repeat in range(2):
        add(folder, HOSTILE, 5, repeat, serve("paged", 5, 20, 0.1), cell=f"x{repeat}")
    add(folder, "paged", 5, 0, status="failed", reason=HOSTILE, model=HOSTILE)
    return folder


def all_oom(path: Path) -> RunFolder:
    folder = make(path)
    for backend in ("contiguous", "paged"):
        add(folder, backend, 16, 0, status="oom", reason="the arena needs 9,000 bytes, the device has 8,000")
    return folder


def all_rejected(path: Path) -> RunFolder:
    folder = make(path)
    add(folder, "paged", 1, 0, refused(4), status="rejected", reason="no request finished; 4 of 4: too long")
    return folder


def one_cell(path: Path) -> RunFolder:
    folder = make(path)
    add(folder, "paged", None, 0, serve("paged", 1, 1, 0.1), request_rate=0.5, input_tokens=None, output_tokens=None)
    return folder


def gaps(path: Path) -> RunFolder:
    folder = both(path, loads=[1, 5, 10], repeats=2)
    add(folder, "contiguous", 20, 0, status="oom", reason="no room")
    add(folder, "paged", 20, 0, serve("paged", 20, 40, 0.1))
    return folder


def bare(path: Path) -> RunFolder:
    folder = RunFolder.create(path, {"model": None, "cells": None, "command": "?", "price": {"usd_per_hour": 2.5}})
    folder.write_cell("a", {"backend": "paged", "status": "ok"})
    return folder


RUNS: dict[str, Callable[[Path], RunFolder]] = {
    "usual": both,
    "hostile": hostile,
    "all out of memory": all_oom,
    "all rejected": all_rejected,
    "one cell": one_cell,
    "gaps": gaps,
    "bare": bare,
    "empty": lambda path: RunFolder.create(path, {}),
    "interrupted": lambda path: both(path, loads=[5], repeats=1, interrupted=True, cells=[{}] * 9),
}


@pytest.mark.parametrize("kind", RUNS)
def test_every_run_has_a_page_and_last_words(kind: str, tmp_path: Path) -> None:  # llm-d-benchmark#680
    folder = RUNS[kind](tmp_path / "run")
    text = render_report(folder)
    page = Page(text)
    assert "script" not in page.tags
    assert not re.search(r"""https?:|//|url\((?!#)|@import|\bsrc=""", text)
    assert set(re.findall(r'href="([^"]*)"', text)) - {f"#{name}" for name in page.ids} == set()
    assert "broken" not in re.findall(r'class="([^"]+)"', text) or kind == "bare"
    assert {"nan", "None", "inf"}.isdisjoint(re.findall(r"\w+", page.text))
    assert text == render_report(RunFolder.open(folder.path))
    assert closing(folder, folder.path / "report.html").endswith("report.html\n")
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
        assert len(svg) < 20_000


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    text = render_report(hostile(tmp_path / "run"))
    assert "<script" not in text
    assert Page(text).text.count(HOSTILE) >= 6  # model, device, headline, both charts, table, reason
    assert HOSTILE in closing(hostile(tmp_path / "again"), width=200)


def test_figures_are_the_same_twice_and_follow_the_theme(tmp_path: Path) -> None:
    folder = gaps(tmp_path / "run")
    first, second = figures(folder, Results.of(folder)), figures(folder, Results.of(folder))
    assert [figure.svg for figure in first] == [figure.svg for figure in second]
    assert len(first) == 3
    for figure in first:
        assert not re.search("#[0-9a-fA-F]{6}|font-family|§", figure.svg)
        used = set(re.findall(r"var\(--([\w-]+)\)", figure.svg))
        assert used <= LIGHT.keys() == DARK.keys()


@pytest.mark.parametrize("faster", [1.0, 2.0])
def test_a_title_claims_no_difference_that_is_not_proven(faster: float, tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], faster=faster)
    title = figures(folder, Results.of(folder))[0].title
    assert title.endswith("; no difference is proven") == (faster == 1.0)


def test_many_variants_leave_the_title_short_and_are_defined(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], repeats=1, faster=1.5)
    assert "+ prefix cache" not in render_report(folder) and ">samples<" not in render_report(folder)
    for number, reserve in enumerate(("declared", "pow2", "oracle")):
        add(folder, "contiguous", 5, 0, serve("contiguous", 5, 20, 0.2 + number / 10), reserve=reserve)
    extras: list[dict[str, Any]] = [{"prefix_caching": True}, {"preemption": "swap"}]
    for number, columns in enumerate(extras):
        add(folder, "paged", 5, 0, serve("paged", 5, 20, 0.3), cell=f"p{number}", samples=1, **columns)
    title = figures(folder, Results.of(folder))[0].title
    assert title == (
        "Paged reaches 75 output tokens/s, contiguous max 50, contiguous declared 25, 4 others less; "
        "no difference is proven"
    )
    text = render_report(folder)
    assert "+ static, + prefix cache, + swap" in text and "Paged + prefix cache" in text
    assert len(re.findall("<svg", text)) == 8
    Page(text)


def test_the_numbers_behind_the_charts(tmp_path: Path) -> None:
    """One wave of 5: 20, 25, 30 and 35 of 80 rows used, 35 at the end of each request's stay, 80 held."""
    folder = make(tmp_path / "run")
    add(folder, "contiguous", 5, 0, serve("contiguous", 5, 5, 0.1))
    speed, memory = figures(folder, Results.of(folder))
    assert speed.title == "Contiguous reaches 50 output tokens/s"
    assert speed.numbers == (("contiguous", (("5", "50.0", "–", "1"),)),)
    ((name, rows),) = memory.numbers
    assert memory.title == "Contiguous: tokens fill 34\u202f% of the KV memory"
    heads = ("from second", "used %", "reserved %", "never filled %", "rounding %", "free %")
    assert (name, memory.heads) == ("contiguous", heads)
    assert rows[::3] == tuple(
        (at, used, reserved, "56.2", "0.0", "0.0")
        for at, used, reserved in (
            ("0.00", "25.0", "18.8"),
            ("0.10", "31.2", "12.5"),
            ("0.20", "37.5", "6.2"),
            ("0.30", "43.8", "0.0"),
        )
    )


def test_a_figure_that_raises_is_a_box_and_the_rest_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#55664."""

    def broken(*_: object) -> None:
        raise ValueError("no <colour>\nleft")

    monkeypatch.setattr(charts, "throughput", broken)
    text = render_report(both(tmp_path / "run"))
    assert "ValueError: no &lt;colour&gt; left" in text
    assert text.count("<svg") == 2
    Page(text)


def test_damaged_records_cost_only_their_figure(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], repeats=1)
    (folder.path / "cells" / "paged-5-0" / "steps.parquet").write_bytes(b"not parquet")
    text = render_report(folder)
    assert text.count("<svg") == 2
    assert text.count('class="broken"') == 1


def test_140_cells_take_little_room(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    run = {backend: serve(backend, 5, 20, 0.1) for backend in ("contiguous", "paged")}
    for users in range(1, 15):
        for repeat, backend in product(range(5), run):
            add(folder, backend, users, repeat, run[backend])
    assert len(render_report(folder)) < 290_000


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = both(tmp_path / "run", loads=[5], repeats=1)
    path = write_report(folder)
    assert path == folder.path / "report.html"
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KvbenchError, match="No space left on device"):
        write_report(folder)
    assert path.read_bytes() == before


def test_a_page_needs_no_torch(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], repeats=1)
    script = (
        "import sys; from kvbench.metrics.store import RunFolder; from kvbench.reports.html import write_report;"
        "write_report(RunFolder.open(sys.argv[1])); assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script, str(folder.path)], cwd=ROOT, check=True)


def test_last_words(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], repeats=1)
    add(folder, "paged", 5, 1, status="oom", reason="needs 9 bytes,\nhas 8")
    text = closing(folder, Path("runs/a/report.html"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Measured: SmolLM2-135M · bfloat16, 2 CPU cores, 80 tokens of KV memory")
    for line in (
        "! 1 of 3 cells failed, out of memory",
        "! p99 from as few as 20 requests: below 299 the slowest alone decide it",
        "! paged at 5 users, 1 cell: needs 9 bytes, has 8",
        "! no price: give --price USD_PER_HOUR for $/1M out",
        "Report: runs/a/report.html",
    ):
        assert line in lines
    assert "\u202f" not in text


def test_names_beside_lines_lie_apart() -> None:
    assert apart([10.0, 12.0, 50.0], 12, 100) == [10.0, 22.0, 50.0]
    assert apart([95.0, 99.0], 12, 100) == [88.0, 100.0]


TEXT = "ink ink2 ink3 paged contiguous third fourth ok warn bad waste".split()


def luminance(token: str) -> float:
    """WCAG's relative luminance of `#rrggbb`."""
    channels = [int(token[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("tokens", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", TEXT)
def test_text_can_be_read_on_its_ground(tokens: dict[str, str], name: str) -> None:
    """WCAG contrast; the design asks for 4.6 to 1."""
    for ground in ("bg", "surface"):
        light, dark = sorted((luminance(tokens[name]), luminance(tokens[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.6
