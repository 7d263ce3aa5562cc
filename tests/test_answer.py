"""How many tokens an answer has, when each came, and what is said where stream and usage disagree: by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.types import Request
from kvbench.metrics.records import FAILED, FINISHED, RequestRecord
from kvbench.workloads.answer import DONE, Answer, spread
from kvbench.workloads.faults import Fault

REQUEST = Request(3, (7, 8, 9), max_tokens=9, output_tokens=5, scheduled_s=1.0)


def answer(*chunks: dict[str, Any], request: Request = REQUEST) -> Answer:
    """Chunks that come at 1, 2, 3 … s."""
    made = Answer(request, sent_s=1.5)
    for second, chunk in enumerate(chunks, 1):
        made.take(json.dumps(chunk).encode(), float(second))
    return made


def part(text: str, **more: Any) -> dict[str, Any]:
    usage = {"usage": {"completion_tokens": more.pop("so_far")}} if "so_far" in more else {}
    return {"choices": [{"index": 0, "text": text, **more}], **usage}


def told(output: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": output, **more}}


def record(made: Answer) -> RequestRecord:
    (only,) = made.records(FINISHED, "", 99.0)
    return only


def test_token_ids_say_when_each_token_came() -> None:
    made = record(answer(part("ab", token_ids=[1, 2]), part("", token_ids=[3]), part("c", token_ids=[4, 5]), told(5)))
    assert made.token_s == [1, 1, 2, 3, 3]
    assert (made.told_tokens, made.streamed_tokens, made.chunks, made.output_tokens) == (5, 5, 3, 5)
    assert (made.scheduled_s, made.sent_s, made.first_s, made.last_s) == (1.0, 1.5, 1, 3)


def test_usage_in_every_chunk_says_so_too() -> None:
    made = record(answer(part("ab", so_far=2), part("c", so_far=3), part("de", so_far=5), told(5)))
    assert made.token_s == [1, 1, 2, 3, 3] and made.streamed_tokens is None


def test_a_usage_at_the_end_is_shared_out_by_the_length_of_the_texts() -> None:
    assert record(answer(part("a"), part("abcde"), told(6))).token_s == [1, 2, 2, 2, 2, 2]
    assert record(answer(part("ab"), part("ab"), told(6))).token_s == [1, 1, 1, 2, 2, 2]
    assert record(answer(part("a"), part("b", finish_reason="length", so_far=4))).token_s == [1, 1, 2, 2]


def test_without_usage_a_chunk_is_a_token() -> None:
    made = record(answer(part("abc"), part(""), part("d", finish_reason="stop")))
    assert made.token_s == [1, 3]
    assert (made.told_tokens, made.chunks, made.empty_chunks, made.reason) == (None, 2, 1, "stop")


def test_usage_counts_where_the_stream_shows_more_or_less() -> None:
    fewer = record(answer(part("a"), part("b"), part("c"), told(2)))
    assert (fewer.token_s, fewer.told_tokens, fewer.chunks) == ([1, 3], 2, 3)
    more = record(answer(part("a", token_ids=[1]), part("b", token_ids=[2]), told(4)))
    assert (more.token_s, more.told_tokens, more.streamed_tokens) == ([1, 1, 2, 2], 4, 2)


def test_what_was_asked_stands_beside_what_came() -> None:
    over = record(answer(part("a"), part("b"), told(6)))
    assert (over.output_tokens, over.asked_output_tokens) == (6, 5)
    free = record(answer(part("a"), told(1), request=Request(0, (1,), max_tokens=9)))
    assert free.asked_output_tokens == 9


def test_what_the_server_counts_of_the_prompt() -> None:
    made = record(answer(part("a"), told(1, prompt_tokens=11, prompt_tokens_details={"cached_tokens": 4})))
    assert (made.input_tokens, made.asked_tokens, made.cached_tokens, made.told_cached_tokens) == (11, 3, 4, 4)
    silent = record(answer(part("a"), told(1)))
    assert (silent.input_tokens, silent.told_cached_tokens) == (3, None)


def test_reasoning_and_tool_calls_are_tokens_a_role_is_none() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"tool_calls": [{"name": "f"}]}]
    made = record(answer(*({"choices": [{"index": 0, "delta": delta}]} for delta in deltas), told(2)))
    assert made.token_s == [2, 3] and made.empty_chunks == 0


def test_samples_are_told_apart_and_usage_is_shared_by_them() -> None:
    two = Request(0, (1,), 9, 5, n=2)
    chunks = [{"choices": [{"index": index, "text": text}]} for index, text in ((1, "a"), (0, "a"), (1, "b"))]
    first, second = answer(*chunks, told(3), request=two).records(FINISHED, "", 9.0)
    assert (first.token_s, second.token_s) == ([2], [1, 3])
    absent, present = answer(chunks[0], told(1), request=two).records(FINISHED, "", 9.0)
    assert (absent.status, absent.reason, present.status) == (FAILED, "empty: the answer has no token", FINISHED)


def test_what_an_answer_lacks() -> None:
    with pytest.raises(Fault, match="cut"):
        answer(part("a")).check()
    answer(part("a", finish_reason="stop")).check()
    done = answer(part("a"))
    done.take(DONE, 2.0)
    done.check()
    with pytest.raises(Fault, match="empty: the answer has no token, though usage tells 4"):
        answer(part("", finish_reason="stop"), told(4)).check()


def test_a_request_that_was_never_sent_was_late_to_the_end() -> None:
    (never,) = Answer(REQUEST).records("unfinished", "the run ended first", 9.0)
    assert (never.sent_s, never.first_s, never.output_tokens) == (9.0, None, 0)


def test_a_text_without_ids_is_shared_out_to_the_nearest_token() -> None:
    """Two tokens beyond one a chunk, over texts of 4 and 2 characters: 1.5 and 0.5 of them."""
    made = record(answer(part("abcd"), part("ef", finish_reason="length"), told(4)))
    assert made.token_s == [1, 1, 1, 2] and made.chunks == 2


@given(st.integers(0, 60), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_spread_keeps_the_total_and_both_ends(total: int, weights: list[int]) -> None:
    found = spread(total, weights)
    assert sum(found) == total and len(found) == len(weights) and min(found) >= 0
    if total >= 2 and len(weights) >= 2:
        assert found[0] and found[-1]
    if total >= len(weights):
        assert min(found) >= 1
        over = [weight - 1 for weight in weights] if sum(weights) > len(weights) else [1] * len(weights)
        for before in range(len(weights) + 1):
            exact = before + (total - len(weights)) * sum(over[:before]) / sum(over)
            assert abs(sum(found[:before]) - exact) <= 0.5
    assert spread(sum(weights), weights) == weights
