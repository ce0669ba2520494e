"""Interned holder sets live in slabs of equal records; slabs and hash buckets come and go one page at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.radix import compiled
from kvist.radix._slots import MAX_SLOTS
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap

_SLAB_BYTES = 256 * 1024
_OVERREAD_BYTES = 64  # a match reads dense sets in vectors
_BUCKET_PAGE_BYTES = layout.BUCKETS_PER_PAGE * 4
_MAX_SLABS = 1 << (31 - layout.RECORD_BITS)
_SLAB = np.dtype(
    [("address", "i8")]
    + [(name, "u4") for name in ("record_bytes", "capacity", "used", "fresh", "free", "previous", "next", "class")]
)
_CLASS = np.dtype([("record_bytes", "u4"), ("head", "u4")])


def _record_sizes() -> list[int]:
    """Return the record sizes: payloads of 8 bytes up to a dense set of all slots, each at most half as large again."""
    payloads = [8]
    while payloads[-1] < MAX_SLOTS // 2:
        payloads += [payloads[-1] * 3 // 2 // 4 * 4, payloads[-1] * 2]
    return [layout.RECORD_HEADER_BYTES + payload for payload in payloads]


class SetArena:
    """Owns the memory of the holder sets; the compiled code finds it through the control block."""

    def __init__(self, heap: Heap, control: memoryview) -> None:
        self._heap = heap
        self._control = control
        self._num_slab_ids = 1  # slab 0 stands for "none"
        self._free_slab_ids: list[int] = []
        control[layout.SLABS >> 3] = heap.allocate(64 * layout.SLAB_BYTES)
        sizes = _record_sizes()
        control[layout.CLASSES >> 3] = address = heap.allocate(len(sizes) * layout.CLASS_BYTES)
        self.classes = np.frombuffer(heap.view(address), _CLASS, len(sizes))
        self.classes["record_bytes"] = sizes
        control[layout.TRANSITIONS >> 3] = heap.allocate(
            layout.NUM_TRANSITIONS * layout.TRANSITION_BYTES + layout.NUM_STEPS * layout.STEP_BYTES
        )
        control[layout.BUCKETS >> 3] = address = heap.allocate(8)
        self._bucket_pages(1)[0] = heap.allocate(_BUCKET_PAGE_BYTES)
        control[layout.NUM_BUCKETS >> 3] = layout.BUCKETS_PER_PAGE
        control[layout.NEXT_STAMP >> 3] = 1

    def slabs(self) -> NDArray[np.void]:
        """Return a view of the slab directory; drop it before a slab is added."""
        return np.frombuffer(self._heap.view(self._control[layout.SLABS >> 3]), _SLAB, self._num_slab_ids)

    def _bucket_pages(self, num_pages: int) -> memoryview:
        return self._heap.view(self._control[layout.BUCKETS >> 3]).cast("q")[:num_pages]

    def add_slab(self, size_class: int) -> None:
        """Provide records of one class, and buckets for them; O(one page of buckets)."""
        record_bytes = int(self.classes["record_bytes"][size_class])
        capacity = min(1 << layout.RECORD_BITS, max(4, _SLAB_BYTES // record_bytes))
        slab_id = self._free_slab_ids.pop() if self._free_slab_ids else self._new_slab_id()
        slab = self.slabs()[slab_id]
        slab["address"] = self._heap.allocate(capacity * record_bytes + _OVERREAD_BYTES)
        slab["record_bytes"], slab["capacity"], slab["class"] = record_bytes, capacity, size_class
        slab["used"] = slab["fresh"] = slab["free"] = slab["previous"] = slab["next"] = 0
        self.classes["head"][size_class] = slab_id  # asked for only while the class has no slab with room
        self._control[layout.NUM_EMPTY_SLABS >> 3] += 1
        num_buckets = self._control[layout.NUM_BUCKETS >> 3]
        if self._control[layout.NUM_SETS >> 3] + capacity > 2 * num_buckets:
            self._split_buckets(num_buckets // layout.BUCKETS_PER_PAGE)

    def _new_slab_id(self) -> int:
        if self._num_slab_ids == _MAX_SLABS:
            raise MemoryError("the index cannot address more holder sets")
        self._num_slab_ids += 1
        self._fit(layout.SLABS, self._num_slab_ids * layout.SLAB_BYTES)
        return self._num_slab_ids - 1

    def _fit(self, field: int, size_bytes: int) -> None:
        """Double a directory that has become too small."""
        address = self._control[field >> 3]
        if self._heap.capacity_bytes(address) < size_bytes:
            self._control[field >> 3] = self._heap.resize(address, 2 * size_bytes)

    def _split_buckets(self, num_pages: int) -> None:
        self._fit(layout.BUCKETS, (num_pages + 1) * 8)
        self._bucket_pages(num_pages + 1)[num_pages] = self._heap.allocate(_BUCKET_PAGE_BYTES)
        compiled.split_buckets(self._control[layout.SELF >> 3])

    def release_spare(self) -> None:
        """Give back the slabs that hold no set, and one page of buckets if most are empty."""
        if self._control[layout.NUM_EMPTY_SLABS >> 3]:
            slabs = self.slabs()
            for slab_id in np.flatnonzero((slabs["used"] == 0) & (slabs["address"] != 0)).tolist():
                self._release_slab(slabs, slab_id)
            self._control[layout.NUM_EMPTY_SLABS >> 3] = 0
            # No remembered transition may lead into memory that is gone.
            transitions = self._control[layout.TRANSITIONS >> 3]
            self._heap.view(transitions)[:] = bytes(self._heap.capacity_bytes(transitions))
        if self.has_spare_buckets:
            num_pages = self._control[layout.NUM_BUCKETS >> 3] // layout.BUCKETS_PER_PAGE
            compiled.merge_buckets(self._control[layout.SELF >> 3])
            self._heap.free(self._bucket_pages(num_pages)[num_pages - 1])

    @property
    def has_spare_buckets(self) -> bool:
        """Whether a page of buckets is better given back."""
        num_buckets = self._control[layout.NUM_BUCKETS >> 3]
        is_sparse: bool = self._control[layout.NUM_SETS >> 3] < num_buckets // 2
        return is_sparse and num_buckets > layout.BUCKETS_PER_PAGE

    def _release_slab(self, slabs: NDArray[np.void], slab_id: int) -> None:
        slab = slabs[slab_id]
        before, after = int(slab["previous"]), int(slab["next"])
        if before:
            slabs["next"][before] = after
        else:
            self.classes["head"][int(slab["class"])] = after
        if after:
            slabs["previous"][after] = before
        self._heap.free(int(slab["address"]))
        slab["address"] = 0
        self._free_slab_ids.append(slab_id)
