"""The updates and queries that an index and Dynamo's RadixTree get in the same run, and how the two are compared."""

from __future__ import annotations

import gc
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter, process_time
from typing import Any

import numpy as np
from _common import best_and_spread, time_call_us
from dynamo.llm import RadixTree

from kvist.events import Event, Removed, Stored, Tier, WorkerRank
from kvist.radix import RadixIndex

RANKS = [WorkerRank(f"w{worker}", 0) for worker in range(4096)]
NUM_WORKERS, QUERY_BLOCKS = 256, 1000
Row = list[object]
Times = tuple[float, float]
COMPARISON = [
    "case",
    "kvist, wall",
    "kvist, CPU",
    "RadixTree, wall",
    "RadixTree, CPU",
    "wall, best to best",
    "CPU, median (range)",
]


def hashes_of(rng: np.random.Generator, *shape: int) -> Any:
    """Return block hashes; below 2**63, because the peer's JSON takes no more."""
    return rng.integers(1, 2**63, shape, dtype=np.uint64)


def peer_event(parent: int | None, hashes: list[int]) -> bytes:
    """Return a stored event as the peer takes it, with one number for both of its hashes of a block."""
    blocks = [{"block_hash": block, "tokens_hash": block} for block in hashes]
    return json.dumps({"event_id": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}).encode()


def peer_removal(hashes: list[int]) -> bytes:
    """Return a removed event as the peer takes it."""
    return json.dumps({"event_id": 0, "data": {"removed": {"block_hashes": hashes}}}).encode()


def row_of(name: str, pairs: list[tuple[Times, Times]]) -> Row:
    """Return a row from the (wall, CPU) times of both sides in each repetition."""
    low, middle, high = best_and_spread(theirs[1] / own[1] for own, theirs in pairs)
    own_wall, own_cpu = (min(own[i] for own, _ in pairs) for i in range(2))
    peer_wall, peer_cpu = (min(theirs[i] for _, theirs in pairs) for i in range(2))
    times = [f"{each:.3g}" for each in (own_wall, own_cpu, peer_wall, peer_cpu)]
    return [name, *times, f"{peer_wall / own_wall:.1f}x", f"{middle:.1f}x ({low:.1f}-{high:.1f})"]


def compare(name: str, ours: Callable[[], object], peers: Callable[[], object], num_calls: int, num_reps: int) -> Row:
    """Return a row: the best of either side on the wall and of CPU, and the CPU ratio of alternating repetitions."""
    return row_of(name, [(time_call_us(ours, num_calls), time_call_us(peers, num_calls)) for _ in range(num_reps)])


class Both:
    """An index and a tree that are told the same."""

    def __init__(self) -> None:
        self.index, self.tree = RadixIndex(), RadixTree()

    def store(self, workers: list[int], parent: int | None, hashes: Any) -> None:
        """Store a part of a chain on some workers."""
        event = peer_event(parent, hashes.tolist())
        for worker in workers:
            self.index.store(RANKS[worker], Tier.GPU, parent, hashes)
            self.tree.apply_event(worker, event)

    def grow_chains(self, chains: Any, workers_of: Callable[[int], list[int]]) -> None:
        """Store chains: a hundred grow side by side, eight blocks at a time."""
        for first in range(0, len(chains), 100):
            for block in range(0, chains.shape[1], 8):
                for number, chain in enumerate(chains[first : first + 100], first):
                    self.store(workers_of(number), int(chain[block - 1]) if block else None, chain[block : block + 8])

    def compare(self, name: str, queries: Any, num_calls: int, num_reps: int, *, is_read: bool = True) -> Row:
        """Return a row of matches along some queries; answers are read unless said otherwise, and checked to agree."""
        lists = [query.tolist() for query in queries]
        for query, as_list in zip(queries[:20], lists, strict=False):
            assert depths_of(self.index, query) == {
                w: n for (w, _), n in self.tree.find_matches(as_list).scores.items()
            }
        own, theirs = cycle(queries), cycle(lists)
        match, find = self.index.match, self.tree.find_matches

        def read_ours() -> object:
            answer = match(next(own))
            return answer.holder_ids, answer.depths

        if is_read:
            return compare(name, read_ours, lambda: find(next(theirs)).scores, num_calls, num_reps)
        return compare(name, lambda: match(next(own)), lambda: find(next(theirs)), num_calls, num_reps)


