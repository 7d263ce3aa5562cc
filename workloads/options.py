"""How a flag's word is read: one of some names, a time with its unit, or a name with numbers (`lognormal:cv=0.8`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from kvbench.errors import KvbenchError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
LARGEST, SMALLEST = 10**9, 1e-6
"""Beyond these a number is a slip of the finger, and would only fail later and less clearly."""


def choice(value: str, allowed: Iterable[str], flag: str) -> str:
    """`value` if it is one of `allowed`, in any case; else KvbenchError with the nearest."""
    names = list(allowed)
    value = value.strip()
    if value.lower() in names:
        return value.lower()
    near = difflib.get_close_matches(value.lower(), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise KvbenchError(f"{flag} {value!r} is not one of {', '.join(names)}{hint}")


def seconds(text: str, flag: str, *, zero: bool = False) -> float:
    """`500ms`, `30s`, `1.5m`, `2h` in seconds; `0s` where `zero` is a time too."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if found is None or found[2].lower() not in _SECONDS:
        raise KvbenchError(f"{flag} cannot read {text!r}; write a time with its unit, such as 500ms, 30s, 5m or 2h")
    value = float(found[1]) * _SECONDS[found[2].lower()]
    if not (0 < value <= LARGEST or (zero and value == 0)):
        raise KvbenchError(f"{flag} must be a time above 0 and at most {LARGEST:,} s, not {text!r}")
    return value


def shaped(text: str, known: Mapping[str, Mapping[str, str]], flag: str) -> tuple[str, dict[str, float]]:
    """`lognormal:cv=0.8:max=4096` as its name and numbers. `known` says which keys each name takes and what each is:
    `number` (see `positive`) or `time` (with its unit). KvbenchError, with the nearest, for all else."""
    name, *items = text.split(":")
    name = choice(name, known, flag)
    keys = known[name]
    found: dict[str, float] = {}
    for item in items:
        key, mark, word = (part.strip() for part in item.partition("="))
        if not keys:
            raise KvbenchError(f"{flag} {name} takes nothing more; drop {':' + item!r}")
        if not mark or not word:
            raise KvbenchError(f"{flag} {name} takes key=value after a colon, not {item!r}; it knows {', '.join(keys)}")
        key = choice(key, keys, f"{flag} {name}:")
        if key in found:
            raise KvbenchError(f"{flag} {name} has {key} twice; give it once")
        found[key] = (
            seconds(word, f"{flag} {name}:{key}") if keys[key] == "time" else _number(word, f"{name}:{key}", flag)
        )
    return name, found


def _number(word: str, key: str, flag: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise KvbenchError(f"{flag} {key} must be a number, not {word!r}") from None
    return positive(value, f"{flag} {key}")


def positive(value: float, what: str) -> float:
    """`value` if it is a number that can be worked with; else KvbenchError."""
    if not SMALLEST <= value <= LARGEST:  # NaN fails this too
        raise KvbenchError(f"{what} must be a number above 0, from {SMALLEST:f} to {LARGEST:,}, not {value:g}")
    return value
