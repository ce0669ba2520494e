"""Loading a dump into our indexes, frame by frame: only the blocks of streams that can continue here."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.indexer.dumps.dumper import Namespaced
from kvist.indexer.dumps.format import (
    Blocks,
    DumpReader,
    Frame,
    NamesFrame,
    NamespaceHead,
    StreamState,
    names_of,
    residencies_of,
)
from kvist.indexer.engine import EngineFollower, EngineProgress
from kvist.indexer.engine_rank import Names
from kvist.indexer.source import Source
from kvist.radix import Residencies


class Destination(Protocol):
    """Where a dump goes."""

    def find(self, head: NamespaceHead) -> Namespaced | None:
        """Return the index that a namespace's blocks go to, None to skip them."""

    def resume(self, into: Namespaced, state: StreamState) -> Source | None:
        """Return the source that continues a stream from its progress, None if there is none."""


@dataclass(slots=True)
class _NamespaceLoad:
    """The namespace that the frames belong to, and what to load: of stock engines' ranks only named blocks."""

    into: Namespaced
    ranks: set[WorkerRank] = field(default_factory=set)
    engines: dict[WorkerRank, EngineFollower] = field(default_factory=dict)
    frames: defaultdict[tuple[WorkerRank, Tier], list[Names]] = field(default_factory=lambda: defaultdict(list))
    names: dict[tuple[WorkerRank, Tier], Names] = field(default_factory=dict)
    """The names in `frames`, sorted by block; moved here when the first blocks come."""


class Takeover:
    """Loads the frames of one dump; `sources` are those that continue from it, reset again if it is cut short."""

    def __init__(self, destination: Destination, origin: str, *, is_old: bool = False) -> None:
        """Load what `destination` accepts; `origin` names the dump in errors.

        `is_old`: the dump was made some time ago, so that only a replay can tell whether a stock engine is the same
        process.
        """
        self._destination = destination
        self._origin = origin
        self._is_old = is_old
        self._current: _NamespaceLoad | None = None
        self.sources: list[tuple[Namespaced, Source]] = []

    def load_frame(self, frame: Frame) -> None:
        """Load the next frame; raises MalformedMessageError."""
        if isinstance(frame, NamespaceHead):
            self._current = self._open_namespace(frame)
        elif self._current is not None and isinstance(frame, NamesFrame):
            rank = WorkerRank(frame.worker, frame.rank)
            if rank in self._current.engines:
                self._current.frames[rank, frame.tier].append(names_of(frame, self._origin))
        elif self._current is not None and isinstance(frame, Blocks):
            self._load_blocks(self._current, residencies_of(frame, self._origin))

    async def read(self, pieces: AsyncIterable[bytes]) -> None:
        """Load a dump to its end, yielding to the event loop after each frame; after a failure nothing stays loaded.

        Raises MalformedMessageError, and what the pieces raise.
        """
        reader = DumpReader(self._origin)
        try:
            async for piece in pieces:
                for frame in reader.feed(piece):
                    self.load_frame(frame)
                    await asyncio.sleep(0)
            reader.close()
        except BaseException:
            for into, source in self.sources:
                into.indexer.undo_resume(source.worker)
            raise

    def _open_namespace(self, head: NamespaceHead) -> _NamespaceLoad | None:
        into = self._destination.find(head)
        if into is None:
            return None
        load = _NamespaceLoad(into)
        for state in head.streams:
            if self._is_old and isinstance(state.progress, EngineProgress):
                state = replace(state, progress=replace(state.progress, is_in_doubt=True))
            source = None if state.progress is None else self._destination.resume(into, state)
            if state.progress is not None and source is not None:
                self.sources.append((into, source))
                ranks = [WorkerRank(state.worker, each.rank) for each in state.progress.ranks]
                if source.engine is None:
                    load.ranks.update(ranks)
                else:
                    load.engines.update(dict.fromkeys(ranks, source.engine))
        return load

    def _load_blocks(self, load: _NamespaceLoad, held: Residencies) -> None:
        for where in [*load.frames]:
            load.names[where] = _ordered(load.frames.pop(where))
        held, named = _select(held, load.ranks, load.names)
        load.into.index.restore(held)
        for rank, names in named:
            load.engines[rank].load_names(rank.rank, names)


def _ordered(frames: list[Names]) -> Names:
    """Return the names sorted by block, without blocks that have several: one may be newer than the dump's moment."""
    engine_hashes, blocks = (np.concatenate(part) for part in list(zip(*frames, strict=True))[1:])
    blocks, first, counts = np.unique(blocks, return_index=True, return_counts=True)
    return Names(frames[0].tier, engine_hashes[first[counts == 1]], blocks[counts == 1])


def _select(
    held: Residencies, whole: set[WorkerRank], names: dict[tuple[WorkerRank, Tier], Names]
) -> tuple[Residencies, list[tuple[WorkerRank, Names]]]:
    """Return what is left of the residencies, and the names of the named blocks that are left.

    That is all of the ranks in `whole`, and of the ranks in `names` the blocks that have a name.
    """
    is_whole = np.array([rank in whole for rank in held.ranks], bool)
    rank_idx, tiers, named = held.members >> 4, held.members & 15, []
    kept = np.where(is_whole[rank_idx], tiers, 0)
    for (idx, rank), tier in product(enumerate(held.ranks), Tier):
        each = names.get((rank, tier))
        if each is None:
            continue
        places = np.flatnonzero((rank_idx == idx) & (tiers >> tier & 1 == 1))
        found = _find(each.blocks, held.hashes[places])
        kept[places[found >= 0]] |= 1 << tier
        found = found[found >= 0]
        named.append((rank, Names(tier, each.engine_hashes[found], each.blocks[found])))
    left = kept > 0
    members = (rank_idx[left] << 4 | kept[left]).astype(np.uint32)
    return Residencies(held.ranks, held.hashes[left], held.depths[left], members), named


def _find(ordered: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the index of each wanted number in ascending ones, -1 where it is not there."""
    if len(ordered) == 0:
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[places] == wanted, places, -1)
