"""The public score: what a row says, which rows are refused or left out, how data are split, and what errors are."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.cli.app import main
from kvbench.errors import KvbenchError
from kvbench.planner.crossvalidate import FOLDS, corrected, cross_validate, lonely_cards, rate_fold
from kvbench.planner.effects import PARAMETERS, effect_names, values_of
from kvbench.planner.fit import Case, fit, objective, residuals
from kvbench.planner.predict import Refused, lengths, look_up, metrics_of, parameters_of, sustained_per_s
from kvbench.planner.published import COLUMNS, Configuration, Row, parse_rows, read_note, read_rows
from kvbench.planner.residuals import fit_residuals
from kvbench.planner.score import Outcome, look_at, score
from kvbench.planner.shipped import shipped
from kvbench.planner.tally import refusals, summarise

ROW = {
    "model": "Meta-Llama-3-8B-Instruct",
    "num_gpus": "1",
    "tp": "1",
    "precision": "BF16",
    "engine": "vLLM-0.8.5",
    "input_len": "256",
    "output_len": "128",
    "concurrency_or_rate": "rate=2/s",
    "metric": "tpot_mean_ms",
    "value": "12.5",
    "group": "mine",
    "note": "200 requests",
    "load_kind": "rate",
    "load_value": "2",
    "arrivals": "poisson",
    "num_requests": "",
    "input_tokens_mean": "256",
    "output_tokens_mean": "128",
    "gpu_id": "h100-sxm",
    "shape": "Llama-3-8B",
}


def text_of(*changes: dict[str, str]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(ROW | change for change in changes)
    return out.getvalue()


def rows_of(*changes: dict[str, str]) -> list[Row]:
    return parse_rows(io.StringIO(text_of(*changes), newline=""), "mine.csv")


def test_a_row_is_read_whole() -> None:
    [row] = rows_of({})
    assert row.value == 12.5 and row.line == 2 and row.settings.requests == 200
    assert row.configuration.key == "mine | vLLM-0.8.5 | Llama-3-8B BF16 | 1xh100-sxm/tp1 | 256+128 | rate:2:poisson"
    [row] = rows_of({"tp": "submitter choice", "num_requests": "500"})
    assert row.configuration.tp is None and row.configuration.requests == 500


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": "fast"}, "mine.csv line 2: value is 'fast', not a number"),
        ({"value": "nan"}, "mine.csv line 2: value is nan; give a finite number above 0"),
        ({"value": ""}, "mine.csv line 2: no value"),
        ({"value": "-3"}, "value is -3; give a finite number above 0"),
        ({"load_kind": "burst"}, "load_kind is 'burst'; known are rate, closed, offline, batch, other"),
        ({"load_value": ""}, "load_kind rate needs a load_value"),
        ({"load_value": "inf"}, "load_value is inf"),
        ({"load_value": "1e300"}, "load_value is 1e300; give a number from 0.000001 to 1,000,000,000"),
        ({"value": "1e-308"}, "value is 1e-308; give a number from"),
        ({"input_tokens_mean": "1e7"}, "input_tokens_mean is 1e7; give a number from 0.000001 to 1,000,000"),
        ({"num_requests": "9" * 400}, "give a whole number above 0, at most 1,000,000,000"),
        ({"tp": "0"}, "tp is 0; give a whole number above 0"),
        ({"tp": "1.5"}, "tp is 1.5; give a whole number above 0"),
        ({"output_tokens_mean": "0"}, "output_tokens_mean is 0"),
    ],
)
def test_a_faulty_row_is_one_line(change: dict[str, str], says: str) -> None:
    with pytest.raises(KvbenchError) as caught:
        rows_of(change)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_faulty_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="cannot read"):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(KvbenchError, match="lacks the column gpu_id"):
        parse_rows(io.StringIO(text_of({}).replace("gpu_id", "gpu")), "mine.csv")
    with pytest.raises(KvbenchError, match="has no rows"):
        parse_rows(io.StringIO(",".join(COLUMNS) + "\n"), "mine.csv")
    with pytest.raises(KvbenchError, match="line 2: the number of fields"):
        parse_rows(io.StringIO(",".join(COLUMNS) + "\na,b\n"), "mine.csv")
    with pytest.raises(KvbenchError, match="has the column tp twice"):
        parse_rows(io.StringIO(text_of({}).replace("gpu_id,shape", "gpu_id,shape,tp")), "mine.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvbenchError, match="not UTF-8"):
        read_rows(tmp_path / "bytes.csv")


def test_notes_tell_how_the_engine_was_started() -> None:
    told = read_note("vllm serve x --max-num-batched-tokens 8192; max_num_seqs=128; gpu_mem_util=0.95; 300 prompts")
    assert (told.batched_tokens, told.sequences, told.memory_share, told.requests) == (8192, 128, 0.95, 300)
    assert read_note("max_num_tokens=16384").batched_tokens == 16384
    assert read_note("") == read_note("nothing said")
    assert read_note(f"max_num_seqs={'9' * 5000}").sequences == 10**9


def test_a_file_may_begin_with_the_mark_of_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("\ufeff" + text_of({}), encoding="utf-8")
    assert read_rows(tmp_path / "mine.csv") == rows_of({})


def test_nothing_is_written_over_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "mine.csv", tmp_path / "page.md"
    file.write_text(text_of({}))
    page.write_bytes(b"\xff")
    for option in ("--rows", "--split", "--report"):
        with pytest.raises(SystemExit) as ended:
            main(["score", str(file), option, str(file)])
        assert ended.value.code == 2
        assert f"{option} {file} is the file that is scored" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["score", str(file), "--report", str(page)])
    assert "is not UTF-8 text; name a Markdown file" in capsys.readouterr().err
    assert file.read_text() == text_of({}) and page.read_bytes() == b"\xff"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"gpu_id": ""}, "card or shape"),
        ({"gpu_id": "abacus"}, "card or shape"),
        ({"shape": "HAL-9000"}, "card or shape"),
        ({"load_kind": "other"}, "load"),
        ({"input_tokens_mean": ""}, "lengths"),
        ({"tp": "see source"}, "cards"),
        ({"engine": "steam"}, "cards"),
        ({"shape": "Llama-3-70B"}, "memory"),
        ({"metric": "joy"}, "metric"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(change: dict[str, str], rule: str) -> None:
    outcomes = score(rows_of(change, {}), shipped())
    assert [one.refused for one in outcomes] == [rule, ""]
    assert outcomes[0].predicted is None and outcomes[0].reason
    assert outcomes[1].predicted and outcomes[1].baseline and outcomes[1].predicted > outcomes[1].baseline
    refused, _, share = refusals(outcomes)
    assert refused == {rule: 1} and share == (0.0 if rule == "card or shape" else 0.5)


def test_what_is_no_time_or_known_to_be_wrong_is_excluded() -> None:
    rows = rows_of(
        {"metric": "kv_pool_tokens"},
        {"group": "splitwise", "metric": "prompt_step_ms", "load_kind": "batch", "load_value": "64", "tp": "2"},
        {"group": "splitwise", "note": "pcap 200 W"},
        {"metric": "ttft_mean_ms", "load_value": "900"},
        {"metric": "ttft_mean_ms", "load_value": "900", "num_requests": "300"},
        {"metric": "tpot_mean_ms", "load_value": "900"},
        {"metric": "ttft_mean_ms", "load_value": "1"},
    )
    excluded = [one.excluded for one in score(rows, shipped())]
    assert excluded == ["memory", "known fault", "known fault", "overload without a request count", "", "", ""]


def test_errors_are_relative_to_what_was_measured() -> None:
    [row] = rows_of({"value": "10"})
    outcomes = [Outcome(row, "new rate", predicted, 5.0) for predicted in (11.0, 8.0, 10.0, 14.0)]
    [line] = summarise(
        [*outcomes, Outcome(row, "new rate", refused="load"), Outcome(row, "new rate", excluded="memory")]
    )
    assert line.n == 4 and line.refused == 1 and line.excluded == 1
    assert line.mape == pytest.approx(0.175) and line.bias == pytest.approx(0.075)
    assert line.median == pytest.approx(0.15) and line.p90 == pytest.approx(0.2 + 0.7 * 0.2)
    assert line.baseline_mape == pytest.approx(0.5) and line.baseline_n == 4
    [nothing] = summarise([Outcome(row, "unknown", refused="load")])
    assert nothing.n == 0 and nothing.mape is None and nothing.as_row()["bias"] is None


def made_up(**values: float) -> list[Row]:
    """Rows that the model itself predicts under given parameters: three cards, two shapes, several loads."""
    changes = [
        {"gpu_id": card, "shape": shape, "load_kind": kind, "load_value": load, "metric": metric, "value": "1"}
        for card in ("h100-sxm", "a100-80-sxm", "rtx-4090")
        for shape in ("Llama-3-8B", "Qwen2.5-7B")
        for kind, load in (("rate", "1"), ("rate", "8"), ("closed", "1"), ("closed", "16"), ("offline", ""))
        for metric in ("output_tput", "tpot_mean_ms", "ttft_mean_ms")
    ]
    rows = []
    for row in rows_of(*changes):
        configuration, settings = row.configuration, row.settings
        situation = look_up(configuration, settings)
        named = {p.name: p.median for p in PARAMETERS} | values
        predicted = metrics_of(configuration, settings, situation, *parameters_of(named))
        rows.append(replace(row, value=predicted[row.metric]))
    return rows


def test_a_fit_finds_what_made_the_rows() -> None:
    truth = {"bandwidth_efficiency": 0.72, "compute_efficiency": 0.45, "sequence_s": 4e-5, "request_s": 1e-2}
    cases = look_at(made_up(**truth)).cases
    before = objective(cases, {}, residuals(cases, {}))
    effects = fit(cases, rounds=6)
    left = residuals(cases, effects)
    assert objective(cases, effects, left) < before / 5
    assert max(abs(float(value)) for off in left for value in off) < 0.05
    found = values_of(effects, cases[0].names)
    assert found["bandwidth_efficiency"] == pytest.approx(0.72, rel=0.05)
    assert found["compute_efficiency"] == pytest.approx(0.45, rel=0.1)


def test_what_was_never_seen_keeps_its_prior_and_the_effects_of_its_kin() -> None:
    [row] = rows_of({})
    situation = look_up(row.configuration, row.settings)
    names = effect_names(row.configuration, situation)
    prior = values_of({}, names)
    assert prior["bandwidth_efficiency"] == 0.8
    other = values_of({("bandwidth_efficiency", "card: a100-80-sxm"): -0.2}, names)
    assert other == prior
    shared = values_of({("bandwidth_efficiency", "all"): -0.1}, names)
    assert shared["bandwidth_efficiency"] < 0.8
    assert values_of({("bandwidth_efficiency", "all"): 9.0}, names)["bandwidth_efficiency"] == 0.97


def test_residuals_correct_what_is_near_and_leave_the_rest() -> None:
    rows = [replace(row, value=1.3 * row.value) for row in made_up() if row.configuration.card == "h100-sxm"]
    cases = look_at(rows).cases
    extra = fit_residuals(cases, residuals(cases, {}))
    assert corrected(cases[0], {}, extra)["output_tput"] > 1.15 * cases[0].predict({})["output_tput"]
    [far] = look_at(rows_of({"gpu_id": "l40s", "engine": "SGLang-0.5.5.post1"})).cases
    assert corrected(far, {}, extra) == {"tpot_mean_ms": far.predict({})["tpot_mean_ms"]}


def test_data_are_split_by_configuration_never_by_row() -> None:
    rows = made_up()
    folds = {
        row.configuration.key: {rate_fold(r.configuration) for r in rows if r.configuration == row.configuration}
        for row in rows
    }
    assert all(len(fold) == 1 for fold in folds.values())
    assert {fold for each in folds.values() for fold in each} <= {str(i) for i in range(FOLDS)}
    assert len({fold for each in folds.values() for fold in each}) > 2


def test_a_fold_is_predicted_without_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one card are measured twice as slow: nothing of that reaches the card's own predictions."""
    rows = made_up()
    odd = [replace(r, value=3 * r.value) if r.configuration.card == "rtx-4090" else r for r in rows]
    plain, changed = look_at(rows).cases, look_at(odd).cases

    def of_card(cases: list[Case]) -> list[dict[str, float]]:
        held = cross_validate(cases, fit(cases, rounds=3), lambda _: None, cases)
        return [h.predicted for h in held if h.kind == "new card" and h.case.configuration.card == "rtx-4090"]

    for before, after in zip(of_card(plain), of_card(changed), strict=True):
        assert after == pytest.approx(before, rel=0.05)  # a twentieth of the change, of which the start is all


