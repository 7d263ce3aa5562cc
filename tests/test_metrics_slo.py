"""How service level objectives are written, and when they hold."""

from __future__ import annotations

import pytest

from kvbench.errors import KvbenchError
from kvbench.metrics.records import RequestRecord
from kvbench.metrics.slo import DEFAULT_SLOS, Slo, parse_slo, parse_slos


def request(ttft_s: float | None, tokens: int = 2) -> RequestRecord:
    """Finished with that TTFT and 10 ms between its tokens; failed where it is None."""
    if ttft_s is None:
        return RequestRecord(0, 0.0, 0.0, 8, 8, status="failed", reason="broken")
    token_s = [ttft_s + 0.01 * i for i in range(tokens)]
    return RequestRecord(
        *(0, 0.0, 0.0, 8, 8),
        first_s=token_s[0],
        last_s=token_s[-1],
        token_s=token_s,
        output_tokens=tokens,
        status="finished",
    )


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:1500", Slo("ttft", 1.5)),
        ("tpot:50", Slo("tpot", 0.05)),
        ("ttft:p99:1500", Slo("ttft", 1.5, 99)),
        ("e2e:500ms", Slo("e2e", 0.5)),
        ("TTFT:1.5s", Slo("ttft", 1.5)),
        (" ttft : p99.9 : 2s ", Slo("ttft", 2.0, 99.9)),
        ("ttft:0.0001", Slo("ttft", 1e-7)),
    ],
)
def test_parse(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo
    assert parse_slo(str(slo)) == slo


def test_written_as_short_as_it_was_read() -> None:
    texts = ["ttft:0.0001", "tpot:50", "e2e:p99:0.3ms", "ttft:0.1"]
    assert [str(parse_slo(text)) for text in texts] == ["ttft:1e-07s", "tpot:0.05s", "e2e:p99:0.0003s", "ttft:0.0001s"]


def test_lists_and_the_default() -> None:
    assert parse_slos(["ttft:1500,tpot:50"]) == parse_slos(["ttft:1.5s", "tpot:50ms"]) == DEFAULT_SLOS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tfft:1500", "unknown SLO metric 'tfft'; did you mean ttft"),
        ("e2el:1500", "did you mean e2e"),
        ("speed:9", "use one of ttft, tpot, e2e"),
        ("ttft", "is not METRIC:VALUE"),
        ("ttft:p99:1:2", "is not METRIC:VALUE"),
        ("ttft:p99", "'p99' is no time"),
        ("ttft:", "'' is no time"),
        ("ttft:9e99999999", "is no time"),
        ("ttft:5min", "'5min' is no time"),
        ("ttft:0", "above 0"),
        ("ttft:-5ms", "above 0"),
        ("ttft:nan", "above 0"),
        ("ttft:inf", "above 0"),
        ("ttft:best:100", "'best' is no percentile"),
        ("ttft:p0:100", "above p0"),
        ("ttft:p101:100", "at most p100"),
        ("ttft:pnan:100", "at most p100"),
    ],
)
def test_bad_text_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(KvbenchError, match=message) as caught:
        parse_slo(text)
    assert "\n" not in str(caught.value)


def test_each_request() -> None:
    slo = Slo("ttft", 1.0)
    assert slo.met_by(request(1.0))
    assert not slo.met_by(request(1.001))
    assert not slo.met_by(request(None))


def test_one_token_passes_a_tpot_objective_vacuously() -> None:
    slo = Slo("tpot", 0.001)
    assert slo.met_by(request(1.0, tokens=1))
    assert not slo.met_by(request(1.0, tokens=2))
    assert Slo("tpot", 0.001, 99).judge([request(1.0, tokens=1)]) == (None, True)
    assert Slo("tpot", 0.001, 99).judge([request(1.0, tokens=1), request(None)]) == (None, False)


def test_a_percentile_that_reaches_into_the_errors_fails_and_is_null() -> None:
    values = [request(i / 10) for i in range(1, 10)]  # 0.1 … 0.9 and one error: ten samples
    many = [*values, request(None)]
    cases: list[tuple[list[RequestRecord], float, float, float | None, bool]] = [
        (values, 0.501, 50, 0.5, True),
        (many, 0.551, 50, 0.55, True),  # between 0.5 and 0.6
        (many, 0.549, 50, 0.55, False),
        (many, 9.0, 88, 0.892, True),  # rank 7.92: both neighbours are finite
        (many, 9.0, 90, None, False),  # rank 8.1 lies between 0.9 and the error
    ]
    for requests, limit_s, rank, value_s, holds in cases:
        judged_s, held = Slo("ttft", limit_s, rank).judge(requests)
        assert judged_s == pytest.approx(value_s)
        assert held is holds
