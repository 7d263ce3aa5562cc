"""The cards: memory, bandwidth, rates, links and prices, each figure with its source; a user's own beside them."""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError

TORCH_SHARE = 0.994
"""What torch reports as a card's total is this share of the driver's (81,559 MiB by the driver, 79.18 GiB by torch)."""

NOTED = "torch's total"
MIB, GIB, GB = 2**20, 2**30, 10**9
TEXTS = ("id", "name", "link", "note", "memory_source", "source", "as_of", "price_source", "price_as_of")
NUMBERS = (
    "driver_mib",
    "torch_total_bytes",
    "vendor_gb",
    "bandwidth_gb_s",
    "bf16_tflops",
    "fp16_tflops",
    "fp8_tflops",
    "link_gb_s_per_direction",
    "tdp_w",
    "usd_per_hour_low",
    "usd_per_hour_high",
)
FIELDS = (*TEXTS, *NUMBERS, "aliases")
"""What a card of a file may say."""

RATES = {"bf16_tflops": "bfloat16", "fp16_tflops": "float16", "fp8_tflops": "fp8"}
MEMORY = ("torch_total_bytes", "driver_mib", "vendor_gb")
LARGEST = 10**15


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. `memory_bytes` is what torch reports as its total, or would: `memory_source` says which, and of whom.
    `flops_per_s` by dtype are dense; a dtype that is not among them the card does not multiply. `link_bytes_per_s` is
    per direction. `usd_per_hour` is the lowest and the highest price seen."""

    id: str
    name: str
    memory_bytes: int
    memory_source: str
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    link: str = ""
    link_bytes_per_s: float | None = None
    tdp_w: float | None = None
    usd_per_hour: tuple[float, float] | None = None
    note: str = ""
    source: str = ""
    as_of: str = ""
    price_source: str = ""
    price_as_of: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def memory_noted(self) -> bool:
        """Whether `memory_bytes` is what somebody saw torch report, no estimate."""
        return self.memory_source.startswith(NOTED)

    @property
    def names(self) -> tuple[str, ...]:
        """All that it may be called."""
        return (self.id, self.name, *self.aliases)

    @property
    def usd_per_hour_middle(self) -> float | None:
        """The middle of the prices seen, which stands for all of them where one number is needed."""
        return None if self.usd_per_hour is None else sum(self.usd_per_hour) / 2


@cache
def catalogue() -> tuple[Card, ...]:
    """The built-in cards."""
    return _cards(tomllib.loads(files("kvbench.planner").joinpath("gpus.toml").read_text("utf-8")), "gpus.toml")


def find_card(name: str, extra: Sequence[Card] = ()) -> Card:
    """The card of that id, name or alias, whatever its case, blanks and dashes; those of a user's file (`extra`) come
    first, and take the place of the catalogue's of the same id. KvbenchError, with the nearest, where there is none."""
    cards, own = [*extra, *catalogue()], {card.id: card for card in extra}
    for card in cards:
        if _key(name) in map(_key, card.names):
            return own.get(card.id, card)
    known = {_key(called): card for card in reversed(cards) for called in card.names}
    near = difflib.get_close_matches(_key(name), known, n=1, cutoff=0)
    raise KvbenchError(
        f"unknown card {name!r}; the nearest known one is {known[near[0]].id} ({known[near[0]].name}). "
        "`kvbench gpus` lists all, --gpu-file adds your own"
    )


def _key(name: str) -> str:
    return re.sub(r"nvidia|amd|geforce|[^a-z0-9]", "", name.lower())


def load_cards(path: Path) -> tuple[Card, ...]:
    """The cards of a user's file: TOML with `[[card]]` tables as in `gpus.toml`, or CSV with the same columns."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin theirs with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise KvbenchError(f"cannot read --gpu-file {path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix.lower() == ".csv":
        return _cards({"card": _rows(text, path)}, str(path))
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no TOMLDecodeError
        raise KvbenchError(f"--gpu-file {path} is not TOML: {error}") from error
    return _cards(table, str(path))


def _rows(text: str, path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, what is blank left out."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        rows, names = list(reader), reader.fieldnames or []
    except csv.Error as error:
        raise KvbenchError(f"--gpu-file {path} line {reader.line_num} is not CSV: {error}") from error
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise KvbenchError(f"--gpu-file {path} has the column {twice!r} twice; keep one of them")
    if any(None in row or None in row.values() for row in rows):
        raise KvbenchError(f"--gpu-file {path} has a row with more or fewer fields than its first line")
    return [{key: value for key, value in row.items() if value} for row in rows]


def with_prices(cards: Iterable[Card], prices: Iterable[str]) -> tuple[Card, ...]:
    """The cards at a user's prices: `2.50` for all of them, or `h100=2.50` for one."""
    found = list(cards)
    for text in prices:
        name, mark, number = text.rpartition("=")
        usd = _price(number, text)
        chosen = found if not mark else [card for card in found if _key(name) in map(_key, card.names)]
        if not chosen:
            shown = ", ".join(card.id for card in found[:3]) + ", …" * (len(found) > 3)
            raise KvbenchError(f"--price {text} names no card that is shown: {shown}")
        priced = {card.id: replace(card, usd_per_hour=(usd, usd), price_source="--price", price_as_of="")
                  for card in chosen}  # fmt: skip
        found = [priced.get(card.id, card) for card in found]
    return tuple(found)


