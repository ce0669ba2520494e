"""All memory of an index comes from one allocator, and goes back to the operating system when it is freed.

Buffers are whole pages of private, anonymous memory: they can grow in place, cost nothing until touched, and leave no
holes in the heap when thousands of them grow side by side.
"""

from __future__ import annotations

import ctypes
import mmap

PAGE_BYTES = mmap.PAGESIZE


def page_rounded(size_bytes: int) -> int:
    """Return the size in whole pages, at least one."""
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


class Heap:
    """Hands out zeroed buffers by address and accounts for every byte of them; several tables may share one."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._scratch: int | None = None
        self.size_bytes = 0
        self.peak_bytes = 0

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a new buffer of at least `size_bytes`, all zero."""
        size_bytes = page_rounded(size_bytes)
        return self._adopt(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def resize(self, address: int, size_bytes: int) -> int:
        """Grow or shrink a buffer, keeping its contents; return its new address. New bytes are zero."""
        buffer = self._maps.pop(address)
        self.size_bytes -= len(buffer)
        try:
            buffer.resize(page_rounded(size_bytes))
        finally:
            address = self._adopt(buffer)  # as it was, if there was no memory for more
        return address

    def free(self, address: int) -> None:
        """Give a buffer back to the operating system."""
        buffer = self._maps.pop(address)
        self.size_bytes -= len(buffer)
        buffer.close()

    def scratch(self, size_bytes: int) -> int:
        """Return the address of a buffer for use until the next call, with any contents; it is kept for that."""
        if self._scratch is None:
            self._scratch = self.allocate(size_bytes)
        elif size_bytes > self.capacity_bytes(self._scratch):
            self._scratch = self.resize(self._scratch, size_bytes * 5 // 4)
        return self._scratch

    def free_scratch(self) -> None:
        """Give the scratch buffer back, until it is needed again."""
        if self._scratch is not None:
            self.free(self._scratch)
            self._scratch = None

    def capacity_bytes(self, address: int) -> int:
        """Return the size of a buffer, in whole pages."""
        return len(self._maps[address])

    def view(self, address: int) -> memoryview:
        """Return the bytes of a buffer; release the view before the buffer is resized or freed."""
        return memoryview(self._maps[address])

    def _adopt(self, buffer: mmap.mmap) -> int:
        first_byte = ctypes.c_char.from_buffer(buffer)
        address = ctypes.addressof(first_byte)
        del first_byte  # an exported pointer would forbid resizing
        self._maps[address] = buffer
        self.size_bytes += len(buffer)
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        return address
