"""An index lies in memory that is handed to it, takes of it what it needs, and gives it back."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from index_invariants import check_invariants

from kvist.events import Stored, Tier, WorkerRank
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import CORE, QUERY, SEGMENT
from kvist.radix.compiled.matching import match
from kvist.radix.memory import CORE_BYTES, index_bytes, reserved_array

W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)


def test_what_is_written_through_one_mapping_is_matched_through_another() -> None:
    descriptor, size_bytes = os.memfd_create("index"), index_bytes(3)
    os.ftruncate(descriptor, size_bytes)
    index = RadixIndex(segment_bits=3, memory=mmap.mmap(descriptor, size_bytes))
    other = mmap.mmap(descriptor, size_bytes)
    core, segments = np.frombuffer(other, CORE, 1), np.frombuffer(other, SEGMENT, 8, CORE_BYTES)
    blocks = np.random.default_rng(1).integers(0, 2**64, 50_000, dtype=np.uint64)
    index.store(W0, Tier.GPU, None, blocks)
    index.store(W1, Tier.GPU, None, blocks[:300])
    query = reserved_array(QUERY, 1)
    assert match(core, segments, query, blocks, len(blocks)) == 2
    assert query["holder_depths"][0][:2].tolist() == [[300] * 4, [50_000] * 4]
    assert core["generation"][0] % 2 == 0
    with index.writing:
        assert core["generation"][0] % 2 == 1
    full_bytes = os.fstat(descriptor).st_blocks * 512
    assert index.statistics().size_bytes < full_bytes < 50_000 * 32 + (1 << 20)
    for worker in ("w0", "w1"):
        index.remove_worker(worker)
    while index.sweep():
        pass
    check_invariants(index)
    assert os.fstat(descriptor).st_blocks * 512 < full_bytes - 50_000 * 16
    assert match(core, segments, query, blocks, len(blocks)) == 0
    os.close(descriptor)


def test_an_index_that_is_full_says_so_and_goes_on_and_one_with_a_cap_evicts() -> None:
    blocks = np.random.default_rng(1).integers(0, 2**64, 500_000, dtype=np.uint64)
    index = RadixIndex(segment_bits=0)
    with pytest.raises(MemoryError, match="no room for more"):
        index.store(W0, Tier.GPU, None, blocks)
    num_blocks = index.statistics().num_blocks
    assert 370_000 < num_blocks < 500_000
    assert index.digest(W0).num_blocks == num_blocks
    assert index.match(blocks)[W0].gpu == num_blocks
    index.remove(W0, Tier.GPU, blocks[1_000:])
    assert index.store(W0, Tier.GPU, int(blocks[999]), blocks[-1_000:]).num_stored == 1_000
    capped = RadixIndex(segment_bits=1, max_blocks=100_000)
    assert capped.apply(W0, [Stored(blocks.tobytes())]).num_stored == 500_000
    assert capped.statistics().num_blocks <= 100_000
    assert len(RadixIndex(max_blocks=100_000_000).segments) == 512
