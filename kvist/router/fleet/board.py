"""Numbers that the router's processes share: a table with a row for each front and a column for each rank of the fleet.

    whole board     how many columns were ever in use; a hash of each column's rank, 0 if it is free; the rows
    row             one cell for the front itself, and one for each column; what priced policies know
    cell            up to eight numbers, of eight bytes each; `RankField` and `FrontField` say which
    for prices      work of each column, and prompts in flight (`kvist.router.policy`)
    queues          how many requests wait for the models of each number
    tenants         what they have in flight and may still ask for (`kvist.router.tenants.rows`)

Other routers (`replicas`) have rows behind those of the fronts, which the keeper writes when it receives their
summaries. Only its front writes to a row; a reader takes the sum, or the maximum, of a cell over all rows, which is
what a single process would have counted. A request changes several numbers, each at once, and a reader may see some of
them before the others: its decision then counts one request more or less, and the next one counts right. Only the
keeper assigns columns. The memory outlives each of these processes,
but not the router; a row is cleared before another process takes it over.
"""

from __future__ import annotations

import mmap
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.router.policy.in_flight import NUM_SLOTS, SLOT
from kvist.router.policy.work import LEARNT, LEARNT_S, NUM_FIELDS, learnt_of
from kvist.router.tenants.rows import ROW_WORDS as TENANT_ROW_WORDS

MAX_FRONTS = 64
MAX_COLUMNS = 1 << 14
NUM_QUEUES = 1 << 12
"""Models whose numbers are equal modulo this share one counter, and so the bound of a queue."""
_WORD, _CELL_WORDS = 8, 8
_HASHES_AT = 64
_ROWS_AT = _HASHES_AT + MAX_COLUMNS * _WORD
_ROW = np.dtype(
    [
        ("cells", "i8", (1 + MAX_COLUMNS, _CELL_WORDS)),
        ("work", "f8", (NUM_FIELDS, MAX_COLUMNS)),
        ("in_flight", SLOT, NUM_SLOTS),
        ("queues", "i8", NUM_QUEUES),
        ("tenants", "i8", TENANT_ROW_WORDS),
    ]
)
"""The parts of a row, in the order of the table above; `cells` begins with the front's own."""
_ROW_WORDS = _ROW.itemsize // _WORD
TENANTS_WORD = _ROW_WORDS - TENANT_ROW_WORDS
QUEUES_WORD = TENANTS_WORD - NUM_QUEUES


class RankField(IntEnum):
    """The numbers in a rank's cell: its load by one front (`kvist.router.fleet.load`); the last is a float."""

    RUNNING = 0
    PREFILL = 1
    ENDED = 2
    ANSWERED = 3
    LAST_BYTE_AT = 4


class FrontField(IntEnum):
    """The numbers in a front's own cell; floats from HEAD_SINCE on.

    HEAD is the number of the model that its first waiting request is for, 0 if none waits; ALIVE_AT is when it last
    wrote that.
    """

    LISTENING = 0
    RUNNING = 1
    DISPATCHED = 2
    HEAD = 3
    HEAD_PRIORITY = 4
    HEAD_SINCE = 5
    ALIVE_AT = 6
    HEAD_START = 7


def board_bytes(num_rows: int) -> int:
    """Return the size of a board with so many rows; its memory is only taken as it is written to."""
    return _ROWS_AT + num_rows * _ROW.itemsize


def clear_row(memory: mmap.mmap, row: int) -> None:
    """Clear the row of a front, or of another router, that is gone."""
    start = _ROWS_AT + row * _ROW.itemsize
    memory[start : start + _ROW.itemsize] = bytes(_ROW.itemsize)


