"""Taking a peer's dump into our own indexes, frame by frame, no more of it than our streams can go on with."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvist.errors import MalformedMessageError
from kvist.events import WorkerRank
from kvist.events.transports import public_url
from kvist.indexer.engine_map import Names
from kvist.indexer.progress import EngineProgress
from kvist.indexer.service.answers import stream_name
from kvist.indexer.service.dump_format import (
    Blocks,
    Frame,
    NamesFrame,
    NamespaceHead,
    StreamState,
    chunk_of,
    names_of,
)
from kvist.indexer.service.registry import Member, Namespace, Registry
from kvist.radix import SnapshotChunk

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    """The namespace that frames are about: ranks to take over, of stock engines only what has a name."""

    member: Member
    ranks: set[WorkerRank] = field(default_factory=set)
    engine_ranks: set[WorkerRank] = field(default_factory=set)
    frames: defaultdict[WorkerRank, list[Names]] = field(default_factory=lambda: defaultdict(list))
    names: dict[WorkerRank, Names] = field(default_factory=dict)
    """Those of `frames`, ordered by block."""


class Takeover:
    """Takes the frames of one dump; `streams` are those that were resumed, to be forgotten if it is cut short."""

    def __init__(self, registry: Registry, peer: str) -> None:
        self._registry = registry
        self._peer = peer
        self._part: _Part | None = None
        self.streams: list[tuple[Member, str]] = []

    def take(self, frame: Frame) -> None:
        """Take the next frame; raises MalformedMessageError."""
        if isinstance(frame, NamespaceHead):
            self._part = self._begin(frame)
        elif self._part is not None and isinstance(frame, NamesFrame):
            rank = WorkerRank(frame.stream, frame.rank)
            if rank in self._part.engine_ranks:
                self._part.frames[rank].append(names_of(frame, self._peer))
        elif self._part is not None and isinstance(frame, Blocks):
            self._restore(self._part, chunk_of(frame, self._peer))

    def undo(self) -> None:
        """Forget all that was taken."""
        for member, stream in self.streams:
            member.indexer.forget(stream)

    def _begin(self, head: NamespaceHead) -> _Part | None:
        member = self._registry.find(Namespace(head.model_name, head.group))
        if member is None or member.block_size != head.block_size:
            _logger.warning("not restored: other block size, or not followed model=%s", head.model_name)
            return None
        part = _Part(member)
        for state in head.streams:
            if state.progress is not None and _is_followed(member, state):
                stream = stream_name(state.instance_id, state.dp_rank)
                member.indexer.resume(stream, state.progress)
                self.streams.append((member, stream))
                ranks = {WorkerRank(stream, each.rank) for each in state.progress.ranks}
                (part.engine_ranks if isinstance(state.progress, EngineProgress) else part.ranks).update(ranks)
        return part

    def _restore(self, part: _Part, chunk: SnapshotChunk) -> None:
        for rank in [*part.frames]:
            part.names[rank] = _ordered(part.frames.pop(rank))
        chunk, named = _select(chunk, part.ranks, part.names)
        part.member.index.restore(chunk)
        for rank, names in named.items():
            engine = part.member.indexer.engine_of(rank.worker)
            if engine is None:
                raise MalformedMessageError(self._peer, f"dump: names for {rank}, whose stream is no engine's")
            engine.resume_names(rank.rank, names)


def _is_followed(member: Member, state: StreamState) -> bool:
    """Return whether the stream is followed here, too, at the same place."""
    stream = member.instances.get(state.instance_id, {}).get(state.dp_rank)
    return stream is not None and public_url(stream.endpoint) == state.endpoint


def _ordered(frames: list[Names]) -> Names:
    engine_hashes, blocks = (np.concatenate(part) for part in zip(*frames, strict=True))
    order = np.argsort(blocks)
    return Names(engine_hashes[order], blocks[order])


def _select(
    chunk: SnapshotChunk, whole: set[WorkerRank], names: dict[WorkerRank, Names]
) -> tuple[SnapshotChunk, dict[WorkerRank, Names]]:
    """Return the chunk as if nobody but these ranks held anything, some of them no more than their names tell of.

    With it come the names of what is left.
    """
    is_whole = np.array([rank in whole for rank in chunk.ranks], bool)
    if is_whole.all():
        return chunk, {}
    lengths: NDArray[np.int64] = (chunk.offsets[1:] - chunk.offsets[:-1]).astype(np.int64)[chunk.set_idx]
    block_idx = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(block_idx)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    members = chunk.members[chunk.offsets[chunk.set_idx[block_idx]] + within]
    rank_idx = members >> 4
    is_kept = is_whole[rank_idx]
    named = {}
    for idx, rank in enumerate(chunk.ranks):
        if rank in names:
            places = np.flatnonzero(rank_idx == idx)
            found = _find(names[rank].blocks, chunk.hashes[block_idx[places]])
            is_kept[places] = found >= 0
            found = found[found >= 0]
            named[rank] = Names(names[rank].engine_hashes[found], names[rank].blocks[found])
    is_used = is_whole | np.array([rank in names for rank in chunk.ranks], bool)
    new_rank_idx = np.cumsum(is_used) - 1
    members, rank_idx = members[is_kept], rank_idx[is_kept]
    ends = np.cumsum(np.bincount(block_idx[is_kept], minlength=len(lengths)))
    kept = SnapshotChunk(
        ranks=tuple(rank for rank, used in zip(chunk.ranks, is_used.tolist(), strict=True) if used),
        hashes=chunk.hashes,
        depths=chunk.depths,
        set_idx=np.arange(len(lengths), dtype=np.uint32),
        offsets=np.concatenate([[0], ends]).astype(np.uint32),
        members=(new_rank_idx[rank_idx] << 4 | members & 15).astype(np.uint32),
    )
    return kept, named


def _find(ordered: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where each wanted number is in ascending ones, -1 where it is not."""
    if len(ordered) == 0:
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[places] == wanted, places, -1)
