"""The state of tenants that the processes of a router share: each has a row, with a cell for each tenant it has served.

    RUNNING     running requests                                    the sum over all rows
    VERSION     grows with each write, in whichever row: of the following, those with the highest version count
    AT            when the tenant's buckets were last updated       0 if they never were
    REQUESTS      how many requests it had left then
    TOKENS        how many prompt tokens it had left then
    FINISH        the virtual time at which its last request from a queue finishes (`kvist.router.admission`)

A cell has the last five twice, and a write replaces the older ones, with their version 0 meanwhile: so nobody reads
half of a write, also if its process has died. A row begins with the virtual time of its process; the latest of all rows
counts. Only its process writes to a row; of two writes within a microsecond one may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from xxhash import xxh3_64_intdigest

NUM_PLACES = 1 << 13
_NUM_LOOKS = 16
"""A tenant's cell is within so many of its hashed place; if all are taken, it replaces a tenant without requests."""
_CELL_WORDS, _STATE_WORDS = 12, 5
ROW_WORDS = (1 + NUM_PLACES + _NUM_LOOKS) * _CELL_WORDS


class Field(IntEnum):
    """The words of a cell, up to its second state; those from AT on are floats."""

    TENANT = 0
    RUNNING = 1
    VERSION = 2
    AT = 3
    REQUESTS = 4
    TOKENS = 5
    FINISH = 6


_RUNNING, _VERSION, _AT = map(int, (Field.RUNNING, Field.VERSION, Field.AT))


class TenantRows:
    """The rows that begin at `starts` in memory, viewed as integers and as floats; only row `own` is written."""

    def __init__(self, ints: memoryview[int], floats: memoryview[float], starts: Sequence[int], own: int) -> None:
        self._ints, self._floats, self._starts, self._own = ints, floats, starts, starts[own]

    @property
    def virtual_time(self) -> float:
        """Return the virtual start of the request that was last taken from a queue."""
        return max(self._floats[start] for start in self._starts)

    def advance(self, virtual_time: float) -> None:
        """Advance the virtual time to this, unless it is later already."""
        self._floats[self._own] = max(self._floats[self._own], virtual_time)

    def num_running(self, tenant: str) -> int:
        """Return how many requests of the tenant are running, in all processes."""
        return sum(self._ints[cell + _RUNNING] for cell in self._cells(_number_of(tenant)))

    def count(self, tenant: str, num_running: int) -> None:
        """Add to the tenant's running requests in this process; negative for requests that end."""
        cell = self._own_cell(_number_of(tenant)) + _RUNNING
        self._ints[cell] = max(0, self._ints[cell] + num_running)

    def read(self, tenant: str) -> list[float]:
        """Return the tenant's AT, REQUESTS, TOKENS and FINISH, all 0 if it has no cell yet."""
        _, state = self._newest(_number_of(tenant))
        return state

    def write(self, tenant: str, first: Field, *values: float) -> None:
        """Change the tenant's state, from the field `first` on."""
        number = _number_of(tenant)
        version, state = self._newest(number)
        state[first - _AT : first - _AT + len(values)] = values
        place = min(_states_of(self._own_cell(number)), key=lambda each: self._ints[each + _VERSION])
        self._ints[place + _VERSION] = 0
        for field, value in enumerate(state, place + _AT):
            self._floats[field] = value
        self._ints[place + _VERSION] = version + 1

    def _newest(self, number: int) -> tuple[int, list[float]]:
        while True:
            places = [each for cell in self._cells(number) for each in _states_of(cell)]
            version, place = max([(self._ints[each + _VERSION], each) for each in places], default=(0, 0))
            if version == 0:
                return 0, [0.0] * 4
            state = [*self._floats[place + _AT : place + _AT + 4]]
            if self._ints[place + _VERSION] == version:  # else it was written twice meanwhile
                return version, state

    def _cells(self, number: int) -> list[int]:
        found = [self._find(start, number) for start in self._starts]
        return [cell for cell in found if cell is not None and self._ints[cell] == number]

    def _own_cell(self, number: int) -> int:
        ints, cell = self._ints, self._find(self._own, number)
        if cell is None:
            near = _near(self._own, number)
            cell = next((each for each in near if ints[each + _RUNNING] == 0), near[0])
        if ints[cell] != number:
            for field in range(_CELL_WORDS):
                ints[cell + field] = 0
            ints[cell] = number
        return cell

    def _find(self, start: int, number: int) -> int | None:
        """Return the tenant's cell in a row, or a free one; None where other tenants have all of its places."""
        for cell in _near(start, number):
            if self._ints[cell] in (number, 0):
                return cell
        return None


def _states_of(cell: int) -> tuple[int, int]:
    """Return from where a `Field` of each of the cell's states is counted."""
    return cell, cell + _STATE_WORDS


def _near(start: int, number: int) -> range:
    first = start + (1 + number % NUM_PLACES) * _CELL_WORDS
    return range(first, first + _NUM_LOOKS * _CELL_WORDS, _CELL_WORDS)


def _number_of(tenant: str) -> int:
    return xxh3_64_intdigest(tenant.encode()) >> 1 or 1
