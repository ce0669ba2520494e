"""Rows of a snapshot in a temporary file: it comes back, places are used again, a full disk stops nothing."""

from __future__ import annotations

import errno
import os
import random
from typing import Any

import numpy as np
import pytest

from kvist.errors import KvistError
from kvist.events import Tier, WorkerRank
from kvist.radix import RadixIndex, SnapshotLostError, _snapshot, _spill
from kvist.radix._spill import Spill
from kvist.radix.memory import Heap

W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)
BLOCKS = np.random.default_rng(5).integers(1, 2**63, 3_000, dtype=np.uint64)


class Disk:
    """Stands for `os` where rows are written and read; it can be full, slow to take, or broken."""

    def __init__(self) -> None:
        self.room_bytes: int | None = None
        self.most_bytes = 1 << 30
        self.is_broken = False
        self.descriptors: set[int] = set()

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        size = min(len(data), self.most_bytes)
        if self.room_bytes is not None:
            size = min(size, self.room_bytes)
            if not size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room_bytes -= size
        self.descriptors.add(descriptor)
        return os.pwrite(descriptor, data[:size], offset)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, buffers, offset)

    def pread(self, descriptor: int, num_bytes: int, offset: int) -> bytes:
        return os.pread(descriptor, num_bytes, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(_spill, "os", disk)
    return disk


@pytest.fixture
def heap() -> Heap:
    return Heap()


def rows_of(heap: Heap, first: int, num_rows: int) -> int:
    """Return the address of rows that refer to no set and have numbers for keys."""
    address = heap.allocate(max(1, num_rows) * 16)
    with heap.view(address) as view:
        words = np.frombuffer(view, np.uint64)
        words[: num_rows * 2 : 2] = np.arange(first, first + num_rows)
        del words
    return address


def read(heap: Heap, spill: Spill, number: int) -> list[int]:
    address, num_rows = spill.read(number)
    if not num_rows:
        return []
    with heap.view(address) as view:
        return np.frombuffer(view, np.uint64)[: num_rows * 2 : 2].tolist()


def test_rows_come_back_in_order_and_their_places_are_used_again(
    heap: Heap, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spill, "_BLOCK_ROWS", 4)
    disk.most_bytes = 33  # a part at a time
    rng, spill, waiting, most = random.Random(1), Spill(heap), {n: [] for n in range(5)}, 0
    key = 0
    for _ in range(400):
        number = rng.randrange(5)
        if waiting[number] or rng.random() < 0.5:
            rows = read(heap, spill, number)
            assert rows == waiting[number][: len(rows)]
            assert bool(rows) == bool(waiting[number])
            num_taken = rng.randint(0, len(rows))
            spill.take(number, num_taken)
            del waiting[number][:num_taken]
        else:
            num_rows = rng.randint(1, 30)
            address = rows_of(heap, key, num_rows)
            spill.put(number, address, num_rows)
            heap.free(address)
            waiting[number] = list(range(key, key + num_rows))
            key += num_rows
        assert len(spill) == sum(map(len, waiting.values()))
        assert [spill.num_rows(number) for number in range(5)] == [len(rows) for rows in waiting.values()]
        most = max(most, sum(-(-len(rows) // 4) + 1 for rows in waiting.values()))
    (descriptor,) = disk.descriptors
    assert key * 16 > 4 * os.fstat(descriptor).st_size, "most of it was written where others were"
    assert os.fstat(descriptor).st_size <= most * 4 * 16
    assert os.fstat(descriptor).st_nlink == 0
    spill.close()
    spill.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert heap.size_bytes == 0


def test_a_full_disk_leaves_in_the_queue_what_was_written(
    heap: Heap, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spill, "_BLOCK_ROWS", 4)
    spill, address = Spill(heap), rows_of(heap, 0, 10)
    disk.room_bytes = 100
    with pytest.raises(OSError, match="No space left"):
        spill.put(7, address, 10)
    assert read(heap, spill, 7) == [0, 1, 2, 3]
    assert spill.num_rows(7) == len(spill) == 4
    with pytest.raises(OSError, match="No space left"):
        spill.put(8, address, 3)
    assert spill.num_rows(8) == 0
    assert read(heap, spill, 8) == []
    disk.room_bytes = None
    spill.put(8, address, 3)
    assert read(heap, spill, 8) == [0, 1, 2]


def filled(**options: Any) -> RadixIndex:
    """Return an index of chains of 30 that two workers hold, the second one in part: sets, and single holders."""
    index = RadixIndex(segment_bits=3, **options)
    for first in range(0, len(BLOCKS), 30):
        index.store(W0, Tier.GPU, None, BLOCKS[first : first + 30])
        index.store(W1, Tier.GPU, None, BLOCKS[first : first + 20])
    return index


def sweep_all(index: RadixIndex) -> None:
    while index.sweep():
        pass


@pytest.mark.parametrize("room_bytes", [0, 5_000, 20_000])
def test_a_snapshot_that_a_full_disk_ends_says_so_and_the_index_goes_on(disk: Disk, room_bytes: int) -> None:
    index = filled()
    size_bytes = index.statistics().size_bytes
    snapshot = index.snapshot(100)
    told = [next(snapshot)]
    disk.room_bytes = room_bytes
    index.remove(W0, Tier.GPU, BLOCKS)
    index.check_invariants()
    assert index.digest(W0).num_blocks == 0
    for _ in range(2):
        with pytest.raises(SnapshotLostError, match="No space left on device") as caught:
            told += snapshot
    assert isinstance(caught.value, KvistError)
    assert "No space left" in caught.value.reason
    sweep_all(index)
    index.check_invariants()
    assert index.statistics().size_bytes < size_bytes
    disk.room_bytes = None
    with index.snapshot() as second:
        index.remove_worker("w1")
        sweep_all(index)
        assert sum(len(chunk.hashes) for chunk in second) == 2_000
    sweep_all(index)
    index.check_invariants()


def test_a_snapshot_that_cannot_be_read_back_says_so_and_costs_only_memory(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_snapshot, "_MAX_COLLECTED", 500)
    index = filled()
    snapshot = index.snapshot(100)
    next(snapshot)
    index.remove(W0, Tier.GPU, BLOCKS)
    disk.is_broken = True
    with pytest.raises(SnapshotLostError, match="Input/output error"):
        list(snapshot)
    sweep_all(index)
    assert "rows=3000" in caplog.text
    assert index.match(BLOCKS[:20]).depths.tolist() == [[20] * 4]
    assert sum(len(chunk.hashes) for chunk in index.snapshot()) == 2_000


def test_what_is_copied_while_depths_are_counted_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_snapshot, "_MAX_VISITS", 1)
    monkeypatch.setattr(_snapshot, "_MAX_COLLECTED", 700)
    for num_steps in range(12):
        index = filled()
        with index.snapshot(100) as snapshot:
            chunks = [next(snapshot) for _ in range(num_steps)]
            index.remove(W0, Tier.GPU, BLOCKS)
            index.check_invariants()
            chunks += snapshot
        told = [block for chunk in chunks for block in chunk.hashes.tolist()]
        assert sorted(told) == sorted(BLOCKS.tolist())
        depths = [depth for chunk in chunks for depth in chunk.depths.tolist()]
        assert depths == sorted(depths)


def test_the_file_lies_where_tmpdir_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, heap: Heap) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(OSError, match="absent"):
        Spill(heap).put(0, rows_of(heap, 0, 1), 1)
    assert heap.size_bytes <= 4096


def test_a_forgotten_snapshot_leaves_neither_memory_nor_a_file(disk: Disk) -> None:
    index = filled()
    sweep_all(index)
    size_bytes = index.statistics().size_bytes
    snapshot = index.snapshot(100)
    next(snapshot)
    index.store(W1, Tier.HOST, None, BLOCKS[:30])
    del snapshot
    sweep_all(index)
    index.check_invariants()
    assert index.statistics().size_bytes <= size_bytes + 4096 * 8
    (descriptor,) = disk.descriptors
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
