"""Tables answer as a dict does while they grow, lose rows and shrink, in little memory at every size."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from kvist.indexer.compiled.engine_blocks import get, put
from kvist.radix.compiled.layout import HEAD, ROW, SEGMENT
from kvist.radix.compiled.table import resize
from kvist.radix.memory import needed_room, reserved_array


class Map:
    """A table of numbers, as an engine's names are."""

    def __init__(self, bits: int = 4, multiplier: int = 0x9E37_79B9_7F4A_7C15) -> None:
        self.segments = reserved_array(SEGMENT, 1 << bits)
        self.head = np.zeros(1, HEAD)
        self.head["multiplier"], self.head["bits"] = multiplier, bits

    def __setitem__(self, key: int, value: int) -> None:
        put(self.head, self.segments, 0, np.array([key], np.uint64), np.array([value], np.uint64))

    def __getitem__(self, key: int) -> int:
        return get(self.head, self.segments, key)

    def __delitem__(self, key: int) -> None:
        self[key] = 0

    def __len__(self) -> int:
        return int(self.head["num_rows"][0])

    @property
    def size_bytes(self) -> int:
        rooms = self.segments["room"]
        return int(rooms.sum()) * ROW.itemsize + int((rooms > 0).sum()) * SEGMENT.fields["rows"][1]


def random_keys(num_keys: int) -> Any:
    return np.random.default_rng(1).integers(0, 2**64, num_keys, dtype=np.uint64)


@pytest.mark.parametrize("bits", [0, 1, 4])
def test_a_table_answers_as_a_dict_while_it_grows_loses_and_shrinks(bits: int) -> None:
    numbers, keys = Map(bits), random_keys(20_000).tolist()
    for value, key in enumerate(keys, 1):
        numbers[key] = value
    for value, key in enumerate(keys[5:10], 6):
        numbers[key] = value
    assert len(numbers) == 20_000
    assert all(numbers[key] == value for value, key in enumerate(keys, 1))
    full_bytes = numbers.size_bytes
    for key in keys[2_000:]:
        del numbers[key]
    for number, segment in enumerate(numbers.segments):
        resize(numbers.head, numbers.segments, number, needed_room(int(segment["count"])))
    assert numbers.size_bytes < full_bytes / 3
    assert [numbers[key] for key in keys] == [*range(1, 2_001), *[0] * 18_000]


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_share_places_come_and_go_at_both_ends_of_a_segment(seed: int) -> None:
    numbers, expected, rng = Map(0, multiplier=1), dict[int, int](), np.random.default_rng(seed)
    ends = [0, 1 << 40, (1 << 64) - (1 << 40)]  # keys are hashes: searches begin at the first place, and at the last
    for step in range(4_000):
        key = ends[int(rng.integers(0, 3))] + int(rng.integers(0, 60))
        if rng.random() < 0.45:
            del numbers[key]
            expected.pop(key, None)
        else:
            numbers[key] = expected[key] = step + 1
        assert len(numbers) == len(expected)
        if step % 100 == 0:
            assert all(numbers[end + n] == expected.get(end + n, 0) for end in ends for n in range(60))


def test_a_row_takes_at_most_27_bytes_and_24_on_average_at_every_size() -> None:
    numbers, keys, at = Map(), random_keys(250_000).tolist(), 0
    sizes = []
    for end in (50_000 * 1.05 ** np.arange(33)).astype(int).tolist():
        for value, key in enumerate(keys[at:end], 1):
            numbers[key] = value
        at = end
        sizes.append(numbers.size_bytes / end)
    assert np.mean(sizes) < 24.5
    assert max(sizes) < 27


def test_a_segment_that_is_full_takes_all_its_pages() -> None:
    numbers = Map(0)
    for key in random_keys(30_000).tolist():
        numbers[key] = 1
    assert (SEGMENT.fields["rows"][1] + 16 * int(numbers.segments["room"][0])) % mmap.PAGESIZE == 0
