"""Random lives of a fleet: after every step the index answers as a dict of sets does, and its structure is sound."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from index_invariants import check_invariants

from kvist.events import Cleared, Removed, Stored, Tier, WorkerRank
from kvist.radix import ApplyResult, RadixIndex, Residencies, Snapshot, snapshot

WORKERS = ["w0", "w1", "w2", "w3"]
RANKS = [WorkerRank(worker, rank) for worker in WORKERS for rank in range(2)] + [
    WorkerRank("wide", r) for r in range(40)
]
MULTIPLIER = 0xD6E8_FEB8_6659_FD93
HASHES = [0, 1, 2**64 - 1, *(n * MULTIPLIER % 2**64 for n in range(2, 22)), *(7 << 32 | n for n in range(18))]
KEYS_ARE_HASHES = (1 - 0x9E37_79B9_7F4A_7C15) % 2**64 // 2  # the seed whose multiplier is 1: many keys share a prefix
CHAINS = [HASHES[:12], HASHES[12:30], HASHES[6:9] + HASHES[30:]]

sources = st.sampled_from(RANKS)
tiers = st.sampled_from(Tier)
chains = st.sampled_from(CHAINS)
some_hashes = st.lists(st.sampled_from(HASHES), max_size=12)


def u64(hashes: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(hashes, np.uint64)


class IndexMachine(RuleBasedStateMachine):
    """Drives an index and the oracle side by side."""

    make_oracle: Callable[[], Any]
    blocks_of: Callable[[RadixIndex], set[int]]

    @initialize(
        segment_bits=st.sampled_from([0, 1, 3]),
        seed=st.just(KEYS_ARE_HASHES) | st.integers(0, 2**64 - 1),
        max_blocks=st.none() | st.sampled_from([1, 8, 30]),
    )
    def start(self, segment_bits: int, seed: int, max_blocks: int | None) -> None:
        self.index = RadixIndex(max_blocks=max_blocks, segment_bits=segment_bits, seed=seed)
        self.oracle = type(self).make_oracle()
        self.cap = max_blocks
        self.num_evicted = 0
        self.snapshot: Snapshot | None = None

    @rule(source=sources, tier=tiers, chain=chains, start=st.integers(0, 11), length=st.integers(0, 12))
    def store_part_of_a_chain(self, source: WorkerRank, tier: Tier, chain: list[int], start: int, length: int) -> None:
        parent = chain[start - 1] if start else None
        hashes = chain[start : start + length]
        result = self.index.store(source, tier, parent, u64(hashes))
        assert result == self.oracle.store(source, tier, parent, hashes)

    @rule(tier=tiers, chain=chains, data=st.data())
    def store_a_prefix_on_many_ranks(self, tier: Tier, chain: list[int], data: st.DataObject) -> None:
        for source in data.draw(st.lists(sources, max_size=40, unique=True)):
            hashes = chain[: data.draw(st.integers(1, len(chain)))]
            result = self.index.store(source, tier, None, u64(hashes))
            assert result == self.oracle.store(source, tier, None, hashes)
            self.forget_what_was_evicted()

    @rule(source=sources, tier=tiers, parent=st.none() | st.sampled_from(HASHES), hashes=some_hashes)
    def store_nonsense(self, source: WorkerRank, tier: Tier, parent: int | None, hashes: list[int]) -> None:
        result = self.index.store(source, tier, parent, u64(hashes))
        assert result == self.oracle.store(source, tier, parent, hashes)

    @rule(source=sources, tier=tiers, hashes=some_hashes)
    def remove_in_any_order(self, source: WorkerRank, tier: Tier, hashes: list[int]) -> None:
        assert self.index.remove(source, tier, u64(hashes)) == self.oracle.remove(source, tier, hashes)

    @rule(source=sources, first=some_hashes, chain=chains, removed=some_hashes, tier=tiers, is_cleared=st.booleans())
    def apply_a_batch(
        self, source: WorkerRank, first: list[int], chain: list[int], removed: list[int], tier: Tier, is_cleared: bool
    ) -> None:
        batch = [
            Stored(u64(first).tobytes(), None, tier),
            *([Cleared()] if is_cleared else []),
            Stored(u64(chain).tobytes(), None, tier),
            Removed(u64(removed).tobytes(), tier),
            Stored(u64(removed).tobytes(), chain[3], tier),
        ]
        result = self.index.apply(source, batch)
        outcomes = [self.oracle.store(source, tier, None, first)]
        if is_cleared:
            self.oracle.held.pop(source, None)
        outcomes.append(self.oracle.store(source, tier, None, chain))
        outcomes.append(self.oracle.remove(source, tier, removed))
        outcomes.append(self.oracle.store(source, tier, chain[3], removed))
        assert result == ApplyResult(*map(sum, zip(*outcomes, strict=True)))

    @rule(source=sources)
    def clear_a_rank(self, source: WorkerRank) -> None:
        self.index.clear(source.worker, source.rank)
        self.oracle.held.pop(source, None)

    @rule(worker=st.sampled_from([*WORKERS, "wide"]), is_forgotten=st.booleans())
    def lose_a_worker(self, worker: str, is_forgotten: bool) -> None:
        (self.index.remove_worker if is_forgotten else self.index.clear)(worker)
        for source in [source for source in self.oracle.held if source.worker == worker]:
            del self.oracle.held[source]

    @rule(max_rows=st.integers(1, 500))
    def sweep_a_slice(self, max_rows: int) -> None:
        self.index.sweep(max_rows)

    @rule()
    def sweep_everything(self) -> None:
        while self.index.sweep():
            pass
        statistics = self.index.statistics()
        assert statistics.num_blocks == self.oracle.num_blocks
        assert statistics.num_retired == 0

    @rule(max_blocks=st.integers(1, 30))
    def begin_a_snapshot(self, max_blocks: int) -> None:
        if self.snapshot is None:
            self.snapshot = self.index.snapshot(max_blocks)
            self.chunks: list[Residencies] = []
            self.was = copy.deepcopy(self.oracle)
            self.max_blocks = max_blocks

    @rule(num_chunks=st.integers(1, 5))
    def read_some_of_the_snapshot(self, num_chunks: int) -> None:
        if self.snapshot is not None:
            self.chunks += itertools.islice(self.snapshot, num_chunks)

    @rule(is_abandoned=st.booleans())
    def end_the_snapshot(self, is_abandoned: bool) -> None:
        if self.snapshot is None:
            return
        if is_abandoned:
            self.snapshot.close()
        else:
            self.chunks += self.snapshot
            self.check_chunks()
        self.snapshot = None

    def check_chunks(self) -> None:
        """What was read is what was held when the snapshot began, and can be restored."""
        hashes = {block for held in self.was.held.values() for block, _ in held}
        restored = RadixIndex(segment_bits=2)
        seen: set[int] = set()
        for chunk in reversed(self.chunks):
            restored.restore(chunk)
        for chunk in self.chunks:
            blocks = set(chunk.hashes.tolist())
            assert len(blocks) <= self.max_blocks
            for block in blocks:
                assert block not in seen
                seen.add(block)
        assert seen == hashes
        check_invariants(restored)
        for source in RANKS:
            assert restored.digest(source) == self.was.digest(source)

    @rule()
    def restore_the_index_onto_itself(self) -> None:
        if self.snapshot is None:
            for chunk in self.index.snapshot(7):
                self.index.restore(chunk)
                check_invariants(self.index)

    def forget_what_was_evicted(self) -> None:
        """Blocks go only beyond the cap; nobody holds them then, and all who held them say so."""
        num_evicted = self.index.statistics().num_evicted
        if num_evicted == self.num_evicted:
            return
        assert self.cap is not None
        assert self.index.statistics().num_blocks <= self.cap
        left = self.blocks_of(self.index)
        for source, held in self.oracle.held.items():
            lost = {(block, tier) for block, tier in held if block not in left}
            assert self.index.evicted_from(source) or not lost
            held -= lost
        self.num_evicted = num_evicted

    @invariant()
    def index_and_oracle_agree(self) -> None:
        self.forget_what_was_evicted()
        check_invariants(self.index)
        for source in RANKS:
            assert self.index.digest(source) == self.oracle.digest(source)
        for hashes in [*CHAINS, CHAINS[0][:3], HASHES[::-1], CHAINS[0][:6] + CHAINS[1][:6]]:
            match = self.index.match(u64(hashes))
            assert dict(match) == self.oracle.match(hashes)
            assert match.depths[:, -1].tolist() == sorted(match.depths[:, -1].tolist())


def test_a_random_life_of_a_fleet_is_as_a_dict_of_sets_says(
    make_oracle: Callable[[], Any], blocks_of: Callable[[RadixIndex], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    IndexMachine.make_oracle = staticmethod(make_oracle)
    IndexMachine.blocks_of = staticmethod(blocks_of)
    monkeypatch.setattr(snapshot, "_MAX_VISITS", 3)  # many steps
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
