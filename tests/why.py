"""Why paged: one 80 GB card and a 13B model, worked through with the commands of kvbench. Writes docs/why-paged.md.

Every number of the page comes from a command that stands in it, and every verdict from those numbers: a test writes the
page again and compares.

    python tests/why.py
"""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shown import ROOT, Shell, block, table

PAGE, TEXT = ROOT / "docs" / "why-paged.md", ROOT / "tests" / "why.md"

Row = dict[str, Any]

CARD, OTHER_CARD, MODEL, GROUPED = "h100-sxm", "a100-80-sxm", "llama-2-13b", "llama-3.1-8b"
LONGEST = 4096
CHATS = "--input-len 1024 --output-len 512 --range-ratio 0.8"
SHORT = "--input-len 161 --output-len 338 --range-ratio 0.8"
USERS, CROWD = 40, 160
"""As many as the claim has with paged, and as many as fill the memory with short chats."""
CLAIM_FILLED, CLAIM_GAIN = ((30, 40), (80, 90)), (2.0, 4.0)
"""Tokens' share of the memory in % under contiguous and under paged, and how many times the throughput."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep on a virtual card, and the comparison of its variants."""

    name: str
    flags: str
    card: str = CARD
    model: str = MODEL

    @property
    def commands(self) -> tuple[str, str]:
        where = f"--device sim:{self.card} --model {self.model} --max-model-len {LONGEST}"
        sweep = f"kvbench sweep {where} {self.flags} --repeats 3 --output why/{self.name} --format json"
        return sweep, f"kvbench compare why/{self.name} --format json"


_ALL = (
    Sweep("chats", f"{CHATS} --concurrency 10,{USERS} --num-prompts 320 --reserve max,declared"),
    Sweep("short", f"{SHORT} --concurrency {USERS},{CROWD} --num-prompts 640 --reserve max,declared"),
    Sweep("longest", f"--input-len 2048 --output-len 2048 --concurrency {USERS} --num-prompts 160"),
    Sweep("prompts", f"--input-len 2048 --output-len 16 --range-ratio 0.8 --concurrency {USERS} --num-prompts 320"),
    Sweep("grouped", f"{CHATS} --concurrency {USERS} --num-prompts 320", model=GROUPED),
    Sweep("a100", f"{CHATS} --concurrency {USERS} --num-prompts 320", card=OTHER_CARD),
)
SWEEPS = {one.name: one for one in _ALL}

WORDS = (
    ("chats", 10, 0.995, 1.005),
    ("chats", USERS, 1.2, 2.0),
    ("short", USERS, 1.8, 4.0),
    ("short", CROWD, 2.5, 4.0),
    ("longest", USERS, 1.0, 1.3),
    ("prompts", USERS, 0.95, 1.1),
    ("grouped", USERS, 0.995, 1.005),
    ("a100", USERS, 1.2, 2.0),
)
"""Between what the gains must lie for the words of the page to be true."""


def capacity(model: str, longest: int) -> str:
    limits = "--max-num-batched-tokens 2048 --max-num-seqs 256"
    lengths = f"--input-len 1024 --output-len 512 --max-model-len {longest}"
    return f"kvbench capacity --model {model} --gpu {CARD} {lengths} {limits} --format json"


