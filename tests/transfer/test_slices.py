from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL, KnownWindow
from kvist.kvcache.sequences import ABSENT
from kvist.kvcache.stale import num_blocks_for, num_stale_blocks
from kvist.transfer.slices import (
    BlockCountMismatchError,
    KvSlice,
    SliceGroup,
    Suffix,
    TokenRange,
    align,
    pair_blocks,
    positional_block_ids,
    raw_cached_tokens,
    slice_of_tables,
    suffix,
)

BLOCK_SIZE, PROMPT_LEN = 16, 100
FULL_GROUP = SliceGroup(0, FULL, BLOCK_SIZE, PROMPT_LEN)
WINDOWED = SliceGroup(1, 40, BLOCK_SIZE, PROMPT_LEN)


@pytest.mark.parametrize(
    ("group", "num_source", "num_destination", "slice_end", "starts"),
    [
        (FULL_GROUP, 7, 7, 100, (0, 0)),
        (FULL_GROUP, 7, 4, 100, (0, 48)),
        (WINDOWED, 4, 3, 100, (48, 64)),
        (FULL_GROUP, 2, 2, 48, (16, 16)),
        (WINDOWED, 0, 0, 48, (48, 48)),
        (WINDOWED, 0, 0, 32, (48, 48)),
    ],
)
def test_the_written_starts_hold(
    group: SliceGroup, num_source: int, num_destination: int, slice_end: int, starts: tuple[int, int]
) -> None:
    lists = (range(num_source), range(num_destination))
    assert tuple(suffix(group, block_ids, slice_end).start_token for block_ids in lists) == starts


def test_three_blocks_go_to_where_only_the_first_live_one_is_cached() -> None:
    pairs = pair_blocks(WINDOWED, [13, 14, 15, 16], [24, 25, 26], PROMPT_LEN)
    assert pairs == (64, (14, 15, 16), (24, 25, 26))


def test_a_cached_prefix_shortens_the_list_of_a_full_group_and_not_that_of_a_windowed_one() -> None:
    table = [20, 21, 22, 23, 24, 25, 26]
    assert suffix(FULL_GROUP, table, PROMPT_LEN, 32) == (32, (22, 23, 24, 25, 26))
    assert pair_blocks(FULL_GROUP, range(10, 17), range(22, 27), PROMPT_LEN) == (
        32,
        (12, 13, 14, 15, 16),
        (22, 23, 24, 25, 26),
    )
    assert suffix(WINDOWED, table, PROMPT_LEN, 32) == (48, (23, 24, 25, 26))
    assert suffix(WINDOWED, [13, 14, 15, 16], PROMPT_LEN).start_token == 48
    assert pair_blocks(WINDOWED, range(13, 17), range(23, 27), PROMPT_LEN) == (48, (13, 14, 15, 16), (23, 24, 25, 26))


def test_stale_blocks_at_the_head_of_a_list_go_with_its_start() -> None:
    untrimmed = tuple(range(10, 17))
    clamped_only = align(Suffix(48, untrimmed), Suffix(48, (23, 24, 25, 26)), BLOCK_SIZE)
    assert clamped_only.source_ids == (10, 11, 12, 13), "moving the start alone pairs the wrong blocks"
    assert pair_blocks(WINDOWED, untrimmed, [23, 24, 25, 26], PROMPT_LEN).source_ids == (13, 14, 15, 16)


def test_what_is_stale_is_decided_by_the_prompt_and_not_by_the_slice() -> None:
    whole = list(range(10, 17))
    slices = [slice_of_tables([whole, whole], TokenRange(0, 48), BLOCK_SIZE, (0, 0), is_last=False)]
    slices.append(slice_of_tables([whole, whole], TokenRange(48, 100), BLOCK_SIZE, (0, 0)))
    live = [suffix(WINDOWED, part.block_ids_per_group[1], part.token_range.end).block_ids for part in slices]
    assert [len(block_ids) for block_ids in live] == [0, 4]
    assert num_stale_blocks(48, 40, BLOCK_SIZE) == 0, "the end of the first slice would have kept block 0 and on"
    assert [part.is_last for part in slices] == [False, True]
    assert [len(part.block_ids_per_group[0]) for part in slices] == [3, 4]


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        (Suffix(0, (10, 11, 12, 13)), Suffix(32, (20, 21, 22)), (32, (12, 13), (20, 21))),
        (Suffix(16, (10, 11, 12)), Suffix(0, (20, 21, 22, 23)), (16, (10, 11, 12), (21, 22, 23))),
        (Suffix(0, (1,)), Suffix(16, (2,)), (16, (), ())),
    ],
)
def test_lists_are_aligned_as_written(
    source: Suffix, destination: Suffix, expected: tuple[int, tuple[int, ...], tuple[int, ...]]
) -> None:
    assert align(source, destination, BLOCK_SIZE) == expected


