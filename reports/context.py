"""Where the numbers come from and what to beware of: device, model, versions, price, and how far to trust them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvbench.metrics.points import Context, LoadPoint
from kvbench.metrics.records import MEASURED
from kvbench.metrics.stats import P99_SAMPLES
from kvbench.metrics.store import RunFolder
from kvbench.metrics.summary import of_total
from kvbench.metrics.window import STEADY, TOTAL
from kvbench.reports.groups import OK, Group, Results, Row, evidences
from kvbench.reports.predictions import range_checks
from kvbench.reports.servers import server_checks, server_line
from kvbench.reports.sign import GOOD, WARNING, Check
from kvbench.reports.words import DASH, binary_size, count, listing, number, percent, plain, times

STATUS_WORDS = {
    "oom": "out of memory",
    "failed": "with an error",
    "rejected": "with every request rejected",
    "timeout": "over their time limit",
}

RATE_SLACK = 0.05
"""An open loop is overloaded where it answers this share less than was drawn; its last answers always come late."""
INCOMPLETE = 0.1
"""From this share on, tokens of requests that did not finish are a good part of a cell's output tokens."""
BUSY = 1.5
"""Repeats of one point that differ by this factor are not the work of their seeds."""


def facts(manifest: Row, section: str) -> Mapping[str, Any]:
    """A section of run.json; empty where it is absent."""
    found = manifest.get(section)
    return found if isinstance(found, dict) else {}


def planned(manifest: Row) -> int:
    """How many cells the sweep set out to run; 0 where run.json does not say."""
    cells = manifest.get("cells")
    return len(cells) if isinstance(cells, list) else 0


def evidence(results: Results) -> str:
    """`Measured`, `Simulated`, both, or `Not measured` where no cell ran."""
    return listing(evidences(results.ok)).capitalize() or "Not measured"


def headline_facts(folder: RunFolder, results: Results) -> list[str]:
    """Model, device, memory, workload and date, for the line above the headline."""
    model, device, kv = (facts(folder.manifest, name) for name in ("model", "device", "kv"))
    first: Row = results.rows[0] if results.rows else {}
    weights = {"real": "", "random": ", random weights"}.get(str(model.get("weights")), "")
    dtype = model.get("dtype") or first.get("dtype")
    said = [
        f"{model.get('name') or first.get('model') or 'unknown model'}{f' · {dtype}' if dtype else ''}{weights}",
        str(device.get("name") or first.get("device") or ""),
        _pool(kv),
        server_line(folder.manifest),
        _workload(facts(folder.manifest, "dataset"), results),
        str(folder.manifest.get("created") or "")[:10],
    ]
    return [text for text in said if text]


def _workload(data: Mapping[str, Any], results: Results) -> str:
    """The data set in its own words, or by name and lengths."""
    if data.get("lengths"):
        return str(data["lengths"])
    lengths = listing([f"{data[key]} {way}" for key, way in (("input", "in"), ("output", "out")) if data.get(key)])
    if not lengths and len(results.contexts) == 1 and results.middle != Context():
        lengths = str(results.middle)
    return ": ".join(part for part in (f"{data['name']} prompts" if data.get("name") else "", lengths) if part)


def _pool(kv: Mapping[str, Any]) -> str:
    if kv.get("pool_tokens") is None:
        return ""
    size = f" ({binary_size(kv['pool_bytes'])})" if kv.get("pool_bytes") is not None else ""
    return f"{plain(kv['pool_tokens'])} tokens of KV memory{size} for each backend"


