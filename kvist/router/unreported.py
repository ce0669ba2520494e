"""What workers' ranks should hold that no event tells, by the prompts that they were sent. No I/O, no clock.

A worker that no stream has reported on yet is expected to hold the prompts that it was sent last. Those blocks are in
the index, held by a rank that no stream can name, and count until the first stream reports on the worker. From then on
a rank is expected to hold two kinds of prompts beside what it reports, until it is cleared. What follows an image has
names that the router cannot compute: it counts where the rank holds all that comes before the first image. And a
partial rank that cannot be asked for what it holds reports nothing that follows a block whose report was missed, a
system prompt perhaps, for as long as it keeps that block: so the prompts count that it was sent and did not report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.events.session import SourceState
from kvist.router.expected import ExpectedBlocks

if TYPE_CHECKING:
    from kvist.radix import RadixIndex

_PREFIX = "expected "
"""Of the names of the ranks that hold in the index what others are expected to hold; no worker's own has a space."""
STEP_BLOCKS = 2048
"""How much of a prompt is recorded at a time: in up to 0.8 ms, where 300,000 tokens would take 7 (2026-11-28)."""


class UnreportedPrompts:
    """The prompts that each rank is expected to hold, as far as no events say what it holds."""

    def __init__(
        self,
        states: Callable[[str], Mapping[int, SourceState]],
        max_blocks: int,
        time_to_live_s: float,
        now_s: Callable[[], float],
    ) -> None:
        """Expect of all workers together no more than `max_blocks`; `states` are those of a worker's reported ranks."""
        self.radix: RadixIndex | None = None
        """The index, once there is one."""
        self._states, self._now_s = states, now_s
        self._max_blocks, self._time_to_live_s = max_blocks, time_to_live_s
        self._rooms: dict[str, int] = {}
        """Blocks that each worker caches."""
        self._reporting_anew: set[str] = set()
        self._expected: dict[WorkerRank, ExpectedBlocks] = {}
        """By the name that holds them in the index."""
        self._clearings: dict[WorkerRank, int | None] = {}
        """By the same names, the clearing of the rank that is meant when its last prompt was recorded."""

    def set_room(self, worker: str, num_blocks: int, *, reports_anew: bool = False) -> None:
        """Expect the worker to keep so many blocks of what it is sent; `reports_anew`: it can be asked what it holds.

        Call it again now and then: that also forgets some of what has expired.
        """
        if num_blocks == 0 or not any(map(self._counts, self._holders(worker))):
            self.forget(worker)
        self._rooms[worker] = num_blocks
        if reports_anew:
            self._reporting_anew.add(worker)
        for holder in self._holders(worker):
            self._expected[holder].capacity = self._capacity(worker)
            self._forget_some(holder)

    def has_room(self, worker: str) -> bool:
        """Return whether the worker is expected to keep anything, once it was sent it."""
        return self.radix is not None and self._rooms.get(worker, 0) > 0

    def record(self, target: WorkerRank, hashes: NDArray[np.uint64]) -> Iterator[None]:
        """Record that a rank now holds all blocks of a prompt, unless its events have said so.

        Yields after each step, where others may run, but no other recording.
        """
        if self.radix is None or not self.has_room(target.worker):
            return
        found = self.radix.match(hashes)
        if target in found.ranks and found.depths[found.ranks.index(target), -1] == len(hashes):
            return
        holder, now_s = holder_of(target), self._now_s()
        if holder not in self._expected or not self._counts(holder):
            self.radix.clear(*holder)
            self._expected[holder] = ExpectedBlocks(self._capacity(target.worker), self._time_to_live_s)
        expected, self._clearings[holder] = self._expected[holder], self.radix.clearing_of(target)
        starts = range(0, min(len(hashes), expected.capacity), STEP_BLOCKS)
        steps = [hashes[start : min(start + STEP_BLOCKS, expected.capacity)] for start in starts]
        # Stored before they are marked: a block that is forgotten meanwhile is removed, too.
        for start, step in zip(starts, steps, strict=True):  # all of them: the index may have evicted some
            if self._expected.get(holder) is not expected:  # the worker has restarted, or is gone
                return
            self.radix.store(holder, Tier.GPU, int(hashes[start - 1]) if start else None, step)
            yield
        for step in reversed(steps):
            expected.use(step.tolist(), now_s)
            yield
        while self._expected.get(holder) is expected and self._forget_some(holder):
            yield

    def forget(self, worker: str) -> None:
        """Expect nothing of the worker any more: it has restarted, or is gone."""
        self._rooms.pop(worker, None)
        self._reporting_anew.discard(worker)
        for holder in self._holders(worker):
            del self._expected[holder], self._clearings[holder]
            assert self.radix is not None
            self.radix.remove_worker(holder.worker)

    def clearing_of(self, target: WorkerRank) -> int | None:
        """Return the clearing of the name that holds in the index what a rank is expected to hold, None if nothing."""
        holder = holder_of(target)
        is_expected = self.radix is not None and holder in self._expected and self._counts(holder)
        return self.radix.clearing_of(holder) if self.radix is not None and is_expected else None

    def pop_from(
        self, overlaps: dict[WorkerRank, tuple[int, ...]]
    ) -> list[tuple[WorkerRank, SourceState | None, tuple[int, ...]]]:
        """Remove what is expected from a prompt's overlaps; return the ranks that should hold it, and their states."""
        expected = [(holder, overlaps.pop(holder)) for holder in self._expected.keys() & overlaps.keys()]
        counted = [(_target_of(holder), depths) for holder, depths in expected if self._counts(holder)]
        return [(target, self._states(target.worker).get(target.rank), depths) for target, depths in counted]

    def _counts(self, holder: WorkerRank) -> bool:
        """Return whether what a rank is expected to hold still counts, as it was not cleared since.

        Its first report clears it, too. But if that shows that earlier ones were missed, for which it cannot be asked,
        all recorded before it stays.
        """
        target, clearing = _target_of(holder), self._clearings[holder]
        assert self.radix is not None
        if clearing is not None or target.worker in self._reporting_anew:
            return clearing == self.radix.clearing_of(target)
        return self._states(target.worker) in ({}, {target.rank: SourceState.PARTIAL})

    def _holders(self, worker: str) -> list[WorkerRank]:
        name = _PREFIX + worker
        return [holder for holder in self._expected if holder.worker == name]

    def _capacity(self, worker: str) -> int:
        """Return how many blocks one of the worker's ranks is expected to keep."""
        num_blocks = min(self._rooms[worker], self._max_blocks // len(self._rooms))
        return num_blocks // max(1, len(self._states(worker)))

    def _forget_some(self, holder: WorkerRank) -> bool:
        """Forget some blocks that the rank should not hold any more; return whether there were any."""
        block_hashes = self._expected[holder].forget(self._now_s(), STEP_BLOCKS)
        if block_hashes and self.radix is not None:
            self.radix.remove(holder, Tier.GPU, np.array(block_hashes, np.uint64))
        return bool(block_hashes)


def add_expected(
    overlaps: dict[WorkerRank, tuple[int, ...]],
    target: WorkerRank,
    state: SourceState | None,
    expected: tuple[int, ...],
    num_exact: int | None,
) -> None:
    """Add what a rank should hold of a prompt, whatever it reports.

    Of a prompt with images that counts where a live rank holds the `num_exact` blocks before the first.
    """
    num_needed = num_exact if state is SourceState.LIVE else 0
    if num_needed is None:
        return
    held = overlaps.get(target, (0,) * len(expected))
    depths = [max(each, more) if each >= num_needed else each for each, more in zip(held, expected, strict=True)]
    if any(depths):
        overlaps[target] = tuple(depths)


def holder_of(target: WorkerRank) -> WorkerRank:
    """Return the name that holds in the index what a rank is expected to hold."""
    return WorkerRank(_PREFIX + target.worker, target.rank)


def _target_of(holder: WorkerRank) -> WorkerRank:
    return WorkerRank(holder.worker.removeprefix(_PREFIX), holder.rank)
