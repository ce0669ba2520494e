"""Engine maps: what they take, and give back."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.events import Tier, WorkerRank
from kvist.indexer.engine_map import EngineMap
from kvist.radix import RadixIndex


@pytest.fixture
def engine_map() -> EngineMap:
    return EngineMap(RadixIndex(seed=1))


def test_a_hash_takes_less_than_24_bytes(engine_map):
    for name in range(200_000):
        engine_map.mark(name)
    assert len(engine_map) == 200_000
    assert engine_map.size_bytes / len(engine_map) < 24
    assert all(engine_map.is_irregular(name) for name in range(0, 200_000, 1000))


def test_memory_goes_back_when_most_hashes_are_gone(engine_map):
    for name in range(50_000):
        engine_map.mark(name)
    full_bytes = engine_map.size_bytes
    engine_map.tidy()
    assert engine_map.size_bytes == full_bytes
    for name in range(1000, 50_000):
        engine_map.drop(name)
    for _ in range(50):
        engine_map.tidy()
    assert engine_map.size_bytes < full_bytes / 8
    assert all(engine_map.is_irregular(name) for name in range(1000))
    assert not engine_map.is_irregular(1000)
    engine_map.clear()
    assert len(engine_map) == 0


def test_names_are_told_some_at_a_time_while_the_map_grows():
    index, source = RadixIndex(seed=1), WorkerRank("w", 0)
    hashes = np.random.default_rng(2).integers(1, 2**63, 60_000, dtype=np.uint64)
    index.store(source, Tier.GPU, None, hashes)
    engine_map, slot = EngineMap(index), index.slot_of(source)
    blocks = hashes.tolist()
    for block in blocks[:50_000]:
        engine_map.put(block ^ 1, block)
    told, num_parts = [], 0
    for number, names in enumerate(engine_map.names(slot)):
        assert 0 < len(names.blocks) <= 4096
        assert (names.engine_hashes ^ np.uint64(1) == names.blocks).all()
        told += names.blocks.tolist()
        num_parts += 1
        for block in blocks[50_000 + number * 500 :][:500]:
            engine_map.put(block ^ 1, block)  # segments grow, the one that is told among them
    assert num_parts > 12
    assert len(told) == len(set(told))
    assert set(blocks[:50_000]) <= set(told)
