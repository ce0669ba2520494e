"""The index of a fleet's KV caches: which rank holds how many leading blocks of a prompt, exactly and now.

A row is a block hash, with the id of an interned set of slots, which stand for the ranks that hold the block, with the
number of blocks before it, and with the time of its last use. A match looks up the prompt's hashes and intersects sets
only where their id changes. `compiled` has the hot loops, over arrays that its `layout` describes; `index` is the
interface, `values` has what it returns, and `reader` matches in another process. No clock, one thread, and no I/O.
"""

from kvist.radix.index import RadixIndex
from kvist.radix.reader import RadixReader
from kvist.radix.values import ApplyResult, Depths, Match, Residencies, Statistics

__all__ = ["ApplyResult", "Depths", "Match", "RadixIndex", "RadixReader", "Residencies", "Statistics"]
