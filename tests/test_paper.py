"""docs/paper.md is what its command writes, and as near to the paged-attention paper as it says."""

from __future__ import annotations

import paper


def test_the_page_is_what_the_simulation_says() -> None:
    assert paper.misses() == []
    assert paper.page() == paper.PAGE.read_text(encoding="utf-8"), "make paper writes it again"


def test_requests_are_cut_at_the_longest_and_have_the_means_of_the_paper() -> None:
    asked = paper.requests(1.0)
    assert max(len(one.prompt) + one.max_tokens for one in asked) == paper.LONGEST
    assert abs(sum(len(one.prompt) for one in asked) / len(asked) / paper.INPUT - 1) < 0.1
    assert abs(sum(one.max_tokens for one in asked) / len(asked) / paper.OUTPUT - 1) < 0.1
