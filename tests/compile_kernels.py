"""Compiles the attention kernels for cards that are not here, as the runtime would: `make check`.

Every configuration that the runtime selects for the models below, for sm_80, sm_90, sm_100 and gfx942, with pointers
and sizes that are divisible by 16 and with such that are not. Prints registers, spills and shared memory of each kernel
and exits 1 where one does not compile, does not fit the card's shared memory, or spills in a default configuration
(bfloat16, divisible, CUDA). What has been compiled from the same sources is remembered.

    python tests/compile_kernels.py [--quiet]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvbench.engine.attention.configuration import (
    Asked,
    Target,
    attention_constants,
    reduce_constants,
    write_constants,
)

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "engine/attention/kernels.py", ROOT / "engine/attention/configuration.py", Path(__file__))
TARGETS = (Target("cuda", 80), Target("cuda", 90), Target("cuda", 100), Target("hip", "gfx942"))

LLAMA = Asked(32, 8, 128, 2, decode=True, paged=True, block_size=16)
"""Llama-3.1-8B's heads."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to compile. `default`: what most models run, where nothing may spill."""

    kernel: str
    name: str
    dtype: str
    asked: Asked
    pieces: int
    default: bool


def cases() -> Iterator[Case]:
    """Heads of all sizes, both maps and both kinds of batch; then what is weighed and stored otherwise."""
    shapes = {
        "llama-8b": LLAMA,
        "smollm2": replace(LLAMA, heads=9, kv_heads=3, head_dim=64),
        "gemma-2": replace(LLAMA, heads=16, kv_heads=8, head_dim=256),
    }
    for name, shape in shapes.items():
        for decode in (True, False):
            for paged in (True, False):
                asked = replace(shape, decode=decode, paged=paged, block_size=16 if paged else 1)
                label = f"{name} {'decode' if decode else 'prompt'} {'paged' if paged else 'contiguous'}"
                yield Case("attention", label, "bf16", asked, 1, default=True)
    yield Case("attention", "llama-8b decode paged, 16 pieces", "bf16", LLAMA, 16, default=True)
    yield Case("attention", "gqa 16 decode", "bf16", replace(LLAMA, heads=32, kv_heads=2), 1, default=True)
    yield Case("attention", "mha decode", "bf16", replace(LLAMA, kv_heads=32), 1, default=True)
    for dim in (80, 96, 112):
        for decode in (True, False):
            yield Case(
                "attention",
                f"head {dim} {'decode' if decode else 'prompt'}",
                "bf16",
                replace(LLAMA, head_dim=dim, decode=decode),
                1,
                default=True,
            )
    everything = replace(LLAMA, window=True, softcap=True, sinks=True)
    for decode in (True, False):
        when = "decode" if decode else "prompt"
        yield Case(
            "attention", f"window, cap, sinks {when}", "bf16", replace(everything, decode=decode), 1, default=True
        )
        yield Case("attention", f"e4m3 {when}", "bf16", replace(LLAMA, eight=True, decode=decode), 1, default=False)
        yield Case("attention", f"llama-8b {when}", "fp16", replace(LLAMA, decode=decode), 1, default=False)
        yield Case("attention", f"llama-8b {when}", "fp32", replace(LLAMA, itemsize=4, decode=decode), 1, default=False)
    for eight in (False, True):
        yield Case(
            "write", f"write {'e4m3' if eight else ''}", "bf16", replace(LLAMA, eight=eight), 1, default=not eight
        )
    yield Case("reduce", "reduce, sinks", "bf16", replace(LLAMA, sinks=True), 16, default=True)


@dataclass(frozen=True, slots=True)
class Built:
    """What a compiler made of a case. `problem`: why it is not good."""

    target: str
    kernel: str
    name: str
    dtype: str
    divisible: bool
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    limit_bytes: int | None = None
    problem: str = ""


