"""Tables beside the index: keys and values on the same rows, grown by their owner, in little memory at every size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvist.radix import compiled
from kvist.radix.compiled import layout
from kvist.radix.compiled.intrinsics import get32, get64, getu64, put32
from kvist.radix.compiled.jit import jit_for
from kvist.radix.compiled.table import delete_row, find, home_of, insert_row, segment_of
from kvist.radix.memory import Heap
from kvist.radix.tables import DENSE, SegmentTable

INPUT, MULTIPLIER = layout.INPUT, layout.MULTIPLIER
jit = jit_for(Path(__file__), Path(compiled.__file__).parent)


@jit("i8(i8,i8,i8,i8)", is_entry=True)
def put_all(control, keys, first, end):  # type: ignore[no-untyped-def]
    """Give each key its index, and one more, as value; return the index where help is needed, or the end."""
    for index in range(first, end):
        key = getu64(keys + index * 8) * getu64(control + MULTIPLIER)
        segment = segment_of(control, key)
        home = home_of(control, segment, key)
        row = find(home, key)
        if row:
            put32(row, index + 1)
        elif insert_row(control, segment, home, key, index + 1) < 0:
            return index
    return end


@jit("i8(i8,u8)", is_entry=True)
def get(control, number):  # type: ignore[no-untyped-def]
    key = number * getu64(control + MULTIPLIER)
    row = find(home_of(control, segment_of(control, key), key), key)
    return get32(row) if row else 0


@jit("void(i8,u8)", is_entry=True)
def drop(control, number):  # type: ignore[no-untyped-def]
    key = number * getu64(control + MULTIPLIER)
    segment = segment_of(control, key)
    home = home_of(control, segment, key)
    delete_row(control, segment, home, find(home, key))


@jit("i8(i8)", is_entry=True)
def num_rows(control):  # type: ignore[no-untyped-def]
    return get64(control + layout.NUM_ROWS)


class Map:
    """A table that owns its control block, as engine maps do."""

    def __init__(self, heap: Heap, bits: int, scratch: Heap | None = None) -> None:
        self.heap = heap
        self.address = heap.allocate(layout.TABLE_BYTES)
        self.control = heap.view(self.address).cast("q")
        self.table = SegmentTable(heap, self.control, self.address, DENSE, bits=bits, scratch=scratch)
        self.num_grown = 0

    def put(self, keys: Any, first: int, end: int) -> None:
        while (first := put_all(self.address, keys.ctypes.data, first, end)) < end:
            self.table.grow(self.control[layout.NEED_ARG >> 3])
            self.num_grown += 1

    def close(self) -> None:
        self.table.free()
        self.control.release()
        self.heap.free(self.address)


@pytest.fixture
def make_map() -> Callable[..., Map]:
    return lambda bits=4: Map(Heap(), bits)


def random_keys(num_keys: int) -> Any:
    return np.random.default_rng(1).integers(0, 2**64, num_keys, dtype=np.uint64)


@pytest.mark.parametrize("bits", [0, 1, 4])
def test_a_table_answers_as_a_dict_while_it_grows_loses_and_shrinks(make_map: Callable[..., Map], bits: int) -> None:
    numbers, keys = make_map(bits), random_keys(20_000)
    numbers.put(keys, 0, len(keys))
    numbers.put(keys, 5, 10)
    assert num_rows(numbers.address) == 20_000
    assert all(get(numbers.address, key) == index + 1 for index, key in enumerate(keys.tolist()))
    numbers.heap.free_scratch()
    full_bytes = numbers.heap.size_bytes
    for key in keys[2_000:].tolist():
        drop(numbers.address, key)
    for index in numbers.table.shrinkable():
        numbers.table.shrink(index)
    numbers.heap.free_scratch()
    assert numbers.heap.size_bytes < full_bytes / 3
    assert [get(numbers.address, key) for key in keys.tolist()] == [*range(1, 2_001), *[0] * 18_000]


def test_an_entry_takes_at_most_16_bytes_at_every_size(make_map: Callable[..., Map]) -> None:
    numbers, keys, at = make_map(), random_keys(1_000_000), 0
    sizes = []
    for end in (100_000 * 1.05 ** np.arange(48)).astype(int).tolist():
        numbers.put(keys, at, end)
        numbers.heap.free_scratch()
        at = end
        sizes.append(numbers.heap.size_bytes / end)
    assert np.mean(sizes) < 15.5
    assert max(sizes) < 16.4


def test_segments_that_fill_together_grow_together_and_stay_as_large(make_map: Callable[..., Map]) -> None:
    numbers, keys, at = make_map(6), random_keys(40_000), 0
    for end in (2_000 * 1.01 ** np.arange(300)).astype(int).tolist():
        numbers.put(keys, at, end)
        assert numbers.table.shrinkable() == []
        at = end
    assert min(numbers.table.num_rows(index) for index in range(64)) > 600  # so each has grown after it began
    assert numbers.num_grown < 2 * 64


def test_a_table_may_grow_with_the_scratch_of_another_heap() -> None:
    own, other, keys = Heap(), Heap(), random_keys(5_000)
    numbers = Map(own, 3, scratch=other)
    numbers.put(keys, 0, len(keys))
    assert other.size_bytes > 0
    assert all(get(numbers.address, key) == index + 1 for index, key in enumerate(keys.tolist()))
    numbers.close()
    assert own.size_bytes == 0


def test_tables_of_one_heap_share_its_scratch_and_leave_nothing_behind() -> None:
    heap, keys = Heap(), random_keys(5_000)
    maps = [Map(heap, 3) for _ in range(20)]
    for each in maps:
        each.put(keys, 0, len(keys))
    heap.free_scratch()
    assert heap.size_bytes < 20 * 5_000 * 24
    for each in maps:
        each.close()
    assert heap.size_bytes == 0
