"""Engine maps: what they take, and give back."""

from __future__ import annotations

import pytest

from kvist.indexer.engine_map import EngineMap
from kvist.radix import RadixIndex


@pytest.fixture
def engine_map() -> EngineMap:
    return EngineMap(RadixIndex(seed=1))


def test_a_hash_takes_less_than_sixteen_bytes(engine_map):
    for name in range(200_000):
        engine_map.mark(name)
    assert len(engine_map) == 200_000
    assert engine_map.size_bytes / len(engine_map) < 16
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