def test_cards_alone_with_their_engine_are_told_apart() -> None:
    cases = look_at(rows_of({}, {"gpu_id": "a100-80-sxm"}, {"gpu_id": "l4", "engine": "SGLang-0.5.5.post1"})).cases
    assert lonely_cards(cases) == {"l4"}


def test_classes_of_the_shipped_parameters() -> None:
    model = shipped()

    def kind(**changes: object) -> str:
        base = Configuration(
            *("iog", "vLLM-0.8.5", "h100-pcie", "Llama-3.1-8B", "FP16", 1, 1, "rate", 3.0, "poisson", None),
            *(206.0, 212.0, "206+212"),
        )
        return model.kind(replace(base, **changes), "vllm-v1")  # type: ignore[arg-type]

    assert kind() == "new rate"
    assert kind(load_value=4.0) == "calibrated"
    assert kind(shape="Phi-4") == "new model"
    assert kind(card="mi300x") == "new card"
    assert model.kind(
        Configuration(*("x", "y", "mi300x", "z", "FP8"), 1, 1, "rate", 1.0, "", None, 1.0, 1.0, ""), "steam"
    ) == ("new card and engine")


def test_lengths_keep_their_mean_and_their_end() -> None:
    drawn = lengths(345, 0.7, 512, 300, "outputs")
    assert sum(drawn) / 300 == pytest.approx(345, rel=0.01) and max(drawn) == 512 and min(drawn) >= 1
    assert lengths(256, 0.7, 256, 3, "outputs") == (256,) * 3
    assert lengths(7.4, 0.0, 99, 2, "outputs") == (7, 7)


