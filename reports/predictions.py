"""What simulated cells rest on, and where measurements of them would lie."""

from __future__ import annotations

from kvbench.reports.groups import Results, Row
from kvbench.reports.sign import WARNING, Check
from kvbench.reports.words import listing, number

RANGED = {"output_tokens_per_s": "out tok/s", "tpot_mean_s": "mean TPOT", "ttft_mean_s": "mean TTFT"}


def range_checks(results: Results) -> list[Check]:
    """Of simulated cells: what they rest on and where a measurement would lie; apart, where steps went beyond what
    their times were fitted to."""
    known: dict[str, str] = {}
    far = []
    for group in results.groups:
        row = next((row for row in group.ok if row.get("evidence_class") and row.get("output_tokens_per_s")), None)
        if row is None:
            continue
        if words := row.get("beyond_fit"):
            low, high = group.mean("output_tokens_per_s_low").value, group.mean("output_tokens_per_s_high").value
            if low is not None and high is not None:
                name = f"{results.name(group.variant)} at {group.load}"
                far.append(f"{name} with {words}: {number(low)} to {number(high)} out tok/s rather than one number")
        elif row["evidence_class"] not in known and (text := _range_of(row)):
            known[str(row["evidence_class"])] = text
    checks = [Check(WARNING, f"{kind} predictions: 9 of 10 measurements {text}") for kind, text in known.items()]
    return checks + ([Check(WARNING, f"beyond what step times were fitted to: {listing(far)}")] if far else [])


def _range_of(row: Row) -> str:
    """From how much below to how much above a row's numbers; the same for all rows of a class
    whose steps a fit reaches."""
    ends = {
        name: tuple(float(row[f"{column}{end}"]) / float(row[column]) - 1 for end in ("_low", "_high"))
        for column, name in RANGED.items()
        if row.get(column) and row.get(f"{column}_low") is not None and row.get(f"{column}_high") is not None
    }
    return listing([f"{100 * low:+.0f} to {100 * high:+.0f} % of {name}" for name, (low, high) in ends.items()])
