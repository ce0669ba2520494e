"""One decorator for every compiled function of the indexer; which of them Python may call, it says with `is_entry`."""

from __future__ import annotations

from pathlib import Path

import kvist.radix.compiled
from kvist.radix.compiled.jit import jit_for

# Functions of the index are inlined into those here: an edit there makes this machine code stale, too.
jit = jit_for(Path(__file__).parent, Path(kvist.radix.compiled.__file__).parent)
