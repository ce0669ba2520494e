"""Who holds what at one moment, of a recording or of an index that runs, and how two of them differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.indexer.dumps.format import Blocks, DumpReader, chunk_of
from kvist.radix import SnapshotChunk

Holdings: TypeAlias = Mapping[tuple[WorkerRank, Tier], NDArray[np.uint64]]
"""Hashes of the blocks that a rank holds in a tier, ascending."""


class Difference(NamedTuple):
    """How many blocks one rank holds in one tier: in the first, in the second, in both."""

    worker: str
    rank: int
    tier: str
    only_first: int
    only_second: int
    both: int


def holdings_of(chunks: Iterable[SnapshotChunk]) -> Holdings:
    """Return what the chunks of a snapshot say."""
    parts: defaultdict[tuple[WorkerRank, Tier], list[NDArray[np.uint64]]] = defaultdict(list)
    for chunk in chunks:
        ranks, hashes, _, members = chunk.residencies()
        for holder, tier in product(np.unique(members >> 4).tolist(), Tier):
            parts[ranks[holder], tier].append(hashes[(members >> 4 == holder) & (members >> tier & 1 == 1)])
    held = {holder: np.unique(np.concatenate(hashes)) for holder, hashes in parts.items()}
    return {holder: hashes for holder, hashes in held.items() if len(hashes)}


def chunks_of_dump(pieces: Iterable[bytes], source: str) -> Iterator[SnapshotChunk]:
    """Yield the blocks of a dump, as `GET /dump` and state files have them; raises MalformedMessageError."""
    reader = DumpReader(source)
    for piece in pieces:
        yield from (chunk_of(frame, source) for frame in reader.feed(piece) if isinstance(frame, Blocks))
    reader.close()


def differences(first: Holdings, second: Holdings) -> list[Difference]:
    """Return how the two differ, rank by rank and tier by tier, where they are alike, too."""
    nothing = np.empty(0, np.uint64)
    found = []
    for rank, tier in sorted(first.keys() | second.keys()):
        ours, theirs = first.get((rank, tier), nothing), second.get((rank, tier), nothing)
        both = len(np.intersect1d(ours, theirs, assume_unique=True))
        found.append(Difference(*rank, tier.name.lower(), len(ours) - both, len(theirs) - both, both))
    return found
