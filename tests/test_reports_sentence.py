"""The closing sentence of every kind of run: true, whole, and of use to somebody who reads nothing else."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_reports_runs import add, both, make, refused, serve

from kvbench.metrics.store import RunFolder
from kvbench.reports.groups import Results
from kvbench.reports.sentence import Finding, find
from kvbench.reports.words import THIN, binary_size, count, listing, number, percent, ratio_decimals, ratio_end, times


def finding(folder: RunFolder) -> Finding:
    found = find(Results.of(folder), folder.manifest)
    return Finding(*(getattr(found, field.name).replace(THIN, " ") for field in fields(found)))


def speeds(path: Path, paged: dict[int, list[float]], **manifest: Any) -> RunFolder:
    """One request at a time, in steps of 0.1 s with contiguous; paged is so many times faster, by users and repeat."""
    folder = make(path, **manifest)
    for users, ratios in paged.items():
        for repeat, ratio in enumerate(ratios):
            add(folder, "contiguous", users, repeat, serve("contiguous", users, 20, 0.1))
            add(folder, "paged", users, repeat, serve("paged", users, 20, 0.1 / ratio))
    return folder


def test_first_what_a_seed_fixes_then_what_repeats_prove(tmp_path: Path) -> None:
    """Geometric mean of 1.29, 1.32 and 1.35 is 1.3198; t(2) = 4.3027, s of the logarithms 0.022729: e^±0.0565."""
    found = finding(speeds(tmp_path / "run", {5: [1.29, 1.32, 1.35]}))
    assert found.headline == "Paged gives 1.32 × the output tokens/s of contiguous at 5 users."
    assert found.fixed == (
        "At 5 users, paged ran 5 requests at once, contiguous 5. Of the KV memory, tokens filled 34 % with paged and "
        "34 % with contiguous on average; of what was held, 12 % with paged and 56 % with contiguous was wasted."
    )
    assert found.proven == (
        "At 5 users, paged gave 1.32 × the output tokens/s of contiguous "
        "(95 % interval 1.25 to 1.40, 3 paired repeats)."
    )
    assert str(found) == f"{found.fixed} {found.proven}"


def test_the_loser_is_named_whichever_it_is(tmp_path: Path) -> None:
    found = finding(speeds(tmp_path / "run", {1: [0.8, 0.81, 0.79]}))
    assert found.headline == "Contiguous gives 1.25 × the output tokens/s of paged at 1 user."


def test_nothing_proven_comes_with_a_bound(tmp_path: Path) -> None:
    """Logarithms of 0.99, 1.00, 1.01: s = 0.010000. Two ratios at 95 % together: t(2) at 98.75 % is 6.2053, so the
    interval is e^±0.03583 about 1: 3.7 %, rounded up."""
    found = finding(speeds(tmp_path / "run", {1: [0.99, 1.0, 1.01], 5: [0.99, 1.0, 1.01]}))
    assert found.headline == "No proven difference in output tokens/s between paged and contiguous, from 1 to 5 users."
    assert found.proven == (
        "Between paged and contiguous no difference in output tokens/s is proven; if there is one, it is smaller than "
        "3.7 % at 1 user and 3.7 % at 5 users (95 % sure, 3 paired repeats)."
    )


def test_a_largest_load_without_proof_has_its_bound_beside_what_is_proven(tmp_path: Path) -> None:
    """The bound is that of the interval e^±0.03583 about 1, as above."""
    found = finding(speeds(tmp_path / "run", {1: [1.19, 1.2, 1.21], 5: [0.99, 1.0, 1.01]}))
    assert found.proven.startswith("At 1 user, paged gave 1.20 × the output tokens/s of contiguous (95 % interval")
    assert found.proven.endswith("At 5 users no difference is proven; if there is one, it is smaller than 3.7 %.")


def test_a_bound_beyond_twice_is_a_ratio(tmp_path: Path) -> None:
    """Of ln 0.95 and ln 1.05: mean -0.00125, s 0.07077, t(1) 12.7062: e^(0.00125 + 0.63586) is 1.892, of ln 0.94 and
    ln 1.06: e^(0.00180 + 0.76325) is 2.149."""
    found = finding(speeds(tmp_path / "run", {1: [0.94, 1.06]}))
    assert "smaller than 2.2 × at 1 user (95 % sure, 2 paired repeats)" in found.proven


def test_a_bound_that_says_nothing_is_not_given(tmp_path: Path) -> None:
    found = finding(speeds(tmp_path / "run", {1: [0.8, 1.3]}))
    assert found.proven.endswith("is proven: the repeats differ too much (2 paired repeats).")


def test_many_loads_are_many_chances(tmp_path: Path) -> None:
    """Of the logarithms of 1.021, 1.05 and 1.037, t = 0.0353 / (0.01404 / sqrt 3) = 4.36: beyond t(2) at 97.5 %, 4.30,
    where it is the only ratio, but not at 98.75 %, 6.21, where it is one of two."""
    ratios = [1.021, 1.05, 1.037]
    assert finding(speeds(tmp_path / "one", {1: ratios})).headline.startswith("Paged gives 1.04 ×")
    assert finding(speeds(tmp_path / "two", {1: ratios, 5: ratios})).headline.startswith("No proven difference")


def test_many_loads_share_a_bound(tmp_path: Path) -> None:
    found = finding(speeds(tmp_path / "run", {users: [1.0, 1.0] for users in (1, 2, 3, 4)}))
    assert (
        "if there is one, it is smaller than 0.1 % at each of the 4 loads (95 % sure, 2 paired repeats)."
        in found.proven
    )


def test_from_a_load_on(tmp_path: Path) -> None:
    same, better = [0.99, 1.0, 1.01], [1.19, 1.2, 1.21]
    found = finding(speeds(tmp_path / "run", {1: same, 2: same, 3: better, 5: [1.5, 1.51, 1.49]}))
    assert found.headline == (
        "From 3 users on, paged gives up to 1.50 × the output tokens/s of contiguous; "
        "up to 2 users, no proven difference."
    )
    found = finding(speeds(tmp_path / "last", {1: same, 2: better}))
    assert found.headline == (
        "At 2 users paged gives 1.20 × the output tokens/s of contiguous; at 1 user, no proven difference."
    )


def test_at_every_load(tmp_path: Path) -> None:
    found = finding(speeds(tmp_path / "run", {1: [1.19, 1.2, 1.21], 2: [1.09, 1.1, 1.11]}))
    assert found.headline == (
        "Paged gives up to 1.20 × the output tokens/s of contiguous at every load measured, from 1 to 2 users."
    )


def test_a_gap_in_the_proof(tmp_path: Path) -> None:
    same, better = [0.99, 1.0, 1.01], [1.19, 1.2, 1.21]
    found = finding(speeds(tmp_path / "run", {1: better, 2: same, 3: better}))
    assert found.headline == (
        "Paged gives up to 1.20 × the output tokens/s of contiguous at 1 user and 3 users; "
        "elsewhere no proven difference."
    )


def test_each_wins_somewhere(tmp_path: Path) -> None:
    worse, better = [0.79, 0.8, 0.81], [1.49, 1.5, 1.51]
    found = finding(speeds(tmp_path / "run", {1: worse, 2: better}))
    assert (
        found.headline == "Up to 1 user contiguous gives more output tokens/s (1.25 ×), from 2 users on paged (1.50 ×)."
    )
    found = finding(speeds(tmp_path / "mixed", {1: worse, 2: better, 3: worse}))
    assert found.headline == (
        "Which gives more output tokens/s depends on the load: contiguous at 1 user (1.25 ×), "
        "paged at 2 users (1.50 ×) and contiguous at 3 users (1.25 ×)."
    )


def test_one_repeat_proves_nothing(tmp_path: Path) -> None:
    found = finding(speeds(tmp_path / "run", {1: [1.3]}))
    assert (
        found.headline
        == "Paged gave 1.30 × the output tokens/s of contiguous at 1 user, but one repeat cannot prove it."
    )
    assert found.proven.endswith("but one repeat cannot prove it.")
    found = finding(speeds(tmp_path / "same", {1: [1.0]}))
    assert found.headline == "Paged and contiguous were equally fast at 1 user, but one repeat cannot prove it."


def test_repeats_are_paired_by_seed_not_by_place(tmp_path: Path) -> None:
    """Seeds differ by 50 %, backends by 10 %: paired it is proven. A repeat without its partner is no pair."""
    folder = make(tmp_path / "run")
    for repeat, pace in ((0, 1.0), (1, 1.5), (2, 0.7)):
        add(folder, "contiguous", 1, repeat, serve("contiguous", 1, 20, 0.11 * pace), seed=repeat)
        add(folder, "paged", 1, repeat, serve("paged", 1, 20, 0.1 * pace * (1 + repeat / 1000)), seed=repeat)
    add(folder, "paged", 1, 3, serve("paged", 1, 20, 9.0), seed=3)
    assert "1.10 ×" in finding(folder).headline
    assert "3 paired repeats" in finding(folder).proven


def with_more(folder: RunFolder, *variants: tuple[str, dict[str, Any], list[float]], users: int = 5) -> RunFolder:
    """Further variants at a load, each so many times as fast as a step of 0.1 s, by repeat."""
    for backend, columns, ratios in variants:
        for repeat, ratio in enumerate(ratios):
            name = "-".join(str(value) for value in (backend, *columns.values(), users, repeat))
            add(folder, backend, users, repeat, serve(backend, users, 20, 0.1 / ratio), cell=name, **columns)
    return folder


PREFIX: dict[str, Any] = {"prefix_caching": True}
SWAP: dict[str, Any] = {"preemption": "swap"}


def test_first_policies_make_the_main_contest_and_each_further_thing_a_clause(tmp_path: Path) -> None:
    """Six ratios hold together: paged against both contiguous variants, declared against max, and three of paged.
    Each further one differs by 1 % between repeats: ln 0.99, 0 and ln 1.01 have s = 0.0100002, and t(2) at 99.583 % is
    10.886, so an interval is e^±0.06285 about its ratio (1.1, 1.7 / 1.2 and 1)."""
    about = [0.99, 1.0, 1.01]
    asked = [("contiguous", "max", {}), ("contiguous", "declared", {}), ("paged", None, {}), ("paged", None, SWAP),
             ("paged", None, PREFIX), ("paged", None, PREFIX | SWAP)]  # fmt: skip
    planned = [{"backend": backend, "reserve": reserve, **more} for backend, reserve, more in asked]
    folder = with_more(
        speeds(tmp_path / "run", {5: [1.2, 1.2, 1.2]}, cells=planned),
        ("contiguous", {"reserve": "declared"}, [1.1 * ratio for ratio in about]),
        ("paged", PREFIX, [1.7 * ratio for ratio in about]),
        ("paged", SWAP, [1.2 * ratio for ratio in about]),
        ("paged", PREFIX | SWAP, [1.7 * ratio for ratio in about]),
    )
    found = finding(folder)
    assert found.headline == "Paged gives 1.20 × the output tokens/s of contiguous max at 5 users."
    assert found.fixed.startswith("At 5 users, paged ran 5 requests at once, contiguous max 5. Of the KV memory")
    assert "declared" not in found.fixed + found.proven and "prefix" not in found.fixed + found.proven
    assert found.further == (
        "At 5 users, contiguous declared gave 1.10 × [1.03–1.17] the output tokens/s of contiguous max; "
        "the prefix cache gave 1.42 × [1.33–1.51] the output tokens/s of paged without it; "
        "swapping made no proven difference to paged (1.00 × [0.94–1.06]). "
        "In brackets: 95 % intervals. 2 more comparisons in the report."
    )
    assert str(found) == f"{found.fixed} {found.proven} {found.further}"


def test_closing_words_stay_short_however_many_variants_there_are(tmp_path: Path) -> None:
    variants: list[tuple[str, dict[str, Any], list[float]]] = []
    for reserve, batching in product(("max", "declared", "pow2", "oracle"), ("continuous", "static")):
        variants.append(("contiguous", {"reserve": reserve, "batching": batching}, [1.0, 1.0]))
    for prefix, preemption in product((False, True), ("recompute", "swap")):
        variants.append(("paged", {"prefix_caching": prefix, "preemption": preemption}, [1.5, 1.51]))
    folder = make(tmp_path / "run", cells=[{"backend": backend, **columns} for backend, columns, _ in variants])
    for users in (5, 10):
        with_more(folder, *variants, users=users)
    found = finding(folder)
    assert len(str(found)) < 1200 and found.further.count("At ") == 1
    assert "static batching made no proven difference to contiguous max (" in found.further
    assert "contiguous declared, contiguous pow2 and contiguous oracle made no proven difference" in found.further
    assert "more comparisons in the report." in found.further


def test_several_policies_share_a_clause_and_losers_are_below_1(tmp_path: Path) -> None:
    folder = with_more(
        both(tmp_path / "run", loads=[5], faster=1.2),
        ("contiguous", {"reserve": "declared"}, [1.5, 1.51, 1.5]),
        ("contiguous", {"reserve": "oracle"}, [2.0, 2.01, 2.0]),
        ("contiguous", {"batching": "static"}, [0.5, 0.5, 0.5]),
    )
    found = finding(folder)
    assert "contiguous declared gave 1.5" in found.further and "] and contiguous oracle 2.0" in found.further
    assert "static batching gave 0.50 × [" in found.further
    assert "the output tokens/s of contiguous max without it" in found.further


def test_a_switch_that_came_first_is_told_the_same_way_round(tmp_path: Path) -> None:
    folder = with_more(
        make(tmp_path / "run", cells=[{"backend": "paged", **PREFIX}, {"backend": "paged"}]),
        ("paged", PREFIX, [1.7, 1.7]),
        ("paged", {"prefix_caching": False}, [1.0, 1.0]),
        ("contiguous", {}, [1.0, 1.0]),
    )
    found = finding(folder)
    assert found.headline == "Paged + prefix cache gives 1.70 × the output tokens/s of contiguous at 5 users."
    assert "the prefix cache gave 1.70 × [1.70–1.70] the output tokens/s of paged without it" in found.further


def test_without_a_second_backend_the_first_two_variants_meet(tmp_path: Path) -> None:
    folder = with_more(
        make(tmp_path / "run"), ("paged", {"prefix_caching": False}, [1.0, 1.0]), ("paged", PREFIX, [1.7, 1.7])
    )
    found = finding(folder)
    assert found.headline == "Paged + prefix cache gives 1.70 × the output tokens/s of paged at 5 users."
    assert found.further == ""


def test_one_repeat_of_a_further_variant_proves_nothing(tmp_path: Path) -> None:
    folder = with_more(speeds(tmp_path / "run", {5: [1.2]}), ("paged", PREFIX, [1.5]))
    assert finding(folder).further == (
        "At 5 users, the prefix cache gave 1.25 × the output tokens/s of paged without it, but one repeat cannot "
        "prove it."
    )


def test_an_interval_that_says_nothing_is_not_given(tmp_path: Path) -> None:
    folder = with_more(speeds(tmp_path / "run", {5: [1.2, 1.2]}), ("paged", PREFIX, [0.5, 2.5]))
    assert finding(folder).further == (
        "At 5 users, the prefix cache made no proven difference to paged (the repeats differ too much)."
    )


def test_the_same_cell_once_more_is_held_against_the_first(tmp_path: Path) -> None:  # vllm#54227
    folder = speeds(tmp_path / "run", {5: [1.2, 1.2, 1.21]})
    for repeat in range(3):
        add(folder, "paged", 5, repeat, serve("paged", 5, 20, 0.1 / 1.2), cell=f"paged-5-{repeat}.2")
    assert "paged (2) made no proven difference to paged (1.00 × [0.98–1.01])" in finding(folder).further


def test_the_headline_speaks_of_the_middle_context_and_says_so(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for tokens, backend, repeat in product((64, 128, 256), ("contiguous", "paged"), range(2)):
        run = serve(backend, 1, 20, 0.1 / (1 + (backend == "paged") * tokens / 1000 + repeat / 100))
        add(folder, backend, 1, repeat, run, input_tokens=tokens, cell=f"{backend}-{tokens}-{repeat}")
    assert finding(folder).headline.endswith("at 1 user, with 128 tokens in and 4 tokens out.")
    assert "1.13 ×" in finding(folder).headline


def test_the_headline_names_a_prefix_where_the_grid_has_several(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for prefix, backend, repeat in product((0, 80), ("contiguous", "paged"), range(2)):
        run = serve(backend, 1, 20, 0.1 / (1.2 if backend == "paged" else 1))
        add(folder, backend, 1, repeat, run, prefix_tokens=prefix, cell=f"{backend}-{prefix}-{repeat}")
    assert finding(folder).headline.endswith("with 4 tokens in, 4 tokens out and a shared prefix of 80 tokens.")


def test_rates_in_place_of_users(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for backend, repeat in product(("contiguous", "paged"), range(2)):
        run = serve(backend, 1, 20, 0.1 / (1.2 if backend == "paged" else 1))
        add(folder, backend, None, repeat, run, request_rate=0.5)
    assert finding(folder).headline == "Paged gives 1.20 × the output tokens/s of contiguous at 0.5 requests/s."


def test_one_backend_only(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for users in (1, 5):
        add(folder, "paged", users, 0, serve("paged", users, 20, 0.1))
    found = finding(folder)
    assert found.headline == "Paged gave up to 50.0 output tokens/s, at 5 users."
    assert found.fixed.startswith("At 5 users, paged ran 5 requests at once. Of the KV memory, tokens filled 34 % with")


def test_one_backend_cannot_run_here(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for repeat in range(2):
        add(folder, "paged", 5, repeat, serve("paged", 5, 20, 0.1))
        add(folder, "contiguous", 5, repeat, status="oom", reason="no room")
    found = finding(folder)
    assert found.headline == "Only paged could run; contiguous ran out of memory in all 2 cells."
    assert found.caveat == "2 of 4 cells failed, 2 of them out of memory."


def test_no_cell_ran(tmp_path: Path) -> None:
    folder = make(tmp_path / "oom")
    for backend, repeat in product(("contiguous", "paged"), range(6)):
        add(folder, backend, 16, repeat, status="oom", reason="no room")
    assert str(finding(folder)) == "Nothing could be measured: all 12 cells failed, 12 of them out of memory."
    folder = make(tmp_path / "one")
    add(folder, "paged", 16, 0, status="failed", reason="ValueError: no logits")
    assert str(finding(folder)) == "Nothing could be measured: the only cell failed, with an error."
    folder = make(tmp_path / "none", interrupted=True, cells=[{}] * 4)
    assert str(finding(folder)) == (
        "Nothing was measured: the run ended before its first cell did. The run was interrupted after 0 of 4 cells."
    )


def test_every_request_was_rejected(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for backend in ("contiguous", "paged"):
        add(folder, backend, 1, 0, refused(4), status="rejected", reason="no request finished; 4 of 4: too long")
    assert str(finding(folder)) == (
        "Nothing could be measured: all 2 cells failed, 2 of them with every request rejected."
    )


def test_failures_and_interruptions_are_said(tmp_path: Path) -> None:
    folder = both(tmp_path / "run", loads=[5], interrupted=True, cells=[{}] * 20)
    add(folder, "paged", 5, 3, status="oom", reason="no room")
    add(folder, "paged", 5, 4, status="timeout", reason="over 60 s")
    found = finding(folder)
    assert found.headline.endswith("(2 of 8 cells of this comparison failed).")
    assert found.caveat == (
        "2 of 8 cells failed, 1 of them out of memory and 1 over their time limit. "
        "The run was interrupted after 8 of 20 cells."
    )


def test_backends_that_never_met(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "contiguous", 1, 0, serve("contiguous", 1, 20, 0.1))
    add(folder, "paged", 5, 0, serve("paged", 5, 20, 0.1))
    assert str(finding(folder)) == "Paged and contiguous share no load at which both ran."


def test_what_is_simulated_says_so_in_every_part(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 1, 0, serve("paged", 1, 20, 0.1), evidence="simulated")
    found = finding(folder)
    assert found.headline.startswith("Simulated: Paged gave")
    assert all(part.startswith("Simulated: ") for part in (found.fixed, found.proven))
    assert str(found).count("Simulated: ") == 1 and str(found).startswith("Simulated: At 1 user,")


def test_numbers_in_words() -> None:
    assert [number(None), number(-0.04, 1), number(1234.56, 1)] == ["–", "0.0", "1,234.6"]
    assert [count(1, "user"), count(0, "user"), count(1200, "user")] == ["1 user", "0 users", "1,200 users"]
    assert [listing([]), listing(["a"]), listing(["a", "b", "c"])] == ["", "a", "a, b and c"]
    assert [percent(0.125, 1), percent(None), times(1.5)] == ["12.5\u202f%", "–", "1.50\u202f×"]
    assert [binary_size(n) for n in (None, 512, 3 << 19, 300 << 20)] == ["–", "512 B", "1.5 MiB", "300 MiB"]


@pytest.mark.parametrize(("ratio", "decimals"), [(1.2, 2), (1.004, 3), (1.0004, 4), (1.0, 2), (None, 2)])
def test_a_bound_that_is_not_1_never_looks_like_1(ratio: float | None, decimals: int) -> None:
    assert ratio_decimals(ratio, 1.5) == decimals


def test_requests_without_an_answer_are_said_in_the_closing_words(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    run = serve("paged", 5, 20, 0.1)
    for record in run.requests[:6]:
        record.status, record.reason = "failed", "outgrew the whole KV pool"
    add(folder, "paged", 5, 0, run)
    add(folder, "contiguous", 5, 0, serve("contiguous", 5, 20, 0.1))
    assert "With paged, 6 of 20 requests got no whole answer." in str(finding(folder))


def test_many_variants_without_answers_are_one_sentence(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for reserve, missing in (("max", 1), ("declared", 2), ("pow2", 7), ("oracle", 1)):
        run = serve("contiguous", 5, 20, 0.1)
        for record in run.requests[:missing]:
            record.status, record.reason = "failed", "outgrew the whole KV pool"
        add(folder, "contiguous", 5, 0, run, reserve=reserve)
    assert finding(folder).caveat == (
        "With 4 variants requests got no whole answer, most with contiguous pow2: 7 of 20."
    )


def test_several_samples_run_at_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add(folder, "paged", 5, 0, serve("paged", 5, 20, 0.1), samples=4)
    assert "paged ran 5 samples at once" in finding(folder).fixed


def test_an_interval_without_a_useful_end_says_so() -> None:
    assert [ratio_end(end) for end in (None, 0.5, 999.994, 1000.1, 1e77)] == [
        "–",
        "0.50",
        "999.99",
        *["over 1,000"] * 2,
    ]
