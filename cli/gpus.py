"""`kvbench gpus`: the cards that can be planned for, each figure with its source."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.planner.catalog import Card


def gpus(
    gpu_file: Annotated[
        Path | None, typer.Option(help="Your own cards too: TOML or CSV, with the fields of planner/gpus.toml.")
    ] = None,
    price: Annotated[list[str] | None, typer.Option(help="US dollars per card-hour: 2.50, or h100=2.50.")] = None,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """List the cards of the catalogue, each figure with its source."""
    from kvbench.cli.config import FORMATS
    from kvbench.planner.catalog import catalogue, load_cards, with_prices
    from kvbench.reports.catalogue import GPUS, render
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    own = () if gpu_file is None else load_cards(gpu_file)
    replaced = {card.id for card in own}
    cards = with_prices([*own, *(card for card in catalogue() if card.id not in replaced)], price or [])
    rows = [row(card) for card in cards]
    width = shutil.get_terminal_size((100, 24)).columns
    sys.stdout.write(render(rows, GPUS, _notes(rows), output_format, width))


def row(card: Card) -> dict[str, Any]:
    """A card as a flat row, strict JSON values in base units."""
    low, high = card.usd_per_hour or (None, None)
    rates = {f"{dtype}_flops_per_s": card.flops_per_s.get(dtype) for dtype in ("bfloat16", "float16", "fp8")}
    return {
        "id": card.id,
        "name": card.name,
        "aliases": ", ".join(card.aliases),
        "memory_bytes": card.memory_bytes,
        "memory_source": card.memory_source,
        "memory_noted": card.memory_noted,
        "bandwidth_bytes_per_s": card.bandwidth_bytes_per_s,
        **rates,
        "link": card.link,
        "link_bytes_per_s": card.link_bytes_per_s,
        "tdp_w": card.tdp_w,
        "source": card.source,
        "as_of": card.as_of,
        "usd_per_hour_low": low,
        "usd_per_hour_high": high,
        "price_source": card.price_source,
        "price_as_of": card.price_as_of,
        "note": card.note,
    }


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """Where the figures come from, each source once."""
    estimated = sum(not row["memory_noted"] for row in rows)
    sources = dict.fromkeys((row["source"], row["as_of"]) for row in rows)
    prices = dict.fromkeys((row["price_source"], row["price_as_of"]) for row in rows if row["price_source"])
    return [
        f"memory: what torch reports; for {estimated} of {len(rows)} cards estimated from the driver's or the vendor's "
        "figure (`--format csv` says which)",
        f"bandwidth, dense rates, link per direction, power: {_listed(sources)}",
        *([f"prices: {_listed(prices)}"] if prices else []),
    ]


def _listed(sources: dict[tuple[str, str], None]) -> str:
    return "; ".join(" ".join(filter(None, (source, date and f"({date})"))) for source, date in sources)
