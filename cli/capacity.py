"""`kvbench capacity`: what fits into a card, before anybody owns it. Reckons; needs neither a GPU nor torch."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer


def capacity(
    model: Annotated[str, typer.Option(help="Built-in shape, folder or config.json.")],
    gpu: Annotated[str, typer.Option(help="Card by id or name, a list too; `kvbench gpus` lists them.")],
    dtype: Annotated[str | None, typer.Option(help="auto | float32 | bfloat16 | float16")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Weights in fp8 | int4 | nvfp4 | mxfp4 | none; default: as the model has them.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="auto (as --dtype) | float32 | bfloat16 | float16 | fp8")] = "auto",
    tp: Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help="Cards that share the model.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the card's memory that is used.")] = 0.9,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt + answer, a slot of `max`; default: the longest context shown.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step; default: as vLLM's server on that card.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences running at once; default: as vLLM's.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a block (paged).")] = 16,
    graph_memory: Annotated[
        str | None, typer.Option(help="CUDA graphs inside the budget, as 1GiB; default none, as vLLM.")
    ] = None,
    input_len: Annotated[str | None, typer.Option(help="Prompt tokens, a list too; default: 750 to 96,000.")] = None,
    output_len: Annotated[
        str | None, typer.Option(help="Answer tokens, a list too; default: a third of the prompt.")
    ] = None,
    gpu_file: Annotated[
        Path | None, typer.Option(help="Your own cards: TOML or CSV, with the fields of planner/gpus.toml.")
    ] = None,
    price: Annotated[list[str] | None, typer.Option(help="US dollars per card-hour: 2.50, or h100=2.50.")] = None,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Show how many tokens and users fit into a card, in either layout, and every term of the sum.

    Bytes are of one card. Users at once are counted by the rules of the very allocators that `sweep` measures.
    """
    from kvbench.cli.config import FORMATS
    from kvbench.cli.fit import Asked, facts, parse_contexts, parse_kv_dtype, quantised
    from kvbench.cli.parse import parse_bytes, parse_dtype
    from kvbench.engine.hf_config import load_shape
    from kvbench.planner.catalog import find_card, load_cards, with_prices
    from kvbench.reports.capacity import render
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    asked = Asked(
        dtype=parse_dtype(dtype),
        kv_dtype=parse_kv_dtype(kv_dtype),
        tp=tp,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_batched_tokens=max_num_batched_tokens,
        max_sequences=max_num_seqs,
        block_size=block_size,
        graph_bytes=0 if graph_memory is None else parse_bytes(graph_memory, "--graph-memory"),
        contexts=parse_contexts(input_len, output_len),
    )
    own = () if gpu_file is None else load_cards(gpu_file)
    named = dict.fromkeys(find_card(name, own) for name in gpu.split(","))
    shape = quantised(load_shape(model), quantization)
    rows = [facts(shape, card, asked) for card in with_prices(named, price or [])]
    sys.stdout.write(render(rows, output_format, shutil.get_terminal_size((100, 24)).columns))
