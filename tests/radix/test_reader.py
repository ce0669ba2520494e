"""A reader in another mapping answers as the index does, and never with half a change.

The second is tried with processes: one writes without a pause, by changes that leave each rank's answer one of two when
they are whole, and others match all the time. Run as a script, this file is one of them.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvist.events import Cleared, Removed, Stored, Tier, WorkerRank
from kvist.events.types import GroupRule
from kvist.radix import RadixIndex, RadixReader
from kvist.radix.memory import index_bytes

NUM_CHAINS, CHAIN, SHORT, WINDOW = 12, 96, 40, 4
"""Chains of so many blocks, of which a rank holds all or the first few; of one of several groups, a few at the end."""
NUM_GIVINGS, SEGMENT_BITS, MAX_BLOCKS = 1 << 22, 3, 4000
NUM_PLAIN, NUM_GROUPED = 24, 6
DEADLINE_S = 180.0


@contextmanager
def shared_memory(size_bytes: int) -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size_bytes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def answers_of(index: RadixIndex, hashes: NDArray[np.uint64], num_usable: int) -> dict[int | None, tuple[int, ...]]:
    return {index.clearing_of(rank): tuple(each) for rank, each in index.match(hashes, num_usable).items()}


@pytest.mark.parametrize("max_blocks", [None, 300])
def test_a_reader_answers_as_the_index_and_its_oracle_do(
    make_oracle: Callable[[], Any], max_blocks: int | None
) -> None:
    rng = random.Random(7)
    with shared_memory(index_bytes(1)) as descriptor:
        index = RadixIndex(max_blocks=max_blocks, segment_bits=1, seed=5, memory=mmap.mmap(descriptor, 0))
        reader, oracle = RadixReader(mmap.mmap(descriptor, 0)), make_oracle()
        ranks = [WorkerRank(f"w{number % 5}", number // 5) for number in range(20)]
        chains = [[rng.getrandbits(64) for _ in range(20)] for _ in range(20)]
        for step in range(1500):
            rank, chain = rng.choice(ranks), rng.choice(chains)
            tier, place = Tier(rng.randrange(4)), rng.randrange(20)
            blocks, kind = chain[place : place + rng.randrange(1, 20)], rng.randrange(10)
            if kind < 6:
                parent = chain[place - 1] if place else None
                index.store(rank, tier, parent, np.array(blocks, np.uint64))
                oracle.store(rank, tier, parent, blocks)
            elif kind < 9:
                index.remove(rank, tier, np.array(blocks, np.uint64))
                oracle.remove(rank, tier, blocks)
            elif step % 7 == 0:
                index.remove_worker(rank.worker)
                for each in ranks:
                    oracle.held.pop(each if each.worker == rank.worker else None, None)
                index.sweep(500)
            else:
                index.clear(*rank)
                oracle.held.pop(rank, None)
            hashes, num_usable = np.array(chain, np.uint64), rng.randrange(21)
            found = reader.match(hashes, num_usable)
            assert found == answers_of(index, hashes, num_usable)
            if max_blocks is None:
                expected = oracle.match(chain[:num_usable])
                assert found == {index.clearing_of(each): depths for each, depths in expected.items()}
            for each in ranks:
                slot, clearing = index.slot_of(each), index.clearing_of(each)
                if slot is not None and clearing is not None:
                    assert reader.num_held(slot, clearing) == index.digest(each).num_blocks
                    assert reader.num_held(slot, clearing + 1) == 0
        assert not reader.wants_uses
        index.store(ranks[0], Tier.GPU, None, np.arange(1, 200, dtype=np.uint64))
        assert reader.wants_uses == (max_blocks is not None)


def test_a_reader_keeps_to_the_rules_of_ranks_of_several_groups() -> None:
    with shared_memory(index_bytes(0)) as descriptor:
        index = RadixIndex(segment_bits=0, memory=mmap.mmap(descriptor, 0))
        reader, rank, hashes = (
            RadixReader(mmap.mmap(descriptor, 0)),
            WorkerRank("w", 0),
            np.arange(1, 41, dtype=np.uint64),
        )
        index.set_groups(rank, [GroupRule(0), GroupRule(3)])
        index.store(rank, Tier.GPU, None, hashes[:30])
        assert reader.match(hashes, 40) == {}
        index.store(rank.companion, Tier.GPU, None, hashes[:20])
        assert reader.match(hashes, 40) == {index.clearing_of(rank): (20,) * 4} == answers_of(index, hashes, 40)
        index.clear(*rank)
        index.store(rank, Tier.GPU, None, hashes[:30])
        found = reader.match(hashes, 40)
        assert found == answers_of(index, hashes, 40)
        assert found[index.clearing_of(rank)] == (30,) * 4


def test_a_reader_gives_up_on_a_writer_that_stopped_in_the_middle() -> None:
    with shared_memory(index_bytes(0)) as descriptor:
        index = RadixIndex(segment_bits=0, memory=mmap.mmap(descriptor, 0))
        reader, hashes = RadixReader(mmap.mmap(descriptor, 0)), np.arange(1, 9, dtype=np.uint64)
        index.store(WorkerRank("w", 0), Tier.GPU, None, hashes)
        with index.writing:
            assert reader.match(hashes, 8) is None
        assert reader.match(hashes, 8) == {1: (8,) * 4}


# --- Processes --------------------------------------------------------------------------------------------------------


def chains_of_all() -> NDArray[np.uint64]:
    return np.random.default_rng(3).integers(1, 2**64, (NUM_CHAINS, CHAIN), dtype=np.uint64)


class Writer:
    """Changes an index all the time; `owners` has for each clearing the number of its rank, plus 1, for readers."""

    def __init__(self, descriptor: int, owners: int, *, has_cap: bool) -> None:
        cap = MAX_BLOCKS if has_cap else None
        self.index = RadixIndex(max_blocks=cap, segment_bits=SEGMENT_BITS, memory=mmap.mmap(descriptor, 0))
        self.owners = np.frombuffer(mmap.mmap(owners, 0), np.int64)
        self.rng, self.chains = random.Random(1), chains_of_all()
        self.ranks = [WorkerRank(f"r{number % 10}", number // 10) for number in range(NUM_PLAIN + NUM_GROUPED)]
        self.is_long = [False] * len(self.ranks)
        for number in range(len(self.ranks)):
            self.begin(number, [])

    def own(self, number: int) -> None:
        clearing = self.index.clearing_of(self.ranks[number])
        assert clearing is not None
        self.owners[clearing] = number + 1

    def begin(self, number: int, first: list[Cleared]) -> None:
        """Have a rank hold the first blocks of its chain, from nothing, by one change."""
        rank, chain = self.ranks[number], self.chains[number % NUM_CHAINS]
        self.is_long[number] = False
        if number < NUM_PLAIN:
            self.index.apply(rank, [*first, Stored(chain[:SHORT].tobytes())])
        else:  # it holds all, and its companion says which of it counts
            self.index.clear(*rank)
            self.index.clear(*rank.companion)
            self.index.set_groups(rank, [GroupRule(0), GroupRule(WINDOW)])
            self.index.store(rank.companion, Tier.GPU, None, chain[SHORT - WINDOW : SHORT])
            self.index.store(rank, Tier.GPU, None, chain)
        self.own(number)

    def toggle(self, number: int) -> None:
        """Have it hold all of its chain, or the first blocks alone again, by one change."""
        rank, chain = self.ranks[number], self.chains[number % NUM_CHAINS]
        self.is_long[number] = not self.is_long[number]
        if number >= NUM_PLAIN:
            rank, blocks = rank.companion, chain[CHAIN - WINDOW :].tobytes()
            self.index.apply(rank, [Stored(blocks) if self.is_long[number] else Removed(blocks)])
        elif self.is_long[number]:
            self.index.apply(rank, [Stored(chain[SHORT:].tobytes(), int(chain[SHORT - 1]), Tier.HOST)])
        else:
            self.index.apply(rank, [Removed(chain[SHORT:].tobytes(), Tier.HOST)])

    def grow(self, step: int) -> None:
        """Come and go with many blocks of nobody's interest, so that segments and sets grow, move and shrink."""
        filler = WorkerRank(f"filler {step % 7}", 0)
        self.index.store(filler, Tier.GPU, None, np.random.default_rng(step).integers(1, 2**64, 3000, np.uint64))
        self.index.store(filler, Tier.GPU, None, self.chains[step % NUM_CHAINS])
        if step % 3 == 0:
            self.index.remove_worker(f"filler {(step + 3) % 7}")
        if step % 5 == 0:
            for _ in self.index.snapshot(500):
                self.toggle(self.rng.randrange(len(self.ranks)))

    def run(self) -> None:
        """Go on until killed."""
        print("writes", flush=True)
        for step in itertools.count(1):
            number = self.rng.randrange(len(self.ranks))
            if step % 41 == 0:
                self.index.clear(*self.ranks[number])
                self.begin(number, [])
            elif step % 43 == 0:
                self.begin(number, [Cleared()])
            else:
                self.toggle(number)
            if step % 100 == 0:
                self.grow(step // 100)
            if step % 10 == 0:
                self.index.sweep(300)


def read(descriptor: int, owners_descriptor: int, seconds: float, *, has_cap: bool) -> None:
    """Match so long, and until enough was seen; ends with an AssertionError at an answer that no whole change makes."""
    reader, owners = RadixReader(mmap.mmap(descriptor, 0)), np.frombuffer(mmap.mmap(owners_descriptor, 0), np.int64)
    rng, chains, seen = random.Random(os.getpid()), chains_of_all(), Counter[object]()
    plain = {(SHORT,) * 4, (SHORT, CHAIN, CHAIN, CHAIN)}
    grouped = {(SHORT,) * 4, (CHAIN,) * 4}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or seen["answers"] <= 100 or len(seen) < 4 - has_cap:
        assert time.monotonic() < end_s + DEADLINE_S, seen
        which = rng.randrange(NUM_CHAINS)
        found = reader.match(chains[which], CHAIN)
        seen["disturbed" if found is None else "answers"] += 1
        for clearing, depths in (found or {}).items():
            number = int(owners[clearing]) - 1
            if number < 0:  # a filler's, or one that came just now
                continue
            assert number % NUM_CHAINS == which, (which, number, depths)
            assert has_cap or depths in (plain if number < NUM_PLAIN else grouped), (number, depths)
            seen[depths if not has_cap else depths[3] > SHORT] += 1
    print(seen)


def stress(seconds: float, *, has_cap: bool, **environment: str) -> None:
    with shared_memory(index_bytes(SEGMENT_BITS)) as index, shared_memory(8 * NUM_GIVINGS) as owners:

        def start(role: str) -> subprocess.Popen[str]:
            arguments = map(str, (sys.executable, __file__, role, index, owners, seconds, int(has_cap)))
            pipe, variables = subprocess.PIPE, {**os.environ, **environment}
            return subprocess.Popen(
                [*arguments], pass_fds=(index, owners), stdout=pipe, stderr=pipe, text=True, env=variables
            )

        started = [start("write")]
        try:
            assert started[0].stdout is not None
            assert started[0].stdout.readline() == "writes\n", started[0].communicate()
            started += [start("read"), start("read")]
            give_up_s = seconds + 2 * DEADLINE_S
            ended = [(process.communicate(timeout=give_up_s), process.returncode) for process in started[1:]]
            assert started[0].poll() is None, started[0].communicate()
        finally:
            for process in started:
                process.kill()
                process.communicate()
        assert not any(code for _, code in ended), ended


@pytest.mark.parametrize("has_cap", [False, True], ids=["unbounded", "evicting"])
def test_no_reader_sees_half_a_change(has_cap: bool) -> None:
    stress(3, has_cap=has_cap)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("has_cap", [False, True], ids=["unbounded", "evicting"])
def test_no_reader_sees_half_a_change_for_minutes(has_cap: bool) -> None:
    stress(240, has_cap=has_cap)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("checked bounds")
def test_what_half_a_change_looks_like_leads_no_reader_beyond_any_array(checked_bounds: dict[str, str]) -> None:
    stress(60, has_cap=False, **checked_bounds)


if __name__ == "__main__":
    role, index_descriptor, owners_of, run_s, is_capped = sys.argv[1], *sys.argv[2:]
    if role == "write":
        Writer(int(index_descriptor), int(owners_of), has_cap=is_capped == "1").run()
    else:
        read(int(index_descriptor), int(owners_of), float(run_s), has_cap=is_capped == "1")