FITS, FITS_GROUPED, FITS_GROUPED_LONG = (
    capacity(MODEL, LONGEST),
    capacity(GROUPED, LONGEST),
    capacity(GROUPED, 131_072),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a sweep's two commands said."""

    rows: list[Row]
    contests: list[Row]

    def of(self, variant: str, users: int) -> Row:
        [found] = [row for row in self.rows if _variant(row) == variant and row["concurrency"] == users]
        return found

    def gain(self, users: int, over: str = "contiguous max") -> Row:
        """Of paged in output tokens/s."""
        [found] = [
            one
            for one in self.contests
            if one["metric"] == "output_tokens_per_s" and one["concurrency"] == users and one["new"] == "paged"
            if one["base"] == over or (over == "contiguous max" and one["base"] == "contiguous")
        ]
        return found

    def reads(self, users: int, fits: Row) -> float:
        """How many times the tokens/s paged could give if a step did nothing but read weights, keys and values."""
        weights, pool = fits["weights_bytes"], fits["pool_bytes"]
        before, after = (self.of(one, users) for one in ("contiguous max", "paged"))
        took = [weights + row["kv_utilisation_mean"] * pool for row in (before, after)]
        return float(after["peak_running"] / before["peak_running"] * took[0] / took[1])


def _variant(row: Row) -> str:
    return f"contiguous {row['reserve']}" if row["backend"] == "contiguous" else "paged"


def runs(seen: Seen) -> str:
    """A sweep's rows as a table."""
    head = ["", "users", "at once", "KV filled %", "out tok/s", "TTFT p50 ms", "TPOT p50 ms", "preempted"]
    rows = [
        [
            _variant(row),
            str(row["concurrency"]),
            str(row["peak_running"]),
            f"{100 * row['kv_utilisation_mean']:.0f}",
            f"{row['output_tokens_per_s']:,.0f}",
            f"{1000 * row['ttft_p50_s']:,.0f}",
            f"{1000 * row['tpot_p50_s']:.1f}",
            f"{row['preemptions']:.0f}",
        ]
        for row in seen.rows
    ]
    return table(head, rows)


def gains(seen: Seen) -> str:
    """What paged gave more, as a table."""
    rows = [
        [
            f"paged over {one['base']}",
            str(one["concurrency"]),
            f"{one['value']:.2f} ×",
            f"{one['low']:.2f} to {one['high']:.2f}",
            one["window"],
            one["verdict"],
        ]
        for one in seen.contests
        if one["metric"] == "output_tokens_per_s" and one["new"] == "paged"
    ]
    return table(["output tokens/s", "users", "gain", "interval", "window", "verdict"], rows)


def _gain(one: Row) -> str:
    return f"{one['value']:.2f} × [{one['low']:.2f} to {one['high']:.2f}]"


def claim(told: Sequence[tuple[str, Seen, int]]) -> str:
    """The claim part by part, a column for each traffic."""
    users, filled, gained = ["10 users → 40"], ["memory filled 30–40 % → 80–90 %"], ["2–4 × the throughput"]
    for _, seen, asked in told:
        before, after = (seen.of(one, asked) for one in ("contiguous max", "paged"))
        all_in = before["peak_running"] < asked == after["peak_running"]
        users.append(f"{before['peak_running']} → {after['peak_running']}: {'holds' if all_in else 'does not'}")
        shares = [round(100 * row["kv_utilisation_mean"]) for row in (before, after)]
        inside = all(low <= share <= high for share, (low, high) in zip(shares, CLAIM_FILLED, strict=True))
        filled.append(f"{shares[0]} % → {shares[1]} %: {'holds' if inside else 'does not'}")
        gained.append(f"{_gain(one := seen.gain(asked))}: {_held(one)}")
    return table(["claim", *(name for name, _, _ in told)], [users, filled, gained], words=len(told) + 1)


def _held(one: Row) -> str:
    low, high = CLAIM_GAIN
    if low <= one["low"] and one["high"] <= high:
        return "holds"
    return "less" if one["high"] < low else "more" if one["low"] > high else "on the edge"


@dataclass(frozen=True, slots=True)
class Told:
    """What all commands of the page said: the sweeps by name, what fits, and where step times come from."""

    sweeps: dict[str, Seen]
    fits: Row
    grouped: Row
    grouped_long: Row
    steps: list[str]


@cache
def told() -> Told:
    """Runs the commands of the page: half a minute of one core."""
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        sweeps = {one.name: Seen(*map(shell.run, one.commands)) for one in SWEEPS.values()}
        fits, grouped, long = (shell.run(command) for command in (FITS, FITS_GROUPED, FITS_GROUPED_LONG))
        return Told(sweeps, fits, grouped, long, [_steps(Path(folder) / "why" / name) for name in ("chats", "a100")])


def doubts() -> list[str]:
    """What the words of the page say and its numbers do not: then the words have to be written anew."""
    sweeps, found = told().sweeps, []
    for name, users, low, high in WORDS:
        gain = sweeps[name].gain(users)
        if not low <= gain["low"] <= gain["high"] <= high:
            found.append(f"{name}, {users} users: {_gain(gain)} instead of {low} to {high}")
    if sweeps["short"].of("contiguous declared", USERS)["peak_running"] != USERS:
        found.append(f"contiguous declared does not serve {USERS} short chats at once")
    return found


def page() -> str:
    """The whole of docs/why-paged.md."""
    values: dict[str, object] = {**_numbers(told()), **_memory(told())}
    for name, one in SWEEPS.items():
        seen = told().sweeps[name]
        values |= {f"{name}_commands": block(*one.commands), f"{name}_runs": runs(seen), f"{name}_gains": gains(seen)}
    return TEXT.read_text(encoding="utf-8").format(**values)


def _numbers(all_: Told) -> dict[str, object]:
    """What stands between the words of the page: users, gains, waits."""
    chats, short = all_.sweeps["chats"], all_.sweeps["short"]
    before, after = (chats.of(one, USERS) for one in ("contiguous max", "paged"))
    return {
        "users": USERS,
        "crowd": CROWD,
        "before": before["peak_running"],
        "after": after["peak_running"],
        "more": f"{after['peak_running'] / before['peak_running']:.1f}",
        "filled_before": f"{100 * before['kv_utilisation_mean']:.0f}",
        "filled_after": f"{100 * after['kv_utilisation_mean']:.0f}",
        "gain": f"{chats.gain(USERS)['value']:.1f}",
        "short_gain": f"{short.gain(CROWD)['value']:.1f}",
        "waits": f"{before['ttft_p50_s']:.0f}",
        "waits_after": f"{after['ttft_p50_s']:.1f}",
        "pace": f"{1 / before['tpot_p50_s']:.0f}",
        "pace_after": f"{1 / after['tpot_p50_s']:.0f}",
        "claim": claim(
            [
                (f"long chats, {USERS} users", chats, USERS),
                (f"short chats, {USERS}", short, USERS),
                (f"short chats, {CROWD}", short, CROWD),
            ]
        ),
        "reads": f"{chats.reads(USERS, all_.fits):.1f}",
        "short_reads": f"{short.reads(CROWD, all_.fits):.1f}",
        "read_before": f"{before['kv_utilisation_mean'] * all_.fits['pool_bytes'] / 2**30:.0f}",
        "read_after": f"{after['kv_utilisation_mean'] * all_.fits['pool_bytes'] / 2**30:.0f}",
        "declared": _gain(chats.gain(USERS, "contiguous declared")),
        "short_declared": _gain(short.gain(CROWD, "contiguous declared")),
        "a100_gain": _gain(all_.sweeps["a100"].gain(USERS)),
        "steps": "\n".join(all_.steps),
    }


def _memory(all_: Told) -> dict[str, object]:
    """What `kvbench capacity` says."""
    names = {"contiguous": "contiguous max", "contiguous declared": "contiguous declared", "paged": "paged"}
    rows = [[name, str(all_.fits["max_concurrency"][key]["1536"])] for key, name in names.items()]
    return {
        "fits_command": block(FITS),
        "fits": table(["", "users at once with 1,536 tokens each"], rows),
        "pool": f"{all_.fits['pool_tokens']:,}",
        "token_kib": f"{all_.fits['kv_bytes_per_token'] / 1024:.0f}",
        "weights_gib": f"{all_.fits['weights_bytes'] / 2**30:.0f}",
        "grouped_fits": block(FITS_GROUPED, FITS_GROUPED_LONG),
        "grouped_pool": f"{all_.grouped['pool_tokens']:,}",
        "grouped_token_kib": f"{all_.grouped['kv_bytes_per_token'] / 1024:.0f}",
        "grouped_places": all_.grouped["max_concurrency"]["contiguous"]["1536"],
        "long_places": all_.grouped_long["max_concurrency"]["contiguous"]["1536"],
        "long_paged": all_.grouped_long["max_concurrency"]["paged"]["1536"],
    }


def _steps(run: Path) -> str:
    """Where the step times of a run come from, as an item of a list."""
    device = json.loads((run / "run.json").read_text(encoding="utf-8"))["device"]
    facts = device["step_times"]
    read = facts["bandwidth_efficiency"]
    text = (
        f"- {device['card']['name']}: {facts['source']}. {read:.0%} of the datasheet's bandwidth for weights, "
        f"{read * facts['kv_efficiency']:.0%} for keys and values, {facts['compute_efficiency']:.0%} of its FLOP/s, "
        f"{1e6 * facts['sequence_s']:.0f} µs a user and step on the host."
    )
    return textwrap.fill(text, 120, subsequent_indent="  ")


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {'; '.join(doubts()) or 'its words are those of its numbers'}")
    raise SystemExit(1 if doubts() else 0)


if __name__ == "__main__":
    main()
