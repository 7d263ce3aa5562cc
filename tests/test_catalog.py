"""The cards: the catalogue against its source, names as people write them, a user's own file, prices."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from kvbench.errors import KvbenchError
from kvbench.planner.catalog import NUMBERS, Card, catalogue, find_card, load_cards, with_prices

GIB = 2**30


def refusal(path: Path) -> str:
    with pytest.raises(KvbenchError) as refused:
        load_cards(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def written(folder: Path, text: str, name: str = "cards.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_catalogue_has_every_card_and_figure_of_its_source(shared_data: Path) -> None:
    with (shared_data / "gpus.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [card.id for card in catalogue()] == [line["id"] for line in lines]
    for card, line in zip(catalogue(), lines, strict=True):
        rates = {"bfloat16": line["bf16_tflops"], "float16": line["fp16_tflops"], "fp8": line["fp8_tflops"]}
        assert (card.name, card.link, card.note) == (line["name"], line["link"], line["note"])
        assert card.flops_per_s == {dtype: float(text) * 1e12 for dtype, text in rates.items() if text}
        assert card.bandwidth_bytes_per_s == float(line["bandwidth_gb_s"]) * 1e9
        assert card.link_bytes_per_s == float(line["link_gb_s_per_direction"]) * 1e9
        assert card.tdp_w == float(line["tdp_w"])
        low, high = line["usd_per_hour_low"] or line["usd_per_hour_high"], line["usd_per_hour_high"] or low_of(line)
        assert card.usd_per_hour == ((float(low), float(high)) if low else None)
        if line["torch_total_bytes"]:
            assert card.memory_bytes == int(line["torch_total_bytes"])
            assert card.memory_source.startswith("torch's total: ")
        elif line["driver_mib"]:
            assert card.memory_bytes == int(int(line["driver_mib"]) * 2**20 * 0.994)
            assert card.memory_source.startswith("estimated: 99.4% of the driver's ")
        else:
            assert card.memory_bytes == int(float(line["vendor_gb"]) * GIB * 0.994)
            assert card.memory_source.startswith("estimated: 99.4% of the vendor's ")


def low_of(line: dict[str, str]) -> str:
    return line["usd_per_hour_low"]


def test_every_figure_has_a_source_and_a_date() -> None:
    for card in catalogue():
        assert card.memory_source and card.source and card.as_of
        assert bool(card.price_source) == bool(card.price_as_of) == (card.usd_per_hour is not None)


def test_estimated_memory_is_near_what_torch_reports() -> None:
    """The rule for cards whose total nobody has noted, on the two whose total is known."""
    for name, driver_mib in (("h100-sxm", 81559), ("rtx-4090", 24564)):
        assert driver_mib * 2**20 * 0.994 == pytest.approx(find_card(name).memory_bytes, rel=0.015)


@pytest.mark.parametrize(
    ("name", "id_"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100 SXM", "h100-sxm"),
        ("NVIDIA H100-80GB", "h100-sxm"),
        ("h100", "h100-sxm"),
        ("H100PCIE", "h100-pcie"),
        ("a100", "a100-80-sxm"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("l40s", "l40s"),
        ("AMD MI300X", "mi300x"),
    ],
)
def test_names_as_people_write_them(name: str, id_: str) -> None:
    assert find_card(name).id == id_


@pytest.mark.parametrize(
    ("name", "nearest"), [("h10", "h100-sxm"), ("rtx-4091", "rtx-4090"), ("A100-80-sxn", "a100-80-sxm")]
)
def test_an_unknown_card_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    """aiconfigurator#1259: no silent fallback."""
    with pytest.raises(KvbenchError, match=rf"^unknown card '{name}'; the nearest known one is {nearest} "):
        find_card(name)


@pytest.mark.parametrize("name", ["", "  ", "nvidia", "\n", "日本"])
def test_what_is_no_name_is_refused_too(name: str) -> None:
    with pytest.raises(KvbenchError, match=r"^unknown card"):
        find_card(name)


OWN = """
[[card]]
id = "h900"
name = "H900 \\u00d7"
aliases = ["H9"]
driver_mib = 100000
bandwidth_gb_s = 9000
bf16_tflops = 3000.5
usd_per_hour_high = 12
source = "a leaflet"
as_of = "2026-11"
"""


def test_a_users_card(tmp_path: Path) -> None:
    (card,) = load_cards(written(tmp_path, OWN))
    assert (card.id, card.aliases, card.flops_per_s) == ("h900", ("H9",), {"bfloat16": 3000.5e12})
    assert card.memory_bytes == int(100000 * 2**20 * 0.994)
    assert card.usd_per_hour == (12, 12) and card.usd_per_hour_middle == 12
    assert (card.source, card.as_of) == ("a leaflet", "2026-11")
    assert find_card("h9", [card]) is card


@pytest.mark.parametrize("text", [OWN, "id,driver_mib,bandwidth_gb_s\nh900,100000,9000\n"], ids=["toml", "csv"])
def test_a_file_may_begin_with_the_mark_of_a_spreadsheet(tmp_path: Path, text: str) -> None:
    (card,) = load_cards(written(tmp_path, "\ufeff" + text, "cards.toml" if text == OWN else "cards.csv"))
    assert card.id == "h900"


def test_a_users_card_comes_before_the_catalogues(tmp_path: Path) -> None:
    own = load_cards(written(tmp_path, OWN.replace("h900", "h100-sxm")))
    for name in ("h100-sxm", "H100 SXM", "H100", "H9"):  # by all names of both
        assert find_card(name, own) is own[0]
    assert find_card("h100-pcie", own) is find_card("h100-pcie")


