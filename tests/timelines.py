"""Two recorded runs of vLLM, replayed request by request on virtual cards: writes docs/timelines.md and its figure.

The requests come when they came and are as long as they were; the step times are those of the shipped parameters, which
nothing here fits. The recordings are read from a folder beside the checkout and not shipped.

    python tests/timelines.py ../shared/data/traces
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shown import ROOT, Shell, block, table
from timelines_figure import draw

from kvbench.metrics.store import RunFolder
from kvbench.planner.shipped import shipped

Floats = NDArray[np.float64]

PAGE, FIGURE, TEXT = (
    ROOT / "docs" / "timelines.md",
    ROOT / "docs" / "timelines.svg",
    ROOT / "tests" / "timelines_page.md",
)
CARD, ENGINE = "rtx-pro-6000", "vLLM-0.19.0"
SEATS = 128
"""Requests that run at once at most."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run and the command that replays it. What the files do not say (cards, seats, tokens a step) was read
    off them: docs/timelines.md says how."""

    model: str
    tp: int

    @property
    def name(self) -> str:
        return f"llmservingsim_vllm_RTXPRO6000_{self.model}"

    @property
    def command(self) -> str:
        limits = f"--tp {self.tp} --max-num-seqs {SEATS} --max-num-batched-tokens 2048"
        trace = f"--dataset azure --dataset-path {self.model}.csv --arrivals trace"
        device = f"--device sim:{CARD} --model {self.model} --backend paged"
        return (
            f"kvbench sweep {device} {trace} {limits} --num-warmups 0 --repeats 1 --output {self.model} --format json"
        )


RECORDINGS = (Recording("Llama-3.1-8B", 1), Recording("Qwen3-32B", 2))


@dataclass(frozen=True, slots=True)
class Times:
    """Of each request, in seconds from the first one's arrival: `float64 [requests]`; `tokens` of its answer."""

    arrived_s: Floats
    admitted_s: Floats
    first_s: Floats
    last_s: Floats
    tokens: Floats

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> Floats:
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def e2e_s(self) -> Floats:
        return self.last_s - self.arrived_s

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens.sum() / self.last_s.max())

    def running(self, at_s: Floats) -> Floats:
        return _between(self.admitted_s, self.last_s, at_s)

    def waiting(self, at_s: Floats) -> Floats:
        return _between(self.arrived_s, self.admitted_s, at_s)


