"""Taking a dump into indexes of our own, frame by frame, no more of it than our streams can go on with."""

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
from kvist.indexer.engine import EngineFollower
from kvist.indexer.progress import EngineProgress
from kvist.indexer.residency import Names
from kvist.indexer.source import Source
from kvist.radix import Residencies


class Destination(Protocol):
    """Where a dump goes."""

    def find(self, head: NamespaceHead) -> Namespaced | None:
        """Return where a namespace's blocks go, None for nowhere."""

    def resume(self, into: Namespaced, state: StreamState) -> Source | None:
        """Return who goes on with a stream of a namespace, from its progress on; None for nobody."""


@dataclass(slots=True)
class _Part:
    """The namespace that frames are about: ranks to take over, of stock engines only what has a name."""

    into: Namespaced
    ranks: set[WorkerRank] = field(default_factory=set)
    engines: dict[WorkerRank, EngineFollower] = field(default_factory=dict)
    frames: defaultdict[tuple[WorkerRank, Tier], list[Names]] = field(default_factory=lambda: defaultdict(list))
    names: dict[tuple[WorkerRank, Tier], Names] = field(default_factory=dict)
    """Those of `frames`, ordered by block."""


class Takeover:
    """Takes the frames of one dump; `sources` are those that go on with it, to be forgotten if it is cut short."""

    def __init__(self, destination: Destination, origin: str, *, is_old: bool = False) -> None:
        """Take what `destination` has a place for; `origin` stands for the dump in errors.

        An old one is of some time ago: only a replay can tell that a stock engine is still the same process.
        """
        self._destination = destination
        self._origin = origin
        self._is_old = is_old
        self._part: _Part | None = None
        self.sources: list[tuple[Namespaced, Source]] = []

    def take(self, frame: Frame) -> None:
        """Take the next frame; raises MalformedMessageError."""
        if isinstance(frame, NamespaceHead):
            self._part = self._begin(frame)
        elif self._part is not None and isinstance(frame, NamesFrame):
            rank = WorkerRank(frame.worker, frame.rank)
            if rank in self._part.engines:
                self._part.frames[rank, frame.tier].append(names_of(frame, self._origin))
        elif self._part is not None and isinstance(frame, Blocks):
            self._restore(self._part, residencies_of(frame, self._origin))

    async def read(self, pieces: AsyncIterable[bytes]) -> None:
        """Take a dump to its end, giving way after each frame; if that fails, all that was taken is forgotten.

        Raises MalformedMessageError, and what the pieces raise.
        """
        reader = DumpReader(self._origin)
        try:
            async for piece in pieces:
                for frame in reader.feed(piece):
                    self.take(frame)
                    await asyncio.sleep(0)
            reader.close()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        for into, source in self.sources:
            into.indexer.forget(source.worker)

    def _begin(self, head: NamespaceHead) -> _Part | None:
        into = self._destination.find(head)
        if into is None:
            return None
        part = _Part(into)
        for state in map(self._aged, head.streams):
            source = None if state.progress is None else self._destination.resume(into, state)
            if state.progress is not None and source is not None:
                self.sources.append((into, source))
                ranks = [WorkerRank(state.worker, each.rank) for each in state.progress.ranks]
                if source.engine is None:
                    part.ranks.update(ranks)
                else:
                    part.engines.update(dict.fromkeys(ranks, source.engine))
        return part

    def _aged(self, state: StreamState) -> StreamState:
        if not self._is_old or not isinstance(state.progress, EngineProgress):
            return state
        return replace(state, progress=replace(state.progress, is_in_doubt=True))

    def _restore(self, part: _Part, held: Residencies) -> None:
        for where in [*part.frames]:
            part.names[where] = _ordered(part.frames.pop(where))
        held, named = _select(held, part.ranks, part.names)
        part.into.index.restore(held)
        for rank, names in named:
            part.engines[rank].resume_names(rank.rank, names)


def _ordered(frames: list[Names]) -> Names:
    """Return names by block, without blocks that have several: one of these may have come after the dump's moment."""
    engine_hashes, blocks = (np.concatenate(part) for part in list(zip(*frames, strict=True))[1:])
    blocks, first, counts = np.unique(blocks, return_index=True, return_counts=True)
    return Names(frames[0].tier, engine_hashes[first[counts == 1]], blocks[counts == 1])


def _select(
    held: Residencies, whole: set[WorkerRank], names: dict[tuple[WorkerRank, Tier], Names]
) -> tuple[Residencies, list[tuple[WorkerRank, Names]]]:
    """Return what is held as if nobody but these ranks held anything, some of them no more than their names tell of.

    With it come the names of what is left.
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
    """Return where each wanted number is in ascending ones, -1 where it is not."""
    if len(ordered) == 0:
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[places] == wanted, places, -1)