@pytest.mark.parametrize(
    ("num_cached", "expected"), [(0, (13, 14, 15, 16)), (32, (13, 14, 15, 16)), (64, (14, 15, 16)), (112, ())]
)
def test_a_table_gives_what_lies_between_the_cached_tokens_and_the_prompts_end(
    num_cached: int, expected: tuple[int, ...]
) -> None:
    table = [ABSENT, ABSENT, ABSENT, 13, 14, 15, 16, 17]
    assert positional_block_ids(table, PROMPT_LEN, BLOCK_SIZE, num_cached) == expected


def test_speculative_tokens_lie_behind_the_prompt_and_are_not_sent() -> None:
    table = [5, 6, 7]  # 16 tokens of the prompt and 7 guessed ones in blocks of 8
    assert slice_of_tables([table], TokenRange(0, 16), 8, (0,)) == KvSlice(TokenRange(0, 16), ((5, 6),))
    with pytest.raises(BlockCountMismatchError, match="3 blocks, but 16 tokens fill 2"):
        suffix(SliceGroup(0, FULL, 8, 16), table, 16)


def test_a_receiver_that_asks_for_a_stale_block_gets_its_list_trimmed_at_the_head() -> None:
    group = SliceGroup(1, 128, 128, 1225 * 128)
    assert pair_blocks(group, [10], [20, 21], 1225 * 128) == (156672, (10,), (21,))


@pytest.mark.parametrize("group", [FULL_GROUP, WINDOWED])
def test_a_receiver_that_needs_a_block_the_sender_lacks_is_refused(group: SliceGroup) -> None:
    with pytest.raises(BlockCountMismatchError, match=f"in group {group.group_id}") as caught:
        pair_blocks(group, [15, 16], [24, 25, 26], PROMPT_LEN)
    assert caught.value.group_id == group.group_id


@pytest.mark.parametrize(("num_source", "num_destination"), [(8, 7), (7, 8)])
def test_more_blocks_than_the_slice_has_are_refused_on_either_side(num_source: int, num_destination: int) -> None:
    with pytest.raises(BlockCountMismatchError, match="8 blocks, but 100 tokens fill 7"):
        pair_blocks(FULL_GROUP, range(num_source), range(num_destination), PROMPT_LEN)


def test_a_window_without_a_prompt_length_is_refused_by_group() -> None:
    with pytest.raises(InvalidValueError, match="prompt_len of group 3"):
        SliceGroup(3, 40, BLOCK_SIZE, None)
    assert suffix(SliceGroup(3, FULL, BLOCK_SIZE, None), [1, 2], 48) == (16, (1, 2))


@pytest.mark.parametrize(
    ("raw", "window", "expected"),
    [
        (32, FULL, 32),
        (32, 40, 48),
        (32, 64, 32),
        (32, 101, 32),
        (0, FULL, 0),
        (0, 40, 48),
        (80, 40, 80),
    ],
)
def test_what_counts_as_cached_begins_behind_the_stale_blocks(raw: int, window: KnownWindow, expected: int) -> None:
    assert SliceGroup(0, window, BLOCK_SIZE, PROMPT_LEN).effective_cached_tokens(raw) == expected


def test_raw_counts_know_nothing_of_windows() -> None:
    assert raw_cached_tokens(None, 3, BLOCK_SIZE) == (0, 0, 0), "no reuse is zero for every group, windowed or not"
    assert raw_cached_tokens(47, 2, BLOCK_SIZE) == (32, 32), "a block that is cached in part is not cached"


def test_nothing_missing_is_an_empty_slice() -> None:
    held = slice_of_tables([range(7)], TokenRange(0, PROMPT_LEN), BLOCK_SIZE, (112,))
    assert held.block_ids_per_group == ((),)
    assert pair_blocks(FULL_GROUP, range(7), [], PROMPT_LEN) == (112, (), ())
    assert pair_blocks(WINDOWED, [13, 14, 15, 16], [], PROMPT_LEN) == (112, (), ())
    assert TokenRange(5, 5).start == 5


def test_a_later_start_than_the_lists_length_says_drops_the_blocks_before_it() -> None:
    assert pair_blocks(FULL_GROUP, range(10, 17), range(20, 27), PROMPT_LEN, 70) == (64, (14, 15, 16), (24, 25, 26))
    assert pair_blocks(WINDOWED, range(13, 17), range(23, 27), PROMPT_LEN, 16) == (
        48,
        (13, 14, 15, 16),
        (23, 24, 25, 26),
    )


@pytest.mark.parametrize("bounds", [(-1, 5), (6, 5)])
def test_a_range_that_ends_before_it_begins_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(InvalidValueError, match="token_range"):
        TokenRange(*bounds)


