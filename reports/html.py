"""The page: one self-contained HTML file about a run, without script or network, made of the run folder alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError
from kvbench.metrics.store import RunFolder
from kvbench.reports.charts import figures
from kvbench.reports.columns import answer_columns, device_columns, pool_columns
from kvbench.reports.context import checks, evidence, headline_facts, no_device_figures, provenance, reasons
from kvbench.reports.definitions import EXTRAS, RATE, SAMPLES, definitions
from kvbench.reports.figure import looks
from kvbench.reports.groups import Results
from kvbench.reports.page_tables import cell_table, duel_table, memory_tables, meters, variant_tables
from kvbench.reports.sentence import find
from kvbench.reports.svg import DARK, LIGHT
from kvbench.reports.words import DASH

if TYPE_CHECKING:
    from markupsafe import Markup

_HERE = Path(__file__).parent
_FONTS = (
    '--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","PingFang SC","Hiragino Sans GB",'
    '"Microsoft YaHei","Noto Sans CJK SC",sans-serif;--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace'
)


def write_report(folder: RunFolder) -> Path:
    """Write the page into the run folder, whole or not at all; its path. KvbenchError where that is not possible."""
    text = render_report(folder)
    target = folder.path / "report.html"
    aside = target.with_name(f".{target.name}")
    try:
        aside.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        aside.replace(target)
    except OSError as error:
        raise KvbenchError(f"cannot write {target}: {error.strerror or error}; make the folder writable") from error
    return target


def render_report(folder: RunFolder) -> str:
    """The page of any run, however little of it there is. The same folder gives the same bytes."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("template.html").render(_content(folder)) + "\n"


def _content(folder: RunFolder) -> dict[str, Any]:
    results = Results.of(folder)
    command = folder.manifest.get("command")
    finding = find(results, folder.manifest)
    why, why_at = meters(results)
    columns = (*answer_columns(results), *pool_columns(results), *device_columns(results))
    terms = {column.key for column in columns}
    terms |= {EXTRAS} if any(variant.extras for variant in results.variants) else set()
    terms |= {RATE} if any(row.get(RATE) is not None for row in results.ok) else set()
    terms |= {SAMPLES} if any(context.samples > 1 for context in results.contexts) else set()
    content: dict[str, Any] = {
        "css": _css(),
        "run_name": folder.path.resolve().name,
        "evidence": evidence(results),
        "label": f" ({results.label})" if results.label else "",
        "facts": headline_facts(folder, results),
        "finding": finding,
        "headline": _coloured(finding.headline, results),
        "figures": figures(folder, results),
        "meters": why,
        "meters_at": why_at,
        "checks": checks(folder, results),
        "reasons": reasons(results),
        "origin": provenance(folder, results),
        "tables": variant_tables(results),
        "spread": any(len(group.ok) > 1 for group in results.groups),
        "memory": memory_tables(results),
        "no_device_figures": no_device_figures(folder.manifest),
        "duels": duel_table(results),
        "cells": cell_table(results),
        "definitions": definitions(terms),
        "command": shlex.join(map(str, command)) if isinstance(command, list) and command else DASH,
    }
    names = {"tables": "By load", "memory": "Memory", "duels": "Side by side", "cells": "Every cell"}
    shown = {key: name for key, name in names.items() if content[key]}
    return content | {"sections": [*shown.items(), ("definitions", "Definitions"), ("made", "Command")]}


def _css() -> Markup:
    """The tokens of both themes and the style sheet; print is always light."""
    from markupsafe import Markup

    light, dark = (_variables(tokens) for tokens in (LIGHT, DARK))
    themes = (
        f":root{{color-scheme:light;{light};{_FONTS}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}\n"
    )
    return Markup(themes + (_HERE / "style.css").read_text(encoding="utf-8"))


def _variables(tokens: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in tokens.items())


def _coloured(text: str, results: Results) -> Markup:
    """The variants' names in their colours."""
    from markupsafe import Markup, escape

    tokens = {str(escape(results.name(variant))).lower(): look.token for variant, look in looks(results).items()}
    names = "|".join(re.escape(name) for name in sorted(tokens, key=len, reverse=True))

    def span(name: re.Match[str]) -> str:
        return f'<span class="{tokens[name[0].lower()]}">{name[0]}</span>'

    text = str(escape(text))
    return Markup(re.sub(rf"\b(?:{names})\b", span, text, flags=re.IGNORECASE) if names else text)
