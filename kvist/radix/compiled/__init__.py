"""Every compiled function of the index; `layout` says what lies at the addresses they are given.

Functions take the address of the control block and integers, never an array, so that a call from Python costs a fifth
of a microsecond and calls among them count no references; only `match` takes and makes arrays (`boxing`). Addresses,
indices and set ids are int64 throughout; only block hashes and their products are uint64. **Trap:** an int64 with a
uint64 becomes a float64, so constants that meet a hash are `_U*`. `table` finds and places rows, `sets` interns who
holds them; `updates` stores and removes, `matching` looks a prompt up, `following` scores who holds it. Other packages
may build on all of it: their `jit_for` must then name this folder too.
"""

from kvist.radix.compiled.events import read_events
from kvist.radix.compiled.eviction import count_priorities, evict, touch
from kvist.radix.compiled.housekeeping import merge_buckets, purge, split_buckets
from kvist.radix.compiled.matching import match
from kvist.radix.compiled.sets import list_members
from kvist.radix.compiled.snapshots import capture, collect, collect_captured, count_depths, release
from kvist.radix.compiled.table import put_back, take_out
from kvist.radix.compiled.updates import apply, remove, restore, store

__all__ = [
    "apply",
    "capture",
    "collect",
    "collect_captured",
    "count_depths",
    "count_priorities",
    "evict",
    "list_members",
    "match",
    "merge_buckets",
    "purge",
    "put_back",
    "read_events",
    "release",
    "remove",
    "restore",
    "split_buckets",
    "store",
    "take_out",
    "touch",
]
