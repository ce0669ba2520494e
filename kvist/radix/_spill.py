"""Rows that a snapshot has still to tell wait in a temporary file, so that they take no memory.

The file has no name, and lies in the directory that TMPDIR chooses. Blocks of it whose rows were taken are written to
again. Rows refer to their sets until they are taken or released, wherever they wait.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

import numpy as np
from numpy.typing import NDArray

from kvist.radix import compiled
from kvist.radix.compiled import layout
from kvist.radix.memory import Heap

_logger = logging.getLogger(__name__)

_BLOCK_ROWS = 4096
_ROW_BYTES = layout.LOOSE_ROW_BYTES
_WORDS_A_ROW = _ROW_BYTES // 4
_SET_WORD = 3


@dataclass(slots=True)
class _Queue:
    """Rows in the order they were put: the blocks they fill, and how many of the first one were taken."""

    blocks: deque[int] = field(default_factory=deque)
    num_taken: int = 0
    num_rows: int = 0


class Spill:
    """Queues of loose rows, by number, in one file that is there while it is needed."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._queues: dict[int, _Queue] = {}
        self._file: IO[bytes] | None = None
        self._num_blocks = 0
        self._free_blocks: list[int] = []
        self._buffer: int | None = None  # of one block

    def __len__(self) -> int:
        """Return the number of rows that wait."""
        return sum(queue.num_rows for queue in self._queues.values())

    def num_rows(self, number: int) -> int:
        """Return how many rows wait in a queue."""
        return self._queues[number].num_rows if number in self._queues else 0

    def put(self, number: int, address: int, num_rows: int) -> None:
        """Let rows of a heap's buffer wait; raises OSError with the first `num_rows(number)` of them in the queue."""
        if not num_rows:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            self._buffer = self._heap.allocate(_BLOCK_ROWS * _ROW_BYTES)
        with self._heap.view(address) as rows:
            for start in range(0, num_rows, _BLOCK_ROWS):
                end = min(start + _BLOCK_ROWS, num_rows)
                if not self._free_blocks:
                    self._free_blocks.append(self._num_blocks)
                    self._num_blocks += 1
                with rows[start * _ROW_BYTES : end * _ROW_BYTES] as part:
                    _write(self._file.fileno(), part, self._free_blocks[-1] * _BLOCK_ROWS * _ROW_BYTES)
                queue = self._queues.setdefault(number, _Queue())
                queue.blocks.append(self._free_blocks.pop())
                queue.num_rows += end - start

    def read(self, number: int) -> tuple[int, int]:
        """Return the address and number of the next rows of a queue, until the next call; raises OSError."""
        queue = self._queues.get(number)
        if queue is None:
            return 0, 0
        num_rows = min(queue.num_rows, _BLOCK_ROWS - queue.num_taken)
        assert self._file is not None
        assert self._buffer is not None
        offset = (queue.blocks[0] * _BLOCK_ROWS + queue.num_taken) * _ROW_BYTES
        with self._heap.view(self._buffer) as buffer, buffer[: num_rows * _ROW_BYTES] as part:
            if os.preadv(self._file.fileno(), [part], offset) < len(part):
                raise OSError(errno.EIO, "the temporary file of a snapshot was cut short")
        return self._buffer, num_rows

    def take(self, number: int, num_rows: int) -> None:
        """Remove the next rows of a queue, no more than `read` gave."""
        if not num_rows:
            return
        queue = self._queues[number]
        queue.num_taken += num_rows
        queue.num_rows -= num_rows
        if queue.num_taken == _BLOCK_ROWS or queue.num_rows == 0:
            self._free_blocks.append(queue.blocks.popleft())
            queue.num_taken = 0
        if queue.num_rows == 0:
            del self._queues[number]

    def release(self, control: int, max_rows: int) -> int:
        """Take back the references of some rows, which are gone then; return how many."""
        number = next(iter(self._queues))
        try:
            address, num_rows = self.read(number)
        except OSError as error:
            _logger.error("holder sets stay in memory that nobody needs: %s rows=%d", error, len(self))
            self._queues.clear()
            return 0
        num_rows = min(num_rows, max_rows)
        compiled.release(control, address, num_rows)
        self.take(number, num_rows)
        return num_rows

    def set_ids(self) -> Iterator[NDArray[np.uint32]]:
        """Yield the sets that rows refer to; slow, for tests."""
        for queue in self._queues.values():
            assert self._file is not None
            first = queue.num_taken
            for block, left in zip(queue.blocks, range(first + queue.num_rows, 0, -_BLOCK_ROWS), strict=True):
                num_rows = min(left, _BLOCK_ROWS)
                data = os.pread(self._file.fileno(), num_rows * _ROW_BYTES, block * _BLOCK_ROWS * _ROW_BYTES)
                yield np.frombuffer(data, np.uint32)[_SET_WORD::_WORDS_A_ROW][first:]
                first = 0

    def close(self) -> None:
        """Give the file and the memory back. May be called again."""
        if self._file is not None and self._buffer is not None:
            self._file.close()
            self._heap.free(self._buffer)
            self._file = self._buffer = None

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True)
class Leftovers:
    """Rows that a closed snapshot collected, or copied, and did not tell."""

    heap: Heap
    collected: int
    first: int  # of those collected
    end: int
    spill: Spill

    def __bool__(self) -> bool:
        return self.first < self.end or len(self.spill) > 0

    def release(self, control: int, max_rows: int) -> int:
        """Take back the references of some rows; return how many."""
        num_rows = min(self.end - self.first, max_rows)
        if num_rows:
            self.end -= num_rows
            compiled.release(control, self.collected + self.end * _ROW_BYTES, num_rows)
        elif len(self.spill):
            num_rows = self.spill.release(control, max_rows)
        return num_rows

    def close(self) -> None:
        """Give all memory back."""
        self.heap.free(self.collected)
        self.spill.close()

    def set_ids(self) -> Iterator[NDArray[np.uint32]]:
        """Yield the sets that rows refer to; slow, for tests."""
        rows = np.frombuffer(self.heap.view(self.collected), np.uint32)[_SET_WORD::_WORDS_A_ROW]
        yield rows[self.first : self.end].copy()
        yield from self.spill.set_ids()


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write everything or raise OSError: a disk that fills up takes a part first."""
    num_written = 0
    while num_written < len(data):
        num_written += os.pwrite(descriptor, data[num_written:], offset + num_written)
