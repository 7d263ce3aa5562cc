"""Whole runs of requests with several samples, on pools that share, copy and swap: every sample gets the tokens of a
machine without limits, and the books are those of somebody who looks at every row in every step."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from fakes import CACHED_KINDS, KINDS, SWAPPING_KINDS, Served, answer, asking, make_pool, request, serve_on
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_abort import PHASES, Story
from test_engine import Cell
from test_prefix_runs import Watched, check_rows

from kvbench.engine.scheduler import Limits
from kvbench.engine.sequence import Sequence
from kvbench.engine.types import COMMON, SAMPLE, Sampling, Usage
from kvbench.metrics.memory import memory_summary, split
from kvbench.metrics.records import ABORTED, FAILED, FINISHED, REJECTED, Hold
from kvbench.metrics.window import total
from kvbench.paged.blocks import BlockPool
from kvbench.workloads.load import ClosedLoop, OpenLoop

PAGED_KINDS = tuple(kind for kind in (*KINDS, *CACHED_KINDS, *SWAPPING_KINDS) if "-" in kind and kind != "paged-256")


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    kind = draw(st.sampled_from([*PAGED_KINDS, *SWAPPING_KINDS, "max", "declared", "oracle"]))
    limits = Limits(
        max_model_len=48,
        max_batched_tokens=draw(st.one_of(st.integers(8, 80), st.integers(8, 80), st.integers(1, 8))),
        max_sequences=draw(st.one_of(st.integers(4, 9), st.integers(4, 9), st.integers(1, 3))),
    )
    requests = []
    for number in range(draw(st.one_of(st.integers(4, 8), st.integers(1, 8)))):
        output = draw(st.one_of(st.integers(6, 14), st.integers(1, 14)))
        common = [position % 50 for position in range(draw(st.integers(0, 20)))]
        prompt = common + [(number + position) % 50 for position in range(draw(st.integers(not common, 12)))]
        requests.append(
            asking(
                number,
                prompt,
                output,
                n=draw(st.sampled_from([1, 2, 3, 4, 4, 6])),
                scheduled_s=draw(st.integers(0, 64)) * 2**-9,
            )
        )
    concurrency = draw(st.one_of(st.just(len(requests)), st.integers(0, len(requests))))
    pool_tokens = draw(st.one_of(st.integers(40, 80), st.integers(40, 80), st.integers(16, 260)))
    return Cell(kind, pool_tokens, limits, tuple(requests), concurrency)


def watched(cell: Cell) -> Watched | None:
    """The pool of a paged cell, watched."""
    if not cell.kind.startswith(("cached", "paged", "swapping")):
        return None
    name, _, size = cell.kind.partition("-")
    swap_tokens = cell.pool_tokens // 2 if "swapping" in name else 0
    return Watched(cell.pool_tokens, int(size), prefix_caching="cached" in name, swap_tokens=swap_tokens)


@settings(max_examples=300)
@given(cells())
def test_any_workload_with_samples(cell: Cell) -> None:
    pool = watched(cell)
    served = cell.serve(pool)
    check_samples(cell, served)
    check_progress(cell, served)
    if pool is not None:
        check_rows(served.run, pool)
        check_moves(served, pool)
    else:
        split(served.run)
    assert cell.serve() == served, "the same run twice gave other records"
    records, steps = served.run.requests, served.run.steps
    event(f"swapped: {any(one.swaps for one in records)}, recomputed: {any(r.swaps < r.preemptions for r in records)}")
    event(f"copied: {any(step.copied_tokens for step in steps)}")


def check_samples(cell: Cell, served: Served) -> None:
    records = served.run.requests
    expected = [(asked, sample) for asked in cell.requests for sample in range(asked.n)]
    assert [(one.request, one.sample) for one in records] == [(asked.id, sample) for asked, sample in expected]
    rows = cell.pool_tokens // max(1, cell.block) * max(1, cell.block)
    for record, (asked, sample) in zip(records, expected, strict=True):
        output = answer(asked, sample=sample)
        if asked.n > cell.limits.seats:
            assert record.status == REJECTED and "never run at once" in record.reason
        elif record.status == REJECTED:
            assert not served_at_all(cell, len(asked.prompt))
        elif record.status == FAILED:
            assert cell.block and len(asked.prompt) + len(output) - 1 > rows
            assert record.output_token_ids == output[: rows + 1 - len(asked.prompt)]
        else:
            assert (record.status, record.output_token_ids) == (FINISHED, output)
        assert 0 <= record.swaps <= record.preemptions
    by_request = defaultdict(list)
    for record in records:
        by_request[record.request].append(record)
    if cell.block:
        for samples in by_request.values():
            assert len({one.first_s for one in samples}) == 1, "samples of one prompt begin together"
            assert all(one.cached_tokens == 0 for one in samples[1:])


def served_at_all(cell: Cell, prompt: int) -> bool:
    if block := cell.block:
        return prompt <= cell.pool_tokens // block * block
    return cell.pool_tokens >= (48 if cell.kind == "max" else 64)


def check_progress(cell: Cell, served: Served) -> None:
    """Whoever runs gets a token in every step, so nobody starves and there are no more steps than one at a time with
    one token a step would need."""
    steps, records = served.run.steps, served.run.requests
    assert all(step.sequences == step.running <= cell.limits.seats for step in steps)
    assert len(steps) <= sum(one.input_tokens + one.output_tokens - 1 for one in records if one.status != REJECTED)
    assert sum(step.preemptions for step in steps) == sum(one.preemptions for one in records)


def check_moves(served: Served, pool: Watched) -> None:
    steps = served.run.steps
    outside = 0
    for step in steps:
        outside += step.swapped_out_tokens
        assert step.swapped_in_tokens <= outside
        assert 0 <= step.swapped_tokens <= outside
    swapped = sum(one.swaps for one in served.run.requests)
    assert (swapped > 0) == any(step.swapped_out_tokens for step in steps)
    assert pool.usage().swapped == 0


@pytest.mark.parametrize("blocks", [2, 3])
def test_four_samples_share_a_prompt_and_copy_its_tail(blocks: int) -> None:
    """Blocks of 8. A prompt of a block and 3 tokens lies in two blocks for all; three copy the second one before they
    write, the last one left writes into the original. A prompt of two whole blocks needs no copy."""
    prompt = 11 if blocks == 2 else 16
    asked = request(0, prompt, 4, n=4)
    run, batches, _ = serve_on(BlockPool(200, 8), ClosedLoop([asked], 1), Limits(32))
    assert [len(batch) for batch in batches] == [1, 4, 4, 4]
    assert [step.sampled_tokens for step in run.steps] == [4, 4, 4, 4]
    copied = 3 * 3 if blocks == 2 else 0
    assert [step.copied_tokens for step in run.steps] == [0, copied, 0, 0]
    common = prompt // 8 * 8
    own = [0, prompt - common + 1, prompt - common + 2, prompt - common + 3]
    assert [step.used_tokens for step in run.steps] == [prompt] + [common + 4 * rows for rows in own[1:]]
    assert [step.logical_tokens for step in run.steps] == [prompt, *(4 * (prompt + more) for more in (1, 2, 3))]
    assert [one.output_token_ids for one in run.requests] == [answer(asked, sample=sample) for sample in range(4)]
    assert len({one.first_s for one in run.requests}) == 1
    assert {hold.request: hold.held_tokens for hold in run.holds if hold.request == COMMON} == {COMMON: common}


@pytest.mark.parametrize("samples", [2, 4, 6])
def test_the_share_of_blocks_saved_is_that_of_the_formula(samples: int) -> None:
    """Blocks of 16, a prompt of 161 (ShareGPT's mean): of the samples' blocks all but one's full ones of the prompt."""
    run, *_ = serve_on(BlockPool(4096, 16), ClosedLoop([request(0, 161, 338, n=samples)], 1), Limits(600, 600))
    for step in run.steps[1:]:
        logical, saved = samples * -(-(161 + step.step) // 16), (samples - 1) * 10
        assert (step.logical_held_tokens, step.held_tokens) == (16 * logical, 16 * (logical - saved))
    seconds = [step.end_s - step.start_s for step in run.steps]
    shares = [1 - step.held_tokens / step.logical_held_tokens for step in run.steps]
    mean = sum(second * share for second, share in zip(seconds, shares, strict=True)) / sum(seconds)
    assert memory_summary(run, total(run))["kv_blocks_saved_mean"] == pytest.approx(mean)


def test_samples_that_share_nothing_compute_the_prompt_themselves() -> None:
    asked = request(0, 11, 3, n=3)
    run, batches, _ = serve_on(make_pool("max", 96, 32), ClosedLoop([asked], 1), Limits(32))
    assert [[piece.end - piece.start for piece in batch] for batch in batches] == [[11] * 3, [1] * 3, [1] * 3]
    assert [one.output_token_ids for one in run.requests] == [answer(asked, sample=sample) for sample in range(3)]
    assert {(hold.request, hold.sample) for hold in run.holds} == {(0, 0), (0, 1), (0, 2)}


def test_a_client_asks_again_when_its_last_sample_has_ended() -> None:
    """One client, two requests of three samples; one of the second's outgrows nothing, all end in their turn."""
    run, *_ = serve_on(BlockPool(200, 8), ClosedLoop([request(n, 9, 5, n=3) for n in range(2)], 1), Limits(32))
    first, second = run.requests[:3], run.requests[3:]
    assert max(one.last_s or 0 for one in first) == second[0].scheduled_s


def test_samples_are_admitted_together_or_not_yet() -> None:
    """Four seats, one taken: four samples wait for it, although three of them would fit."""
    requests = [request(0, 4, 6), request(1, 4, 2, n=4, scheduled_s=2**-9)]
    run, batches, _ = serve_on(BlockPool(200, 8), OpenLoop(requests), Limits(32, 100, 4))
    assert [len(batch) for batch in batches] == [1] * 7 + [4]
    assert run.requests[1].admitted_s == run.requests[0].last_s


def test_more_samples_than_can_ever_run_are_refused() -> None:
    for limits in (Limits(32, 100, 3), Limits(32, 3, 100)):
        for pool in (BlockPool(200, 8), make_pool("max", 200, 32)):
            run, *_ = serve_on(pool, ClosedLoop([request(0, 4, 6, n=4)], 1), limits)
            assert [one.status for one in run.requests] == [REJECTED] * 4
            assert {one.reason for one in run.requests} == {
                "its 4 samples never run at once: max_num_seqs "
                f"{limits.max_sequences}, max_num_batched_tokens {limits.max_batched_tokens}"
            }


def test_samples_of_one_seed_differ_and_none_depends_on_how_many_there_are() -> None:  # vllm PR#10980
    asked = request(7, 4, 6, n=4, sampling=Sampling(1.0, seed=5))
    seeds = [asked.sampling_of(sample).seed for sample in range(4)]
    assert len(set(seeds)) == 4 and seeds[0] == 5
    assert seeds == [replace(asked, n=9).sampling_of(sample).seed for sample in range(4)]


def test_rows_put_aside_come_back_and_nothing_is_computed_twice() -> None:
    """Two sequences in 6 blocks of 4: the later one makes room, waits outside, and goes on where it was."""
    requests = [asking(0, list(range(8)), 13), asking(1, list(range(20, 28)), 8)]
    pool = BlockPool(24, 4, swap_tokens=12)
    run, batches, _ = serve_on(pool, ClosedLoop(requests, 2), Limits(32))
    second = run.requests[1]
    assert (second.preemptions, second.swaps) == (1, 1)
    assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]
    computed = sorted((piece.start, piece.end) for batch in batches for piece in batch if piece.id == 1)
    assert computed == [(0, 8), *((position, position + 1) for position in range(8, 15))], "something ran twice"
    (out,) = {step.swapped_out_tokens for step in run.steps} - {0}
    assert [step.swapped_in_tokens for step in run.steps if step.swapped_in_tokens] == [out]
    assert {step.swapped_tokens for step in run.steps} == {0, out}
    assert next(hold for hold in run.holds if hold.request == 1) == Hold(1, 0, 1, 8, 8, out)


def test_what_finds_no_room_outside_is_computed_again() -> None:
    requests = [asking(0, list(range(8)), 13), asking(1, list(range(20, 28)), 8)]
    run, *_ = serve_on(BlockPool(24, 4, swap_tokens=8), ClosedLoop(requests, 2), Limits(32))
    second = run.requests[1]
    assert (second.preemptions, second.swaps) == (1, 0)
    assert [one.output_token_ids for one in run.requests] == [answer(one) for one in requests]


@pytest.mark.parametrize("kind", PAGED_KINDS)
def test_a_failed_allocation_at_any_call_changes_no_token(kind: str) -> None:  # vllm#16832
    """Each reservation in turn is refused, whatever is free: samples are preempted and swapped at every moment."""
    requests = [asking(n, [*range(9), 30 + n, 31 + n], 7, n=1 + n) for n in range(3)]
    expected = [answer(one, sample=sample) for one in requests for sample in range(one.n)]
    fails = swaps = 0
    while True:
        run, _, calls = serve_on(make_pool(kind, 80, 32), ClosedLoop(requests, 3), Limits(32, 9, 5), fails={fails})
        assert [one.output_token_ids for one in run.requests] == expected, f"call {fails}"
        split(run)
        swaps += sum(one.swaps for one in run.requests)
        if (fails := fails + 1) > calls:
            break
    assert fails > 40 and (swaps > 10 or "swapping" not in kind)


@pytest.mark.parametrize("kind", ["paged-4", "swapping-4", "cached_swapping-4", "max"])
def test_an_abort_takes_all_samples_at_any_moment(kind: str) -> None:
    """In the queue, in the middle of the prompt, after the fork, while some are put aside or have ended."""
    requests = [asking(n, [*range(5), *range(10 * n, 10 * n + 6)], 9 - 2 * n, n=1 + n) for n in range(3)]
    met = Counter[str]()
    for number, phase in ((number, phase) for number in itertools.count() for phase in PHASES):
        story = Story(kind, 64 if kind != "max" else 144, Limits(24, 6, 6))
        story.step(*requests)
        for _ in range(number):
            story.step()
        if not story.engine.pending:
            break
        aside = any(one.computed for one in story.engine.scheduler.waiting if one.request.id == 2)
        (did,) = story.step(aborts={phase: [2]})
        run = story.end()
        for record in run.requests[:3]:
            assert record.output_token_ids == answer(requests[record.request], sample=record.sample)
        for record in run.requests[3:]:
            expected = answer(requests[2], sample=record.sample)
            assert record.output_token_ids == expected[: record.output_tokens]
            assert did or (record.status == FINISHED and record.output_tokens == len(expected))
            met[f"{record.status}, {'some' if record.output_tokens else 'no'} tokens"] += 1
        met["aside"] += aside
    assert met[f"{ABORTED}, no tokens"] > 10 and met[f"{ABORTED}, some tokens"] > 10, met
    assert met["aside"] or "swapping" not in kind


def test_random_mixtures_leave_nothing() -> None:
    """Many requests of up to six samples through a pool that holds a few of them."""
    draw = random.Random(3)
    requests = [
        asking(n, [draw.randrange(50) for _ in range(draw.randint(1, 40))], draw.randint(1, 30), n=draw.randint(1, 6))
        for n in range(60)
    ]
    for kind in ("paged-4", "cached-4", "swapping-4", "cached_swapping-4"):
        pool = make_pool(kind, 160, 80)
        run, *_ = serve_on(pool, ClosedLoop(requests, 12), Limits(80, 64, 12))
        assert all(one.status == FINISHED for one in run.requests)
        assert [one.output_token_ids for one in run.requests] == [
            answer(one, sample=sample) for one in requests for sample in range(one.n)
        ]
        assert sum(one.preemptions for one in run.requests) > 10
        assert (sum(one.swaps for one in run.requests) > 5) == ("swapping" in kind)
        assert replace(pool.usage(), cached=0) == Usage(0, 0, 160)


def test_what_is_given_up_before_its_copy_is_not_copied() -> None:
    """A sample that is freed at once after it asked for its own block, and one that is freed on its way back in."""
    pool = BlockPool(64, 4, swap_tokens=16)
    parent, child = (Sequence.of(request(0, 6, 8, n=2), sample=sample) for sample in range(2))
    assert pool.reserve(parent, 6)
    parent.computed = child.computed = 6
    pool.commit(parent)
    pool.fork(parent, child)
    child.tokens.append(1)
    assert pool.reserve(child, 7)
    pool.free(child)
    assert pool.take_moves() == []
    parent.tokens.append(1)
    assert pool.swap_out(parent) and len(pool.take_moves()) == 2
    other = Sequence.of(request(1, 6, 8))
    assert pool.reserve(other, 6)
    other.computed = 6
    assert pool.swap_out(other) and pool.usage().swapped == 12
    pool.free(other)
    assert pool.take_moves() == [] and pool.usage().swapped == 6
    assert pool.reserve(parent, 7)
    pool.free(parent)
    assert pool.take_moves() == [] and pool.usage() == Usage(0, 0, 64)


def test_a_sample_that_comes_back_finds_the_prompt_with_another() -> None:
    """Blocks of 4, no prefix cache. Two samples of a prompt of two blocks run beside a request that leaves no room for
    the second; it comes back once that has ended, and begins behind the prompt. That is no hit in its record."""
    requests = [asking(0, list(range(20, 28)), 5), asking(1, list(range(8)), 9, n=2)]
    run, batches, _ = serve_on(BlockPool(24, 4), ClosedLoop(requests, 2), Limits(32))
    _, first, second = run.requests
    assert (first.preemptions, second.preemptions, second.cached_tokens) == (0, 1, 0)
    pieces = [piece for batch in batches for piece in batch if piece.id == SAMPLE + 1]
    assert (pieces[0].stay, pieces[0].start) == (1, 8)
    expected = [answer(requests[0]), answer(requests[1]), answer(requests[1], sample=1)]
    assert [one.output_token_ids for one in run.requests] == expected