def _between(begin_s: Floats, end_s: Floats, at_s: Floats) -> Floats:
    """How many have begun and not ended at each of these times."""
    begun = np.searchsorted(np.sort(begin_s), at_s, side="right")
    return (begun - np.searchsorted(np.sort(end_s), at_s, side="right")).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recorded run beside its replay. `seen` are [t, running, waiting] as its server logged them once a second.
    `full_step_s` is how long a step took in which every seat decoded and nothing else was done, in the recording and
    in the replay."""

    recording: Recording
    recorded: Times
    simulated: Times
    seen: Floats
    full_step_s: tuple[float, float]
    step_times: dict[str, Any]


def read(folder: Path, recording: Recording) -> tuple[list[dict[str, Any]], Times]:
    """The requests in order of arrival, and their times. Arrivals are on the wall clock and the rest on another: the
    quickest hand-over of all is taken to have taken no time."""
    lines = (folder / f"{recording.name}_requests.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: row["arrival_time"])
    columns = {key: np.array([row[key] for row in rows]) for key in rows[0] if key != "request_id"}
    apart_s = (columns["queued_ts"] - columns["arrival_time"]).min()
    zero_s = columns["arrival_time"][0] + apart_s
    arrived_s = columns["arrival_time"] - columns["arrival_time"][0]
    admitted_s, first_s, last_s = (
        columns[f"{name}_ts"] - zero_s for name in ("scheduled", "first_token", "last_token")
    )
    return rows, Times(arrived_s, admitted_s, first_s, last_s, columns["output_toks"])


def replay(folder: Path, recording: Recording) -> Replayed:
    rows, recorded = read(folder, recording)
    with tempfile.TemporaryDirectory() as work:
        _write_azure(Path(work) / f"{recording.model}.csv", rows, recorded.arrived_s)
        Shell(Path(work)).run(recording.command)
        run = RunFolder.open(Path(work) / recording.model)
        [cell] = run.cells()["cell"]
        requests, steps = (done := run.run(cell)).requests, done.steps
        step_times = run.manifest["device"]["step_times"]
    columns = [(one.scheduled_s, one.admitted_s, one.first_s, one.last_s, one.output_tokens) for one in requests]
    simulated = Times(*np.array(columns, dtype=float).T)
    assert np.allclose(simulated.arrived_s, recorded.arrived_s, atol=1e-5)
    assert (simulated.tokens == recorded.tokens).all()
    log = _log(folder, recording)
    quiet = (log["running"] == SEATS) & (log["prompt_throughput"] == 0)
    full = [step.end_s - step.start_s for step in steps if step.decode_tokens == SEATS and not step.prefill_tokens]
    full_step_s = float(np.median(SEATS / log["gen_throughput"][quiet])), float(np.median(full))
    seen = np.stack([log[key] for key in ("t", "running", "waiting")], axis=1)
    return Replayed(recording, recorded, simulated, seen, full_step_s, step_times)


def _write_azure(path: Path, rows: Sequence[dict[str, Any]], arrived_s: Floats) -> None:
    start = datetime(2026, 1, 1)
    with path.open("w", encoding="utf-8", newline="") as out:
        write = csv.writer(out)
        write.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for row, at_s in zip(rows, arrived_s, strict=True):
            stamp = start + timedelta(seconds=float(at_s))
            write.writerow([stamp.strftime("%Y-%m-%d %H:%M:%S.%f"), row["input_toks"], row["output_toks"]])


def _log(folder: Path, recording: Recording) -> dict[str, Floats]:
    """What the server logged once a second, by column."""
    with (folder / f"{recording.name}_timeseries.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}


METRICS: dict[str, Callable[[Times], float]] = {
    "TTFT mean, s": lambda times: float(times.ttft_s.mean()),
    "TTFT p99, s": lambda times: float(np.percentile(times.ttft_s, 99)),
    "TPOT mean, ms": lambda times: 1000 * float(times.tpot_s.mean()),
    "TPOT p99, ms": lambda times: 1000 * float(np.percentile(times.tpot_s, 99)),
    "E2E mean, s": lambda times: float(times.e2e_s.mean()),
    "E2E p99, s": lambda times: float(np.percentile(times.e2e_s, 99)),
    "output tokens/s": lambda times: times.tokens_per_s,
    "last token after, s": lambda times: float(times.last_s.max()),
    "between the first 60 first tokens, ms": lambda times: (
        1000 * float(np.median(np.diff(np.unique(times.first_s))[:60]))
    ),
}


def _gap_s(times: Times) -> float:
    """Between the ends of steps in which somebody got a first token, in the median of the first 60."""
    return float(np.median(np.diff(np.unique(times.first_s))[:60]))


def _table(one: Replayed) -> str:
    pairs = {name: (of(one.recorded), of(one.simulated)) for name, of in METRICS.items()}
    was_s, is_s = one.full_step_s
    pairs[f"a step of {SEATS} that decode, ms"] = 1000 * was_s, 1000 * is_s
    rows = [[name, _digits(was), _digits(is_), f"{100 * (is_ / was - 1):+.1f} %"] for name, (was, is_) in pairs.items()]
    return table(["", "recorded", "simulated", "error"], rows)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.1f}"


def _curves(one: Replayed) -> str:
    """How far the curves are apart, and the recording's two files from each other."""
    end_s = max(one.recorded.last_s.max(), one.simulated.last_s.max())
    at_s = np.arange(0.0, end_s, 0.1)
    apart = [
        np.abs(was - is_).mean()
        for was, is_ in (
            (one.recorded.running(at_s), one.simulated.running(at_s)),
            (one.recorded.waiting(at_s), one.simulated.waiting(at_s)),
        )
    ]
    logged = np.abs(one.recorded.running(one.seen[:, 0]) - one.seen[:, 1]).mean()
    ttft_s = np.abs(one.simulated.ttft_s - one.recorded.ttft_s)
    e2e_s = np.abs(one.simulated.e2e_s / one.recorded.e2e_s - 1)
    host_ms = 1000 * SEATS * one.step_times["sequence_s"]
    text = (
        f"On average over time the curves are {apart[0]:.1f} running and {apart[1]:.1f} waiting requests apart (the "
        f"recording's own log and its requests: {logged:.1f} running). Request by request the TTFT differs by "
        f"{np.median(ttft_s):.2f} s and the whole time by {100 * np.median(e2e_s):.1f} % in the median. Of a step in "
        f"which {SEATS} decode, the parameters charge the host {host_ms:.1f} ms for its users."
    )
    return textwrap.fill(text, 120)


