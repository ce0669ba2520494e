"""The decorator of the indexer's compiled functions that Python calls, and types of their arguments."""

from __future__ import annotations

from typing import Any

from numba import types

from kvist.machine_code import INDEXER_SOURCES
from kvist.radix.compiled.jit import jit_for

BYTES: Any = types.Array(types.uint8, 1, "C", readonly=True)
U32S: Any = types.Array(types.uint32, 1, "C")
U64S: Any = types.Array(types.uint64, 1, "C")
TABLE: Any = types.Array(types.int64, 2, "C")

# Functions of the index are compiled into those here: an edit there makes this machine code stale, too.
jit = jit_for(*INDEXER_SOURCES)
