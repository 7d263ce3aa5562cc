"""A sweep made ready: its plan, what each cell asks, how much memory is set aside, and how long it may take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.asking import CPU_CONTEXT, RANGE_RATIO
from kvbench.cli.config import SweepConfig
from kvbench.cli.job import Job, prepare
from kvbench.cli.load_config import parse_contexts, parse_loads
from kvbench.cli.parse import parse_caching, parse_variants
from kvbench.cli.stack import BACKENDS
from kvbench.cli.warm import Asked, Pace, _guess, warm_up
from kvbench.engine.types import Request
from kvbench.errors import KvbenchError
from kvbench.metrics.points import Context, Variant
from kvbench.workloads.datasets import Drawn, RandomTokens
from kvbench.workloads.grid import Cell
from kvbench.workloads.lengths import Lengths

BYTES = 4096  # of KV a token: tiny in float32
PAGED, CACHED = Variant("paged"), Variant("paged", prefix_caching=True)

pytestmark = pytest.mark.usefixtures("what_is_loaded_stays")


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Every draw of random prompts: longest prompt, count and seed."""
    seen: list[tuple[int, int, int]] = []
    real = RandomTokens.draw

    def noted(dataset: RandomTokens, count: int, seed: int) -> list[Drawn]:
        seen.append((dataset.longest_input, count, seed))
        return real(dataset, count, seed)

    monkeypatch.setattr(RandomTokens, "draw", noted)
    return seen


def variants(backends: str = "contiguous,paged", **told: str) -> tuple[Variant, ...]:
    policies = {name: backend.policies for name, backend in BACKENDS.items()}
    return parse_variants(
        backends, dict.fromkeys(("reserve", "batching", "prefix_caching", "preemption")) | told, policies
    )


def config(**more: Any) -> SweepConfig:
    told: dict[str, Any] = {
        "variants": variants(),
        "loads": parse_loads("4", None),
        "contexts": parse_contexts("12", "8"),
        "model": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "repeats": 1,
        "temperature": 0.5,
    }
    return SweepConfig(**told | more)


def cell(job: Job, variant: Variant, context: Context | None = None) -> Cell:
    return next(one for one in job.cells if one.variant == variant and context in (None, one.context))


def test_policies_of_each_backend_make_variants_in_the_order_asked() -> None:
    assert list(map(str, variants(prefix_caching="off,on", preemption="recompute,swap", reserve="declared"))) == [
        "contiguous declared",
        "paged",
        "paged + swap",
        "paged + prefix cache",
        "paged + prefix cache + swap",
    ]
    assert list(map(str, variants("paged", prefix_caching="ON"))) == ["paged + prefix cache"]
    assert list(map(str, variants("paged,contiguous,paged", batching="static"))) == ["paged", "contiguous max + static"]
    assert [parse_caching(None, enable) for enable in (None, True, False)] == [None, "on", "off"]
    assert parse_caching("on", True) == "on" and parse_caching("off,on", None) == "off,on"
    with pytest.raises(KvbenchError, match="--no-enable-prefix-caching says off, --prefix-caching on"):
        parse_caching("on", False)


def test_prefixes_and_samples_are_axes_of_the_grid() -> None:
    job = prepare(config(contexts=parse_contexts("12", "8", "0,20", "1,4"), variants=variants("paged")))
    assert [one.context for one in job.cells] == [
        *(Context(12, 8, 0, 1), Context(12, 8, 0, 4), Context(12, 8, 20, 1), Context(12, 8, 20, 4))
    ]
    assert set(job.datasets) == {Context(12, 8), Context(12, 8, 20)}
    plain, four, *prefixed = (job.requests(one) for one in job.cells)
    assert {request.n for request in plain} == {1} and {request.n for request in four} == {4}
    assert [replace(request, n=1) for request in four] == plain
    for requests in prefixed:
        assert len({request.prompt[:20] for request in requests}) == 1 and len(requests[0].prompt) == 32


def test_samples_and_prefixes_alone_leave_lengths_to_the_sweep() -> None:
    job = prepare(config(contexts=parse_contexts(None, None, "20", "2"), variants=variants("paged")))
    assert {one.context for one in job.cells} == {replace(CPU_CONTEXT, prefix_tokens=20, samples=2)}
    (data,) = job.datasets.values()
    assert isinstance(data, RandomTokens) and data.input == Lengths(CPU_CONTEXT.input_tokens or 0, RANGE_RATIO)


