"""Whether a transfer is faster bounced: predicted from costs that were measured on this host, at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import TypeAlias

from kvist.errors import InvalidValueError

# Does one operation on so many fragments of so many bytes each, and returns the seconds it took.
Measure: TypeAlias = Callable[[int, int], float]

FRAGMENT_SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
# Predictions are of a quiet host: bounced must be better by this much before it is chosen.
_MARGIN = 1.25
_REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a fragment costs by its size: measured at some sizes, between them as a power of the size.

    A smaller fragment costs as much as the smallest, a larger one the largest's seconds for each byte.
    """

    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise InvalidValueError unless sizes rise and costs are positive."""
        if not self.sizes_bytes or list(self.sizes_bytes) != sorted(set(self.sizes_bytes)):
            raise InvalidValueError("sizes_bytes", self.sizes_bytes, "at least one, rising")
        if len(self.seconds) != len(self.sizes_bytes) or min(self.seconds) <= 0:
            raise InvalidValueError("seconds", self.seconds, "a positive cost for each size")

    def fragment_s(self, size_bytes: float) -> float:
        """Return the predicted seconds of one fragment."""
        sizes, seconds = self.sizes_bytes, self.seconds
        if size_bytes <= sizes[0]:
            return seconds[0]
        if size_bytes >= sizes[-1]:
            return seconds[-1] * size_bytes / sizes[-1]
        idx = next(i for i, size in enumerate(sizes) if size > size_bytes)
        share = log(size_bytes / sizes[idx - 1]) / log(sizes[idx] / sizes[idx - 1])
        return exp((1 - share) * log(seconds[idx - 1]) + share * log(seconds[idx]))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a write, of a gather and of a scatter; `write_fixed_s` is that of a write of one small fragment."""

    write: CostCurve
    gather: CostCurve
    scatter: CostCurve
    write_fixed_s: float

    def per_fragment_s(self, num_fragments: int, size_bytes: int) -> float:
        """Return the predicted seconds of a write of all fragments as they are."""
        return self.write_fixed_s + num_fragments * self.write.fragment_s(size_bytes / num_fragments)

    def bounced_s(self, num_fragments: int, size_bytes: int) -> float:
        """Return the predicted seconds of gather, one write, and scatter: one after the other, a hand-over each."""
        mean = size_bytes / num_fragments
        copies_s = num_fragments * (self.gather.fragment_s(mean) + self.scatter.fragment_s(mean))
        return 3 * self.write_fixed_s + copies_s + self.write.fragment_s(size_bytes)

    def prefers_bounce(self, num_fragments: int, size_bytes: int) -> bool:
        """Return whether bouncing is expected to be faster, by a margin; blocks are not asked about."""
        if num_fragments < 2 or size_bytes < num_fragments:
            return False
        return self.bounced_s(num_fragments, size_bytes) * _MARGIN < self.per_fragment_s(num_fragments, size_bytes)


def calibrate(
    write: Measure, gather: Measure, scatter: Measure, total_bytes: int, sizes_bytes: Sequence[int] = FRAGMENT_SIZES
) -> CostModel:
    """Measure each operation on fragments of each size, `total_bytes` at a time, and a write of the smallest alone.

    The least of some repetitions counts: whatever else the host does only adds. Raises InvalidValueError.
    """
    if total_bytes < max(sizes_bytes):
        raise InvalidValueError("total_bytes", total_bytes, f"at least the largest fragment, {max(sizes_bytes)}")

    # A bounce writes one large piece: what that costs is measured as well.
    pieces = [*sizes_bytes, total_bytes] if total_bytes > max(sizes_bytes) else list(sizes_bytes)
    plan = {(write, 1, min(sizes_bytes)): inf}
    for measure, sizes in ((write, pieces), (gather, sizes_bytes), (scatter, sizes_bytes)):
        plan |= {(measure, total_bytes // size, size): inf for size in sizes}
    for _ in range(_REPETITIONS):  # of all in turns: what disturbs one for a while does not disturb it each time
        for measure, num_fragments, size in plan:
            least = min(plan[measure, num_fragments, size], measure(num_fragments, size))
            plan[measure, num_fragments, size] = max(least, 1e-9)

    def curve(measure: Measure, sizes: Sequence[int]) -> CostCurve:
        counts = [total_bytes // size for size in sizes]
        seconds = [plan[measure, count, size] / count for count, size in zip(counts, sizes, strict=True)]
        return CostCurve(tuple(sizes), tuple(seconds))

    fixed_s = plan[write, 1, min(sizes_bytes)]
    return CostModel(curve(write, pieces), curve(gather, sizes_bytes), curve(scatter, sizes_bytes), fixed_s)
