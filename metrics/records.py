"""What a run observed, as plain rows: one per request, one per step, one per hold of memory.

Everything later (tables, charts, verdicts) is a pure function of these rows. Standard library only. Times are seconds
on the run's clock, which starts at 0 with the run; sizes are in tokens, one token being one row of the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FINISHED = "finished"
FAILED = "failed"
REJECTED = "rejected"
ABORTED = "aborted"
UNFINISHED = "unfinished"


@dataclass(slots=True)
class RequestRecord:
    """One request from the moment the load wanted it sent to its last token; where it asks for several samples each
    has a record of its own, told apart by `sample`.

    `status` is one of the five words above. `reason` says how it ended: `length` or `stop` where it finished, a
    sentence where it did not; it has no latency then, but its tokens count. Times that never happened are None.
    `token_s` has one entry for each output token. `cached_tokens` of the input were found in memory at its first
    admission; what it finds again after a preemption counts for nothing, and what a sample has of the one that computed
    the prompt neither. In `swaps` of the `preemptions` its rows went to host memory, in the others they were given up.

    Only of a server's answer there are `due_s`, when the load let it go (later than scheduled where it holds requests
    back), `asked_tokens` of the prompt as the workload drew it (`input_tokens` is then what the server counted, where
    it says), `told_tokens` of output and `told_cached_tokens` by its usage (None: it told none), `streamed_tokens` by
    the token ids in its stream, and `chunks` that brought tokens and `empty_chunks` that brought nothing. Nobody knows
    its preemptions and swaps; in files they are null, not 0.
    """

    request: int
    scheduled_s: float
    sent_s: float
    input_tokens: int
    max_tokens: int
    sample: int = 0
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    truncated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    status: str = UNFINISHED
    reason: str = ""
    turn: int = 0
    prompt_token_ids: list[int] | None = None
    output_token_ids: Sequence[int] | None = None
    due_s: float | None = None
    asked_tokens: int | None = None
    told_tokens: int | None = None
    told_cached_tokens: int | None = None
    streamed_tokens: int | None = None
    chunks: int | None = None
    empty_chunks: int | None = None


@dataclass(slots=True)
class StepRecord:
    """One step of the engine: a batch launched at `start_s` whose tokens existed at `end_s`.

    `device_s` is the time inside the executor, `host_s` the rest of the step. `sequences`, `prefill_tokens` and
    `decode_tokens` describe the batch; `attended_pairs` counts its (query, key) pairs, `context_tokens` the computed
    tokens of its sequences after the step. `used`, `held`, `free` and `cached` are what the allocator reported after
    the forward pass and before anything was freed; used + (held - used) + free = pool, where a row that several
    sequences share counts once. `logical` adds up the filled rows of each sequence, so it counts such a row for each,
    `logical_held` the held ones. `swapped` rows lay in host memory, outside the pool. Before anything was computed
    `copied` rows were copied on write and so many `swapped_out` and `swapped_in`.
    """

    step: int
    start_s: float
    end_s: float
    host_s: float
    device_s: float
    sequences: int
    prefill_tokens: int
    decode_tokens: int
    sampled_tokens: int
    attended_pairs: int
    context_tokens: int
    running: int
    waiting: int
    preemptions: int
    pool_tokens: int
    used_tokens: int
    held_tokens: int
    free_tokens: int
    cached_tokens: int = 0
    swapped_tokens: int = 0
    logical_tokens: int = 0
    logical_held_tokens: int = 0
    copied_tokens: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0


@dataclass(slots=True)
class Hold:
    """A sample of `request` held `held_tokens` rows in steps `first_step` up to, not including, `end_step`.

    `asked_tokens` is what its policy asked for before the allocator rounded up, `final_tokens` the rows that were
    filled when the whole stay ended (by finishing, failing or preemption). A stay that grows is several holds. Rows
    that it shares with others are in none of its numbers: `request` -1 holds them, once.
    """

    request: int
    first_step: int
    end_step: int
    held_tokens: int
    asked_tokens: int
    final_tokens: int
    sample: int = 0


@dataclass(slots=True)
class SampleRecord:
    """What a server told of itself at `end_s`, having been asked at `start_s`. None: it does not tell.

    `preemptions` since the sample before; `kv_cache_usage` is the share of its pool that is held.
    """

    step: int
    start_s: float
    end_s: float
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    pool_tokens: int | None = None
    held_tokens: int | None = None
    kv_cache_usage: float | None = None


@dataclass(slots=True)
class Run:
    """All that one cell observed. `end_s` is the time of its last event.

    A run against a server has no steps and no holds but the `samples` of what the server tells, no `pool_tokens`, and
    the tokens that the server's own counters grew by meanwhile.
    """

    requests: list[RequestRecord]
    steps: list[StepRecord]
    holds: list[Hold]
    pool_tokens: int | None
    end_s: float
    external_fragmentation_events: int | None = 0
    server_input_tokens: int | None = None
    server_output_tokens: int | None = None
    samples: list[SampleRecord] = field(default_factory=list)

    @property
    def remote(self) -> bool:
        """Whether a server served it, of which only requests and samples are known."""
        return self.pool_tokens is None
