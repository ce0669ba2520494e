"""The index by example: what it answers, refuses, counts and gives back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from index_invariants import check_invariants
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events import Cleared, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.events.types import Holding
from kvist.radix import ApplyResult, Depths, RadixIndex, snapshot
from kvist.radix.compiled.layout import MAX_DEPTH

W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)
U64 = Callable[..., NDArray[np.uint64]]


@pytest.fixture
def index() -> RadixIndex:
    return RadixIndex(segment_bits=3, seed=7)


def gpu_depths(index: RadixIndex, hashes: NDArray[np.uint64]) -> dict[WorkerRank, int]:
    return {source: depths.gpu for source, depths in index.match(hashes).items()}


def sweep_all(index: RadixIndex) -> None:
    while index.sweep():
        pass


def random_hashes(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 2**64, shape, dtype=np.uint64)


def test_scores_are_leading_blocks_held_now_in_the_worked_example(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 2, 3, 4))
    index.store(W1, Tier.GPU, None, u64(1, 2))
    assert gpu_depths(index, u64(1, 2, 3, 9)) == {W0: 3, W1: 2}
    assert index.remove(W0, Tier.GPU, u64(2)).num_not_found == 0
    assert gpu_depths(index, u64(1, 2, 3, 4)) == {W0: 1, W1: 2}
    assert index.remove(W0, Tier.GPU, u64(999, 1)).num_not_found == 1
    assert gpu_depths(index, u64(1, 2)) == {W1: 2}
    assert index.statistics().num_blocks == 4
    assert index.store(W1, Tier.GPU, 777, u64(5)) == ApplyResult(num_parent_not_found=1)
    assert index.store(W1, Tier.GPU, 2, u64(2)) == ApplyResult(num_invalid=1)
    assert index.statistics().num_blocks == 4


def test_removing_a_suffix_frees_its_blocks_and_may_be_repeated(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 2, 3))
    assert index.remove(W0, Tier.GPU, u64(3, 2, 1)).num_not_found == 0
    assert index.remove(W0, Tier.GPU, u64(3, 2, 1)).num_not_found == 3
    assert index.statistics().num_blocks == 0
    check_invariants(index)


def test_a_block_removed_in_the_middle_and_stored_again_restores_the_whole_score(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 2, 3, 4))
    index.remove(W0, Tier.GPU, u64(2))
    assert index.store(W0, Tier.GPU, 1, u64(2)).num_stored == 1
    assert gpu_depths(index, u64(1, 2, 3, 4)) == {W0: 4}


def test_storing_again_is_no_error_and_stores_nothing(index: RadixIndex, u64: U64) -> None:
    assert index.store(W0, Tier.GPU, None, u64(1, 2)).num_stored == 2
    before = index.digest(W0)
    assert index.store(W0, Tier.GPU, None, u64(1, 2, 3)) == ApplyResult(1)
    assert index.remove(W0, Tier.GPU, u64(3)).num_not_found == 0
    assert index.digest(W0) == before


def test_tiers_are_cumulative_and_a_parent_may_be_in_any_tier(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 2))
    assert index.store(W0, Tier.HOST, 2, u64(3)).num_stored > 0
    assert index.store(W0, Tier.EXTERNAL, 3, u64(4)).num_stored > 0
    index.store(W1, Tier.DISK, None, u64(1))
    match = index.match(u64(1, 2, 3, 4, 5))
    assert match[W0] == Depths(gpu=2, host=3, disk=3, external=4)
    assert match[W1] == Depths(gpu=0, host=0, disk=1, external=1)


def test_a_match_is_a_mapping_and_its_rows_ascend(index: RadixIndex, u64: U64) -> None:
    for depth in (3, 1, 2):
        index.store(WorkerRank("w", depth), Tier.GPU, None, u64(1, 2, 3)[:depth])
    match = index.match(u64(1, 2, 3))
    assert match.depths.tolist() == [[1] * 4, [2] * 4, [3] * 4]
    assert match.ranks == [WorkerRank("w", depth) for depth in (1, 2, 3)] == list(match)
    assert match.num_blocks == 3
    assert len(match) == 3
    assert WorkerRank("x", 0) not in match
    assert len(index.match(u64())) == 0


def test_a_match_still_names_whom_it_meant_after_their_slots_were_reused(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1))
    match = index.match(u64(1))
    index.remove_worker("w0")
    sweep_all(index)
    index.store(W1, Tier.GPU, None, u64(1))
    assert index.match(u64(1)).holder_ids.tolist() == match.holder_ids.tolist()
    assert list(match) == [W0]


def test_each_clearing_has_a_number_of_its_own_whatever_slot_it_leaves(index: RadixIndex, u64: U64) -> None:
    assert index.clearing_of(W0) is None
    numbers = []
    for _ in range(3):
        index.store(W0, Tier.GPU, None, u64(1, 2))
        numbers.append(index.clearing_of(W0))
        index.remove(W0, Tier.GPU, u64(1, 2))
        assert index.clearing_of(W0) == numbers[-1]
        for _ in range(2):
            index.clear("w0", 0)
            sweep_all(index)
    assert None not in numbers
    assert numbers == sorted(set(numbers))
    index.remove_worker("w0")
    assert index.clearing_of(W0) is None


def test_to_remove_a_worker_costs_nothing_for_the_others(index: RadixIndex) -> None:
    num_compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    for number in range(100):
        for rank in range(2):
            index.store(WorkerRank(Name(f"w{number}"), rank), Tier.GPU, None, random_hashes(4, seed=rank))
    num_compared = 0
    index.remove_worker(Name("w7"))
    assert num_compared < 10
    assert index.statistics().num_ranks == 198


def test_a_refused_chain_changes_nothing_that_is_held(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 2))
    index.store(W1, Tier.GPU, None, u64())
    before = index.statistics(), index.digest(W0), index.ranks()
    assert index.store(W0, Tier.GPU, 2, u64(3, 4, 4)) == ApplyResult(num_invalid=1)
    assert index.store(W0, Tier.GPU, 9, u64(3, 4)) == ApplyResult(num_parent_not_found=1)
    assert index.store(W1, Tier.GPU, 2, u64(3)) == ApplyResult(num_parent_not_found=1)
    assert (index.statistics(), index.digest(W0), index.ranks()) == before


def test_a_block_stored_below_two_parents_keeps_its_first_depth(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 2))
    assert index.store(W1, Tier.GPU, None, u64(7, 8, 2)).num_stored > 0
    assert gpu_depths(index, u64(7, 8, 2)) == {W1: 3}
    depths = {h: d for c in index.snapshot() for h, d in zip(c.hashes.tolist(), c.depths.tolist(), strict=True)}
    assert depths == {1: 0, 2: 1, 7: 0, 8: 1}


def test_a_cleared_rank_scores_nothing_at_once_and_others_keep_their_scores(index: RadixIndex, u64: U64) -> None:
    other_rank = WorkerRank("w0", 1)
    for source in (W0, other_rank, W1):
        index.store(source, Tier.GPU, None, u64(1, 2))
    index.clear("w0", 0)
    assert gpu_depths(index, u64(1, 2)) == {other_rank: 2, W1: 2}
    assert index.digest(W0) == Holding(0, 0)
    index.clear("w0")
    assert gpu_depths(index, u64(1, 2)) == {W1: 2}
    assert set(index.ranks()) == {W0, other_rank, W1}
    index.remove_worker("w0")
    assert index.ranks() == [W1]
    index.store(W0, Tier.GPU, None, u64(1))
    assert gpu_depths(index, u64(1, 2)) == {W0: 1, W1: 2}


def test_a_chain_of_a_hundred_thousand_blocks_needs_no_recursion() -> None:
    index, chain = RadixIndex(), random_hashes(100_000)
    assert index.store(W0, Tier.GPU, None, chain).num_stored == 100_000
    assert gpu_depths(index, chain) == {W0: 100_000}
    blocks = [block for chunk in index.snapshot() for block in chunk.hashes.tolist()]
    assert sorted(blocks) == sorted(chain.tolist())
    assert index.remove(W0, Tier.GPU, chain[::-1].copy()).num_not_found == 0
    assert index.statistics().num_blocks == 0
    check_invariants(index)


def test_a_batch_is_applied_in_order(index: RadixIndex, u64: U64) -> None:
    events = [
        Stored(u64(1, 2).tobytes()),
        Cleared(),
        Stored(u64(3).tobytes(), 2),
        Stored(u64(1, 2).tobytes(), None, Tier.HOST),
        Stored(u64(3, 4).tobytes(), 2),
        Stored(u64(4).tobytes(), 4),
        Heartbeat(3, 0),
        Removed(u64(3, 9).tobytes()),
    ]
    result = index.apply(W0, events)
    assert result == ApplyResult(num_stored=6, num_not_found=1, num_parent_not_found=1, num_invalid=1)
    assert dict(index.match(u64(1, 2, 3, 4))) == {W0: Depths(0, 2, 2, 2)}


def test_what_is_no_hash_is_refused_by_name(index: RadixIndex, u64: U64) -> None:
    with pytest.raises(InvalidValueError, match="uint64"):
        index.match(np.array([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="parent"):
        index.store(W0, Tier.GPU, -1, u64(1))
    with pytest.raises(InvalidValueError, match="parent"):
        index.apply(W0, [Stored(b"", 2**64)])
    with pytest.raises(InvalidValueError, match="hashes"):
        index.apply(W0, [Stored(b"123")])
    with pytest.raises(InvalidValueError, match="segment_bits"):
        RadixIndex(segment_bits=-1)


def test_a_batch_with_one_unreadable_event_changes_nothing(index: RadixIndex, u64: U64) -> None:
    good = Stored(u64(1, 2).tobytes())
    for bad, field in (
        (Stored(b"123"), "hashes"),
        (Stored(u64(3).tobytes(), 2**64), "parent"),
        (Stored(u64(3).tobytes(), -1), "parent"),
        (Removed(u64(1).tobytes(), 4), "events"),  # type: ignore[arg-type]
        ("cleared", "events"),
    ):
        with pytest.raises(InvalidValueError, match=field):
            index.apply(W0, [good, Cleared(), bad])  # type: ignore[list-item]
    assert index.statistics().num_blocks == 0
    assert index.ranks() == []


def test_batches_of_every_size_and_parents_of_every_width_are_read() -> None:
    index = RadixIndex(seed=7)
    parents = [0, 127, 128, 2**8, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**64 - 1]
    index.apply(W0, (Stored(np.uint64(parent).tobytes()) for parent in parents))
    chains = random_hashes(len(parents), 9_000)
    result = index.apply(W0, [Stored(c.tobytes(), p) for c, p in zip(chains, parents, strict=True)])
    assert result == ApplyResult(num_stored=chains.size)
    for number in (1, 15, 16, 70_000):
        heartbeats = [Heartbeat(2**64 - 1, 300)] * (number - 1)
        assert index.apply(W0, [*heartbeats, Removed(chains[0, :1].tobytes())]).num_not_found == (number > 1)
    check_invariants(index)


def test_hash_zero_is_a_block_like_any_other_beside_room_that_looks_like_it(u64: U64) -> None:
    index = RadixIndex(segment_bits=0)
    index.store(W0, Tier.GPU, None, u64(0, 1))
    index.remove(W0, Tier.GPU, u64(0))
    assert gpu_depths(index, u64(0, 1)) == {}
    index.store(W1, Tier.GPU, None, u64(0))
    assert gpu_depths(index, u64(0, 1)) == {W1: 1}
    assert index.remove(W1, Tier.GPU, u64(0, 0)).num_not_found == 1
    check_invariants(index)


def test_strided_and_read_only_hashes_are_taken(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 0, 2, 0)[::2])
    assert gpu_depths(index, np.frombuffer(u64(1, 2).tobytes(), np.uint64)) == {W0: 2}


@pytest.mark.parametrize("segment_bits", [0, 4, 8])
def test_segments_grow_with_the_index_and_are_given_back(segment_bits: int) -> None:
    index, chains = RadixIndex(segment_bits=segment_bits), random_hashes(600, 100)
    empty_bytes = index.statistics().size_bytes
    for number, chain in enumerate(chains):
        index.store(WorkerRank(f"w{number % 7}", 0), Tier.GPU, None, chain)
    check_invariants(index)
    statistics = index.statistics()
    assert statistics.num_blocks == statistics.num_held == 60_000
    assert statistics.size_bytes < empty_bytes + 60_000 * 60
    for chain in chains[50:]:
        for worker in range(7):
            index.remove(WorkerRank(f"w{worker}", 0), Tier.GPU, chain)
    sweep_all(index)
    check_invariants(index)
    assert all(gpu_depths(index, chain) == {WorkerRank(f"w{n % 7}", 0): 100} for n, chain in enumerate(chains[:50]))
    assert index.statistics().size_bytes < statistics.size_bytes * 2 / 3
    for worker in range(7):
        index.remove_worker(f"w{worker}")
    sweep_all(index)
    check_invariants(index)
    assert index.statistics().size_bytes < empty_bytes + 100_000


@pytest.mark.parametrize("num_blocks", [300, 3_000, 11_000, 40_000])
def test_housekeeping_comes_to_an_end_whatever_the_index_holds(num_blocks: int) -> None:
    index = RadixIndex()
    hashes = np.random.default_rng(num_blocks).integers(0, 1 << 64, num_blocks, np.uint64)
    index.store(WorkerRank("a", 0), Tier.GPU, None, hashes)
    while index.sweep():
        pass
    assert index._sweeper.shrinkable() == []


def test_a_fleet_of_4096_workers_shares_prefixes_churns_and_leaves_nothing_behind() -> None:
    index, prefix, tails = RadixIndex(), random_hashes(8), random_hashes(4096, 4, seed=2)
    fleet = [WorkerRank(f"w{number}", 0) for number in range(4096)]
    for source, tail in zip(fleet, tails, strict=True):
        index.store(source, Tier.GPU, None, prefix)
        index.store(source, Tier.GPU, int(prefix[-1]), tail)
    assert index.statistics().num_blocks == 8 + 4 * 4096
    match = index.match(np.concatenate([prefix, tails[5]]))
    assert len(match) == 4096
    assert sorted(match.depths[:, 0].tolist()) == [8] * 4095 + [12]
    assert match.ranks[-1] == fleet[5]
    for source in fleet[::2]:
        index.remove_worker(source.worker)
    assert len(index.match(prefix)) == 2048
    sweep_all(index)
    assert len(index.match(prefix)) == 2048
    check_invariants(index)
    for source in fleet[1::2]:
        index.remove_worker(source.worker)
    sweep_all(index)
    statistics = index.statistics()
    assert (statistics.num_blocks, statistics.num_sets, statistics.num_ranks, statistics.num_retired) == (0, 0, 0, 0)
    check_invariants(index)


def test_an_index_goes_as_soon_as_nobody_refers_to_it(u64: U64) -> None:
    for max_blocks in (None, 5):
        index = RadixIndex(max_blocks=max_blocks)
        index.store(W0, Tier.GPU, None, u64(1, 2, 3, 4, 5, 6))
        index.sweep()
        with closing(index.snapshot()) as snapshot:
            next(snapshot)
        reference = weakref.ref(index)
        del index, snapshot
        assert reference() is None


def test_memory_is_back_where_it_began_after_a_fleet_of_thousands_came_and_went(u64: U64) -> None:
    index, rng, prefix = RadixIndex(), np.random.default_rng(1), random_hashes(64)
    index.match(u64(1))
    initial_bytes = index.statistics().size_bytes
    for number in range(6_000):
        source = WorkerRank(f"w{number}", 0)
        index.store(source, Tier.GPU, None, prefix[: int(rng.integers(1, 64))])
        index.store(source, Tier.HOST, None, random_hashes(32, seed=number))
        if number >= 3_000:
            index.remove_worker(f"w{number - 3_000}")
            index.sweep(2_000)
    assert index.statistics().size_bytes > initial_bytes + 1_000_000
    for number in range(3_000, 6_000):
        index.remove_worker(f"w{number}")
    sweep_all(index)
    check_invariants(index)
    assert index.statistics().size_bytes < initial_bytes + 500_000  # what sets took is kept for others
    index.store(WorkerRank("w9999", 0), Tier.GPU, None, prefix)
    assert gpu_depths(index, prefix) == {WorkerRank("w9999", 0): 64}


def test_a_snapshot_takes_16_bytes_a_block_however_much_changes() -> None:
    index, chains = RadixIndex(), random_hashes(3_000, 100)
    for chain in chains:
        index.store(W0, Tier.GPU, None, chain)
    sweep_all(index)
    full_bytes = index.statistics().size_bytes
    with closing(index.snapshot()) as snapshot:
        for number, chunk in enumerate(snapshot):
            index.remove(W0, Tier.GPU, chunk.hashes[:1])
            if number == 40:
                for chain in chains[:1_000]:
                    index.remove(W0, Tier.GPU, chain)
            assert index.statistics().size_bytes <= full_bytes + 16 * 300_000
    assert number > 70
    sweep_all(index)
    assert index.statistics().size_bytes <= full_bytes
    check_invariants(index)


def test_what_is_copied_while_a_snapshot_begins_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_MAX_VISITS", 1)
    blocks = random_hashes(3_000)
    for num_steps in range(12):
        index = RadixIndex(segment_bits=3)
        for first in range(0, len(blocks), 30):
            index.store(W0, Tier.GPU, None, blocks[first : first + 30])
            index.store(W1, Tier.GPU, None, blocks[first : first + 20])
        with closing(index.snapshot(100)) as steps:
            chunks = [next(steps) for _ in range(num_steps)]
            index.remove(W0, Tier.GPU, blocks)
            check_invariants(index)
            chunks += steps
        told = [block for chunk in chunks for block in chunk.hashes.tolist()]
        shared = [block for first in range(0, len(blocks), 30) for block in blocks[first : first + 20].tolist()]
        assert sorted(told) == sorted(blocks.tolist() + shared)
        sweep_all(index)
        check_invariants(index)


def test_a_forgotten_snapshot_leaves_no_memory_behind() -> None:
    index, blocks = RadixIndex(segment_bits=3), random_hashes(3_000)
    index.store(W0, Tier.GPU, None, blocks)
    index.store(W1, Tier.GPU, None, blocks[:20])
    sweep_all(index)
    size_bytes = index.statistics().size_bytes
    snapshot = index.snapshot(100)
    next(snapshot)
    index.store(W1, Tier.HOST, None, blocks[:30])
    assert index.statistics().size_bytes > size_bytes + 3_000
    del snapshot
    sweep_all(index)
    check_invariants(index)
    assert index.statistics().size_bytes <= size_bytes + 4096


def test_depths_are_told_up_to_the_greatest() -> None:
    index, chain = RadixIndex(), random_hashes(MAX_DEPTH + 20)
    index.store(W0, Tier.GPU, None, chain[:10])
    index.store(W0, Tier.GPU, int(chain[9]), chain[10:])
    told = {}
    for chunk in index.snapshot(100_000):
        told |= dict(zip(chunk.hashes.tolist(), chunk.depths.tolist(), strict=True))
    depths = [told[block] for block in chain[[0, 9, 10, 5_000, MAX_DEPTH - 1, MAX_DEPTH, -1]].tolist()]
    assert depths == [0, 9, 10, 5_000, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH]


def test_a_wide_set_meets_narrow_ones_and_reads_nothing_beyond_them() -> None:
    index, fleet, blocks = RadixIndex(), [WorkerRank("w", rank) for rank in range(2_000)], random_hashes(1_000)
    for source in fleet:
        index.store(source, Tier.GPU, None, blocks[:1])
    for source in fleet[:3]:  # dense sets of one word
        index.store(source, Tier.GPU, None, blocks[1:])
    for number in range(1, len(blocks)):
        index.store(fleet[3 + number % 13], Tier.HOST, None, blocks[number : number + 1])
    for number in range(1, len(blocks), 25):
        match = index.match(blocks[[0, number]])
        assert len(match) == 2_000
        deep = {source.rank for source, depths in match.items() if depths.external == 2}
        assert deep == {0, 1, 2, 3 + number % 13}


def test_many_distinct_sets_are_found_and_freed() -> None:
    index, blocks = RadixIndex(), random_hashes(20_000)
    for bit in range(15):
        held = blocks[np.arange(len(blocks)) >> bit & 1 == 1]
        index.store(WorkerRank(f"w{bit * 20}", 0), Tier.GPU, None, held)
    assert index.statistics().num_sets > 16_000
    check_invariants(index)
    for bit in range(15):
        index.remove_worker(f"w{bit * 20}")
    sweep_all(index)
    assert index.statistics().num_sets == 0
    check_invariants(index)


def test_a_snapshot_shows_its_moment_while_everything_changes() -> None:
    index, chains = RadixIndex(segment_bits=4), random_hashes(50, 20)
    for number, chain in enumerate(chains):
        index.store(WorkerRank(f"w{number % 5}", 0), Tier.GPU, None, chain)
    digests = {source: index.digest(source) for source in index.ranks()}
    copy = RadixIndex(segment_bits=0)
    with closing(index.snapshot(max_blocks_per_chunk=100)) as snapshot:
        for number, chunk in enumerate(snapshot):
            copy.restore(chunk)
            index.store(W1, Tier.HOST, None, random_hashes(500, seed=number + 10))
            index.remove(WorkerRank(f"w{number % 5}", 0), Tier.GPU, chains[number])
            index.remove_worker(f"w{number}")
            index.sweep()
            check_invariants(index)
    assert {source: copy.digest(source) for source in copy.ranks()} == digests
    check_invariants(copy)
    sweep_all(index)
    check_invariants(index)


def test_a_segment_that_empties_and_fills_again_is_not_copied_twice(u64: U64) -> None:
    index = RadixIndex(segment_bits=0, seed=7)
    index.store(W0, Tier.GPU, None, u64(1))
    with closing(index.snapshot()) as snapshot:
        index.remove(W0, Tier.GPU, u64(1))
        sweep_all(index)  # gives the vacant segment's memory back
        index.store(W0, Tier.GPU, None, u64(2))
        assert [block for chunk in snapshot for block in chunk.hashes.tolist()] == [1]
    check_invariants(index)


def test_only_one_snapshot_is_open_at_a_time_and_a_forgotten_one_closes_itself(index: RadixIndex, u64: U64) -> None:
    index.store(W0, Tier.GPU, None, u64(1, 2))
    forgotten = index.snapshot()
    with pytest.raises(InvalidValueError, match="snapshot"):
        index.snapshot()
    index.store(W0, Tier.HOST, None, u64(1, 2))
    del forgotten
    assert {block for chunk in index.snapshot() for block in chunk.hashes.tolist()} == {1, 2}
    with pytest.raises(InvalidValueError, match="max_blocks_per_chunk"):
        index.snapshot(0)