def provenance(folder: RunFolder, results: Results) -> list[str]:
    """What one would need to make the numbers again."""
    manifest = folder.manifest
    device, software, timings = (facts(manifest, name) for name in ("device", "environment", "timings"))
    commit = f" @ {software['commit']}" if software.get("commit") else ""
    seeds = sorted({row["seed"] for row in results.rows if row.get("seed") is not None})
    said = [
        str(device.get("name") or DASH),
        f"{device['cores']} cores" if device.get("cores") else "",
        binary_size(device["memory_bytes"]) + " memory" if device.get("memory_bytes") else "",
        *(f"{name} {software[name]}" for name in ("driver", "torch", "transformers", "python") if software.get(name)),
        str(software.get("platform") or ""),
        f"step times {source}" if (source := facts(device, "step_times").get("source")) else "",
        f"kvbench {manifest.get('kvbench_version') or DASH}{commit}",
        f"seed {seeds[0]}" + (f" to {seeds[-1]}" if len(seeds) > 1 else "") if seeds else "",
        price(manifest) or "no price given",
        *(
            f"{words} {plain(round(timings[key], 3))} s"
            for key, words in (("model_load_s", "model loaded in"), ("cold_first_token_s", "first cold token after"))
            if isinstance(timings.get(key), int | float)
        ),
        _made(manifest),
    ]
    return [text for text in said if text]


def _made(manifest: Row) -> str:
    """`made 2026-11-29 20:10 UTC`, with the number of sessions where it was taken up again."""
    if not manifest.get("created"):
        return ""
    sessions = len(manifest.get("sessions") or [])
    again = f", in {sessions} sessions" if sessions > 1 else ""
    return f"made {str(manifest['created'])[:16].replace('T', ' ')} UTC{again}"


def price(manifest: Row) -> str:
    """`$2.5 per device-hour (list price, 2026-11-01; change with --price)`; of a range its middle; empty without
    one."""
    found = facts(manifest, "price")
    if found.get("usd_per_hour") is None:
        return ""
    source = ", ".join(str(found[key]) for key in ("source", "date") if found.get(key))
    if found.get("low") is not None:
        source = f"the middle of ${plain(found['low'])} to ${plain(found['high'])}, {source}"
    return f"${plain(found['usd_per_hour'])} per device-hour ({source}{'; ' if source else ''}change with --price)"


def cells_failed(rows: Sequence[Row]) -> str:
    """`3 of 20 cells failed, 2 of them out of memory`; `all 12 cells failed, ...`, `the only cell failed: ...`."""
    failed = [row for row in rows if row.get("status") != OK]
    kinds = Counter(str(row.get("status")) for row in failed).most_common()
    if len(failed) == len(rows) == 1:
        return f"the only cell failed, {STATUS_WORDS.get(kinds[0][0], kinds[0][0]).replace('their', 'its')}"
    start = f"all {len(rows)} cells" if len(failed) == len(rows) else f"{len(failed)} of {count(len(rows), 'cell')}"
    if len(failed) == 1:
        return f"{start} failed, {STATUS_WORDS.get(kinds[0][0], kinds[0][0]).replace('their', 'its')}"
    said = [f"{n} {'of them ' if not i else ''}{STATUS_WORDS.get(kind, kind)}" for i, (kind, n) in enumerate(kinds)]
    return f"{start} failed, {listing(said)}"


def reasons(results: Results) -> list[str]:
    """Each distinct reason with the cells it stopped: `contiguous at 16 users, 5 cells: ...`."""
    found: dict[tuple[str, str], int] = {}
    for group in results.groups:
        for row in group.failed:
            key = f"{results.name(group.variant)} at {group.load}", str(row.get("reason") or row.get("status"))
            found[key] = found.get(key, 0) + 1
    return [f"{where}, {count(n, 'cell')}: {' '.join(why.split())}" for (where, why), n in found.items()]


def unfinished(results: Results, manifest: Row) -> str:
    """A sentence where the run has fewer cells than it set out to run; empty otherwise."""
    done, asked = len(results.rows), planned(manifest)
    of = f"{done} of {count(asked, 'cell')}" if asked else count(done, "cell")
    if manifest.get("interrupted"):
        return f"The run was interrupted after {of}."
    return f"The run has {of} so far: it goes on or was stopped." if done < asked else ""


def no_device_figures(manifest: Row) -> str:
    """Why a run on a CPU has no figures of torch's beside its pool; empty on a device that has them."""
    if facts(manifest, "device").get("kind") != "cpu":
        return ""
    return (
        "torch keeps books of requested, allocated, active, reserved and split memory for GPUs only. This run used the "
        "CPU, so there are none: the process's own peak stands instead, where the system tells it."
    )


