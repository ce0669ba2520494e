"""One decorator for every compiled function of the indexer; which of them Python may call, it says with `is_entry`."""

from __future__ import annotations

from kvist.machine_code import INDEXER_SOURCES
from kvist.radix.compiled.jit import jit_for

jit = jit_for(*INDEXER_SOURCES)
