"""What the tables tell of a group of cells: columns about answers, about the pool's rows and about the device's bytes.

A column appears where it says something. A zero that is an answer is shown, one that could be nothing else is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.metrics.stats import Interval
from kvbench.reports.groups import Group, Results
from kvbench.reports.servers import any_remote
from kvbench.reports.words import number

EQUAL_SLOTS = "max"
"""The one reservation policy that needs no buddy allocator."""


@dataclass(frozen=True, slots=True)
class Column:
    """`value` of a group in base units times `scale` stands under `head` (its spaces may become line breaks), with its
    interval where `spread`. `counted`: nothing to be uncertain about. `drop`: the order in which columns make room on a
    narrow terminal, 0 never."""

    key: str
    head: str
    value: Callable[[Group], Interval]
    decimals: int = 0
    scale: float = 1.0
    spread: bool = False
    counted: bool = False
    drop: int = 0

    def cell(self, group: Group) -> str:
        """The rounded mean, or a dash."""
        value = self.value(group).value
        return number(None if value is None else value * self.scale, self.decimals)

    def interval(self, group: Group) -> str:
        """`± 12.3`, the half-width of the 95 % interval; empty below two repeats."""
        found = self.value(group)
        if not self.spread or found.high is None or found.value is None:
            return ""
        return f"± {number((found.high - found.value) * self.scale, self.decimals)}"


def _known(value: float | None) -> Interval:
    return Interval(value, None, None, int(value is not None), 0)


def _mean(column: str) -> Callable[[Group], Interval]:
    return lambda group: group.mean(column)


def _sum(column: str) -> Callable[[Group], Interval]:
    return lambda group: _known(sum(values) if (values := group.values(column)) else None)


def _peak(column: str) -> Callable[[Group], Interval]:
    return lambda group: _known(max(group.values(column), default=None))


def _least(column: str) -> Callable[[Group], Interval]:
    return lambda group: _known(min(group.values(column), default=None))


def _share(key: str, head: str, drop: int = 0) -> Column:
    return Column(key, head, _mean(key), 1, 100, drop=drop)


def _mebibytes(key: str, head: str, drop: int = 0) -> Column:
    return Column(key, head, _peak(key), 1, 2**-20, counted=True, drop=drop)


ANSWERS = (
    Column("requests", "requests", _sum("requests_submitted"), counted=True, drop=1),
    Column("output_tokens_per_s", "out tok/s", _mean("output_tokens_per_s"), 1, spread=True),
    Column("ttft_p50_s", "TTFT p50 ms", _mean("ttft_p50_s"), 0, 1e3, drop=4),
    Column("ttft_p99_s", "TTFT p99 ms", _mean("ttft_p99_s"), 0, 1e3),
    Column("tpot_p50_s", "TPOT p50 ms", _mean("tpot_p50_s"), 1, 1e3, drop=3),
    Column("tpot_p99_s", "TPOT p99 ms", _mean("tpot_p99_s"), 1, 1e3),
    _share("attainment", "in time %"),
    _share("kv_utilisation_mean", "KV used %"),
    _share("kv_fragmentation_mean", "KV wasted %"),
    Column("preemptions", "pre- empted", _mean("preemptions"), 1, drop=5),
    Column("peak_running", "peak running", _peak("peak_running"), counted=True),
    Column("usd_per_million_output_tokens", "$/1M out", _mean("usd_per_million_output_tokens"), 3, drop=2),
    Column("failed_cells", "failed cells", lambda group: _known(len(group.failed)), counted=True),
)
REMOTE = (
    Column("send_lag_p99_s", "send lag p99 ms", _mean("send_lag_p99_s"), 1, 1e3, drop=2),
    _share("kv_cache_usage_mean", "KV held %", drop=5),
)
"""What only a run against a server needs: its own word on its memory, and whether the client was in time."""
SHARING = (
    _share("prefix_hit_rate", "prefix hits %"),
    _share("kv_sharing_mean", "KV shared %", drop=6),
)
POOL = (
    _share("kv_utilisation_mean", "used %"),
    _share("kv_reserved_mean", "reserved %"),
    _share("kv_internal_mean", "never filled %"),
    _share("kv_rounding_mean", "rounding %"),
    _share("kv_free_mean", "free %"),
    _share("kv_cached_mean", "cached %"),
    _share("kv_efficiency_mean", "efficiency %", drop=1),
    _share("kv_fragmentation_mean", "KV wasted %", drop=3),
    _share("kv_sharing_mean", "KV shared %"),
    _share("kv_blocks_saved_mean", "blocks saved %"),
    Column("external_fragmentation_events", "external events", _mean("external_fragmentation_events"), 1),
    Column("preemptions", "pre- empted", _mean("preemptions"), 1, drop=2),
    Column("swapped_tokens_peak", "swapped rows, peak", _peak("swapped_tokens_peak"), counted=True),
)
"""Where the rows of the pool were: five parts that add up to 100 %, and what else is said of them."""
DEVICE = (
    _mebibytes("kv_arena_bytes", "KV arena MiB"),
    _mebibytes("swap_space_bytes", "swap space MiB"),
    _mebibytes("device_requested_bytes_peak", "torch requested MiB"),
    _mebibytes("device_allocated_bytes_peak", "torch allocated MiB"),
    _mebibytes("device_active_bytes_peak", "torch active MiB"),
    _mebibytes("device_reserved_bytes_peak", "torch reserved MiB"),
    _mebibytes("device_inactive_split_bytes_peak", "torch inactive split MiB"),
    _mebibytes("host_rss_bytes_peak", "process MiB"),
)
"""What stands beside the pool: bytes, each the largest of the repeats."""
ENERGY = (
    Column("joules_per_output_token", "J/out tok", _mean("joules_per_output_token"), 3, spread=True),
    Column("power_mean_w", "mean W", _mean("power_mean_w"), 1),
    Column("power_peak_w", "peak W", _peak("power_peak_w"), 1, counted=True),
    Column("clock_mean_hz", "mean clock MHz", _mean("clock_mean_hz"), 0, 1e-6),
    Column("clock_min_hz", "lowest clock MHz", _least("clock_min_hz"), 0, 1e-6, counted=True),
    Column("temperature_peak_c", "hottest °C", _peak("temperature_peak_c"), 0, counted=True),
    Column("throttled", "slowed cells", _sum("throttled"), counted=True),
)
"""How the device fared."""


def answer_columns(results: Results) -> tuple[Column, ...]:
    """Those about sharing only where a prefix cache was on, those about servers only where one was measured."""
    more = (SHARING if _caching(results) else ()) + (REMOTE if any_remote(results) else ())
    after = 1 + next(at for at, column in enumerate(ANSWERS) if column.key == "kv_fragmentation_mean")
    return ANSWERS[:after] + more + ANSWERS[after:]


def pool_columns(results: Results) -> tuple[Column, ...]:
    """Cached and shared rows where rows could be or were, external events where a buddy allocator ran, swapped rows
    where any were."""
    buddies = any(row.get("reserve") not in (None, EQUAL_SLOTS) for row in results.rows)
    says = {
        "kv_cached_mean": _caching(results) or _anywhere(results, "kv_cached_mean"),
        "kv_sharing_mean": _caching(results) or _anywhere(results, "kv_sharing_peak"),
        "kv_blocks_saved_mean": _caching(results) or _anywhere(results, "kv_sharing_peak"),
        "external_fragmentation_events": buddies or _anywhere(results, "external_fragmentation_events"),
        "swapped_tokens_peak": _anywhere(results, "swapped_tokens_peak"),
    }
    return _known_to(results, tuple(column for column in POOL if says.get(column.key, True)))


def device_columns(results: Results) -> tuple[Column, ...]:
    """torch's figures where it has any, and swap space where there was some."""
    swaps = _anywhere(results, "swap_space_bytes")
    return _known_to(results, tuple(column for column in DEVICE if swaps or column.key != "swap_space_bytes"))


def energy_columns(results: Results) -> tuple[Column, ...]:
    """As much as the device tells; a clock alone, which a virtual machine may make up, says nothing."""
    found = _known_to(results, ENERGY)
    return found if any("clock" not in column.key for column in found) else ()


def all_columns(results: Results) -> tuple[Column, ...]:
    """For those who read by name: each column once, those about memory whether anything is known or not."""
    return tuple({column.key: column for column in (*answer_columns(results), *POOL, *DEVICE, *ENERGY)}.values())


def _caching(results: Results) -> bool:
    return any(row.get("prefix_caching") for row in results.rows)


def _anywhere(results: Results, key: str) -> bool:
    return any(row.get(key) for row in results.ok)


def _known_to(results: Results, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    return tuple(column for column in columns if any(column.value(g).value is not None for g in results.groups))
