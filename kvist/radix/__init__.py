"""The index of a fleet's KV caches: which rank holds how many leading blocks of a prompt, exactly and now.

Rows are block hashes; each names who holds the block by the id of an interned set of slots, which stand for ranks, and
knows how many blocks come before it and when it was last used. A match looks up the prompt's hashes and intersects sets
only where their id changes. `compiled` has what is hot, over arrays that its `layout` describes; `index` is the face,
`values` is what it answers, and `reader` answers in another process. No clock, one thread, and no I/O.
"""

from kvist.radix.index import RadixIndex
from kvist.radix.reader import RadixReader
from kvist.radix.snapshot import Snapshot
from kvist.radix.values import ApplyResult, Depths, Match, Residencies, Statistics

__all__ = [
    "ApplyResult",
    "Depths",
    "Match",
    "RadixIndex",
    "RadixReader",
    "Residencies",
    "Snapshot",
    "Statistics",
]
