"""Memory of tables: reserved at its greatest size, and taken a page at a time as it is written to."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from kvist.radix.compiled.layout import CORE, ROW, SEGMENT, Records

CORE_BYTES = -(-CORE.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
"""Before the segments of an index."""
_BLOCKS_A_SEGMENT = 300_000
_ROWS_AT = int(SEGMENT.fields["rows"][1])  # type: ignore[index]


def segment_bits_for(num_blocks: int) -> int:
    """Return the binary logarithm of how many segments so many blocks need, and 8 at least."""
    return max(8, (num_blocks // _BLOCKS_A_SEGMENT).bit_length())


def index_bytes(segment_bits: int) -> int:
    """Return how much memory is to be reserved for an index of `2**segment_bits` segments."""
    return CORE_BYTES + (SEGMENT.itemsize << segment_bits)


def reserved(size_bytes: int) -> mmap.mmap:
    """Return private memory of zeros that is taken from the system a page at a time, as it is written to."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a table begins with a page in each segment
    return memory


def reserved_array(dtype: np.dtype[Any], length: int) -> Records:
    """Return an array of zeros in such memory."""
    return np.frombuffer(reserved(dtype.itemsize * length), dtype, length)


def table_bytes(segments: Records) -> int:
    """Return how much memory the segments of a table take."""
    rooms = segments["room"]
    return int(rooms.sum()) * ROW.itemsize + int((rooms > 0).sum()) * _ROWS_AT
