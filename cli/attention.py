"""`kvbench attention`: how near to this device's limits attention runs, in both layouts and beside torch's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.engine.attention.bench import Heads, Measured
    from kvbench.engine.ceilings import Ceilings

MODEL = {"cpu": "SmolLM2-135M", "cuda": "Llama-3.1-8B"}
CONTEXTS = {"cpu": "128,1024", "cuda": "1024,8192,32768"}
BATCHES = {"cpu": "1,8,32", "cuda": "1,16,128"}


def attention(
    model: Annotated[str | None, typer.Option(help="Whose heads: a built-in shape, or a config.json.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu | cuda[:N]; default: the first GPU, else the CPU.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16 | float16.")] = None,
    path: Annotated[str, typer.Option("--attention", help="auto | torch | cpp | triton.")] = "auto",
    batch: Annotated[str | None, typer.Option(help="Sequences that decode together, as 1,8,32.")] = None,
    input_len: Annotated[str | None, typer.Option(help="Context lengths, as 128,1024.")] = None,
    block_size: Annotated[str, typer.Option(help="Of the paged layout, as 16,64.")] = "16",
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Of each measurement; medians are quoted.")] = 9,
    output: Annotated[
        Path | None, typer.Option(help="Also write attention.csv and attention.svg into this folder.")
    ] = None,
    output_format: Annotated[str, typer.Option("--format", help="table | markdown | csv | json")] = "table",
) -> None:
    """Measure this device's read and copy bandwidth and its multiplications, then attention over batch, context and
    block size, each as a share of what the device can do."""
    import torch
    from rich.console import Console

    from kvbench.cli.config import FORMATS
    from kvbench.cli.parse import parse_dtype
    from kvbench.engine.attention.bench import DECODE, PREFILL, Heads, Problem, measure
    from kvbench.engine.attention.paths import AUTO, PATHS, RANGES_ONLY, choose
    from kvbench.engine.ceilings import measure_ceilings
    from kvbench.engine.environment import find_device
    from kvbench.engine.hf_config import load_shape
    from kvbench.errors import KvbenchError
    from kvbench.reports.attention import render, write
    from kvbench.workloads.grid import parse_ints
    from kvbench.workloads.options import choice

    output_format = choice(output_format, FORMATS, "--format")
    found = find_device(device)
    usual = "bfloat16" if found.bf16 else "float16" if found.kind == "cuda" else "float32"
    name = parse_dtype(dtype) or usual
    shape = load_shape((model or MODEL[found.kind]).strip())
    if shape.kv_rank:
        raise KvbenchError(f"{shape.name} keeps one latent a token (MLA) and no heads; choose another --model")
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    kind = getattr(torch, name)
    allowed = (AUTO, *(one for one in PATHS if one not in RANGES_ONLY))
    chosen = choose(choice(path, allowed, "--attention"), found.torch, kind, heads.dim)
    contexts = parse_ints(input_len or CONTEXTS[found.kind], "--input-len")
    batches, sizes = parse_ints(batch or BATCHES[found.kind], "--batch"), parse_ints(block_size, "--block-size")
    problems = [Problem(DECODE, users, context) for context in contexts for users in batches]
    problems += [Problem(PREFILL, 1, context) for context in contexts]
    say = Console(stderr=True)
    rows: list[Measured] = []
    with say.status("measuring what this device can do"):
        ceilings = measure_ceilings(found.torch, kind, repeats=repeats)
    with say.status("measuring attention") as status, torch.inference_mode():
        for number, problem in enumerate(problems, 1):
            status.update(f"measuring attention: problem {number} of {len(problems)}")
            rows += measure(problem, heads, kind, found.torch, chosen.make, sizes, repeats)
    facts = _facts(found.name, shape.name, name, chosen.name, heads, ceilings)
    table = [_row(one, heads, kind.itemsize, ceilings) for one in rows]
    if output is not None:
        write(output, table, facts)
    sys.stdout.write(render(table, facts, output_format, shutil.get_terminal_size((100, 24)).columns))


def _facts(device: str, model: str, dtype: str, path: str, heads: Heads, ceilings: Ceilings) -> dict[str, Any]:
    return {
        "device": device,
        "model": model,
        "dtype": dtype,
        "attention": path,
        "heads": heads.heads,
        "kv_heads": heads.kv_heads,
        "head_dim": heads.dim,
        "read_bytes_per_s": ceilings.read_bytes_per_s,
        "copy_bytes_per_s": ceilings.copy_bytes_per_s,
        "flops_per_s": ceilings.flops_per_s,
        **{f"{name}_spread": timing.spread for name, timing in ceilings.timings.items()},
    }


def _row(one: Measured, heads: Heads, itemsize: int, ceilings: Ceilings) -> dict[str, Any]:
    """Flat, strict JSON values in base units."""
    return {
        "kind": one.problem.kind,
        "batch": one.problem.batch,
        "context_tokens": one.problem.context,
        "way": one.way,
        "block_size": one.block_size,
        "median_s": one.timing.median_s if one.timing else None,
        "spread": one.timing.spread if one.timing else None,
        "kv_bytes": one.problem.kv_bytes(heads, itemsize),
        "flops": one.problem.flops(heads),
        "share_of_ceiling": one.share(heads, itemsize, ceilings),
        "reason": one.reason,
    }
