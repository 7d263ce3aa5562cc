"""The cases of the prefix cache, by hand."""

from __future__ import annotations

import copy

import pytest
from fakes import asking, request
from test_allocators import state

from kvbench.engine.types import COMMON, Holding, Sequence, Usage
from kvbench.paged.blocks import BlockPool


def letters(text: str) -> list[int]:
    """A token a letter."""
    return list(map(ord, text))


def served(pool: BlockPool, number: int, prompt: str, salt: str = "", *, leave: bool = False) -> Sequence:
    """A sequence whose prompt, a token a letter, has been computed, and who may have gone again."""
    sequence = Sequence.of(asking(number, letters(prompt), cache_salt=salt))
    assert pool.reserve(sequence, sequence.known)
    sequence.cached_tokens, sequence.computed = sequence.computed, sequence.known
    pool.commit(sequence)
    if leave:
        pool.free(sequence)
    return sequence


def hit(pool: BlockPool, prompt: str, salt: str = "") -> int:
    """How many tokens of a prompt would be found."""
    return served(copy.deepcopy(pool), 10**6, prompt, salt).cached_tokens


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [("abcd", 2), ("abcde", 4), ("abc", 2), ("ab", 0), ("a", 0), ("abcdefgh", 4), ("abxd", 2), ("xbcde", 0)],
)
def test_a_hit_is_of_full_blocks_and_leaves_the_last_token_to_run(prompt: str, rows: int) -> None:
    pool = BlockPool(40, 2, prefix_caching=True)
    served(pool, 0, "abcd", leave=True)
    assert hit(pool, prompt) == rows


def test_equal_tokens_after_different_beginnings_are_different_texts() -> None:
    pool = BlockPool(40, 2, prefix_caching=True)
    served(pool, 0, "aabb", leave=True)
    assert hit(pool, "ccbbx") == 0
    assert hit(pool, "bbx") == 0


def test_two_salts_share_nothing() -> None:  # vllm#44701
    pool = BlockPool(60, 2, prefix_caching=True)
    for number, salt in enumerate(["", "a", "b"]):
        assert served(pool, number, "abcdef", salt).cached_tokens == 0
    assert [hit(pool, "abcdef", salt) for salt in ("", "a", "b", "c")] == [4, 4, 4, 0]
    assert pool.usage().saved == 0


def test_without_the_cache_nothing_is_looked_up_or_kept() -> None:
    pool = BlockPool(40, 2)
    served(pool, 0, "abcd", leave=True)
    assert hit(pool, "abcdef") == 0 and pool.usage() == Usage(0, 0, 40)


def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(12, 2, prefix_caching=True)
    served(pool, 0, "aaAA", leave=True)
    served(pool, 1, "bbBB", leave=True)
    served(pool, 2, "aax", leave=True)  # now `aa` was used last; its end `AA` was not
    assert pool.usage().cached == 8
    found = []
    for number, taken in enumerate(["zzzzzz", "yy", "ww"], 3):  # the first takes the two blocks without content too
        served(pool, number, taken, leave=True)
        found.append((hit(pool, "aaAAx"), hit(pool, "bbBBx")))
    assert found == [(2, 4), (2, 2), (2, 0)] and pool.usage().cached == 12


def test_a_block_that_was_found_is_taken_back_from_the_free_ones() -> None:
    pool = BlockPool(6, 2, prefix_caching=True)
    served(pool, 0, "aabb", leave=True)
    again = served(pool, 1, "aabbc")
    assert again.cached_tokens == 4 and pool.usage() == Usage(5, 6, 0)
    assert not pool.reserve(Sequence.of(request(2, 1, 1)), 1)


def test_a_hit_that_lacks_room_for_the_rest_holds_nothing() -> None:
    pool = BlockPool(8, 2, prefix_caching=True)
    served(pool, 0, "aabb", leave=True)
    served(pool, 1, "cc")
    long = Sequence.of(asking(2, letters("aabbdddd")))
    before = state(pool)
    assert not pool.reserve(long, 8) and long.computed == 0 and state(pool) == before


def test_equal_texts_computed_at_once_stay_apart_and_what_follows_can_be_found_after_either() -> None:
    """Two twins compute the same block; the second's stays out of the index. When the first's is evicted, what hung on
    it can no longer be found, until the second grows and brings its own in."""
    pool = BlockPool(12, 2, prefix_caching=True)
    twins = [Sequence.of(asking(number, letters("tt"))) for number in range(2)]
    for twin in twins:
        assert pool.reserve(twin, 2)
    for twin in twins:
        twin.computed = 2
        pool.commit(twin)
    first, second = twins
    second.tokens.extend(letters("ss"))
    assert pool.reserve(second, 4)
    second.computed = 4
    pool.commit(second)
    assert pool.usage() == Usage(6, 6, 6) and hit(pool, "ttssx") == 4  # one's beginning and the other's end
    pool.free(first)
    served(pool, 2, "zzzzzzzz", leave=True)  # evicts the first's block, and with it the way to the second's
    assert hit(pool, "ttx") == 0
    second.tokens.extend(letters("uu"))
    assert pool.reserve(second, 6)
    second.computed = 6
    pool.commit(second)
    assert hit(pool, "ttssx") == 4
    pool.free(second)


def test_what_is_shared_is_held_once_by_hand() -> None:
    """Blocks of 2. The second finds 2 of the first's blocks, the third finds 1: it is common to three, then to two, and
    the one whom the others leave has it to itself again."""
    pool = BlockPool(40, 2, prefix_caching=True)
    one = served(pool, 1, "aabbc")
    assert pool.take_holdings() == [Holding(1, 6, 5, 0)]
    two = served(pool, 2, "aabbdd")
    assert pool.take_holdings() == [Holding(1, 2, 1, 0, 4), Holding(COMMON, 4, 4, 0), Holding(2, 2, 2, 0, 4)]
    three = served(pool, 3, "aaee")
    assert pool.take_holdings() == [Holding(3, 2, 2, 0, 2)]
    assert pool.usage() == Usage(filled=9, held=10, free=30, cached=0, saved=6, saved_held=6)
    pool.free(two)
    changes = [Holding(2, 0, 0, 6), Holding(1, 4, 3, 0, 2), Holding(COMMON, 0, 0, 4), Holding(COMMON, 2, 2, 0)]
    assert pool.take_holdings() == changes
    pool.free(one)
    assert pool.take_holdings() == [Holding(1, 0, 0, 5), Holding(3, 4, 4, 0), Holding(COMMON, 0, 0, 2)]
    assert pool.usage() == Usage(filled=4, held=4, free=36, cached=4)
    pool.free(three)
    assert pool.take_holdings() == [Holding(3, 0, 0, 4)]
