"""What was held when: against plain sets that follow random streams, at moments drawn at random."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvist.events import Cleared, Removed, Stored, Tier, WorkerRank
from kvist.events.codec import encode_snapshot_part
from kvist.events.snapshot import HeldBlocks, Snapshot, snapshot_parts
from kvist.events.transports import Message
from kvist.replay.history import History
from kvist.replay.statistics import StatisticsCollector

PARENTS: dict[int, int | None] = {block: block // 3 or None for block in range(1, 80)}
BLOCK_SIZE, STEP_MS = 4, 10
RANKS = [("a", 0), ("a", 1), ("b", 0)]


def chain_of(block: int | None) -> list[int]:
    return [] if block is None else [*chain_of(PARENTS[block]), block]


def packed(*blocks: int) -> bytes:
    return np.array(blocks, np.uint64).tobytes()


def random_events(rng: Random, num: int) -> list[tuple[tuple[str, int], Stored | Removed | Cleared]]:
    """Return events of ranks; each block is stored once with all before it, so that its place is known."""
    events = [(RANKS[0], Stored(packed(*chain_of(block)))) for block in PARENTS]
    for _ in range(num):
        tier = rng.choice([Tier.GPU, Tier.GPU, Tier.HOST])
        chain = chain_of(rng.randrange(1, 80))
        cut = rng.randrange(len(chain))
        hashes = packed(*chain[cut:])
        kind = rng.random()
        event = Stored(hashes, PARENTS[chain[cut]], tier) if kind < 0.7 else Removed(hashes, tier)
        events.append((rng.choice(RANKS), Cleared() if kind > 0.98 else event))
    return events


def runs_of(held: dict[tuple[tuple[str, int], Tier], set[int]]) -> set[tuple]:
    """Return the tree, block by block: where each run begins and ends, how much is held from it on, and by whom."""
    holders: dict[int, frozenset] = {
        block: frozenset(who for who, blocks in held.items() if block in blocks)
        for block in set().union(*held.values())
    }
    below = {block: [each for each in holders if PARENTS[each] == block] for block in [*holders, None]}

    def goes_on(block: int) -> bool:
        return len(below[block]) == 1 and holders[below[block][0]] == holders[block]

    def size(block: int) -> int:
        return len(holders[block]) + sum(map(size, below[block]))

    runs = set()
    for first in holders:
        parent = PARENTS[first]
        if parent in holders and goes_on(parent):
            continue
        last = first
        while goes_on(last):
            last = below[last][0]
        ranks = sorted({f"{worker} {rank}" for (worker, rank), _ in holders[first]})
        start, end = len(chain_of(parent)) * BLOCK_SIZE, len(chain_of(last)) * BLOCK_SIZE
        runs.add((f"{last:016x}", start, end, size(first), tuple(ranks)))
    return runs


@pytest.mark.parametrize("seed", range(20))
def test_any_moment_is_as_sets_have_it(make, seed):
    rng = Random(seed)
    events = random_events(rng, 150)
    numbers = dict.fromkeys(RANKS, 0)
    collector, moments = StatisticsCollector(), []
    held = {(rank, tier): set() for rank in RANKS for tier in Tier}
    for idx, (rank, event) in enumerate(events):
        message = make.batch(numbers[rank], event, worker=rank[0], rank=rank[1])
        numbers[rank] += 1
        collector.add(make.records(message)[0]._replace(time_ns=make.time_ns + idx * STEP_MS * 1_000_000))
        if isinstance(event, Cleared):
            held |= {(rank, tier): set() for tier in Tier}
        else:
            blocks = set(np.frombuffer(event.hashes, np.uint64).tolist())
            before = held[rank, event.tier]
            held[rank, event.tier] = before | blocks if isinstance(event, Stored) else before - blocks
        moments.append(dict(held))
    history = History(collector)
    for idx, expected in rng.sample(list(enumerate(moments)), 30):
        at_ms = idx * STEP_MS + rng.randrange(STEP_MS)
        counts, num_distinct, num_placed = history.blocks(at_ms)
        told = {(rank, tier): counts[place][tier] for place, (rank, _) in enumerate(history.ranks) for tier in Tier}
        assert told == {who: len(expected[who]) for who in told}
        assert num_distinct == num_placed == len(set().union(*expected.values()))
        rows = history.tree(at_ms)
        names = ("prefix", "from_tokens", "to_tokens", "blocks")
        assert {(*(row[name] for name in names), tuple(row["holders"])) for row in rows} == runs_of(expected)
        for place, row in enumerate(rows):
            above = None if row["parent"] is None else rows[row["parent"]]
            assert above is None or (row["parent"] < place and above["to_tokens"] == row["from_tokens"])
            assert above is None or int(above["prefix"], 16) in chain_of(int(row["prefix"], 16))


def test_what_a_snapshot_alone_tells_counts_and_has_no_place_but_at_the_root(make):
    held = HeldBlocks(np.array([5, 6], np.uint64), np.array([0, 1], np.uint32), np.array([1, 3], np.uint8))
    snapshot = Snapshot(WorkerRank("w", 0), 7, 0, BLOCK_SIZE, held.holding(), (held,))
    parts = [Message(b"kv/w/0", 0, encode_snapshot_part(part)) for part in snapshot_parts(snapshot)]
    collector = StatisticsCollector()
    for record in make.records(*parts, make.batch(0, make.stored(7, parent=6)), make.batch(1, Cleared())):
        collector.add(record)
    history = History(collector)
    assert history.blocks(0) == ([[2, 1, 0, 0]], 2, 1)
    assert history.blocks(10) == ([[3, 1, 0, 0]], 3, 1)
    assert [row["prefix"] for row in history.tree(10)] == [f"{5:016x}"]
    assert history.blocks(20) == ([[0, 0, 0, 0]], 0, 0)


def test_blocks_that_follow_each_other_in_a_circle_have_no_place(make):
    collector = StatisticsCollector()
    for record in make.records(make.batch(0, make.stored(1, 2, parent=3), make.stored(3, parent=2), make.stored(4))):
        collector.add(record)
    history = History(collector)
    assert history.blocks(0) == ([[4, 0, 0, 0]], 4, 1)
    assert [row["prefix"] for row in history.tree(0)] == [f"{4:016x}"]


def test_nothing_was_held_where_nothing_was_said():
    history = History(StatisticsCollector())
    assert (history.blocks(0), history.tree(0)) == (([], 0, 0), [])
