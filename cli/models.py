"""`kvbench models`: the model shapes that are built in, with where their numbers come from."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.engine.shapes import ModelShape

HALF = 2
"""Bytes of a value of keys and values in bfloat16."""


def models(
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """List the built-in model shapes, with where their numbers come from.

    Any other model is named by its folder or config.json.
    """
    from kvbench.cli.config import FORMATS
    from kvbench.engine.shapes import SHAPES
    from kvbench.reports.catalogue import MODELS, render
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    notes = [
        "KV bytes a token: bfloat16, all layers, on one card; active: what one token passes through",
        "source: whose config.json; parameters are counted from it, and equal the published number where there is one",
    ]
    width = shutil.get_terminal_size((100, 24)).columns
    sys.stdout.write(render([row(shape) for shape in SHAPES], MODELS, notes, output_format, width))


def row(shape: ModelShape) -> dict[str, Any]:
    """A shape as a flat row, strict JSON values."""
    own = shape.quantisation
    return {
        "name": shape.name,
        "also": ", ".join(shape.also),
        "family": shape.family,
        "parameters": shape.parameters,
        "published_parameters": shape.published_parameters,
        "active_parameters": shape.active_parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token(HALF),
        "weights_bytes": sum(shape.part_bytes(HALF).values()),
        "quantisation": None if own is None else own.name,
        "layers": shape.layers,
        "sliding_layers": shape.sliding_layers or None,
        "sliding_window": shape.sliding_window,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "latent": shape.latent or None,
        "experts": shape.experts or None,
        "experts_per_token": shape.experts_per_token or None,
        "vocab": shape.vocab,
        "max_positions": shape.max_positions,
        "source": shape.source,
    }
