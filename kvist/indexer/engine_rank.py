"""One rank of an engine's stream: what its window filter lets pass is held in the index."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvist.events import EngineEvent, EngineRemoved, EngineStored, Event, WorkerRank
from kvist.events.windows import FULL, UNKNOWN
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.residency import EngineResidency
from kvist.publisher.filter import WindowFilter
from kvist.publisher.normaliser import Normaliser
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import Records


class EngineRank:
    """Filters and normalises a rank's events, and lets compiled code know how it would go about others like them."""

    def __init__(
        self, source: WorkerRank, block_size: int, index: RadixIndex, apply: Callable[[Iterable[Event]], None]
    ) -> None:
        """Hold blocks of `source` in `index`, which `apply` applies events of it to."""
        self._source = source
        self._block_size = block_size
        self._residency = EngineResidency(index, source, apply)
        self.verdicts = Verdicts(source.rank)
        self._begin()

    def admit(self, event: EngineEvent) -> None:
        """Take one event; what it amounts to is in the index when this returns."""
        before = self._filter.state
        passed = self._filter.admit(event)
        for each in passed:
            self._normaliser.normalise(each)
        if self._filter.state != before:
            self.verdicts.clear()
        elif isinstance(event, EngineStored | EngineRemoved):
            self.verdicts.add(event, passes=bool(passed))

    def clear(self) -> None:
        """Forget what the rank holds and how its groups differ: it restarted, or events were lost."""
        self._residency.clear()
        self.verdicts.clear()
        self._begin()

    @property
    def residency(self) -> EngineResidency:
        """Return what the rank holds, and under which names."""
        return self._residency

    @property
    def filter(self) -> WindowFilter:
        """Return what tells the rank's groups apart."""
        return self._filter

    def settle(self) -> tuple[Records, Records]:
        """Let compiled code know where the rank's blocks are now; return the map of their names."""
        self.verdicts.record["slot"] = self._residency.slot
        return self._residency.map.head, self._residency.map.segments

    def enlarge_map(self) -> None:
        """Provide the room that compiled code asked for."""
        self._residency.map.help_out()

    def tidy(self) -> None:
        """Give back some of the memory that is not needed any more; call it now and then."""
        self._residency.map.tidy()

    def _begin(self) -> None:
        self._filter = WindowFilter(self._source.rank)
        # Partial blocks are never published, so nothing here depends on whether they are remembered.
        self._normaliser = Normaliser(
            self._block_size, rank=self._source.rank, max_partial_blocks=1, holdings=self._residency
        )


class Verdicts:
    """What compiled code knows of a rank: its slot, and how events fare with its filter as it is."""

    def __init__(self, number: int) -> None:
        self.record: Records = np.zeros(1, layout.RANK)
        self.record["number"] = number

    def add(self, event: EngineStored | EngineRemoved, *, passes: bool) -> None:
        """Let every event fare like this one that has its type, group and window."""
        key, record = _verdict_key(event), self.record[0]
        num_verdicts = int(record["num_verdicts"])
        if key is None or key in record["keys"][:num_verdicts]:
            return
        place = num_verdicts % layout.NUM_VERDICTS  # of which there are never so many
        record["keys"][place], record["passes"][place], record["num_verdicts"] = key, passes, place + 1

    def clear(self) -> None:
        """Forget all verdicts: the filter has changed."""
        self.record["num_verdicts"] = 0


def _verdict_key(event: EngineStored | EngineRemoved) -> int | None:
    """Return what compiled code looks for, None for an event that it does not look at."""
    group = 0 if event.group is None else event.group + 1
    if event.window is FULL:
        window = layout.FULL_WINDOW
    else:
        window = 0 if event.window is UNKNOWN else event.window
        if window >= layout.FULL_WINDOW:
            return None
    return isinstance(event, EngineRemoved) | group << 1 | window << 32 if group <= layout.MAX_GROUP else None
