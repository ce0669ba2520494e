"""An index with a cap keeps to it: the least recently used blocks go, the deepest first, and holders lose them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from index_invariants import check_invariants
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events import Stored, Tier, WorkerRank
from kvist.events.types import Holding
from kvist.radix import ApplyResult, RadixIndex

W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)
U64 = Callable[..., NDArray[np.uint64]]


def depth_of(index: RadixIndex, hashes: NDArray[np.uint64], source: WorkerRank = W0) -> int:
    """Return how many leading blocks a rank holds, without touching them."""
    chunks = [chunk for chunk in index.snapshot() if len(chunk.hashes)]
    held = {
        block
        for chunk in chunks
        for block, member in zip(chunk.hashes.tolist(), chunk.members.tolist(), strict=True)
        if chunk.ranks[member >> 4] == source
    }
    missing = [number for number, block in enumerate(hashes.tolist()) if block not in held]
    return missing[0] if missing else len(hashes)


def depth_of_match(index: RadixIndex, hashes: NDArray[np.uint64]) -> int:
    return sum(depths.gpu for depths in index.match(hashes).values())


def random_hashes(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 2**64, shape, dtype=np.uint64)


def test_a_chain_longer_than_the_cap_loses_its_end() -> None:
    index, chain = RadixIndex(max_blocks=32), random_hashes(50)
    assert index.store(W0, Tier.GPU, None, chain).num_stored == 50
    assert index.statistics().num_blocks == 32
    assert index.statistics().num_evicted == 18
    assert depth_of(index, chain) == 32
    check_invariants(index)


def test_what_was_matched_or_stored_last_stays() -> None:
    index, chains = RadixIndex(max_blocks=44), random_hashes(5, 10)
    for chain in chains[:4]:
        index.store(W0, Tier.GPU, None, chain)
    index.match(chains[0])
    index.store(W0, Tier.GPU, None, chains[2])
    index.store(W1, Tier.GPU, None, chains[4])
    assert [depth_of(index, chain) for chain in chains[:4]] == [10, 4, 10, 10]
    assert depth_of(index, chains[4], W1) == 10


def test_matches_count_as_uses_once_the_index_is_half_full() -> None:
    index = RadixIndex(max_blocks=1000, seed=1)
    chains = np.arange(1, 501, dtype=np.uint64).reshape(5, 100)
    for num_stored, chain in enumerate(chains, 1):
        index.store(WorkerRank("w", 0), Tier.GPU, None, chain)
        epoch = int(index.core["epoch"][0])
        index.match(chains[0])  # which ends an epoch, of a 64th of the cap, if it counts
        assert (int(index.core["epoch"][0]) != epoch) == (num_stored * 100 >= 500)


def test_a_match_touches_only_the_blocks_that_lead_without_a_gap(u64: U64) -> None:
    index = RadixIndex(max_blocks=8)
    index.store(W0, Tier.GPU, None, u64(1, 2, 3, 4))
    index.store(W0, Tier.GPU, None, u64(5, 6, 7, 8))
    index.remove(W0, Tier.GPU, u64(2))
    index.match(u64(1, 2, 3, 4))
    index.store(W0, Tier.GPU, None, u64(9, 10))
    index.store(W0, Tier.GPU, None, u64(11, 12))
    assert depth_of(index, u64(1)) == 1
    assert depth_of(index, u64(3)) == depth_of(index, u64(4)) == 0


def test_holders_count_what_they_lost_and_are_known_until_they_are_cleared() -> None:
    index, chains = RadixIndex(max_blocks=64), random_hashes(2, 60)
    index.store(W0, Tier.GPU, None, chains[0])
    index.store(W0, Tier.HOST, None, chains[0])
    index.store(W1, Tier.DISK, None, chains[0])
    assert not index.evicted_from(W0)
    index.apply(WorkerRank("w2", 0), [Stored(chains[1, :50].tobytes())])
    assert index.statistics().num_blocks <= 64
    assert index.evicted_from(W0)
    assert index.evicted_from(W1)
    assert not index.evicted_from(WorkerRank("w2", 0))
    assert not index.evicted_from(WorkerRank("unknown", 0))
    num_left = sum(depth_of(index, chains[0, idx : idx + 1]) for idx in range(60))
    assert index.digest(W0).num_blocks == 2 * num_left
    assert index.digest(W1).num_blocks == num_left
    check_invariants(index)
    index.clear("w0")
    assert not index.evicted_from(W0)
    assert index.digest(W0) == Holding(0, 0)
    check_invariants(index)


def test_an_evicted_block_is_no_parent_and_may_be_stored_again(u64: U64) -> None:
    index = RadixIndex(max_blocks=2)
    index.store(W0, Tier.GPU, None, u64(1))
    index.store(W0, Tier.GPU, None, u64(2))
    index.store(W0, Tier.GPU, None, u64(3))
    assert index.store(W0, Tier.GPU, 1, u64(4)) == ApplyResult(num_parent_not_found=1)
    assert index.remove(W0, Tier.GPU, u64(1)).num_not_found == 1
    assert index.store(W0, Tier.GPU, None, u64(1, 4)).num_stored == 2
    assert index.statistics().num_blocks == 2


def test_blocks_of_ranks_that_are_gone_are_evicted_like_others() -> None:
    index, chains = RadixIndex(max_blocks=100), random_hashes(3, 80)
    for number, chain in enumerate(chains):
        index.store(WorkerRank(f"w{number}", 0), Tier.GPU, None, chain)
        index.remove_worker(f"w{number - 1}")
        check_invariants(index)
    assert index.statistics().num_blocks <= 100
    assert index.digest(WorkerRank("w2", 0)).num_blocks == 80


def test_eviction_follows_use_over_a_long_life() -> None:
    index, chains, rng = RadixIndex(max_blocks=60, segment_bits=2), random_hashes(60, 10), np.random.default_rng(3)
    last_use: dict[int, int] = {}
    depths = {block: depth for chain in chains.tolist() for depth, block in enumerate(chain)}
    for step, number in enumerate(rng.geometric(0.05, 600) % 60):
        chain = chains[number]
        if step % 3:
            lead = depth_of(index, chain)
            index.match(chain)
            last_use |= dict.fromkeys(chain[:lead].tolist(), step)
        else:
            index.store(W0, Tier.GPU, None, chain)
            last_use |= dict.fromkeys(chain.tolist(), step)
        left = {block for chunk in index.snapshot() for block in chunk.hashes.tolist()}
        gone = last_use.keys() - left
        assert left <= last_use.keys()
        assert len(left) <= 60
        if gone:
            youngest = max((last_use[block], -depths[block]) for block in gone)
            assert youngest <= min((last_use[block], -depths[block]) for block in left)
        for block in gone:
            del last_use[block]
    assert index.statistics().num_evicted > 500
    check_invariants(index)


def test_a_large_index_keeps_about_what_the_least_recently_used_rule_would() -> None:
    index, chains, rng = RadixIndex(max_blocks=2_000), random_hashes(1_000, 8), np.random.default_rng(3)
    least_recent: OrderedDict[int, None] = OrderedDict()
    num_kept = num_hits = 0
    for number in (rng.zipf(1.3, 20_000) % 1_000).tolist():
        num_kept += depth_of_match(index, chains[number])
        num_hits += 8 * (number in least_recent)
        index.store(W0, Tier.GPU, None, chains[number])
        least_recent[number] = None
        least_recent.move_to_end(number)
        if len(least_recent) > 250:
            least_recent.popitem(last=False)
    assert num_kept > 0.97 * num_hits
    check_invariants(index)


def test_a_snapshot_still_tells_what_is_evicted_meanwhile() -> None:
    index, chains = RadixIndex(max_blocks=1_000, segment_bits=3), random_hashes(12, 100)
    for chain in chains[:8]:
        index.store(W0, Tier.GPU, None, chain)
    with closing(index.snapshot(50)) as snapshot:
        for chain in chains[8:]:
            index.store(W1, Tier.GPU, None, chain)
            check_invariants(index)
        assert index.evicted_from(W0)
        told = [block for chunk in snapshot for block in chunk.hashes.tolist()]
    assert sorted(told) == sorted(chains[:8].ravel().tolist())
    check_invariants(index)


def test_an_index_that_is_full_stays_at_its_cap() -> None:
    index, sizes = RadixIndex(max_blocks=20_000), []
    for chain in random_hashes(10_000, 8):
        index.store(W0, Tier.GPU, None, chain)
        sizes.append(index.statistics().num_blocks)
    assert max(sizes) == min(sizes[2_500:]) == 20_000
    check_invariants(index)


def test_a_cap_is_at_least_one_block() -> None:
    with pytest.raises(InvalidValueError, match="max_blocks"):
        RadixIndex(max_blocks=0)
