"""What a search for the largest load found, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.metrics.points import Context, LoadPoint, Variant
from kvbench.reports.groups import Row
from kvbench.reports.words import listing, sentence_case


def searches(manifest: Row) -> list[str]:
    """A sentence or two for each search of the run; none where it searched for nothing."""
    found = manifest.get("search")
    if not isinstance(found, list):
        return []
    contexts = {Context.of(one) for one in found}
    slos = listing([str(slo) for slo in manifest.get("slos") or []])
    return [_told(one, slos, several=len(contexts) > 1) for one in found]


def _told(one: Mapping[str, Any], slos: str, *, several: bool) -> str:
    where = f", with {Context.of(one)}" if several else ""
    name = f"{sentence_case(str(Variant.of(one)))}{where}"
    interval = ""
    if one["low"] is not None:
        interval = f" (95 % interval of the limit {one['low']:.3g} to {one['high']:.3g}, {one['runs']} runs)"
    if one["answer"] is None:
        said = f"{name}: no load is known to meet {slos}: {one['why']}{interval}."
    else:
        load = LoadPoint.of({one["of"]: one["answer"] if one["of"] == "request_rate" else int(one["answer"])})
        last = f", and perhaps more: {one['why']}"
        if one["low"] is not None:
            last = f"; {one['retests_passed']} of {one['retests']} fresh seeds passed there, {one['why']}"
        said = f"{name} meets {slos} up to {load}{interval}{last}."
    return " ".join([said, *(f"{sentence_case(warning)}." for warning in one["warnings"])])
