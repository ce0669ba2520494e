from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvist.engine.models.config import rank_slices
from kvist.errors import InvalidValueError
from kvist.transfer.heads import WHOLE, Part, heads_of, num_copies, written_heads

SIZES = range(1, 9)


def can_split(num_heads: int, num_ranks: int) -> bool:
    return num_heads % num_ranks == 0 or num_ranks % num_heads == 0


SPLITS = [(h, p, d) for h, p, d in itertools.product(SIZES, SIZES, SIZES) if can_split(h, p) and can_split(h, d)]


@pytest.mark.parametrize("num_heads", [*SIZES, 32])
@pytest.mark.parametrize("num_ranks", [*SIZES, 64])
def test_heads_are_split_as_weights_are(num_heads: int, num_ranks: int) -> None:
    if not can_split(num_heads, num_ranks):
        for part in (Part(0, num_ranks), Part(num_ranks - 1, num_ranks)):
            with pytest.raises(InvalidValueError, match="tensor_parallel_size"):
                heads_of(num_heads, part)
        return
    width = max(1, num_heads // num_ranks)
    for rank in range(num_ranks):
        (expected,) = rank_slices((num_heads * 5,), (width * 5,), Part(rank, num_ranks))
        heads = heads_of(num_heads, Part(rank, num_ranks))
        assert (heads.start * 5, heads.stop * 5) == (expected.start, expected.stop)
    assert heads_of(num_heads, WHOLE) == range(num_heads)


def test_every_head_of_every_receiver_is_written_once_by_a_rank_that_has_it() -> None:
    assert len(SPLITS) > 150
    for num_heads, num_senders, num_receivers in SPLITS:
        for receiver in (Part(rank, num_receivers) for rank in range(num_receivers)):
            written: Counter[int] = Counter()
            for sender in (Part(rank, num_senders) for rank in range(num_senders)):
                ours, heads = heads_of(num_heads, sender), written_heads(num_heads, sender, receiver)
                assert set(heads) <= set(ours)
                written.update(heads)
            assert written == Counter(heads_of(num_heads, receiver)), (num_heads, num_senders, receiver)


def test_copies_take_turns() -> None:
    for num_heads, num_senders, num_receivers in SPLITS:
        if num_receivers >= num_senders and num_receivers % num_senders == 0:
            pairs = itertools.product(range(num_senders), range(num_receivers))
            counts = Counter(
                sender
                for sender, receiver in pairs
                if written_heads(num_heads, Part(sender, num_senders), Part(receiver, num_receivers))
            )
            assert set(counts.values()) == {num_receivers // num_senders}, "each rank writes for as many"


@pytest.mark.parametrize(("num_heads", "num_ranks", "copies"), [(8, 1, 1), (8, 8, 1), (2, 4, 2), (1, 8, 8)])
def test_heads_have_copies_where_ranks_are_more(num_heads: int, num_ranks: int, copies: int) -> None:
    assert num_copies(num_heads, num_ranks) == copies
