"""The fitted parameters that kvbench ships, and what they were fitted to: `parameters.toml`.

Measured rows themselves are not shipped; of them the file keeps the names of the groups that have effects and a short
digest of each configuration, so that a score can tell what it has seen before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files

from kvbench.planner.effects import PARAMETERS
from kvbench.planner.fit import Case
from kvbench.planner.published import Configuration
from kvbench.planner.reach import Reach, reach_of

FILE = "parameters.toml"


@dataclass(frozen=True, slots=True)
class Shipped:
    """Effects of the step parameters, of the residuals, and the configurations (by digest) behind them."""

    effects: dict[tuple[str, str], float]
    residuals: dict[tuple[str, str], float]
    configurations: frozenset[str]
    families: frozenset[tuple[str, ...]]
    source: str
    date: str
    reach: dict[str, Reach]

    def kind(self, configuration: Configuration, generation: str) -> str:
        """The class of a prediction: how near it is to what the parameters were fitted to."""
        if digest(configuration) in self.configurations:
            return "calibrated"
        family = family_of(configuration, generation)
        if family in self.families:
            return "new rate"
        known = {(one[0], one[2]) for one in self.families}
        if (generation, configuration.card) in known:
            return "new model"
        return "new card" if generation in {one for one, _ in known} else "new card and engine"


def digest(configuration: Configuration) -> str:
    """Eight hexadecimal digits that stand for a configuration."""
    return hashlib.sha256(configuration.key.encode()).hexdigest()[:8]


def family_of(configuration: Configuration, generation: str) -> tuple[str, ...]:
    """Engine generation and version, card, shape, number format and tensor parallelism."""
    return generation, *(str(part) for part in configuration.family)


@cache
def shipped() -> Shipped:
    """What the package has."""
    import tomllib

    return _read(tomllib.loads(files("kvbench.planner").joinpath(FILE).read_text(encoding="utf-8")))


def _read(table: dict[str, dict[str, object]]) -> Shipped:
    def effects(section: str) -> dict[tuple[str, str], float]:
        return {
            (name, group): float(str(value))
            for name, groups in table.get(section, {}).items()
            if isinstance(groups, dict)
            for group, value in groups.items()
        }

    fitted = table["fitted"]
    configurations, families = fitted["configurations"], fitted["families"]
    assert isinstance(configurations, list) and isinstance(families, list)
    return Shipped(
        effects("effect"),
        effects("residual"),
        frozenset(configurations),
        frozenset(tuple(family) for family in families),
        str(fitted["source"]),
        str(fitted["date"]),
        {generation: Reach(**_whole(numbers)) for generation, numbers in table.get("reach", {}).items()},
    )


def _whole(numbers: object) -> dict[str, int]:
    assert isinstance(numbers, dict)
    return {name: int(number) for name, number in numbers.items()}


def write(
    effects: dict[tuple[str, str], float],
    residuals: dict[tuple[str, str], float],
    cases: Sequence[Case],
    source: str,
    date: str,
) -> str:
    """The text of `parameters.toml`. Effects under a thousandth are left out: they are 0 to every digit printed."""
    rows = sum(len(case.measured) for case in cases)
    lines = [
        "# Fitted by `python -m kvbench.planner.refit`; not to be edited by hand. Effects are logarithms: a parameter",
        "# is its prior median (planner/effects.py) times e to the sum of its effects; a residual's multiply a metric.",
        "",
        "[fitted]",
        f"source = {json.dumps(source)}",
        f"date = {json.dumps(date)}",
        f"rows = {rows}",
        f"configurations = {_list(sorted({digest(case.configuration) for case in cases}), 10)}",
    ]
    families = sorted({family_of(case.configuration, case.situation.engine.generation) for case in cases})
    lines += [f"families = {_list(families, 1)}"]
    for generation, reach in reach_of(cases).items():
        lines += ["", f"[reach.{generation}]", *(f"{name} = {number}" for name, number in asdict(reach).items())]
    order = [parameter.name for parameter in PARAMETERS]
    for section, table in (("effect", effects), ("residual", residuals)):
        names = sorted({name for name, _ in table}, key=lambda name: (order.index(name) if name in order else 0, name))
        for name in names:
            lines += ["", f"[{section}.{name}]"]
            groups = sorted(group for one, group in table if one == name)
            lines += [
                f"{json.dumps(group)} = {table[name, group]:.3f}" for group in groups if abs(table[name, group]) >= 1e-3
            ]
    return "\n".join(lines) + "\n"


def _list(items: Iterable[object], in_a_line: int) -> str:
    texts = [json.dumps(item) for item in items]
    lines = [", ".join(texts[i : i + in_a_line]) for i in range(0, len(texts), in_a_line)]
    return "[\n" + "".join(f"    {line},\n" for line in lines) + "]"
