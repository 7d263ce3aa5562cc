"""`--resume`: a run that ended early is taken up again, if what is still to come would be measured as the rest was.

A cell that left a row is done, also one that failed; delete its folder under `cells/` to have it measured once more.
The plan of cells, the size of the pool and all else that the sweep chose by itself are those in `run.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.config import NOUNS, SweepConfig, flag
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, LoadPoint, Variant
from kvbench.metrics.store import RunFolder, is_unused, latest
from kvbench.workloads.grid import Cell

if TYPE_CHECKING:
    from kvbench.cli.job import Job

Facts = Mapping[str, Any]

KEPT = (
    *("variants", "loads", "contexts", "repeats", "seed", "dataset", "dataset_path", "cache_salts"),
    *("prefix_groups", "turns"),
    *("slos", "price_usd_per_hour", "metadata"),
    *("kv_bytes", "swap_bytes", "max_model_len", "block_size"),
)
"""What the plan and the meaning of a row hang on: as the run was first told, whatever --force allows."""

COMPARED: dict[str, dict[str, str]] = {
    "config": {field.name: flag(field.name) for field in fields(SweepConfig)},
    "dataset": {"sha256": "the content of --dataset-path"},
    "environment": {
        "kvbench": "kvbench's version",
        "commit": "kvbench's commit",
        **{name: f"the version of {name}" for name in ("python", "torch", "transformers", "numpy", "triton")},
    },
    "device": {
        "kind": "the kind of device",
        "name": "the device",
        "cores": "the device's number of cores",
        "memory_bytes": "the device's memory in bytes",
        "driver": "the device's driver",
        "cards": "the number of cards",
        "figures": "what the card's times are reckoned from",
    },
    "model": {
        "name": "the model",
        "weights": "the kind of weights",
        "dtype": "the dtype",
        "kv_bytes_per_token": "the KV bytes a token takes",
        "fingerprint": "the content of the weights",
    },
    "server": {
        "model": "the name of the served model",
        "software": "the server's software",
        "version": "the server's version",
        "prompts_as": "the form of the prompts",
        "lengths_held": "whether the server holds answers to their lengths",
        "usage_asked": "whether the server tells its usage",
    },
    "kv": {
        "pool_tokens": "the KV pool in tokens",
        "swap_tokens": "the swap space in tokens",
        "block_size": "the block size",
        "max_model_len": "the longest request allowed",
    },
}
"""The sections of `run.json` that must still be true, and what their entries are called."""

SAME_MEMORY = 0.01
"""A machine's memory, as its kernel counts it, moves by less than this from one start to the next."""


class Continuation:
    """A run taken up again. `left` are the cells without a row, in the order of the plan; `forced` says what is
    different by now and was accepted under --force."""

    def __init__(self, folder: RunFolder, force: bool) -> None:
        self.folder = folder
        self.forced: list[str] = []
        self._force = force
        try:
            self._told = SweepConfig.of(folder.manifest["config"])
            self._plan = [Cell.of(cell) for cell in folder.manifest["cells"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KvbenchError(
                f"{folder.path / 'run.json'} holds no plan that this version can go on with ({error}); start a new run"
            ) from error
        stored = folder.stored()
        self.left = [cell for cell in self._plan if cell.id not in stored]

    @property
    def done(self) -> int:
        return len(self._plan) - len(self.left)

    def check(self, **now: Facts) -> None:
        """KvbenchError, naming the first, where sections of `run.json` differ from what is true `now`; under --force
        they are noted instead."""
        found = [
            f"{label} was {was}, is {is_}{' (stays)' if section == 'config' and name in KEPT else ''}"
            for section, name, label, was, is_ in differences(self.folder.manifest, now)
        ]
        if found and not self._force:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise KvbenchError(
                f"cannot resume {self.folder.path}: {found[0]}{more}; make it as it was, choose a new --output, or "
                "go on with --force, which marks the run"
            )
        self.forced += found

    def pinned(self, config: SweepConfig) -> SweepConfig:
        """`config` with what the run keeps in any case, and what it once chose by itself where nothing is said."""
        kept = replace(config, **{name: getattr(self._told, name) for name in KEPT})
        model, kv = self.folder.manifest["model"], self.folder.manifest["kv"]
        return replace(
            kept,
            model=kept.model or model["name"],
            dtype=kept.dtype or model.get("dtype"),
            kv_bytes=kept.kv_bytes or kv.get("pool_bytes"),
            swap_bytes=kept.swap_bytes or kv.get("swap_bytes") or None,
            max_model_len=kept.max_model_len or kv["max_model_len"],
        )

    def job(self, job: Job) -> Job:
        """A job made of the pinned configuration, with the cells that are left."""
        for cell in self.left:
            if cell.context.single not in job.datasets:
                raise KvbenchError(f"cell {cell.id} has lengths that nothing asks for by now; start a new run")
        return replace(job, cells=self.left, choices=self.folder.manifest["choices"])


def take_up(output: Path | None, *, force: bool, dry_run: bool) -> Continuation | None:
    """The run at `output`, or the latest unfinished one under runs/; None where `output` holds nothing yet.

    Keeps other writers out, unless it is a dry run. KvbenchError where there is no run or somebody writes it.
    """
    if output is not None and is_unused(output):
        return None
    path = latest("runs", unfinished=True) if output is None else output
    folder = RunFolder.open(path) if dry_run else RunFolder.resume(path)
    try:
        return Continuation(folder, force)
    except KvbenchError:
        folder.close()
        raise


def differences(then: Facts, now: Mapping[str, Facts]) -> list[tuple[str, str, str, str, str]]:
    """What is compared and is not `now` as it was `then`: section, entry, what it is called, and both in words.

    Sections of `run.json` on both sides; what one of them lacks is not compared.
    """
    found = []
    for section, facts in json.loads(json.dumps(now)).items():
        known = then.get(section) or {}
        for name, label in COMPARED[section].items():
            if name not in known or name not in facts or _same(name, known[name], facts[name]):
                continue
            was, is_ = (_plainly(value, NOUNS.get(name)) for value in (known[name], facts[name]))
            found.append((section, name, label, was, is_))
    return found


def _same(name: str, then: object, now: object) -> bool:
    if name == "memory_bytes" and isinstance(then, int) and isinstance(now, int):
        return abs(then - now) <= SAME_MEMORY * then
    return then == now


def _plainly(value: Any, noun: type[Variant | LoadPoint | Context] | None = None) -> str:
    """`contiguous max, paged + swap`; `not given`."""
    if value is None or value in ("", [], [""], {}):
        return "not given"
    if isinstance(value, list):
        return ", ".join(_plainly(item, noun) for item in value)
    if isinstance(value, dict):
        return " ".join(str(item) for item in value.values()) if noun is None else str(noun.of(value))
    return str(value)
