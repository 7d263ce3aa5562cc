"""The result of `kvbench attention`: a sentence, a table, and for those who keep it a CSV and a chart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.reports.plain import as_markdown, as_text, wrapped
from kvbench.reports.svg import LIGHT
from kvbench.reports.tables import to_csv
from kvbench.reports.words import DASH, listing, number, percent

Row = Mapping[str, Any]

HEADS = ("", "batch", "context", "way", "median ms", "spread", "of the ceiling", "against contiguous")
WORDS = (0, 3)
CEILING = {"decode": "reads", "prefill": "multiplications"}


def render(rows: Sequence[Row], facts: Row, fmt: str, width: int = 100) -> str:
    """`table`, `markdown`, `csv` or `json`; the last two at full precision, in CSV with the device's facts in each."""
    if fmt == "json":
        return json.dumps({**facts, "rows": list(rows)}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if fmt == "csv":
        return to_csv([{**facts, **row} for row in rows])
    lines = [HEADS, *(_line(row, rows) for row in rows)]
    said = [headline(rows, facts), device_line(facts)]
    reasons = dict.fromkeys(f"{_way(row)}: {row['reason']}" for row in rows if row["reason"])
    if fmt == "markdown":
        notes = [*said[1:], NOTE, *reasons]
        return said[0] + "\n\n" + as_markdown(lines, WORDS) + "\n" + "".join(f"- {note}\n" for note in notes)
    text = wrapped(said[0], width) + wrapped(said[1], width) + "\n" + as_text(lines, WORDS) + "\n"
    return text + "".join(wrapped(note, width, "- ") for note in (NOTE, *reasons))


NOTE = (
    "decode: every key and value read once, against the measured reads; prefill: the products under a causal mask, "
    "against the measured multiplications of a large matrix. The caches are emptied before each repeat. Our two "
    "layouts also write the new keys and values; torch's own ways find theirs side by side. More than 100 %: the "
    "machine changed between the two measurements, or its caches helped"
)


def headline(rows: Sequence[Row], facts: Row) -> str:
    """What the largest decode problem says."""
    decode = [row for row in rows if row["kind"] == "decode" and row["median_s"]]
    if not decode:
        return "Nothing could be measured."
    largest = max(decode, key=lambda row: row["kv_bytes"])
    same = [
        row for row in decode if (row["batch"], row["context_tokens"]) == (largest["batch"], largest["context_tokens"])
    ]
    ours = [row for row in same if row["way"] in ("contiguous", "paged")]
    parts = [f"{_way(row)} at {percent(row['share_of_ceiling'])}" for row in ours]
    others = [row for row in same if row["way"] not in ("contiguous", "paged")]
    best = min(others, key=lambda row: row["median_s"], default=None)
    beside = "" if best is None else f"; {best['way']} at {percent(best['share_of_ceiling'])}"
    problem = f"{largest['batch']} x {number(largest['context_tokens'])} tokens"
    ways = f"{facts['attention']} attention reads {listing(parts)} of what {facts['device']} can read"
    return f"Decoding {problem}, {ways}{beside}."


def device_line(facts: Row) -> str:
    """The ceilings, and how far their repeats lie apart."""
    reads = f"{facts['read_bytes_per_s'] / 1e9:,.0f} GB/s (± {percent(facts['read_spread'] / 2)})"
    return (
        f"{facts['device']}: reads {reads}, "
        f"copies {facts['copy_bytes_per_s'] / 1e9:,.0f} GB/s, multiplies {facts['flops_per_s'] / 1e9:,.0f} GFLOP/s in "
        f"{facts['dtype']}; {facts['model']}: {facts['heads']} query and {facts['kv_heads']} key heads of "
        f"{facts['head_dim']}."
    )


def _way(row: Row) -> str:
    return row["way"] if row["block_size"] is None else f"{row['way']}, blocks of {row['block_size']}"


def _line(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    problem = (row["kind"], row["batch"], row["context_tokens"])
    base = next(
        (
            one["median_s"]
            for one in rows
            if (one["kind"], one["batch"], one["context_tokens"]) == problem and one["way"] == "contiguous"
        ),
        None,
    )
    if row["median_s"] is None:
        return (*map(str, problem), _way(row), DASH, DASH, DASH, DASH)
    return (
        row["kind"],
        number(row["batch"]),
        number(row["context_tokens"]),
        _way(row),
        number(row["median_s"] * 1e3, 3),
        percent(row["spread"]),
        f"{percent(row['share_of_ceiling'])} of {CEILING[row['kind']]}",
        DASH if base is None else f"{number(row['median_s'] / base, 2)} x",
    )


def write(folder: Path, rows: Sequence[Row], facts: Row) -> None:
    """`attention.csv` and `attention.svg` in a folder that need not be there yet. KvbenchError where that fails."""
    from kvbench.errors import KvbenchError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "attention.csv").write_text(render(rows, facts, "csv"))
        _draw(rows, facts, folder / "attention.svg")
    except OSError as error:
        raise KvbenchError(f"cannot write --output {folder}: {error.strerror}; choose another") from error


def _draw(rows: Sequence[Row], facts: Row, path: Path) -> None:
    """The share of the ceiling of each problem, a group of bars each."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ways = list(dict.fromkeys(_way(row) for row in rows if row["median_s"]))
    colours = dict(
        zip(ways, (LIGHT[name] for name in ("contiguous", "paged", "third", "fourth", "ink2", "waste")), strict=False)
    )
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "attention", "font.size": 9}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        for axes, kind in zip(figure.subplots(2, 1), CEILING, strict=True):
            mine = [row for row in rows if row["kind"] == kind]
            problems = list(dict.fromkeys((row["batch"], row["context_tokens"]) for row in mine))
            for number_, way in enumerate(ways):
                found = {
                    (row["batch"], row["context_tokens"]): row for row in mine if _way(row) == way and row["median_s"]
                }
                at = [
                    place + (number_ + 0.5) / len(ways) * 0.8 - 0.4
                    for place, one in enumerate(problems)
                    if one in found
                ]
                shares = [100 * found[one]["share_of_ceiling"] for one in problems if one in found]
                axes.bar(at, shares, 0.8 / len(ways), label=way, color=colours.get(way, LIGHT["ink3"]))
            axes.set_xticks(range(len(problems)), [f"{users} x {context:,}" for users, context in problems])
            axes.set_ylabel(f"{kind}, % of the {CEILING[kind]}")
            axes.axhline(100, color=LIGHT["ink2"], lw=0.8)
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].legend(frameon=False, ncols=max(1, len(ways)))
        figure.suptitle(f"{facts['device']}, {facts['model']}'s heads in {facts['dtype']}".replace("$", r"\$"))
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
