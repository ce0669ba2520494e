from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.events import FULL
from kvist.events.engine_events import KnownWindow
from kvist.kvcache import ABSENT, num_blocks_for, num_stale_blocks
from kvist.transfer.memory import BlockCountMismatchError, pair_blocks, prompt_blocks

BLOCK_SIZE, PROMPT_LEN, WINDOW = 16, 100, 40


Pairs = tuple[tuple[int, ...], tuple[int, ...]]


def pairs_of(window: KnownWindow, source: list[int], destination: list[int], group_id: int = 0) -> Pairs:
    sources, targets = pair_blocks(group_id, window, BLOCK_SIZE, PROMPT_LEN, source, destination, range(7))
    return tuple(sources), tuple(targets)


def pairs_in_slices(
    window: KnownWindow, block_size: int, prompt_len: int, table: list[int], wanted: tuple[int, ...], cut: int
) -> Pairs:
    """Return what is paired of the blocks before a cut, when no others are filled, and then of those behind it."""
    lists: tuple[list[int], list[int]] = ([], [])
    for ordinals in (range(cut), range(cut, num_blocks_for(prompt_len, block_size))):
        filled = prompt_blocks(table[: ordinals.stop], prompt_len, block_size)
        pairs = pair_blocks(0, window, block_size, prompt_len, filled, wanted, ordinals)
        for each, more in zip(lists, pairs, strict=True):
            each.extend(more)
    return tuple(lists[0]), tuple(lists[1])


@pytest.mark.parametrize(
    ("window", "source", "destination", "expected"),
    [
        (WINDOW, [13, 14, 15, 16], [24, 25, 26], ((14, 15, 16), (24, 25, 26))),
        (WINDOW, [13, 14, 15, 16], [23, 24, 25, 26], ((13, 14, 15, 16), (23, 24, 25, 26))),
        (FULL, list(range(10, 17)), [22, 23, 24, 25, 26], ((12, 13, 14, 15, 16), (22, 23, 24, 25, 26))),
        (FULL, list(range(10, 17)), [], ((), ())),
        (WINDOW, [13, 14, 15, 16], [], ((), ())),
    ],
)
def test_lists_are_paired_as_written(
    window: KnownWindow, source: list[int], destination: list[int], expected: Pairs
) -> None:
    assert pairs_of(window, source, destination) == expected


def test_stale_blocks_at_the_head_of_either_list_are_left_out() -> None:
    whole = list(range(10, 17))
    assert pairs_of(WINDOW, whole, [23, 24, 25, 26])[0] == (13, 14, 15, 16)
    assert pairs_of(WINDOW, [13, 14, 15, 16], whole)[1] == (13, 14, 15, 16)
    assert pair_blocks(1, 128, 128, 1225 * 128, [10], [20, 21], range(1225)) == ([10], [21])


def test_a_table_gives_what_lies_before_the_prompts_end() -> None:
    table = [ABSENT, ABSENT, ABSENT, 13, 14, 15, 16, 17]
    assert prompt_blocks(table, PROMPT_LEN, BLOCK_SIZE) == (13, 14, 15, 16)


def test_speculative_tokens_lie_behind_the_prompt_and_are_not_sent() -> None:
    table = [5, 6, 7]  # 16 tokens of the prompt and 7 guessed ones in blocks of 8
    assert prompt_blocks(table, 16, 8) == (5, 6)
    with pytest.raises(BlockCountMismatchError, match="3 blocks, but 16 tokens fill 2"):
        pair_blocks(0, FULL, 8, 16, table, [], range(2))


@pytest.mark.parametrize(("group_id", "window"), [(0, FULL), (1, WINDOW)])
def test_a_receiver_that_needs_a_block_the_sender_lacks_is_refused(group_id: int, window: KnownWindow) -> None:
    with pytest.raises(BlockCountMismatchError, match=f"in group {group_id}: the destination needs 3") as caught:
        pairs_of(window, [15, 16], [24, 25, 26], group_id)
    assert caught.value.group_id == group_id


@pytest.mark.parametrize(("num_source", "num_destination"), [(8, 7), (7, 8)])
def test_more_blocks_than_the_prompt_has_are_refused_on_either_side(num_source: int, num_destination: int) -> None:
    with pytest.raises(BlockCountMismatchError, match="8 blocks, but 100 tokens fill 7"):
        pairs_of(FULL, list(range(num_source)), list(range(num_destination)))


def test_lists_and_tables_agree_in_twenty_thousand_shapes() -> None:
    rng = random.Random(13937)
    for _ in range(20_000):
        block_size = rng.choice((1, 4, 16, 32, 128))
        prompt_len = rng.randint(1, 12 * block_size)
        window: KnownWindow = rng.choice((FULL, rng.randint(1, prompt_len + 40)))
        num_cached = rng.randint(0, prompt_len)
        total = num_blocks_for(prompt_len, block_size)
        num_stale = min(num_stale_blocks(prompt_len, window, block_size), total)
        num_held_stale = rng.randint(0, num_stale)  # a sender may hold some that are stale by the end of the prompt
        held = [ABSENT] * (num_stale - num_held_stale) + list(range(100, 100 + total - num_stale + num_held_stale))
        num_left = max(num_stale, num_cached // block_size)
        exact = [ABSENT] * num_left + held[num_left:]
        wanted = prompt_blocks([*exact, *range(900, 900 + rng.randint(0, 3))], prompt_len, block_size)
        pairs = pairs_in_slices(window, block_size, prompt_len, held, wanted, rng.randint(0, total))
        assert pairs == (wanted, wanted)


@settings(max_examples=300, deadline=None)
@given(
    block_size=st.integers(1, 9),
    prompt_len=st.integers(1, 70),
    window=st.one_of(st.just(FULL), st.integers(1, 90)),
    num_cached_blocks=st.integers(0, 20),
    num_extra_stale=st.integers(0, 20),
    num_guessed=st.integers(0, 20),
    num_cut=st.integers(0, 70),
)
def test_every_token_that_will_be_read_lands_where_the_receiver_looks_for_it(
    block_size: int,
    prompt_len: int,
    window: KnownWindow,
    num_cached_blocks: int,
    num_extra_stale: int,
    num_guessed: int,
    num_cut: int,
) -> None:
    """Two memories token by token: the sender's holds positions, the receiver's is filled by the pairs."""
    total = num_blocks_for(prompt_len, block_size)
    num_reserved = num_blocks_for(prompt_len + num_guessed, block_size)
    num_cached = min(num_cached_blocks, total)
    is_read = [window is FULL or prompt_len - position < window for position in range(prompt_len)]
    is_block_read = [any(is_read[block * block_size : (block + 1) * block_size]) for block in range(total)]
    first_read = is_block_read.index(True) if True in is_block_read else total
    first_held = max(0, first_read - num_extra_stale)
    source = [ABSENT] * first_held + [1000 + block for block in range(first_held, num_reserved)]
    destination = [ABSENT] * first_read + [2000 + block for block in range(first_read, num_reserved)]

    missing = [ABSENT] * num_cached + destination[num_cached:]
    wanted = prompt_blocks(missing, prompt_len, block_size)
    pairs = pairs_in_slices(window, block_size, prompt_len, source, wanted, min(num_cut, total))
    landed = dict(zip(pairs[1], pairs[0], strict=True))

    expected = {
        destination[position // block_size]: source[position // block_size]
        for position in range(num_cached * block_size, prompt_len)
        if is_block_read[position // block_size]
    }
    assert landed == expected