def test_the_source_of_the_catalogue_is_a_users_file(shared_data: Path) -> None:
    for own, known in zip(load_cards(shared_data / "gpus.csv"), catalogue(), strict=True):
        assert (own.id, own.memory_bytes, own.flops_per_s) == (known.id, known.memory_bytes, known.flops_per_s)
        assert (own.usd_per_hour, own.link_bytes_per_s) == (known.usd_per_hour, known.link_bytes_per_s)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("driver_mib", "driver_mb"), "card 1: unknown field 'driver_mb'; the nearest known one is driver_mib"),
        (('id = "h900"', ""), "lacks id"),
        (('id = "h900"', 'id = "--"'), "lacks id"),
        (("driver_mib = 100000", ""), "(h900) lacks its memory; give one of torch_total_bytes, driver_mib, vendor_gb"),
        (("bandwidth_gb_s = 9000", ""), "(h900) lacks bandwidth_gb_s"),
        (("9000", "0"), "bandwidth_gb_s 0; it must be a number above 0"),
        (("9000", "-1"), "bandwidth_gb_s -1"),
        (("9000", "nan"), "bandwidth_gb_s nan"),
        (("9000", "inf"), "bandwidth_gb_s inf"),
        (("9000", "true"), "bandwidth_gb_s True"),
        (("9000", '"fast"'), "bandwidth_gb_s 'fast'"),
        (("9000", "1e300"), "bandwidth_gb_s 1e+300"),
        (("9000", "9" * 400), "bandwidth_gb_s inf"),
        (("9000", "9" * 5000), "is not TOML"),
        (("9000", "[" * 9000), "is not TOML"),
        (('id = "h900"', 'id = "\u65e5"'), "has no letter from a to z and no digit"),
        (('["H9"]', '"H9"'), "aliases 'H9'; they must be a list of names"),
        (('"a leaflet"', "7"), "source 7; it must be a text"),
        (("usd_per_hour_high = 12", "usd_per_hour_high = 1\nusd_per_hour_low = 2"), "usd_per_hour_low 2 above"),
        (("[[card]]", "[[cards]]"), "unknown field 'cards'; the nearest known one is card"),
        (("[[card]]", "[["), "is not TOML"),
    ],
)
def test_a_broken_file_is_one_line_that_says_what(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    line = refusal(written(tmp_path, OWN.replace(*change)))
    assert says in line and str(tmp_path) in line


def test_files_that_hold_no_cards(tmp_path: Path) -> None:
    assert "cannot read --gpu-file" in refusal(tmp_path / "none.toml")
    assert "cannot read --gpu-file" in refusal(tmp_path)
    assert "has no card" in refusal(written(tmp_path, ""))
    assert "has no card" in refusal(written(tmp_path, "card = 3"))
    assert "has no card" in refusal(written(tmp_path, "card = [3]"))
    assert "has no card" in refusal(written(tmp_path, 'card = ["h100"]'))
    assert "line 1 is not CSV" in refusal(written(tmp_path, "id,name\n" + "x" * 200_000 + ",y\n", "cards.csv"))
    assert "has the column 'name' twice" in refusal(written(tmp_path, "id,name,name\nx,y,z\n", "cards.csv"))
    assert "a text of one line" in refusal(written(tmp_path, 'id,note\nx,"two\nlines"\n', "cards.csv"))
    assert "has no card" in refusal(written(tmp_path, "id,name\n", "cards.csv"))
    assert "more or fewer fields" in refusal(written(tmp_path, "id,name\nx,y,z\n", "cards.csv"))
    assert "unknown field 'nam'; the nearest" in refusal(written(tmp_path, "id,nam\nx,y\n", "cards.csv"))
    assert "two cards that can be called 'h900'" in refusal(written(tmp_path, OWN + OWN))
    twice = OWN + OWN.replace('"h900"', '"h901"')
    assert "two cards that can be called" in refusal(written(tmp_path, twice))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "cannot read --gpu-file" in refusal(tmp_path / "bytes.toml")


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_a_file_is_used(tmp_path: Path, name: str) -> None:
    known = {"vendor_gb": 9, "bandwidth_gb_s": 9}
    cards: list[Card] = []
    for told in (known, known | {name: 7}):
        lines = [f"{key} = {value}" for key, value in told.items()]
        cards += load_cards(written(tmp_path, "\n".join(["[[card]]", 'id = "x"', *lines])))
    assert cards[0] != cards[1]


def test_prices_of_a_user_stand_before_the_catalogues() -> None:
    cards = [find_card("h100"), find_card("l4")]
    both = with_prices(cards, ["2.5"])
    assert [card.usd_per_hour for card in both] == [(2.5, 2.5), (2.5, 2.5)]
    assert {card.price_source for card in both} == {"--price"}
    one = with_prices(cards, ["3", "H100=1.25"])
    assert [card.usd_per_hour for card in one] == [(1.25, 1.25), (3, 3)]
    assert with_prices(cards, ["0"])[0].usd_per_hour == (0, 0)
    assert with_prices(cards, []) == tuple(cards)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "$2", "1e9", "h100=", "h100=x"])
def test_prices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(KvbenchError, match=r"^--price must be US dollars per card-hour"):
        with_prices([find_card("h100")], [text])


def test_a_price_for_a_card_that_is_not_asked_for_is_refused() -> None:
    with pytest.raises(KvbenchError, match=r"^--price b200=3 names no card that is shown: h100-sxm$"):
        with_prices([find_card("h100")], ["b200=3"])


def test_the_middle_of_a_range_stands_for_it() -> None:
    card = find_card("h100")
    assert card.usd_per_hour == (2.0, 5.0) and card.usd_per_hour_middle == 3.5
    assert find_card("a10").usd_per_hour_middle is None
    assert not math.isnan(card.memory_bytes)
