"""`tests/gpu.py` runs where nothing but torch, triton and transformers is installed; dry, here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# psutil is asked for a CPU's memory only
ABSENT = "typer rich pandas pyarrow matplotlib scipy jinja2 aiohttp pynvml gguf accelerate hypothesis pytest".split()
BLOCKED = f"""
import runpy, sys
for name in {ABSENT!r}:
    sys.modules[name] = None
sys.argv = ["gpu.py", "--dry", "--output", sys.argv[1]]
runpy.run_path({str(Path(__file__).parent / "gpu.py")!r}, run_name="__main__")
"""


def test_the_script_runs_dry_with_nothing_else_installed(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(file)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    sections = found["sections"]
    assert set(sections) == {"kernels", "attention", "steps", "sweep"} and found["dry"]
    assert sections["kernels"]["cases"] > 50 and not sections["kernels"]["wrong"]
    assert {row["replay"] for row in sections["sweep"]["rows"]} == {"equal"}
    assert all(row["step_s"] > 0 and row["roofline_s"] > 0 for row in sections["steps"]["rows"])
    assert all(row["median_s"] and not row["reason"] for row in sections["attention"]["rows"])


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    script = Path(__file__).parent / "gpu.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 1 and "sees no GPU" in done.stderr and len(done.stderr.strip().splitlines()) == 1
