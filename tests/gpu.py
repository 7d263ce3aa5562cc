"""Everything that needs a GPU to be proven, in one run: `make gpu`. Needs Python, torch, triton and transformers only.

1. the kernels, compiled, against attention's definition in float64, in all their variants;
2. what the device can do: bytes read and copied, multiplications;
3. attention against that, keys and values of a gigabyte and more, both layouts and torch's own ways;
4. decode steps of Llama-3.1-8B with random weights at batch 1, 32 and 256 against their roofline;
5. a sweep of three loads over both backends, and each of its runs served again on its own step times.

Prints a table, writes JSON, and exits 1 where a number is wrong; a section that fails is named and the others go on.
`--dry` runs all of it on a CPU with tiny sizes, to show that the script itself is sound.

    python tests/gpu.py [--output gpu.json] [--dry]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from kvbench.cli.stack import BACKENDS, CacheConfig
from kvbench.engine.arena import Arena, KVShape
from kvbench.engine.attention.bench import DECODE, PREFILL, Heads, Problem, measure
from kvbench.engine.attention.drawn import draw_layout
from kvbench.engine.attention.layout import PathMaker
from kvbench.engine.attention.paths import AUTO, choose
from kvbench.engine.ceilings import Ceilings, measure_ceilings
from kvbench.engine.clock import WallClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.environment import find_device, versions
from kvbench.engine.model import BoundModel
from kvbench.engine.runner import ModelRunner
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Request
from kvbench.engine.weights import find_source, load_model, quiet
from kvbench.errors import KvbenchError
from kvbench.metrics.records import Run
from kvbench.planner.replay import Tape, first_difference, recorded_requests
from kvbench.workloads.load import ClosedLoop

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done: on a card, and dry."""

    model: str
    decode: tuple[tuple[int, int], ...]  # batch and context of attention
    prompts: tuple[int, ...]
    batches: tuple[int, ...]  # of decode steps
    context: int
    loads: tuple[int, ...]
    lengths: tuple[int, int]
    longest_keys: int
    repeats: int


CARD = Sizes(
    "Llama-3.1-8B",
    ((1, 131_072), (64, 8192), (256, 2048)),
    (2048, 8192),
    (1, 32, 256),
    1024,
    (8, 64, 256),
    (256, 64),
    2000,
    9,
)
DRY = Sizes("tiny", ((1, 64), (4, 32)), (32,), (1, 2), 24, (1, 2, 4), (12, 6), 70, 1)


