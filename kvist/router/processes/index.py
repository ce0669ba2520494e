"""The index as a front sees it: matched in the keeper's memory, with the keeper's word for whose slots are whose."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank
from kvist.events.session import SourceState
from kvist.indexer import compilation
from kvist.router.index import Overlaps, RankStatus
from kvist.router.processes.messages import Computed, Message, Used

if TYPE_CHECKING:
    from kvist.radix import RadixReader


class SharedIndex:
    """What `kvist.router.index.Caches` is, while there is a keeper; without one, nobody is known to hold anything."""

    def __init__(self, tell: Callable[[Message], None], now_s: Callable[[], float]) -> None:
        """Tell the keeper what it needs to know of matches and answers."""
        self._tell, self._now_s = tell, now_s
        self._reader: RadixReader | None = None
        self._ranks: dict[str, list[RankStatus]] = {}
        self._counted: dict[str, tuple[float, list[RankStatus]]] = {}
        self._targets: dict[int, WorkerRank] = {}
        self.block_sizes: Mapping[str, int] = {}

    @property
    def has_joined(self) -> bool:
        """Return whether prompts can be hashed and matched."""
        return self._reader is not None

    def attach(self, reader: RadixReader) -> None:
        """Match in this index from now on."""
        self._reader = reader

    def detach(self) -> None:
        """Know nothing of caches any more; the next index counts its givings anew."""
        self._reader = None
        self._targets.clear()
        self._counted.clear()
        for worker, ranks in self._ranks.items():
            self._ranks[worker] = [replace(status, slot=None, clearing=None) for status in ranks]

    def know(self, worker: str, ranks: list[RankStatus], block_size: int | None = None) -> None:
        """Take what the keeper says of a worker's ranks, and of its blocks; of one that is gone they are none."""
        if block_size != self.block_sizes.get(worker):
            others = {name: size for name, size in self.block_sizes.items() if name != worker}
            self.block_sizes = others if block_size is None else {**others, worker: block_size}
        for status in self._ranks.pop(worker, ()):
            self._targets.pop(status.clearing or 0, None)
        self._counted.pop(worker, None)
        if ranks:
            self._ranks[worker] = ranks
        for status in ranks:
            if status.clearing is not None and status.state is not SourceState.RESYNCING:
                self._targets[status.clearing] = status.target

    def match(self, hashes: NDArray[np.uint64], num_usable: int | None = None) -> Overlaps | None:
        """Return who holds how many leading blocks, of the first `num_usable`; None while the keeper writes."""
        reader, targets = self._reader, self._targets
        if reader is None:
            return {}
        found = reader.match(hashes, len(hashes) if num_usable is None else num_usable)
        if found is None:
            return None
        if found and reader.wants_uses:
            self._tell(Used(hashes.tobytes()))
        return {targets[giving]: depths for giving, depths in found.items() if giving in targets}

    def ranks(self, worker: str, max_age_s: float = 0.0) -> list[RankStatus]:
        """Return the worker's ranks, with what each held up to `max_age_s` ago."""
        reader, now_s = self._reader, self._now_s()
        counted_at_s, counted = self._counted.get(worker, (-max_age_s, []))
        if now_s - counted_at_s < max_age_s:
            return counted
        counted = self._ranks.get(worker, [])
        if reader is not None:
            counted = [
                replace(status, num_blocks=reader.num_held(status.slot or 0, status.clearing or 0))
                for status in counted
            ]
        self._counted[worker] = now_s, counted
        return counted

    def is_expecting(self, worker: str) -> bool:
        """Return whether what the worker was given is all that is known of its cache."""
        return any(status.is_approximate for status in self._ranks.get(worker, ()))

    def computed(self, worker: str, hashes: NDArray[np.uint64]) -> None:
        """Take note that a worker, expected to hold what it was given, now holds all blocks of a prompt."""
        self._tell(Computed(worker, hashes.tobytes()))


async def open_reader(path: Path) -> RadixReader:
    """Map the index of this path; raises OSError if it is not there any more."""
    await compilation.load()
    from kvist.radix import RadixReader

    with path.open("r+b") as file:
        return RadixReader(mmap.mmap(file.fileno(), 0))