def _price(number: str, text: str) -> float:
    try:
        usd = float(number)
    except ValueError:
        usd = math.nan
    if not 0 <= usd <= 10**6:
        raise KvbenchError(f"--price must be US dollars per card-hour, as 2.50 or h100=2.50, not {text!r}")
    return usd


def _cards(table: Mapping[str, Any], where: str) -> tuple[Card, ...]:
    """The cards of a file, each checked; what they leave out comes from its `[defaults]`."""
    _known(table, ("card", "defaults"), where)
    rows, defaults = table.get("card"), table.get("defaults", {})
    if not isinstance(rows, list) or not rows or not all(isinstance(one, Mapping) for one in (*rows, defaults)):
        raise KvbenchError(f"{where} has no card; give each as a [[card]] table or as a row of a CSV")
    _known(defaults, TEXTS, where)
    cards = tuple(_card({**defaults, **row}, f"{where}, card {number}") for number, row in enumerate(rows, 1))
    seen: dict[str, str] = {}
    for card in cards:
        for called in dict.fromkeys(map(_key, card.names)):
            if seen.setdefault(called, card.id) != card.id or [one.id for one in cards].count(card.id) > 1:
                raise KvbenchError(f"{where} has two cards that can be called {called!r}; give each a name of its own")
    return cards


def _known(told: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in told:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0)
            raise KvbenchError(f"{where}: unknown field {key!r}; the nearest known one is {near[0]}")


def _card(row: Mapping[str, Any], where: str) -> Card:
    _known(row, FIELDS, where)
    texts = {key: _text(row, key, where) for key in TEXTS}
    numbers = {key: value for key in NUMBERS if (value := _number(row, key, where)) is not None}
    if not _key(texts["id"]):
        found = (
            f"has id {texts['id']!r}, which has no letter from a to z and no digit: it lacks"
            if texts["id"]
            else "lacks"
        )
        raise KvbenchError(f"{where} {found} id, the name by which --gpu finds it")
    if "bandwidth_gb_s" not in numbers:
        raise KvbenchError(f"{where} ({texts['id']}) lacks bandwidth_gb_s, the memory's bandwidth in GB/s")
    low, high = numbers.get("usd_per_hour_low"), numbers.get("usd_per_hour_high")
    low, high = (high if low is None else low), (low if high is None else high)
    if low is not None and high is not None and low > high:
        raise KvbenchError(f"{where} ({texts['id']}) has usd_per_hour_low {low:g} above usd_per_hour_high {high:g}")
    aliases = row.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and _key(alias) for alias in aliases):
        raise KvbenchError(f"{where} ({texts['id']}) has aliases {aliases!r}; they must be a list of names")
    memory_bytes, memory_source = _memory(numbers, texts, where)
    link = numbers.get("link_gb_s_per_direction")
    priced = low is not None and high is not None
    return Card(
        id=texts["id"],
        name=texts["name"] or texts["id"],
        memory_bytes=memory_bytes,
        memory_source=memory_source,
        bandwidth_bytes_per_s=numbers["bandwidth_gb_s"] * GB,
        flops_per_s={dtype: numbers[key] * 10**12 for key, dtype in RATES.items() if key in numbers},
        link=texts["link"],
        link_bytes_per_s=None if link is None else link * GB,
        tdp_w=numbers.get("tdp_w"),
        usd_per_hour=(low, high) if low is not None and high is not None else None,
        note=texts["note"],
        source=texts["source"] or where,
        as_of=texts["as_of"],
        price_source=(texts["price_source"] or where) if priced else "",
        price_as_of=texts["price_as_of"] if priced else "",
        aliases=tuple(aliases),
    )


def _memory(numbers: Mapping[str, float], texts: Mapping[str, str], where: str) -> tuple[int, str]:
    """What torch reports, or an estimate that says what it is made of."""
    origin = texts["memory_source"] or where
    if total := numbers.get("torch_total_bytes"):
        return int(total), f"{NOTED}: {origin}"
    if driver := numbers.get("driver_mib"):
        return int(driver * MIB * TORCH_SHARE), f"estimated: {TORCH_SHARE:.1%} of the driver's {driver:,.0f} MiB"
    if vendor := numbers.get("vendor_gb"):
        return int(vendor * GIB * TORCH_SHARE), f"estimated: {TORCH_SHARE:.1%} of the vendor's {vendor:g} GB, as GiB"
    raise KvbenchError(f"{where} ({texts['id']}) lacks its memory; give one of {', '.join(MEMORY)}")


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str) or "\n" in value:
        raise KvbenchError(f"{where} has {key} {value!r}; it must be a text of one line")
    return value.strip()


def _number(row: Mapping[str, Any], key: str, where: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:  # hundreds of digits
        number = value = math.inf
    if not 0 < number <= LARGEST and not (number == 0 and key.startswith("usd_")):
        raise KvbenchError(f"{where} has {key} {value!r}; it must be a number above 0")
    return number