def test_samples_are_for_every_data_set(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": [5, 6, 7], "output_tokens": 3}\n')
    for dataset, path in (("support", None), ("jsonl", chats)):
        job = prepare(config(contexts=parse_contexts(None, None, None, "1,3"), dataset=dataset, dataset_path=path))
        assert [one.context.samples for one in job.cells] == [1, 1, 3, 3] and len(job.datasets) == 1
        assert {request.n for request in job.requests(job.cells[-1])} == {3}


def test_what_is_asked_is_drawn_once_for_all_variants_and_never_to_check(draws: list[tuple[int, int, int]]) -> None:
    job = prepare(config(loads=parse_loads("2,4", None), repeats=3))
    assert draws == []
    for one in job.cells:
        job.requests(one)
    points = [(12, 6, 0), (12, 12, 0), (12, 6, 1), (12, 12, 1), (12, 6, 2), (12, 12, 2)]
    assert draws == points
    draws.clear()
    warm_up(job)
    assert draws == [(12, 12, 0), (12, 6, 0), (12, 12, 0)], "the warm-up's, then one seed of each point for the guess"


def test_what_no_cell_could_mean_is_refused_without_a_draw(draws: list[tuple[int, int, int]]) -> None:
    for more, words in (
        ({"prompts": 3}, "raise --num-prompts to 4"),
        ({"max_tokens": 7}, "--max-tokens 7 is less than the 8 tokens"),
    ):
        with pytest.raises(KvbenchError, match=words):
            prepare(config(**more))
    assert draws == []


@pytest.mark.parametrize(("samples", "most", "slots"), [("1", 256, 2), ("1,6", 256, 12), ("6", 8, 4)])
def test_the_default_pool_counts_samples(samples: str, most: int, slots: int) -> None:
    """Half of 4 users x 6 samples, 20 tokens each, in blocks of 16; never more than run at once."""
    job = prepare(config(contexts=parse_contexts("12", "8", None, samples), max_sequences=most))
    assert job.stack.cache.pool_tokens == -(-slots * 20 // 16) * 16
    assert f"{slots} {'samples' if samples != '1' else 'requests'} of full length" in job.choices["kv_memory"]


def test_only_variants_that_swap_have_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told = variants(prefix_caching="off,on", preemption="recompute,swap")
    job = prepare(config(variants=told, swap_bytes=BYTES * 50))
    memories = {str(one): job.stack.cache_of(one) for one in told}
    assert {name: memory.swap_tokens for name, memory in memories.items()} == {
        "contiguous max": 0,
        "paged": 0,
        "paged + swap": 48,
        "paged + prefix cache": 0,
        "paged + prefix cache + swap": 48,
    }
    assert [name for name, memory in memories.items() if memory.prefix_caching] == [
        *("paged + prefix cache", "paged + prefix cache + swap")
    ]
    assert "swap_space" not in job.choices
    assert prepare(config()).stack.cache.swap_tokens == 0


def test_swap_space_is_vllms_where_the_machine_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never more than the sequences that can run at once could fill."""
    for available, size, why in ((2**40, 4 * 2**30, "vLLM"), (2**30, 2**28, "25% of the 1.0 GiB of host memory")):
        monkeypatch.setattr("kvbench.engine.environment.available_bytes", lambda _, free=available: free)
        job = prepare(config(variants=variants(preemption="swap"), max_sequences=2048, max_model_len=2048))
        assert job.stack.cache.swap_tokens == size // BYTES and why in job.choices["swap_space"]
    job = prepare(config(variants=variants(preemption="swap"), max_sequences=3, max_model_len=20))
    assert job.stack.cache.swap_tokens == 3 * 32 and job.choices["swap_space"].startswith("3 sequences of full length")


def asking(number: int, prompt: list[int], answer: int) -> Request:
    return Request(number, tuple(prompt), answer, answer, scheduled_s=number)


def test_what_a_point_asks_by_hand() -> None:
    common = list(range(20))
    requests = [asking(0, [*common, 1, 1], 5), asking(1, [*common, 2], 6), asking(2, [*common, 1, 9, 9], 7)]
    assert Asked.by(requests) == Asked(requests=3, prompts=22 + 21 + 23, common=20, answers=18, until_s=2)
    assert Asked.by(requests[:1]).common == 22
    assert Asked.by([asking(0, [1], 1), asking(1, [2], 1)]).common == 0


def test_a_guess_knows_of_samples_and_of_prefixes_by_hand() -> None:
    """12 prompts of 52 tokens, 40 of them common: two blocks of 16. A prompt's token takes 1 s, a step with s sequences
    s / 1000 s, so what the answers take (8 / 1000 s each) hardly counts beside the prompts."""
    job = prepare(config(contexts=parse_contexts("12", "8", "40", "1,4"), variants=variants(prefix_caching="off,on")))
    pace = Pace(prefill_s=1.0, alone_s=1e-3, together_s=16e-3, together=16)
    one, four = Context(12, 8, 40), Context(12, 8, 40, 4)

    def guess(variant: Variant, context: Context) -> float:
        return _guess(job, (at := cell(job, variant, context)), pace, Asked.by(job.requests(at)))

    contiguous, answer_s = Variant("contiguous", "max"), 8e-3
    assert guess(contiguous, one) == pytest.approx(12 * 52 + 12 * answer_s)
    assert guess(contiguous, four) == pytest.approx(4 * 12 * 52 + 48 * answer_s)
    assert guess(PAGED, one) == pytest.approx(12 * 52 + 12 * answer_s)
    assert guess(PAGED, four) == pytest.approx(12 * 52 + 48 * answer_s)
    assert guess(CACHED, one) == pytest.approx(12 * 52 - 8 * 32 + 12 * answer_s)  # four users open
    assert guess(CACHED, four) == pytest.approx(12 * 52 - 8 * 32 + 48 * answer_s)
