"""The index of a fleet's KV caches: which rank holds how many leading blocks of a prompt, exactly and now.

A radix tree laid out in flat arrays and compiled with Numba. Rows are block hashes, five to a cache line, in segments
that grow one at a time (`tables`); each names who holds the block by the id of an interned set (`_sets`) of slots,
which stand for ranks (`_slots`), and knows how many blocks come before it and when it was last used (`_cap`). A match
looks up the prompt's hashes and intersects sets only where their id changes. `compiled` has what is hot, and its
`layout` how it lies in memory; `index` is the face; `values` is what it answers. No clock, one thread, and no I/O but
a snapshot's temporary file (`_snapshot`, `_spill`).
"""

from kvist.radix._snapshot import Snapshot, SnapshotLostError
from kvist.radix.index import RadixIndex
from kvist.radix.values import (
    ApplyResult,
    Depths,
    Match,
    RankDigest,
    SnapshotChunk,
    Statistics,
    StoreResult,
    StoreStatus,
)

__all__ = [
    "ApplyResult",
    "Depths",
    "Match",
    "RadixIndex",
    "RankDigest",
    "Snapshot",
    "SnapshotChunk",
    "SnapshotLostError",
    "Statistics",
    "StoreResult",
    "StoreStatus",
]