def test_a_faster_card_sustains_more() -> None:
    def sustained(card: str) -> float:
        from kvbench.planner.cost import StepParameters, cost_model

        [row] = rows_of({"gpu_id": card})
        situation = look_up(row.configuration, row.settings)
        cost = cost_model(situation.card, situation.shape, situation.number, 1, StepParameters())
        return sustained_per_s(row.configuration, situation, cost)

    assert sustained("h100-sxm") > sustained("a100-80-sxm") > sustained("l4") > 0


def test_a_refusal_says_why() -> None:
    [row] = rows_of({"shape": "Llama-3-70B"})
    with pytest.raises(Refused, match="the weights of Llama-3-70B do not fit on 1 x H100 SXM"):
        look_up(row.configuration, row.settings)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(text_of({}, {"gpu_id": ""}, {"metric": "output_tput", "value": "200"}), encoding="utf-8")
    command = [sys.executable, "-m", "kvbench", "score", str(file)]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=True)
    lines = json.loads(done.stdout)
    assert {"metric", "class", "n", "mape", "bias", "p90", "refused", "excluded"} <= set(lines[0])
    assert sum(line["n"] for line in lines) == 2 and sum(line["refused"] for line in lines) == 1
    assert "3 rows; refused 1 (card or shape 1)" in done.stderr
    for form in ("table", "markdown", "csv"):
        shown = subprocess.run([*command, "--format", form], capture_output=True, text=True, check=True).stdout
        assert "tpot_mean_ms" in shown and "output_tput" in shown
    report = tmp_path / "accuracy.md"
    report.write_text("# Rules stay\n", encoding="utf-8")
    subprocess.run(
        [*command, "--report", str(report), "--rows", str(tmp_path / "rows.csv")], check=True, capture_output=True
    )
    assert report.read_text(encoding="utf-8").startswith("# Rules stay\n") and "| tpot_mean_ms |" in report.read_text()
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4
    faulty = subprocess.run([*command[:-1], str(tmp_path / "none.csv")], capture_output=True, text=True, check=False)
    assert faulty.returncode == 2 and faulty.stderr.count("\n") == 1
