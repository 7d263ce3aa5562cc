"""What a user types, as checked values: sizes, shares, variants, devices. Wrong input ends here, in one line."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvbench.cli.config import DTYPES, SIM, flag
from kvbench.errors import KvbenchError
from kvbench.metrics.points import LoadPoint, Variant
from kvbench.metrics.slo import DEFAULT_SLOS, Slo, parse_slos
from kvbench.workloads.options import choice

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}ib": 1024**_power, _letter: 1024**_power, f"{_letter}b": 1000**_power}

_SWITCH: Mapping[str, object] = {"off": False, "on": True}


def parse_dtype(value: str | None) -> str | None:
    """`auto`, a torch name or its short form; None for auto."""
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
    if value is None or value.lower() == "auto":
        return None
    return choice(short.get(value.lower(), value), DTYPES, "--dtype")


def parse_bytes(text: str, flag: str) -> int:
    """`4GiB`, `500MB`, `1048576`; one letter counts in powers of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise KvbenchError(f"{flag} cannot read {text!r}; write a size such as 512MiB or 4GiB")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if not 1 <= size < 2**60:
        raise KvbenchError(f"{flag} must be a size above 0, not {text!r}")
    return int(size)


def parse_search(
    loads: tuple[LoadPoint, ...] | None, *, rate: bool, concurrency: bool
) -> tuple[str | None, tuple[LoadPoint, ...] | None]:
    """What is searched for, and the load the search begins at."""
    if rate and concurrency:
        raise KvbenchError("--find-max-rate and --find-max-concurrency are two searches; run one of them")
    if not rate and not concurrency:
        return None, loads
    first = LoadPoint(request_rate=1.0) if rate else LoadPoint(concurrency=16)
    return "rate" if rate else "concurrency", loads or (first,)


def parse_share(text: str | None, flag: str) -> float | None:
    """`5%` or `0.05` as a share of 1; None where nothing was told."""
    if text is None:
        return None
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if not 0.0001 <= share < 1:
        raise KvbenchError(f"{flag} must be a share from 0.01% to below 100%, such as 5% or 0.05, not {text!r}")
    return share


def with_server(backends: str, target: str | None, server: str) -> str:
    """`--backend` with the server that `--target` adds; KvbenchError where one is named and has no address."""
    named = server in (item.strip().lower() for item in backends.split(","))
    if named and target is None:
        raise KvbenchError(f"--backend {server} needs its address; add --target http://host:port")
    return backends if named or target is None else f"{backends},{server}"


def parse_variants(
    backends: str, told: Mapping[str, str | None], policies: Mapping[str, Mapping[str, Sequence[str]]]
) -> tuple[Variant, ...]:
    """`--backend` and what was `told` of each policy (a field of `Variant`; None: nothing) as rows of the comparison:
    a backend with every choice among the policies that it has."""
    names = list(dict.fromkeys(choice(item, policies, "--backend") for item in backends.split(",")))
    chosen: dict[str, list[object]] = {}
    for name, text in told.items():
        owner, words = next((owner, of[name]) for owner, of in policies.items() if name in of)
        if text is not None and not any(name in policies[backend] for backend in names):
            raise KvbenchError(
                f"{flag(name)} is a policy of the {owner} backend; add {owner} to --backend or drop {flag(name)}"
            )
        picked = [choice(item, words, flag(name)) for item in (words[0] if text is None else text).split(",")]
        chosen[name] = [_SWITCH.get(word, word) for word in dict.fromkeys(picked)]
    found = []
    for backend in names:
        mine = [name for name in chosen if name in policies[backend]]
        for values in itertools.product(*(chosen[name] for name in mine)):
            found.append(Variant.of({"backend": backend, **dict(zip(mine, values, strict=True))}))
    return tuple(found)


def parse_caching(words: str | None, enable: bool | None) -> str | None:
    """`--prefix-caching`, or vLLM's `--enable-prefix-caching` in its words; KvbenchError where both disagree."""
    if enable is None:
        return words
    alias = "on" if enable else "off"
    if words is not None and words.strip().lower() != alias:
        raise KvbenchError(
            f"--{'' if enable else 'no-'}enable-prefix-caching says {alias}, --prefix-caching {words}; give one of them"
        )
    return alias


def parse_salts(text: str | None) -> tuple[str, ...]:
    """`--cache-salt`: one, or several that the requests take in turns; the empty one where it is not given."""
    if text is None:
        return ("",)
    salts = tuple(text.split(","))
    if not all(salt.strip() for salt in salts):
        raise KvbenchError(f"--cache-salt has an empty salt in {text!r}; give names, such as a,b, or drop it")
    return salts


def parse_metadata(items: Iterable[str]) -> tuple[tuple[str, str], ...]:
    pairs = [item.partition("=") for item in items]
    for key, mark, _ in pairs:
        if not key or not mark:
            raise KvbenchError(f"--metadata takes key=value, not {key!r}")
    if twice := [key for key, count in Counter(key for key, _, _ in pairs).items() if count > 1]:
        raise KvbenchError(f"--metadata {twice[0]} is given twice; give every key once")
    return tuple((key, value) for key, _, value in pairs)


def parse_device(value: str | None) -> str | None:
    """`cpu`, `cuda`, `cuda:N` or `sim:CARD` in any case; None for the best there is."""
    if value is None or re.fullmatch(r"cpu|cuda(:\d+)?|sim:.*\S.*", value.strip().lower()):
        return None if value is None else value.strip().lower()
    raise KvbenchError(f"unknown --device {value!r}; use cpu, cuda, cuda:N or {SIM}CARD, such as {SIM}h100-sxm")


def parse_objectives(slo: Iterable[str], goodput: str | None) -> tuple[Slo, ...]:
    """`--slo` (repeatable) and its alias `--goodput`; the defaults where neither is given."""
    return parse_slos([*slo, *([goodput] if goodput else [])]) or DEFAULT_SLOS