def test_the_suffix_form_agrees_with_the_positional_one_in_twenty_thousand_shapes() -> None:
    rng = random.Random(13937)
    for _ in range(20_000):
        block_size = rng.choice((1, 4, 16, 32, 128))
        prompt_len = rng.randint(1, 12 * block_size)
        window: KnownWindow = rng.choice((FULL, rng.randint(1, prompt_len + 40)))
        num_cached = rng.randint(0, prompt_len)
        total = num_blocks_for(prompt_len, block_size)
        group = SliceGroup(0, window, block_size, prompt_len)
        num_stale = min(num_stale_blocks(prompt_len, window, block_size), total)
        num_held_stale = rng.randint(0, num_stale)  # a sender may hold some that are stale by the end of the prompt
        num_spare = rng.randint(0, 3)
        table = [ABSENT] * (num_stale - num_held_stale) + list(range(100, 100 + total - num_stale + num_held_stale))
        exact = [ABSENT] * num_stale + table[num_stale:]
        positional = positional_block_ids([*exact, *range(900, 900 + num_spare)], prompt_len, block_size, num_cached)
        held = [block_id for block_id in table if block_id != ABSENT]
        assert suffix(group, held, prompt_len, num_cached).block_ids == positional


@settings(max_examples=300, deadline=None)
@given(
    block_size=st.integers(1, 9),
    prompt_len=st.integers(1, 70),
    window=st.one_of(st.just(FULL), st.integers(1, 90)),
    num_cached_blocks=st.integers(0, 20),
    num_extra_stale=st.integers(0, 20),
    num_guessed=st.integers(0, 20),
)
def test_every_token_that_will_be_read_lands_where_the_receiver_looks_for_it(
    block_size: int,
    prompt_len: int,
    window: KnownWindow,
    num_cached_blocks: int,
    num_extra_stale: int,
    num_guessed: int,
) -> None:
    """Two memories token by token: the sender's holds positions, the receiver's is filled by the pairs."""
    total = num_blocks_for(prompt_len, block_size)
    num_reserved = num_blocks_for(prompt_len + num_guessed, block_size)
    num_cached = min(num_cached_blocks, total) * block_size
    is_read = [window is FULL or prompt_len - position < window for position in range(prompt_len)]
    is_block_read = [any(is_read[block * block_size : (block + 1) * block_size]) for block in range(total)]
    first_read = is_block_read.index(True) if True in is_block_read else total
    first_held = max(0, first_read - num_extra_stale)
    source = [ABSENT] * first_held + [1000 + block for block in range(first_held, num_reserved)]
    destination = [ABSENT] * first_read + [2000 + block for block in range(first_read, num_reserved)]

    lists = [
        slice_of_tables([table], TokenRange(0, prompt_len), block_size, (cached,)).block_ids_per_group[0]
        for table, cached in ((source, 0), (destination, num_cached))
    ]
    pairs = pair_blocks(SliceGroup(0, window, block_size, prompt_len), *lists, prompt_len)
    landed = dict(zip(pairs.destination_ids, pairs.source_ids, strict=True))

    expected = {
        destination[position // block_size]: source[position // block_size]
        for position in range(num_cached, prompt_len)
        if is_block_read[position // block_size]
    }
    assert landed == expected
    if landed:
        assert pairs.start_token == min(block_id - 2000 for block_id in landed) * block_size


def test_slices_of_a_prompt_together_bring_what_the_whole_prompt_would() -> None:
    rng = random.Random(18554)
    for _ in range(1000):
        block_size, prompt_len = rng.choice((1, 4, 16)), rng.randint(1, 100)
        window: KnownWindow = rng.choice((FULL, rng.randint(1, prompt_len + 20)))
        group = SliceGroup(0, window, block_size, prompt_len)
        total = num_blocks_for(prompt_len, block_size)
        num_stale = min(num_stale_blocks(prompt_len, window, block_size), total)
        source = list(range(1000, 1000 + total))
        destination = [ABSENT] * num_stale + list(range(2000 + num_stale, 2000 + total))
        num_cached = rng.randint(0, prompt_len)
        cuts = sorted({0, prompt_len, *(rng.randint(0, prompt_len) for _ in range(rng.randint(0, 4)))})
        landed: dict[int, int] = {}
        for start, end in pairwise(cuts):
            part = TokenRange(start, end)
            ours, theirs = slice_of_tables([source, destination], part, block_size, (0, num_cached)).block_ids_per_group
            pairs = pair_blocks(group, ours, theirs, end)
            landed |= zip(pairs.destination_ids, pairs.source_ids, strict=True)
        first = max(num_stale, num_cached // block_size)
        assert landed == {2000 + block: 1000 + block for block in range(first, total)}