def checks(folder: RunFolder, results: Results) -> list[Check]:
    """Missing cells, a forced resumption, failed cells, tokens of no whole answer, answered requests, samples behind
    the p99, repeats, window."""
    found = []
    if late := unfinished(results, folder.manifest):
        found.append(Check(WARNING, late.rstrip(".")))
    if forced := folder.manifest.get("forced"):
        found.append(Check(WARNING, f"resumed by --force although {listing([str(item) for item in forced])}"))
    if results.failed:
        found.append(Check(WARNING, cells_failed(results.rows)))
    elif results.rows:
        found.append(Check(GOOD, f"{count(len(results.rows), 'cell')} {results.label or MEASURED}, none failed"))
    found += _incomplete(results)
    found += server_checks(folder.manifest, results)
    if results.ok:
        found += [_requests(results), *_held(results), *_rates(results), *_tail(results)]
        found += range_checks(results) + _slowed(results)
        found += [*_objectives(folder.manifest, results), _repeats(results), *_until(folder.manifest)]
        found += [*_spread(results), *_windows(results)]
    return found


def _requests(results: Results) -> Check:
    """What became of the requests of the cells that ran."""

    def total(column: str) -> int:
        return sum(int(row.get(column) or 0) for row in results.ok)

    asked = total("requests_submitted")
    bad = [(total(f"requests_{kind}"), kind) for kind in ("rejected", "failed", "aborted", "unfinished", "truncated")]
    if any(n for n, _ in bad):
        return Check(WARNING, f"of {count(asked, 'request')} {listing([f'{n:,} {kind}' for n, kind in bad if n])}")
    return Check(
        GOOD, f"all {asked:,} requests answered, none truncated" if asked > 1 else f"{count(asked, 'request')} asked"
    )


def _incomplete(results: Results) -> list[Check]:
    """Where many of the tokens whose speed is shown belong to answers that nobody got whole."""
    shares: list[tuple[float, Group]] = []
    for group in results.groups:
        for row in group.rows:
            if of := row.get("output_tokens_total"):
                shares.append(((row.get("output_tokens_incomplete") or 0) / of, group))
    many = [share for share, _ in shares if share >= INCOMPLETE]
    if not many:
        return []
    most, group = max(shares, key=lambda found: found[0])
    where = f"{results.name(group.variant)} at {group.load}"
    of = f"in {len(many)} of {count(len(shares), 'cell')} " if len(shares) > 1 else ""
    text = f"{of}requests that did not finish made up to {percent(most)} of the output tokens ({where})"
    return [Check(WARNING, f"{text}: out tok/s counts them, nobody got those answers whole")]


def _tail(results: Results) -> list[Check]:
    # the samples of a request have their first tokens together: only requests are independent
    samples = [min(int(row["ttft_samples"]), _finished(row)) for row in results.ok if row.get("ttft_samples")]
    if not samples:
        return []
    if min(samples) >= P99_SAMPLES:
        return [Check(GOOD, f"every p99 from at least {count(min(samples), 'request')}")]
    few = f"p99 from as few as {count(min(samples), 'request')}"
    return [Check(WARNING, f"{few}: below {P99_SAMPLES} the slowest alone decide it")]


def _slowed(results: Results) -> list[Check]:
    """Where a device was slower than it should be while it was measured."""
    slowed = [row for row in results.ok if row.get("throttled")]
    if not slowed:
        return []
    why = listing(sorted({str(row["throttle_reasons"]) for row in slowed})[:3])
    text = f"the device slowed down in {len(slowed)} of {count(len(results.ok), 'cell')}: {why} of the time"
    return [Check(WARNING, f"{text}; cool it or run again")]


