"""Whether a transfer is faster bounced: predicted from what both ways took on this host, at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np

from kvist.errors import InvalidValueError


class Seconds(NamedTuple):
    """What one transfer took both ways: a write of its fragments; a send of the same in one piece, and a scatter."""

    write: float
    send: float
    scatter: float


# Moves so many fragments of so many bytes each, both ways.
Measure: TypeAlias = Callable[[int, int], Seconds]

FRAGMENT_SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
_FEW = 2
# At start it is worth a second to know: a round takes 0.1 s in shared memory and 0.25 s over NIXL. An upper quartile
# leaves out two of nine rounds, and of three none.
_MAX_ROUNDS = 9
_MIN_ROUNDS = 3
_BUDGET_S = 0.9


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a fragment costs by its size: measured at some sizes, on a line between two of them.

    A smaller fragment costs as much as the smallest, a larger one the largest's seconds for each byte.
    """

    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise InvalidValueError unless sizes rise, there is a cost for each, and none is negative."""
        if not self.sizes_bytes or list(self.sizes_bytes) != sorted(set(self.sizes_bytes)):
            raise InvalidValueError("sizes_bytes", self.sizes_bytes, "at least one, rising")
        if len(self.seconds) != len(self.sizes_bytes) or not min(self.seconds) >= 0:
            raise InvalidValueError("seconds", self.seconds, "a cost of at least 0 for each size")

    def fragment_s(self, size_bytes: float) -> float:
        """Return the predicted seconds of one fragment."""
        within = float(np.interp(size_bytes, self.sizes_bytes, self.seconds))
        return within * max(size_bytes / self.sizes_bytes[-1], 1.0)


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a write of fragments costs at its best, and what their send in one piece and their scatter cost at worst.

    Each fragment costs by its size; the first of them costs `write_fixed_s` in addition, and `bounce_extra_s` on top of
    that where it is bounced.
    """

    write: CostCurve
    send: CostCurve
    scatter: CostCurve
    write_fixed_s: float
    bounce_extra_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a negative cost."""
        for field in ("write_fixed_s", "bounce_extra_s"):
            if not getattr(self, field) >= 0:
                raise InvalidValueError(field, getattr(self, field), "at least 0")

    def per_fragment_s(self, num_fragments: int, size_bytes: int, num_writers: int = 1) -> float:
        """Return the predicted seconds of writes of all fragments as they are, by several writers at a time."""
        each_s = self.write.fragment_s(size_bytes / num_fragments)
        return self.write_fixed_s + num_fragments / num_writers * each_s

    def bounced_s(self, num_fragments: int, size_bytes: int, num_writers: int = 1) -> float:
        """Return the predicted seconds of a bounce: sends at a time, and then one scatter of everything."""
        mean = size_bytes / num_fragments
        each_s = self.send.fragment_s(mean) / num_writers + self.scatter.fragment_s(mean)
        return self.write_fixed_s + self.bounce_extra_s + num_fragments * each_s

    def prefers_bounce(self, num_fragments: int, size_bytes: int, num_writers: int = 1) -> bool:
        """Return whether bouncing is clearly faster; if it is, so it is for more fragments of the same size."""
        if num_fragments <= num_writers or size_bytes < num_fragments:
            return False
        asked = (num_fragments, size_bytes, num_writers)
        return self.bounced_s(*asked) < self.per_fragment_s(*asked)


def calibrate(
    measure: Measure,
    total_bytes: int,
    sizes_bytes: Sequence[int] = FRAGMENT_SIZES,
    clock: Callable[[], float] = perf_counter,
) -> CostModel:
    """Measure few fragments, and `total_bytes` in fragments of each size, in turns, for about a second.

    A write counts with the least of its repetitions, a bounce with their upper quartile: the further they lie apart,
    the less is known, and the more a bounce has to gain. A written byte costs no more in a larger fragment; if it seems
    to, something else was in its way. Raises InvalidValueError for less than two of the largest.
    """
    if total_bytes < _FEW * max(sizes_bytes):
        raise InvalidValueError("total_bytes", total_bytes, f"at least {_FEW} of the largest fragment")
    few, many = (_FEW, min(sizes_bytes)), [(total_bytes // size, size) for size in sizes_bytes]
    measure(*few)  # does not count: agents connect at their first write
    rounds: list[list[Seconds]] = []
    began_s = clock()
    while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and clock() - began_s < _BUDGET_S):
        rounds.append([measure(*asked) for asked in (few, *many)])
    taken = np.sort(np.array(rounds), axis=0)
    least, worst = taken[0], taken[-1 - len(taken) // 4]
    counts = np.array([count for count, _ in many])
    each_s = np.stack((least[1:, 0], worst[1:, 1], worst[1:, 2])) - least[0, :, None]
    rows = np.maximum(each_s, 0.0) / counts
    rows[0] = np.minimum.accumulate(rows[0] / sizes_bytes) * sizes_bytes
    write, send, scatter = (CostCurve(tuple(sizes_bytes), tuple(row.tolist())) for row in rows)
    write_s = float(least[0, 0])
    return CostModel(write, send, scatter, write_s, max(float(worst[0, 1:].sum()) - write_s, 0.0))
