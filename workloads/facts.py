"""What a workload is in numbers, before any of it is asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise

from kvbench.metrics.stats import percentile
from kvbench.workloads.datasets import Outline, Segment

WINDOWS_S = (1, 10, 60)
"""Over which arrivals are counted for the index of dispersion."""

Facts = dict[str, float | int | None]


def facts(outlines: Sequence[Outline], times: Sequence[float] | None, block_size: int) -> Facts:
    """Lengths, and where the load has `times` of its own how they come; None for what there is not."""
    inputs = [float(one.input_tokens) for one in outlines]
    outputs = [float(one.output_tokens) for one in outlines]
    return {
        "requests": len(outlines),
        "conversations": sum(one.turn == 0 for one in outlines),
        **_lengths("input", inputs),
        **_lengths("output", outputs),
        "longest_request_tokens": max(one.input_tokens + one.output_tokens for one in outlines),
        "total_input_tokens": int(sum(inputs)),
        "total_output_tokens": int(sum(outputs)),
        "infinite_cache_hit_rate": hit_rate(outlines, block_size),
        **(_arrivals(times) if times else dict.fromkeys(_arrivals([0.0]))),
    }


def _lengths(way: str, tokens: Sequence[float]) -> Facts:
    return {
        f"{way}_mean_tokens": math.fsum(tokens) / len(tokens),
        f"{way}_cv": variation(tokens),
        **{f"{way}_p{q}_tokens": percentile(tokens, q) for q in (50, 90, 99)},
        f"{way}_longest_tokens": int(max(tokens)),
    }


def _arrivals(times: Sequence[float]) -> Facts:
    span_s = times[-1] - times[0]
    return {
        "duration_s": times[-1],
        "rate_per_s": (len(times) - 1) / span_s if span_s > 0 else None,
        "interarrival_cv": variation([later - earlier for earlier, later in pairwise(times)]),
        **{f"dispersion_{window_s}s": dispersion(times, window_s) for window_s in WINDOWS_S},
    }


def variation(values: Sequence[float]) -> float | None:
    """The coefficient of variation, standard deviation (ddof 1) / mean; None below two values or for a mean of 0."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) / mean if mean else None


def dispersion(times: Sequence[float], window_s: float) -> float | None:
    """The index of dispersion: variance (ddof 1) / mean of the arrivals in each `window_s` from 0 on, a partial last
    one dropped. 1 for Poisson arrivals, 0 for a constant number; None below two whole windows."""
    whole = int(times[-1] / window_s)
    if whole < 2:
        return None
    counts = Counter(window for at_s in times if (window := int(at_s / window_s)) < whole)
    mean = counts.total() / whole
    if not mean:
        return None
    empty = whole - len(counts)  # of a trace with a gap of years most are
    return (math.fsum((count - mean) ** 2 for count in counts.values()) + empty * mean**2) / (whole - 1) / mean


class _Seen:
    """What a prefix cache without limits holds: a tree of segments, with how many tokens of each were computed."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, Hashable], list[int]] = {}  # a segment after another: its own number, its tokens

    def common(self, segments: Sequence[Segment]) -> int:
        """So many tokens of a prompt, from its beginning on, are held."""
        at = tokens = 0
        for key, size in segments:
            node, held = self._held.get((at, key), (0, 0))
            tokens += min(size, held)
            if held < size:
                break
            at = node
        return tokens

    def hold(self, segments: Sequence[Segment]) -> None:
        at = 0
        for key, size in segments:
            node = self._held.setdefault((at, key), [len(self._held) + 1, 0])
            node[1] = max(node[1], size)
            at = node[0]


def hit_rate(outlines: Sequence[Outline], block_size: int) -> float | None:
    """Input tokens that a prefix cache without limits finds in full blocks / all input tokens, where each request comes
    after those before it have ended. As in the engine a prompt's last token is always computed, and an answer's last
    one never stored."""
    seen, found = _Seen(), 0
    for one in outlines:
        common = min(seen.common(one.segments), one.input_tokens - 1)
        found += common // block_size * block_size
        after: tuple[Segment, ...] = ((one.answer, one.output_tokens - 1),) if one.answer is not None else ()
        seen.hold((*one.segments, *after))
    asked = sum(one.input_tokens for one in outlines)
    return found / asked if asked else None