def _held(results: Results) -> list[Check]:
    """Of an open loop: where requests were sent more slowly than they were drawn."""
    behind = []
    for group in results.groups:
        drawn, sent = group.mean("drawn_rate_per_s").value, group.mean("achieved_rate_per_s").value
        most = max(group.values("largest_rate_1s_per_s"), default=None)
        if drawn is not None and any(row.get("rate_held") is False for row in group.ok):
            name, of = f"{results.name(group.variant)} at {group.load}", f"{number(drawn, 1)} requests/s drawn"
            behind.append(f"{name} sent {number(sent, 1)} of {of}, {number(most)} at most in a second")
    return [Check(WARNING, f"rate not held, TTFT counts the wait: {listing(behind)}")] if behind else []


def _finished(row: Row) -> int:
    """Requests of which all samples finished; all there are where a row does not say."""
    return int(row["requests_finished"] if row.get("requests_finished") is not None else row["ttft_samples"])


def _rates(results: Results) -> list[Check]:
    """Of an open loop: what was asked, drawn and answered, where a variant fell behind its schedule."""
    behind = []
    for group in results.groups:
        whole = replace(group, rows=tuple(of_total(row) for row in group.rows))  # whoever is late, answers in the end
        drawn, answered = whole.mean("achieved_rate_per_s").value, whole.mean("requests_per_s").value
        if group.load.request_rate is None or drawn is None or answered is None:
            continue
        if answered < (1 - RATE_SLACK) * drawn:
            asked = f"asked {plain(group.load.request_rate)} requests/s, drawn {number(drawn, 1)}"
            behind.append(f"{results.name(group.variant)} answered {number(answered, 1)} ({asked})")
    return [Check(WARNING, f"overloaded, so waiting grows with the run: {listing(behind)}")] if behind else []


def _objectives(manifest: Row, results: Results) -> list[Check]:
    """In how many cells the service level objectives held."""
    judged = [row for row in results.ok if row.get("slo_met") is not None]
    if not judged:
        return []
    met = sum(bool(row["slo_met"]) for row in judged)
    wanted = listing([str(slo) for slo in manifest.get("slos") or []])
    text = f"in time ({wanted}) for 99 % of requests in {met} of {count(len(judged), 'cell')}"
    return [Check(GOOD if met == len(judged) else WARNING, text)]


def _spread(results: Results) -> list[Check]:
    """Repeats of one point that differ so much that something else used the machine."""
    worst = 1.0
    for group in results.groups:
        speeds = [speed for speed in group.values("output_tokens_per_s") if speed > 0]
        worst = max(worst, max(speeds, default=1.0) / min(speeds, default=1.0))
    if worst < BUSY:
        return []
    return [Check(WARNING, f"repeats of one point differ up to {times(worst, 1)}: was the machine busy with more?")]


def _repeats(results: Results) -> Check:
    most = max(len(group.ok) for group in results.groups)
    if most < 2:
        return Check(WARNING, "one repeat: no speed is proven (--repeats 5 would)")
    return Check(GOOD, f"{most} repeats, paired by seed")


def _until(manifest: Row) -> list[Check]:
    """Of a run that repeats until its intervals are narrow: whether they are."""
    found = facts(manifest, "until_ci")
    if not found:
        return []
    within = f"within ± {percent(found['share'], 1)} after {count(found['repeats'], 'repeat')}"
    if found.get("reached"):
        return [Check(GOOD, f"every interval of out tok/s is {within}")]
    return [Check(WARNING, f"not every interval of out tok/s is {within}: {listing(found['wide'])}")]


def _windows(results: Results) -> list[Check]:
    """Which window the numbers of each load are of; and of a total one, why no steady one."""
    meaning = {
        STEADY: "steady window: start and end of the load left out",
        TOTAL: "total window: start and end of the load included",
    }
    loads: dict[str, list[str]] = {}
    for row in results.ok:
        if row.get("window"):
            loads.setdefault(str(row["window"]), []).append(str(LoadPoint.of(row)))
    why = Counter(str(row["window_reason"]) for row in results.ok if row.get("window_reason"))
    found = []
    for name, where in loads.items():
        text = meaning.get(name, f"{name} window")
        if len(loads) > 1:
            text += f", at {listing(list(dict.fromkeys(where)))}"
        if name == TOTAL and why:
            text += f" ({why.most_common(1)[0][0]})"
        found.append(Check(GOOD, text))
    return found
