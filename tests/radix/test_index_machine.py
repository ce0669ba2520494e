"""Random lives of a fleet: after every step the index answers as a dict of sets does, and its structure is sound."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from index_invariants import check_invariants
from lives import seeds

from kvist.events import Cleared, Removed, Stored, Tier, WorkerRank
from kvist.events.types import GroupRule
from kvist.radix import ApplyResult, RadixIndex, Residencies, snapshot

LIVES = seeds(30)
NUM_STEPS = 60
PLAIN = [WorkerRank(worker, rank) for worker in ("w0", "w1", "w2") for rank in range(2)]
WIDE = [WorkerRank("wide", rank) for rank in range(40)]
GROUPED = [WorkerRank("w3", rank) for rank in range(3)]
RANKS = [*PLAIN, *WIDE, *GROUPED, *(each.companion for each in GROUPED)]
WORKERS = sorted({rank.worker for rank in RANKS})
MULTIPLIER = 0xD6E8_FEB8_6659_FD93
HASHES = [0, 1, 2**64 - 1, *(n * MULTIPLIER % 2**64 for n in range(2, 22)), *(7 << 32 | n for n in range(18))]
KEYS_ARE_HASHES = (1 - 0x9E37_79B9_7F4A_7C15) % 2**64 // 2
"""The seed whose multiplier is 1: many keys share a prefix."""
CHAINS = [HASHES[:12], HASHES[12:30], HASHES[6:9] + HASHES[30:]]


def u64(hashes: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(hashes, np.uint64)


class Life:
    """Drives an index and the oracle side by side, as a seed has it."""

    def __init__(self, seed: int, oracle: Any, blocks_of: Callable[[RadixIndex], set[int]]) -> None:
        self.random = rng = random.Random(seed)
        self.oracle, self.blocks_of = oracle, blocks_of
        self.cap = rng.choice([None, None, 8, 30])
        index_seed = rng.choice([KEYS_ARE_HASHES, rng.getrandbits(64)])
        self.index = RadixIndex(max_blocks=self.cap, segment_bits=rng.choice([0, 1, 3]), seed=index_seed)
        self.num_evicted = 0
        self.snapshot: Generator[Residencies] | None = None
        # Few ranks a life, so that they meet.
        self.ranks = [*rng.sample(PLAIN, 3), *rng.sample(WIDE, rng.choice([0, 2, 20])), *GROUPED[:2]]
        self.ranks += [each.companion for each in GROUPED[:2]]

    def live(self) -> None:
        acts = {
            self.store_part_of_a_chain: 10,
            self.store_a_prefix_on_many_ranks: 4,
            self.store_nonsense: 3,
            self.remove_in_any_order: 8,
            self.apply_a_batch: 4,
            self.set_groups: 4,
            self.clear_a_rank: 2,
            self.lose_a_worker: 1,
            self.touch: 1,
            self.sweep_a_slice: 4,
            self.sweep_everything: 1,
            self.begin_a_snapshot: 2,
            self.read_some_of_the_snapshot: 3,
            self.end_the_snapshot: 2,
            self.restore_the_index_onto_itself: 1,
        }
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
            act()
            self.agree()

    # --- What is told -----------------------------------------------------------------------------------------------

    def store(self, source: WorkerRank, tier: Tier, parent: int | None, hashes: list[int]) -> None:
        assert self.index.store(source, tier, parent, u64(hashes)) == self.oracle.store(source, tier, parent, hashes)
        self.forget_what_was_evicted()

    def some_hashes(self) -> list[int]:
        return self.random.choices(HASHES, k=self.random.randint(0, 8))

    def tier(self) -> Tier:
        return self.random.choice([Tier.GPU, *Tier])

    def store_part_of_a_chain(self) -> None:
        chain, start = self.random.choice(CHAINS), self.random.choice([0, 0, *range(12)])
        parent = chain[start - 1] if start else None
        end = start + self.random.randint(0, 12)
        self.store(self.random.choice(self.ranks), self.tier(), parent, chain[start:end])

    def store_a_prefix_on_many_ranks(self) -> None:
        chain, tier = self.random.choice(CHAINS), self.tier()
        for source in self.random.sample(self.ranks, self.random.randint(1, len(self.ranks))):
            self.store(source, tier, None, chain[: self.random.randint(1, len(chain))])

    def store_nonsense(self) -> None:
        parent = self.random.choice([None, self.random.choice(HASHES)])
        self.store(self.random.choice(self.ranks), self.tier(), parent, self.some_hashes())

    def remove_in_any_order(self) -> None:
        source, tier = self.random.choice(self.ranks), self.tier()
        held = sorted(block for block, each in self.oracle.held.get(source, ()) if each == tier)
        hashes = self.random.sample(held, min(len(held), self.random.randint(0, 4))) + self.some_hashes()[:2]
        assert self.index.remove(source, tier, u64(hashes)) == self.oracle.remove(source, tier, hashes)

    def apply_a_batch(self) -> None:
        source, tier, is_cleared = self.random.choice(self.ranks), self.tier(), self.random.random() < 0.3
        first, chain, removed = self.some_hashes(), self.random.choice(CHAINS), self.some_hashes()
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
            self.oracle.clear(source)
        outcomes.append(self.oracle.store(source, tier, None, chain))
        outcomes.append(self.oracle.remove(source, tier, removed))
        outcomes.append(self.oracle.store(source, tier, chain[3], removed))
        assert result == ApplyResult(*map(sum, zip(*outcomes, strict=True)))

    def set_groups(self) -> None:
        """Let a rank have other groups, which hold some of what it holds; one kind is a tier of its companion."""
        rng, source = self.random, self.random.choice(GROUPED[:2])
        has_ahead, chain = rng.choice([0, 0, 1]), rng.choice(CHAINS)
        rules = [GroupRule(rng.choice([0, 0, 2, 3]), 1, has_ahead)]
        for kind in range(rng.randint(0, 4)):
            rules.append(GroupRule(rng.randint(1, 4), rng.choice([1, 1, 2, 3]), rng.randint(0, has_ahead)))
            self.store(source.companion, Tier(kind), None, chain[: rng.randint(1, len(chain))])
        self.store(source, Tier.GPU, None, chain[: rng.randint(1, len(chain))])
        self.index.set_groups(source, rules)
        self.oracle.set_groups(source, rules)

    def clear_a_rank(self) -> None:
        source = self.random.choice(self.ranks)
        self.index.clear(source.worker, source.rank)
        self.oracle.clear(source)

    def lose_a_worker(self) -> None:
        worker = self.random.choice(WORKERS)
        self.random.choice([self.index.remove_worker, self.index.clear])(worker)
        for source in RANKS:
            if source.worker == worker:
                self.oracle.clear(source)

    def touch(self) -> None:
        self.index.touch(u64(self.random.choice(CHAINS)))

    # --- Housekeeping -----------------------------------------------------------------------------------------------

    def sweep_a_slice(self) -> None:
        self.index.sweep(self.random.choice([1, 5, 50, 500]))

    def sweep_everything(self) -> None:
        while self.index.sweep():
            pass
        statistics = self.index.statistics()
        assert statistics.num_blocks == self.oracle.num_blocks
        assert statistics.num_retired == 0

    def begin_a_snapshot(self) -> None:
        if self.snapshot is None:
            self.max_blocks = self.random.choice([1, 4, 30])
            self.snapshot = self.index.snapshot(self.max_blocks)
            self.chunks: list[Residencies] = []
            self.was = copy.deepcopy(self.oracle)

    def read_some_of_the_snapshot(self) -> None:
        if self.snapshot is not None:
            self.chunks += itertools.islice(self.snapshot, self.random.randint(1, 5))

    def end_the_snapshot(self) -> None:
        if self.snapshot is None:
            return
        if self.random.random() < 0.2:
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
            assert seen.isdisjoint(blocks)
            seen |= blocks
        assert seen == hashes
        check_invariants(restored)
        for source in RANKS:
            assert restored.digest(source) == self.was.digest(source)

    def restore_the_index_onto_itself(self) -> None:
        if self.snapshot is None:
            for chunk in self.index.snapshot(7):
                self.index.restore(chunk)
                check_invariants(self.index)

    # --- What is asked ----------------------------------------------------------------------------------------------

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

    def agree(self) -> None:
        self.forget_what_was_evicted()
        check_invariants(self.index)
        for source in RANKS:
            assert self.index.digest(source) == self.oracle.digest(source)
        for hashes in [*CHAINS, CHAINS[0][:3], HASHES[::-1], CHAINS[0][:6] + CHAINS[1][:6]]:
            num_usable = max(0, len(hashes) - self.random.choice([0, 0, 1, 2]))
            match = self.index.match(u64(hashes), num_usable)
            assert dict(match) == self.oracle.match(hashes, num_usable)
            assert match.depths[:, -1].tolist() == sorted(match.depths[:, -1].tolist())


@pytest.mark.parametrize("seed", LIVES)
def test_a_random_life_of_a_fleet_is_as_a_dict_of_sets_says(
    seed: int,
    make_oracle: Callable[[], Any],
    blocks_of: Callable[[RadixIndex], set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "_MAX_VISITS", 3)  # many steps
    Life(seed, make_oracle(), blocks_of).live()