@dataclass(frozen=True, slots=True)
class Case:
    """A variant of the kernels. `eight`: keys and values as e4m3."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    block: int | None
    queries: tuple[int, ...]
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    eight: bool = False


def cases(kind: str) -> Iterator[Case]:
    """Head sizes, groups, maps, kinds of batch and all that is weighed otherwise."""
    floats = (torch.bfloat16, torch.float16, torch.float32) if kind == "cuda" else (torch.bfloat16, torch.float32)
    for dtype in floats:
        for dim in (64, 80, 96, 112, 128, 256):
            for block in (None, BLOCK):
                yield Case(8, 2, dim, dtype, block, (1, 1, 1))
                yield Case(8, 2, dim, dtype, block, (1, 9, 40))
        for group in (1, 3, 7, 8, 16, 32):
            yield Case(2 * group, 2, 64, dtype, BLOCK, (1, 1, 17))
        for block in (1, 8, 24, 256):
            yield Case(8, 2, 128, dtype, block, (1, 30, 1))
        for window, softcap, sinks in ((33, None, False), (None, 20.0, False), (None, None, True), (33, 20.0, True)):
            for queries in ((1, 1, 1), (1, 9, 40)):
                yield Case(8, 2, 128, dtype, BLOCK, queries, window, softcap, sinks)
    if kind == "cuda":
        for dtype in floats:
            for queries in ((1, 1, 1), (1, 9, 40)):
                yield Case(8, 2, 128, dtype, BLOCK, queries, eight=True)


def definition(
    case: Case, q: Tensor, k: Tensor, v: Tensor, keys: list[int], scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention in float64 by plain matrix products, a sequence at a time; shares no code with what it checks."""
    out, at, first = [], 0, 0
    for length, queries in zip(keys, case.queries, strict=True):
        mine = q[first : first + queries].double().transpose(0, 1)
        own_k, own_v = (x[at : at + length].double().transpose(0, 1) for x in (k, v))
        own_k, own_v = (x.repeat_interleave(case.heads // case.kv_heads, dim=0) for x in (own_k, own_v))
        scores = mine @ own_k.transpose(1, 2) * scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        position = torch.arange(length - queries, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        seen = key <= position
        if case.window is not None:
            seen = seen & (key > position - case.window)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], dim=-1)
        out.append((scores.softmax(-1)[..., :length] @ own_v).transpose(0, 1))
        at, first = at + length, first + queries
    return torch.cat(out)


TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
"""Of outputs around 1: a few roundings of the format."""


def off_by(case: Case, device: torch.device, make: PathMaker, longest: int) -> float:
    """The largest error of a case, over memory that is NaN where nobody wrote."""
    draw = torch.Generator(device="cpu").manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(case.dtype).to(device)

    keys = [max(longest // (place * place * 7 + 1), queries) for place, queries in enumerate(case.queries)]
    drawn = draw_layout(device, keys, case.queries, case.block)
    stored = torch.float8_e4m3fn if case.eight else case.dtype
    arena = Arena(KVShape(1, case.kv_heads, case.dim), drawn.rows, stored, device, fill=float("nan"))
    k, v = normal(sum(keys), case.kv_heads, case.dim), normal(sum(keys), case.kv_heads, case.dim)
    q = normal(sum(case.queries), case.heads, case.dim)
    if case.eight:
        k, v = (x.to(stored).to(case.dtype) for x in (k, v))  # what is stored is exact then
    sinks = normal(case.heads) if case.sinks else None
    places = drawn.places.to(device)
    for rows, x in ((arena.k[0], k), (arena.v[0], v)):
        rows.view(torch.uint8 if case.eight else stored)[places] = x.to(stored).view(
            torch.uint8 if case.eight else stored
        )
    new = torch.cat(
        [
            torch.arange(sum(keys[: n + 1]) - queries, sum(keys[: n + 1]), device=device)
            for n, queries in enumerate(case.queries)
        ]
    )
    scale = case.dim**-0.5
    how: dict[str, Any] = {"scale": scale, "window": case.window, "softcap": case.softcap, "sinks": sinks}
    out = make(arena, max(keys) + BLOCK).attend(drawn.layout, 0, q, k[new], v[new], **how)
    exact = definition(case, q, k, v, keys, scale, sinks)
    return float((out.double() - exact).abs().max())


def kernels(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Section 1."""
    worst: dict[str, float] = {}
    wrong, count = [], 0
    for case in cases(device.type):
        make = choose(AUTO, device, case.dtype, case.dim).make
        error, count = off_by(case, device, make, sizes.longest_keys), count + 1
        name = str(case.dtype).removeprefix("torch.") + (", e4m3" if case.eight else "")
        worst[name] = max(worst.get(name, 0.0), error)
        if not error <= TOLERANCE[case.dtype]:
            wrong.append({**{key: str(value) for key, value in asdict(case).items()}, "error": error})
    for name, error in worst.items():
        print(f"  kernels {name:14} off by {error:.1e} at most")
    print(f"  {count} cases, {len(wrong)} wrong")
    return {"cases": count, "largest_error": worst, "wrong": wrong}


def attention(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, ceilings: Ceilings, heads: Heads
) -> dict[str, Any]:
    """Section 3."""
    rows = []
    problems = [Problem(DECODE, *one) for one in sizes.decode] + [Problem(PREFILL, 1, one) for one in sizes.prompts]
    make = choose(AUTO, device, dtype, heads.dim).make
    for problem in problems:
        for one in measure(problem, heads, dtype, device, make, [BLOCK, 64], sizes.repeats):
            share = one.share(heads, dtype.itemsize, ceilings)
            rows.append(
                {
                    **asdict(problem),
                    "way": one.way,
                    "block_size": one.block_size,
                    "median_s": one.timing and one.timing.median_s,
                    "share_of_ceiling": share,
                    "reason": one.reason,
                }
            )
            way = one.way if one.block_size is None else f"{one.way} {one.block_size}"
            what = (
                one.reason
                if one.timing is None or share is None
                else f"{one.timing.median_s * 1e3:9.3f} ms, {share:4.0%}"
            )
            print(f"  {problem.kind:8} {problem.batch:4} x {problem.context:7,} {way:14} {what}", flush=True)
    return {"rows": rows}


def engine_over(model: BoundModel, backend: str, requests: list[Request], longest: int, users: int) -> Run:
    """Serve these requests, so many at once, each with room for its longest."""
    memory = CacheConfig(-(-users * longest // BLOCK) * BLOCK, BLOCK, longest)
    arena = Arena(model.kv, memory.arena_rows, model.dtype, model.device)
    allocator = BACKENDS[backend].make_allocator(memory)
    path = choose(AUTO, model.device, model.dtype, model.kv.head_dim)
    cache = BACKENDS[backend].make_cache(arena, allocator, longest, path.make)
    limits = Limits(longest, max_batched_tokens=8192, max_sequences=users)
    engine = Engine(allocator, ModelRunner(model, cache), limits, save_tokens=True)
    return serve(ClosedLoop(requests, users), engine, WallClock())


def asked(model: BoundModel, count: int, input_tokens: int, output_tokens: int) -> list[Request]:
    draw = random.Random(5)
    return [
        Request(
            number,
            tuple(draw.randrange(model.vocab_size) for _ in range(input_tokens)),
            output_tokens,
            output_tokens=output_tokens,
        )
        for number in range(count)
    ]


def steps(model: BoundModel, sizes: Sizes, ceilings: Ceilings) -> dict[str, Any]:
    """Section 4: the bytes and products of a step over what the device can do are its roofline."""
    head = model.vocab_size * model.config.hidden_size
    layers = model.parameters - head * (1 if model.tied else 2)
    rows = []
    for batch in sizes.batches:
        for backend in BACKENDS:
            requests = asked(model, batch, sizes.context, 12)
            run = engine_over(model, backend, requests, sizes.context + 12, batch)
            pure = [step for step in run.steps if step.decode_tokens == batch and not step.prefill_tokens]
            took_s = median(step.end_s - step.start_s for step in pure)
            context = median(step.context_tokens for step in pure)
            weights_s = max(
                (layers + head) * model.dtype.itemsize / ceilings.read_bytes_per_s,
                2 * (layers + head) * batch / ceilings.flops_per_s,
            )
            bound_s = weights_s + context * model.kv.bytes_per_token(model.dtype.itemsize) / ceilings.read_bytes_per_s
            host_s = median(step.host_s for step in pure)
            rows.append({"batch": batch, "backend": backend, "step_s": took_s, "roofline_s": bound_s, "host_s": host_s})
            print(
                f"  step of {batch:3} with {backend:10} {took_s * 1e3:8.2f} ms (host {host_s * 1e3:.2f}), "
                f"{bound_s / took_s:4.0%} of the roofline",
                flush=True,
            )
    return {"rows": rows}


def sweep(model: BoundModel, sizes: Sizes) -> dict[str, Any]:
    """Section 5."""
    rows, wrong = [], []
    input_tokens, output_tokens = sizes.lengths
    for users in sizes.loads:
        for backend in BACKENDS:
            longest = input_tokens + output_tokens
            run = engine_over(model, backend, asked(model, 2 * users, *sizes.lengths), longest, users)
            rate = sum(one.output_tokens for one in run.requests) / run.end_s
            memory = CacheConfig(-(-users * longest // BLOCK) * BLOCK, BLOCK, longest)
            tape, again = Tape(run), recorded_requests(run.requests)
            limits = Limits(longest, max_batched_tokens=8192, max_sequences=users)
            engine = Engine(BACKENDS[backend].make_allocator(memory), tape, limits, save_tokens=True)
            difference = first_difference(run, serve(ClosedLoop(again, users), engine, tape))
            rows.append(
                {"users": users, "backend": backend, "output_tokens_per_s": rate, "replay": difference or "equal"}
            )
            wrong += [difference] if difference else []
            print(f"  {users:4} users, {backend:10} {rate:8.0f} tok/s, replayed: {difference or 'equal'}", flush=True)
    return {"rows": rows, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove and time on a GPU what can only be proven and timed there.")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny: is the script itself sound?")
    options = parser.parse_args()
    quiet()
    try:
        sizes, found = (DRY, find_device("cpu")) if options.dry else (CARD, find_device("cuda"))
    except KvbenchError as error:
        raise SystemExit(f"gpu.py: {error}") from error
    device, dtype = found.torch, torch.float32 if options.dry else torch.bfloat16
    began_s = time.monotonic()
    result: dict[str, Any] = {"device": found.facts(), "versions": versions(), "dry": options.dry, "sections": {}}
    wrong = 0

    def section(name: str, work: Callable[[], dict[str, Any]]) -> None:
        nonlocal wrong
        print(f"{name}, after {time.monotonic() - began_s:.0f} s", flush=True)
        try:
            with torch.inference_mode():
                done = work()
        except Exception as error:
            traceback.print_exc()
            done = {"failed": f"{type(error).__name__}: {error}"}
        wrong += bool(done.get("wrong") or done.get("failed"))
        result["sections"][name] = done
        result["seconds"] = time.monotonic() - began_s
        options.output.write_text(json.dumps(result, indent=1, default=str))
        if device.type == "cuda":
            torch.cuda.empty_cache()

    section("kernels", lambda: kernels(device, sizes))
    with torch.inference_mode():
        ceilings = measure_ceilings(device, dtype, repeats=sizes.repeats)
    result["ceilings"] = asdict(ceilings)
    print(
        f"{found.name}: reads {ceilings.read_bytes_per_s / 1e9:,.0f} GB/s, copies "
        f"{ceilings.copy_bytes_per_s / 1e9:,.0f} GB/s, multiplies {ceilings.flops_per_s / 1e12:,.1f} TFLOP/s"
    )
    source = find_source(sizes.model)
    assert source.shape is not None
    heads = Heads(source.shape.heads, source.shape.kv_heads, source.shape.head_dim)
    section("attention", lambda: attention(device, sizes, dtype, ceilings, heads))
    longest = max(sizes.context + 12, sum(sizes.lengths))
    try:
        model = load_model(source, weights="random", dtype=dtype, device=device, max_model_len=longest)
        with torch.inference_mode():
            model.tune()
    except Exception as error:
        raise SystemExit(f"the model cannot be loaded: {error}") from error
    section("steps", lambda: steps(model, sizes, ceilings))
    section("sweep", lambda: sweep(model, sizes))
    print(f"{options.output}: {wrong} sections with something wrong, {time.monotonic() - began_s:.0f} s")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
