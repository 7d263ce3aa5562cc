"""`kvbench calibrate`: fits the time of a step to what was measured on a machine of one's own."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.metrics.records import StepRecord
    from kvbench.metrics.store import RunFolder
    from kvbench.planner.calibrate import Calibration, Rates

Group = tuple[str, str, str, str]
"""Device, model, dtype and backend: what one set of coefficients can hold for."""

Steps = dict[Group, dict[str, "list[StepRecord]"]]
"""Of each group and configuration."""


def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Measured runs of one machine: more loads and lengths tell more.")],
    microbenchmark: Annotated[
        bool, typer.Option(help="Measure copies and matrix products too, where the run was made on this machine.")
    ] = True,
    output_format: Annotated[str, typer.Option("--format", help="table | json")] = "table",
) -> None:
    """Fit the step-time model to the measured steps of runs, and say how far it is off where it was not fitted.

    Each device, model, dtype and backend is fitted by itself. A coefficient that the configurations do not tell apart
    from the others is named "not identified".
    """
    import json

    from kvbench.errors import KvbenchError
    from kvbench.metrics.store import RunFolder
    from kvbench.planner.calibrate import calibrate as fit
    from kvbench.planner.calibrate import observe
    from kvbench.workloads.options import choice

    output_format = choice(output_format, ("table", "json"), "--format")
    steps: Steps = {}
    facts: dict[Group, dict[str, Any]] = {}
    for path in dict.fromkeys(path.resolve() for path in runs):
        _gather(RunFolder.open(path), steps, facts)
    if not steps:
        raise KvbenchError("none of these runs has measured steps; name runs that `kvbench sweep` made on a device")
    results = []
    for group, configurations in steps.items():
        found = fit([observe(configuration, rows) for configuration, rows in configurations.items()])
        results.append(_facts(group, found, _rates(facts[group]) if microbenchmark else None, facts[group]["model"]))
    sys.stdout.write(
        json.dumps(results, indent=1, allow_nan=False) + "\n" if output_format == "json" else _text(results)
    )


def _gather(folder: RunFolder, steps: Steps, facts: dict[Group, dict[str, Any]]) -> None:
    """Adds the measured steps of a run by group and, within it, by configuration: repeats of one cell together, those
    of other runs too, so that none is predicted from a repeat of itself."""
    manifest = folder.manifest
    model, device = manifest.get("model") or {}, manifest.get("device") or {}
    for row in folder.rows():
        cell = str(row["cell"])
        if row.get("evidence") != "measured" or row.get("status") != "ok" or not folder.has_run(cell):
            continue
        run = folder.run(cell)
        if run.remote:
            continue
        group = (str(device.get("name")), str(model.get("name")), str(model.get("dtype")), str(row["backend"]))
        steps.setdefault(group, {}).setdefault(re.sub(r"-r\d+$", "", cell), []).extend(run.steps)
        facts.setdefault(group, {"model": model, "device": device})


def _rates(facts: dict[str, Any]) -> Rates | None:
    """What this machine copies and multiplies, where it is the run's."""
    from kvbench.engine.environment import find_device
    from kvbench.errors import KvbenchError
    from kvbench.planner.calibrate import measure_rates

    device, model = facts["device"], facts["model"]
    try:
        here = find_device(str(device.get("kind"))).facts()
    except KvbenchError:
        return None
    if (here.get("name"), here.get("uuid")) != (device.get("name"), device.get("uuid")):
        return None
    return measure_rates(str(device.get("torch_name") or device.get("kind")), str(model["dtype"]))


def _facts(group: Group, found: Calibration, rates: Rates | None, model: dict[str, Any]) -> dict[str, Any]:
    """A fit as strict JSON. Efficiencies are shares of the microbenchmark's rates."""
    values = {one.name: one for one in found.coefficients}
    efficiencies: dict[str, float | None] = {}
    if rates:
        step, token = values["step_s"], values["token_s"]
        weights, parameters = float(model["weights_bytes"]), float(model["parameters"])
        efficiencies = {
            "copy_bytes_per_s": rates.copy_bytes_per_s,
            "matmul_flops_per_s": rates.matmul_flops_per_s,
            "bandwidth_efficiency": weights / step.value / rates.copy_bytes_per_s if step.identified else None,
            "compute_efficiency": 2 * parameters / token.value / rates.matmul_flops_per_s if token.identified else None,
        }
    return {
        **dict(zip(("device", "model", "dtype", "backend"), group, strict=True)),
        "steps": found.steps,
        "condition_number": found.condition if math.isfinite(found.condition) else None,
        "coefficients": [
            {
                "name": c.name,
                "seconds": c.value,
                "standard_error_s": c.error,
                "identified": c.identified,
                "of": c.meaning,
            }
            for c in found.coefficients
        ],
        "held_out": [
            dict(zip(("configuration", "steps", "bias_total", "mape_step", "p90_step"), line, strict=True))
            for line in found.held_out
        ],
        "machine": efficiencies or None,
    }


def _text(results: Sequence[dict[str, Any]]) -> str:
    lines: list[str] = []
    for one in results:
        lines += [
            f"{one['model']} in {one['dtype']}, {one['backend']}, on {one['device']}: {one['steps']:,} measured steps",
            f"  condition number {one['condition_number'] or math.inf:.3g}",
        ]
        for part in one["coefficients"]:
            error = part["standard_error_s"]
            told = f"± {1e6 * error:.3g}" if error is not None else ""
            word = "" if part["identified"] else "  not identified"
            lines.append(f"  {part['name']:12s} {1e6 * part['seconds']:>12.4g} µs {told:>12s}  {part['of']}{word}")
        if machine := one["machine"]:
            lines.append(
                f"  this machine copies {machine['copy_bytes_per_s'] / 1e9:.1f} GB/s and multiplies "
                f"{machine['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s (measured now); a step reaches "
                f"{_share(machine['bandwidth_efficiency'])} of the one streaming weights and "
                f"{_share(machine['compute_efficiency'])} of the other multiplying"
            )
        lines.append("  predicted without itself:  steps  total  a step  90 % within")
        for line in one["held_out"]:
            lines.append(
                f"    {line['configuration']:32s} {line['steps']:6d} {100 * line['bias_total']:+6.1f} % "
                f"{100 * line['mape_step']:6.1f} % {100 * line['p90_step']:6.1f} %"
            )
        if not one["held_out"]:
            lines.append("    nothing: one configuration alone; measure more loads or lengths")
    return "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.0%}"