def doubts(one: Replayed) -> list[str]:
    """What the words of the page say and the numbers do not: then the words have to be written anew."""

    def error(name: str) -> float:
        return METRICS[name](one.simulated) / METRICS[name](one.recorded) - 1

    was_s, is_s = one.full_step_s
    host_s = SEATS * one.step_times["sequence_s"]
    said = {
        "the TTFT is off by more than the TPOT": error("TTFT mean, s") > error("TPOT mean, ms") > 0,
        "a step in which all decode is too long, by the host's time at most": 0 < is_s - was_s < 1.1 * host_s,
        "steps with prompts are too long": error("between the first 60 first tokens, ms") > 0,
    }
    return [f"{one.recording.model}: not that {words}" for words, true in said.items() if not true]


def known(recording: Recording) -> str:
    """What the shipped parameters were fitted to of this card, in words."""
    families = [one for one in shipped().families if one[1:3] == (ENGINE, CARD)]
    if any(one[3] == recording.model and one[5] == str(recording.tp) for one in families):
        return (
            "The shipped parameters have seen this run: its mean TPOT and its tokens/s are two of the rows they were "
            "fitted to (not its TTFT: overload without a request count). Percentiles, TTFT and curves are new here."
        )
    others = ", ".join(sorted(one[3] for one in families))
    return "The shipped parameters have not seen this run, nor this model on this card" + (
        f"; of the card they know runs of {others} by the same authors." if others else ", nor the card."
    )


def page(replays: Sequence[Replayed]) -> str:
    """The whole of docs/timelines.md."""
    parts = []
    for one in replays:
        recorded = one.recorded
        cards = "one card" if one.recording.tp == 1 else f"{one.recording.tp} cards"
        parts += [
            f"## {one.recording.model} on {cards}",
            block(one.recording.command),
            textwrap.fill(
                f"{len(recorded.tokens)} requests within {recorded.arrived_s[-1]:.0f} s, {recorded.tokens.sum():,} "
                f"tokens of answers. {known(one.recording)} Step times: {one.step_times['source']}.",
                120,
            ),
            _table(one),
            _curves(one),
        ]
    return TEXT.read_text(encoding="utf-8").replace("{runs}", "\n\n".join(parts))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data" / "traces"
    if not folder.is_dir():
        sys.exit(f"timelines: no recordings at {folder}; name the folder that has {RECORDINGS[0].name}_requests.jsonl")
    replays = [replay(folder, recording) for recording in RECORDINGS]
    PAGE.write_text(page(replays), encoding="utf-8")
    draw(replays, FIGURE)
    wrong = [words for one in replays for words in doubts(one)]
    print(f"{PAGE.relative_to(ROOT)}, {FIGURE.relative_to(ROOT)}: {'; '.join(wrong) or 'words and numbers agree'}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
