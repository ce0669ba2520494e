from __future__ import annotations

from itertools import accumulate

import pytest

from kvist.events import FULL
from kvist.kvcache.local import local_pages


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(200, (4, 72, 3, 8)), (95, (0, 95, 3, 31)), (96, (1, 64, 2, 32)), (127, (1, 95, 3, 31)), (128, (2, 64, 2, 32))],
)
def test_a_decode_finds_the_written_pages(num_tokens: int, expected: tuple[int, int, int, int]) -> None:
    pages = local_pages(num_tokens - 1, num_tokens, 64, 32)
    assert (pages.offset, pages.num_tokens, pages.num_pages, pages.last_page_len) == expected


def test_a_batch_counts_the_written_pages() -> None:
    lengths = (200, 64, 10)
    sliding = [local_pages(end - 1, end, 64, 32).num_pages for end in lengths]
    whole = [local_pages(end - 1, end, FULL, 32).num_pages for end in lengths]
    assert list(accumulate(sliding, initial=0)) == [0, 3, 5, 6]
    assert list(accumulate(whole, initial=0)) == [0, 7, 9, 10]


def test_a_position_is_absolute_and_its_page_local() -> None:
    pages = local_pages(199, 200, 64, 32)
    assert pages.locate(199) == (2, 7)
    assert pages.locate(136) == (0, 8), "the oldest key that the query sees"
    assert pages.locate(127)[0] < 0


def test_a_step_of_two_tokens_keeps_what_its_first_query_sees() -> None:
    pages = local_pages(18, 20, 6, 4)
    assert (pages.offset, pages.num_tokens, pages.num_pages) == (3, 8, 2)
    for query in (18, 19):
        keys = range(query - 5, query + 1)
        assert len(keys) == 6
        assert all(0 <= pages.locate(key)[0] < pages.num_pages for key in keys)
    masked_by_local_length = [key for key in range(8, 10) if 18 - key < 6]
    assert not masked_by_local_length, "positions counted from the first page would see nothing"


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_every_visible_key_has_a_page_and_a_window_keeps_no_more_than_it_must(block_size: int) -> None:
    for window in range(1, 20):
        for history in range(60):
            for step in (1, 2, 7):
                pages = local_pages(history, history + step, window, block_size)
                assert pages.num_tokens <= pages.num_pages * block_size
                assert pages.locate(max(0, history + 1 - window))[0] >= 0
                assert pages.locate(history + step - 1) == (pages.num_pages - 1, pages.last_page_len - 1)
                if pages.offset:
                    assert pages.num_tokens <= window + block_size - 1 + step - 1


def test_an_empty_sequence_has_no_pages() -> None:
    pages = local_pages(0, 0, 64, 32)
    assert (pages.num_pages, pages.last_page_len, pages.spill_ordinal) == (0, 0, 0)


def test_the_page_after_the_last_is_never_one_that_is_gone() -> None:
    pages = local_pages(127, 128, 64, 32)
    assert pages.spill_ordinal == 4
    assert local_pages(128, 129, 64, 32).num_pages + 2 == 5