class LoadBoard:
    """One process's view of the board. A front may write to its own row only."""

    def __init__(
        self,
        memory: mmap.mmap | None = None,
        *,
        num_fronts: int = 1,
        num_replicas: int = 0,
        names_columns: bool = True,
    ) -> None:
        """Use shared `memory`, of `board_bytes` for all rows; by default a board of this process alone.

        Only a process that `names_columns`, the keeper, gives ranks columns; the others look them up.
        """
        num_rows = num_fronts + num_replicas
        memory = mmap.mmap(-1, board_bytes(num_rows)) if memory is None else memory
        self.num_fronts, self.num_rows, self._names_columns = num_fronts, num_rows, names_columns
        self.memory = memory
        self.ints, self.floats = memoryview(memory).cast("q"), memoryview(memory).cast("d")
        start = _ROWS_AT // _WORD
        self.row_starts = range(start, start + num_rows * _ROW_WORDS, _ROW_WORDS)
        """Where each row begins in `ints` and `floats`, with the front's own cell; other routers' rows come last."""
        self._hashes: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, MAX_COLUMNS, _HASHES_AT)
        rows = np.frombuffer(memory, _ROW, num_rows, _ROWS_AT)
        self.work: NDArray[np.float64] = rows["work"]
        self.in_flight: NDArray[np.void] = rows["in_flight"]
        self.queues: NDArray[np.int64] = rows["queues"]
        self.cell_ints: NDArray[np.int64] = rows["cells"]
        self.cell_floats = self.cell_ints.view(float)
        """The same memory as `cell_ints`."""
        self.saved_speeds: dict[WorkerRank, tuple[float, float]] = {}
        """What `learnt_speeds` returns first for a rank that gets a column from now on."""
        self.columns: dict[WorkerRank, int] = {}
        """Those that this process has looked up."""

    def cells(self, target: WorkerRank) -> range | None:
        """Return where the cells of a rank begin, one for each row; None while it has no column."""
        column, rows = self.column(target), self.row_starts
        if column is None:
            return None
        offset = (1 + column) * _CELL_WORDS
        return range(rows.start + offset, rows.stop + offset, rows.step)

    def column(self, target: WorkerRank) -> int | None:
        """Return the column of a rank; the keeper assigns one if there is none yet, a front returns None then."""
        column = self.columns.get(target)
        if column is None:
            rank_hash = xxh3_64_intdigest(f"{target.rank} {target.worker}".encode()) | 1
            column = next(iter(np.flatnonzero(self._hashes == rank_hash).tolist()), None)
            if column is None and self._names_columns:
                column = self._assign_column(target, rank_hash)
            if column is not None:
                self.columns[target] = column
        return column

    def learnt_speeds(self) -> dict[WorkerRank, tuple[float, float]]:
        """Return the seconds that each rank took for what it computed, and how much that was, in units of work."""
        seconds, work = learnt_of(self.work[:, :, [*self.columns.values()]])
        return {target: (float(seconds[idx]), float(work[idx])) for idx, target in enumerate(self.columns) if work[idx]}

    def forget(self, worker: str) -> None:
        """Free the columns of a worker's ranks; each is assigned anew once no request runs there."""
        for target in [target for target in self.columns if target.worker == worker]:
            column = self.columns.pop(target)
            if self._names_columns:
                self._hashes[column] = 0

    def _assign_column(self, target: WorkerRank, rank_hash: int) -> int:
        num_used, running = self.ints[0], self.cell_ints[:, 1:, RankField.RUNNING]
        free = np.flatnonzero((self._hashes[:num_used] == 0) & ~running[:, :num_used].any(0))
        if len(free):
            column = int(free[0])
            self.cell_ints[:, 1 + column] = 0
            self.work[:, :, column] = 0.0
            self.in_flight["until_s"][self.in_flight["rank"] == column] = 0.0
        else:
            column = num_used
            if column == MAX_COLUMNS:
                raise InvalidValueError("ranks", column + 1, f"at most {MAX_COLUMNS} in the whole fleet")
            self.ints[0] += 1
        if (learnt := self.saved_speeds.get(target)) is not None:  # no front knows of the column yet
            self.work[0, [LEARNT_S, LEARNT], column] = learnt
        self._hashes[column] = rank_hash
        return column
