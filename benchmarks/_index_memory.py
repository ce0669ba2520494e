"""Memory of an index of ten million blocks, and of Dynamo's tree: what is stored in it, and how it is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _index_loads import NUM_WORKERS, RANKS, Row, hashes_of, peer_event
from dynamo.llm import RadixTree

from kvist.events import Tier
from kvist.radix import RadixIndex

PEER = "RadixTree, one of 256 workers a chain, chains of 128"


def resident_bytes() -> tuple[int, int]:
    """Return this process's resident size now, and its highest since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(fields["VmRSS"]) * 1024, int(fields["VmHWM"]) * 1024


def forget_peak() -> None:
    """Make the peak of the resident size begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def sweep_all(index: RadixIndex) -> None:
    """Do all housekeeping that is left."""
    while index.sweep():
        pass


def fill_single(index: RadixIndex, chains: Any, rng: np.random.Generator) -> None:
    """Give each chain to one of 256 workers."""
    for chain, worker in zip(chains, rng.integers(0, NUM_WORKERS, len(chains)), strict=True):
        index.store(RANKS[worker], Tier.GPU, None, chain)


def fill_eight(index: RadixIndex, chains: Any, rng: np.random.Generator) -> None:
    """Give each chain to a random 8 of 256 workers; first one worker for all chains, then the second, and so on."""
    workers = np.empty((len(chains), 8), np.int16)
    for first in range(0, len(chains), 10_000):
        part = rng.random((len(chains[first : first + 10_000]), NUM_WORKERS), np.float32)
        workers[first : first + 10_000] = np.argpartition(part, 8, axis=1)[:, :8]
    for column in range(8):
        for chain, worker in zip(chains, workers[:, column], strict=True):
            index.store(RANKS[worker], Tier.GPU, None, chain)


def fill_fleet(index: RadixIndex, chains: Any, rng: np.random.Generator) -> None:
    """Give chains to 4,096 workers: 1 to 16 holders each, every hundredth 512; tails are evicted, workers restart."""
    for number, chain in enumerate(chains):
        num_holders = 512 if number % 100 == 0 else int(rng.geometric(0.4)) % 16 + 1
        for worker in rng.integers(0, len(RANKS), num_holders):
            index.store(RANKS[worker], Tier.GPU, None, chain[: len(chain) - int(rng.integers(0, 8))])
        if number % 100 == 0:  # five workers restart, and store again some of what they had
            for worker in rng.integers(0, len(RANKS), 5):
                index.clear(RANKS[worker].worker)
                for again in rng.integers(0, number + 1, 20):
                    index.store(RANKS[worker], Tier.GPU, None, chains[again])
            index.sweep(200_000)


MIXES: dict[str, tuple[Callable[[RadixIndex, Any, np.random.Generator], None], int]] = {
    "one of 256 workers a chain, chains of 128": (fill_single, 128),
    "a random 8 of 256 a chain, chains of 128": (fill_eight, 128),
    "a random 8 of 256 a chain, chains of 16": (fill_eight, 16),
    "4,096 workers with churn, chains of 64": (fill_fleet, 64),
}


def num_chains_of(length: int, quick: bool) -> int:
    """Return how many chains of a length are stored."""
    return (300_000 if quick else 10_000_000) // length


def bench_memory(mix: str, quick: bool) -> list[Row]:
    """Fill an index, or the peer's tree, with ten million blocks; bytes a block by own account and resident."""
    if mix == PEER:
        return [memory_of_peer(quick)]
    fill, length = MIXES[mix]
    rng = np.random.default_rng(1)
    chains = hashes_of(rng, num_chains_of(length, quick), length)
    index = RadixIndex()
    index.match(chains[0])
    rng.random((10_000, NUM_WORKERS), np.float32)  # scratch of the fill itself
    gc.collect()
    before, _ = resident_bytes()
    forget_peak()
    fill(index, chains, rng)
    filled = index.statistics()
    _, peak = resident_bytes()
    sweep_all(index)
    statistics = index.statistics()
    resting, _ = resident_bytes()
    per_block = [
        f"{size / statistics.num_blocks:.1f}"
        for size in (statistics.size_bytes, filled.size_bytes, resting - before, peak - before)
    ]
    return [[mix, f"{statistics.num_blocks:,}", f"{statistics.num_held:,}", f"{statistics.num_sets:,}", *per_block]]


def memory_of_peer(quick: bool) -> Row:
    """Fill the peer's tree as `fill_single` fills an index; it has no account of its own."""
    rng = np.random.default_rng(1)
    chains = hashes_of(rng, num_chains_of(128, quick), 128)
    workers = rng.integers(0, NUM_WORKERS, len(chains)).tolist()
    tree = RadixTree()
    tree.find_matches(chains[0].tolist())
    peer_event(None, chains[0].tolist())
    gc.collect()
    before, _ = resident_bytes()
    forget_peak()
    for chain, worker in zip(chains, workers, strict=True):
        tree.apply_event(worker, peer_event(None, chain.tolist()))
    assert len(tree.find_matches(chains[-1].tolist()).scores) == 1  # behind which everything is applied
    _, peak = resident_bytes()
    gc.collect()
    resting, _ = resident_bytes()
    per_block = [f"{(size - before) / chains.size:.1f}" for size in (resting, peak)]
    return [PEER, f"{chains.size:,}", f"{chains.size:,}", "", "", "", *per_block]