def build(job: tuple[Case, Target, bool]) -> Built:
    """Compile one case, in a process without the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvbench.engine.attention import kernels

    case, target, divisible = job
    kernel = getattr(kernels, f"{case.kernel}_kernel")
    if case.kernel == "attention":
        constants = attention_constants(case.asked, target, case.pieces)
    else:
        constants = write_constants(case.asked) if case.kernel == "write" else reduce_constants(case.asked, case.pieces)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    types = {name: _type(name, case) for name in kernel.arg_names if name not in constants}
    whole = [place for place, name in enumerate(kernel.arg_names) if types.get(name, "")[:1] in ("*", "i")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in whole} if divisible else {},
    )
    label = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    built = Built(label, case.kernel, case.name, case.dtype, divisible, limit_bytes=target.shared_bytes)
    if target.backend == "cuda":
        triton.knobs.nvidia.dump_ptxas_log = True
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            lanes = 32 if target.backend == "cuda" else 64
            done = triton.compile(source, target=GPUTarget(target.backend, target.arch, lanes), options=options)
    except Exception as error:
        return replace(built, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    registers, spilled = _of_log(said.getvalue()) if target.backend == "cuda" else _of_assembly(done.asm["amdgcn"])
    built = replace(built, registers=registers, spilled_bytes=spilled, shared_bytes=done.metadata.shared)
    if done.metadata.shared > target.shared_bytes:
        return replace(built, problem=f"{done.metadata.shared} bytes of shared memory of {target.shared_bytes}")
    if case.default and divisible and target.backend == "cuda" and spilled != 0:
        return replace(built, problem=f"spills {spilled} bytes" if spilled else "the assembler said nothing of spills")
    return built


def _type(name: str, case: Case) -> str:
    """An argument's type as the runtime's tensors and numbers have it."""
    stored = "u8" if case.asked.eight else case.dtype
    pointers = {
        **dict.fromkeys(("q", "k", "v"), case.dtype),
        **dict.fromkeys(("cache_k", "cache_v"), stored),
        **dict.fromkeys(("part", "part_max", "part_sum", "k_scales", "v_scales"), "fp32"),
        **dict.fromkeys(("starts", "ends", "tiles", "tables"), "i32"),
        **dict.fromkeys(("bases", "writes"), "i64"),
        "out": "fp32" if case.kernel == "attention" and case.pieces > 1 else case.dtype,
        "sinks": case.dtype if case.asked.sinks else "fp32",
    }
    if name in pointers:
        return f"*{pointers[name]}"
    return "fp32" if name in ("scale", "softcap") else "i32"


def _of_log(log: str) -> tuple[int | None, int | None]:
    """Registers a thread and spilled bytes, by the assembler's own word."""
    used, stored = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    return int(used[1]) if used else None, int(stored[1]) if stored else None


def _of_assembly(text: str) -> tuple[int | None, int | None]:
    used, spilled = re.search(r"\.vgpr_count:\s+(\d+)", text), re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    return int(used[1]) if used else None, 4 * int(spilled[1]) if spilled else None


def compile_all(jobs: list[tuple[Case, Target, bool]]) -> list[Built]:
    """All of them, a process a core; with a line of progress where somebody looks."""
    found = []
    with ProcessPoolExecutor(os.cpu_count(), initializer=_compiler) as pool:
        for number, built in enumerate(pool.map(build, jobs, chunksize=4), 1):
            found.append(built)
            if sys.stderr.isatty():
                print(f"\rcompiling kernels: {number} of {len(jobs)}", end="", file=sys.stderr, flush=True)
    return found


def _compiler() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvbench-kernels-")  # its log comes only when it compiles


def remembered(digest: str) -> Path:
    """Where the outcome of these very sources and this compiler is kept."""
    return ROOT / ".kernels" / f"{digest}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the attention kernels for cards that are not here.")
    parser.add_argument("--quiet", action="store_true", help="print what is wrong, and one line")
    asked = parser.parse_args()
    try:
        import triton
    except ImportError:
        print("kernels: triton is not installed (it is for Linux only); nothing was compiled")
        return
    text = triton.__version__.encode() + b"".join(source.read_bytes() for source in SOURCES)
    kept = remembered(sha256(text).hexdigest()[:16])
    if kept.is_file():
        built = [Built(**row) for row in json.loads(kept.read_text())]
    else:
        built = compile_all(
            [(case, target, whole) for case in cases() for target in TARGETS for whole in (True, False)]
        )
        kept.parent.mkdir(exist_ok=True)
        for old in kept.parent.glob("*.json"):
            old.unlink()
        kept.write_text(json.dumps([asdict(one) for one in built]))
    wrong = [one for one in built if one.problem]
    for one in wrong if asked.quiet else built:
        print(line(one))
    print(f"kernels: {len(built)} compiled with triton {triton.__version__}, {len(wrong)} not as they should be")
    raise SystemExit(1 if wrong else 0)


def line(one: Built) -> str:
    """A row of the table."""
    aligned = "divisible" if one.divisible else "any"

    def number(value: Any) -> str:
        return "-" if value is None else f"{value:,}"

    return (
        f"{one.target:7} {one.kernel:9} {one.name:36} {one.dtype:4} {aligned:9} registers {number(one.registers):>4}  "
        f"spilled {number(one.spilled_bytes):>6} B  shared {number(one.shared_bytes):>7} of {number(one.limit_bytes)} B"
        + (f"  WRONG: {one.problem}" if one.problem else "")
    )


if __name__ == "__main__":
    main()
