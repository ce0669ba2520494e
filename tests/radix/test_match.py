"""A match answers as a dict of sets does, whatever the holders of a prefix look like and however often it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from index_invariants import check_invariants
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.radix import Depths, RadixIndex

U64 = Callable[..., NDArray[np.uint64]]
LENGTHS = (0, 1, 31, 32, 33, 64, 95, 129, 200)  # groups of 32 that are full, and not, and those after them


class Pair:
    """An index and the oracle, told the same."""

    def __init__(self, oracle: Any, num_ranks: int, num_blocks: int = 200) -> None:
        rng = np.random.default_rng(num_ranks)
        self.index, self.oracle, self.rng = RadixIndex(segment_bits=2, seed=num_ranks), oracle, rng
        self.ranks = [WorkerRank(f"w{number}", 0) for number in range(num_ranks)]
        self.chain: list[int] = rng.integers(0, 2**64, num_blocks, np.uint64).tolist()

    def store(self, source: WorkerRank, tier: Tier, first: int, end: int) -> None:
        parent, hashes = self.chain[first - 1] if first else None, self.chain[first:end]
        result = self.index.store(source, tier, parent, np.array(hashes, np.uint64))
        assert result == self.oracle.store(source, tier, parent, hashes)

    def remove(self, source: WorkerRank, tier: Tier, first: int, end: int) -> None:
        hashes = self.chain[first:end]
        assert self.index.remove(source, tier, np.array(hashes, np.uint64)) == self.oracle.remove(source, tier, hashes)

    def forget(self, source: WorkerRank) -> None:
        self.index.remove_worker(source.worker)
        self.oracle.held.pop(source, None)

    def check(self, *lengths: int) -> None:
        for length in lengths or (len(self.chain),):
            hashes = self.chain[:length]
            expected = self.oracle.match(hashes)
            for _ in range(2):  # the second time, steps between sets are remembered
                match = self.index.match(np.array(hashes, np.uint64))
                assert match == expected
                assert match.depths[:, -1].tolist() == sorted(match.depths[:, -1].tolist())
                assert match.num_blocks == length


def one_depth(pair: Pair) -> None:
    """All hold all: one set, that only the end of the query takes apart."""
    for source in pair.ranks:
        pair.store(source, Tier.GPU, 0, len(pair.chain))


def stairs(pair: Pair) -> None:
    """Nearly every rank ends at a depth of its own, in no order."""
    for source in pair.ranks:
        pair.store(source, Tier.GPU, 0, int(pair.rng.integers(0, len(pair.chain))))


def holes(pair: Pair) -> None:
    """Blocks are evicted from the middle, so that deeper sets have members that shallower ones lack."""
    stairs(pair)
    for source in pair.ranks[::3]:
        first = int(pair.rng.integers(0, len(pair.chain)))
        pair.remove(source, Tier.GPU, first, first + int(pair.rng.integers(1, 9)))


def tiers(pair: Pair) -> None:
    """Prefixes in a fast tier, what follows in a slower one, some in both."""
    for source in pair.ranks:
        ends = np.sort(pair.rng.integers(0, len(pair.chain), 3)).tolist()
        first = 0
        for tier, end in zip(pair.rng.permutation(4)[:3].tolist(), ends, strict=True):
            pair.store(source, Tier(tier), first, end)
            first = max(first, end - int(pair.rng.integers(0, 3)))


def retired(pair: Pair) -> None:
    """Every fifth rank is gone, but not yet swept from the sets."""
    stairs(pair)
    for source in pair.ranks[::5]:
        pair.forget(source)


def shared_prefix(pair: Pair) -> None:
    """All hold the beginning; what follows is one rank's, or three ranks' own."""
    for number, source in enumerate(pair.ranks):
        pair.store(source, Tier.GPU, 0, (120, 50, 50)[min(2, number % 97)])


@pytest.mark.parametrize("num_ranks", [1, 2, 15, 40, 200])
@pytest.mark.parametrize("holders", [one_depth, stairs, holes, tiers, retired, shared_prefix], ids=lambda f: f.__name__)
def test_every_shape_of_sets_scores_as_the_oracle_says(
    oracle: Any, holders: Callable[[Pair], None], num_ranks: int
) -> None:
    pair = Pair(oracle, num_ranks)
    holders(pair)
    pair.check(*LENGTHS)


def test_steps_that_are_remembered_stay_right_while_sets_change_and_their_ids_are_used_again(oracle: Any) -> None:
    pair = Pair(oracle, 60, num_blocks=60)
    stairs(pair)
    pair.check()
    for _ in range(80):
        source, first = pair.ranks[pair.rng.integers(0, 60)], int(pair.rng.integers(0, 58))
        length = int(pair.rng.integers(1, 60 - first))
        match int(pair.rng.integers(0, 6)):
            case 0:
                pair.remove(source, Tier.GPU, first, first + length)
            case 1:
                pair.store(source, Tier.HOST, 0, first + length)
            case 2:
                pair.forget(source)
                pair.store(source, Tier.GPU, 0, first)
            case 3:
                pair.index.sweep(100)
            case _:
                pair.store(source, Tier.GPU, 0, first + length)
        pair.check(60, first + length)
    check_invariants(pair.index)


def test_a_fleet_of_more_than_512_words_meets_sets_of_every_size(oracle: Any) -> None:
    pair = Pair(oracle, 8_300, num_blocks=40)
    for number, source in enumerate(pair.ranks):
        pair.store(source, Tier.GPU if number % 7 else Tier.HOST, 0, 1 + (number % 11 == 0) + (number % 1000 == 0) * 20)
    pair.store(pair.ranks[8_299], Tier.GPU, 0, 40)
    pair.forget(pair.ranks[4_001])
    pair.check(1, 2, 3, 40)


@pytest.mark.parametrize("segment_bits", [0, 3, 8])
def test_chains_are_found_among_many_whether_at_home_or_beyond_it(segment_bits: int) -> None:
    index = RadixIndex(segment_bits=segment_bits, seed=3)
    chains = np.random.default_rng(1).integers(0, 2**64, (300, 100), np.uint64)
    for number, chain in enumerate(chains):
        index.store(WorkerRank("w", number % 5), Tier.GPU, None, chain)
    for number, chain in enumerate(chains):
        assert dict(index.match(chain)) == {WorkerRank("w", number % 5): Depths(100, 100, 100, 100)}
        crossed = np.concatenate([chain[:50], chains[number - 1][50:]])
        assert dict(index.match(crossed)) == {WorkerRank("w", number % 5): Depths(50, 50, 50, 50)}
    assert not index.match(np.arange(100, dtype=np.uint64))


def test_hashes_of_every_layout_are_taken_and_answers_are_arrays_of_their_own(u64: U64) -> None:
    index = RadixIndex()
    index.store(WorkerRank("w", 0), Tier.GPU, None, u64(1, 2, 3))
    read_only = u64(1, 2, 3)
    read_only.flags.writeable = False
    first = index.match(u64(1, 2, 3))
    shifted = np.frombuffer(b"-" + read_only.tobytes(), np.uint64, 3, 1)
    for hashes in (read_only, u64(1, 0, 2, 0, 3)[::2], u64(3, 2, 1)[::-1], memoryview(read_only), shifted):
        assert index.match(hashes) == first  # type: ignore[arg-type]
    index.match(u64(9))
    assert (first.holder_ids.tolist(), first.depths.tolist()) == ([0], [[3, 3, 3, 3]])
    assert first.holder_ids.dtype == first.depths.dtype == np.uint32
    assert first.depths.flags.c_contiguous
    assert (first.depths.shape, index.match(u64(9)).depths.shape) == ((1, 4), (0, 4))


def test_a_match_equals_a_dict_of_the_same_and_has_no_hash(u64: U64) -> None:
    index, source = RadixIndex(), WorkerRank("w", 0)
    index.store(source, Tier.HOST, None, u64(1, 2))
    match = index.match(u64(1, 2, 3))
    assert dict(match) == {source: Depths(0, 2, 2, 2)}
    assert match != {}
    assert match.get(WorkerRank("v", 0)) is None
    with pytest.raises(TypeError, match="unhashable"):
        hash(match)