def depths_of(index: RadixIndex, query: Any) -> dict[int, int]:
    """Return the depth of each worker, as the peer tells it."""
    return {int(source.worker[1:]): depths.gpu for source, depths in index.match(query).items()}


def depths_of_peer(tree: Any, query: list[int]) -> dict[int, int]:
    """Return the depth of each worker, as the peer has it by worker and rank."""
    return {worker: depth for (worker, _), depth in tree.find_matches(query).scores.items()}


@dataclass(frozen=True, slots=True)
class Step:
    """One message of a worker, and a query after it."""

    worker: int
    parent: int | None
    stored: Any
    removed: Any
    query: Any


def removal_heavy(num_steps: int, rng: np.random.Generator) -> Iterator[Step]:
    """Full caches: each new chain of 32 blocks puts out the oldest one of its worker, from its end."""
    held: list[deque[Any]] = [deque() for _ in range(64)]
    for worker in rng.integers(0, 64, num_steps).tolist():
        chain = hashes_of(rng, 32)
        held[worker].append(chain)
        removed = held[worker].popleft()[::-1] if len(held[worker]) > 10 else None
        asked = held[int(rng.integers(0, 64))]
        yield Step(worker, None, chain, removed, asked[int(rng.integers(0, len(asked)))] if asked else chain)


def shared_prefixes(num_steps: int, rng: np.random.Generator) -> Iterator[Step]:
    """Ten system prompts of 200 blocks, and chats that go on from one by 8 blocks a turn, on any of 128 workers."""
    prompts, holders = hashes_of(rng, 10, 200), [set[int]() for _ in range(10)]
    chats: list[tuple[int, Any]] = [(number, prompt) for number, prompt in enumerate(prompts)]
    for worker in rng.integers(0, 128, num_steps).tolist():
        number, chat = chats[int(rng.integers(0, len(chats)))]
        turn = hashes_of(rng, 8)
        query = np.concatenate([chat, turn])
        if worker in holders[number] and len(chat) == 200:
            yield Step(worker, int(chat[-1]), turn, None, query)
        else:
            yield Step(worker, None, query, None, query)
        holders[number].add(worker)
        chats.append((number, query[:1000]))


def run_steps(steps: list[Step], num_checked: int) -> tuple[Times, Times]:
    """Return the µs a step of either side, on the wall and of CPU; some of the answers are checked to agree."""
    messages = [_events_of(step) for step in steps]
    peer_messages = [_peer_events_of(step) for step in steps]
    queries = [step.query.tolist() for step in steps]
    index, tree = RadixIndex(), RadixTree()

    def ours() -> None:
        for step, events in zip(steps, messages, strict=True):
            index.apply(RANKS[step.worker], events)
            answer = index.match(step.query)
            _ = answer.holder_ids, answer.depths

    def peers() -> None:
        for step, events, query in zip(steps, peer_messages, queries, strict=True):
            for event in events:
                tree.apply_event(step.worker, event)
            _ = tree.find_matches(query).scores

    times = _timed_us(ours, len(steps)), _timed_us(peers, len(steps))
    for number in random.Random(1).sample(range(len(steps)), num_checked):
        assert depths_of(index, steps[number].query) == depths_of_peer(tree, queries[number])
    return times


def _timed_us(function: Callable[[], None], num_steps: int) -> Times:
    gc.collect()
    wall, cpu = perf_counter(), process_time()
    function()
    return (perf_counter() - wall) / num_steps * 1e6, (process_time() - cpu) / num_steps * 1e6


def _events_of(step: Step) -> list[Event]:
    events: list[Event] = [Stored(step.stored.tobytes(), step.parent)]
    return events if step.removed is None else [*events, Removed(step.removed.tobytes())]


def _peer_events_of(step: Step) -> list[bytes]:
    events = [peer_event(step.parent, step.stored.tolist())]
    return events if step.removed is None else [*events, peer_removal(step.removed.tolist())]
