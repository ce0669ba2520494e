"""A fleet's random life with every index into an array checked; a planted overrun shows that the checks are on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import index_invariants
import pytest

LIFE = """
from index_invariants import check_invariants
import numpy as np
from numba import int64, types, uint64
from kvist.events import Removed, Stored, Tier, WorkerRank
from kvist.radix import RadixIndex
from kvist.radix.compiled.jit import jit_for
from pathlib import Path

@jit_for(Path(__file__))((types.Array(uint64, 1, "C"), int64))
def planted(array, place):
    return array[place]

try:
    planted(np.zeros(8, np.uint64), 8)
except IndexError:
    print("checked")

rng = np.random.default_rng(1)
for max_blocks, bits in ((None, 0), (None, 3), (900, 2)):
    index, copy = RadixIndex(max_blocks=max_blocks, segment_bits=bits, seed=3), RadixIndex(segment_bits=1)
    ranks = [WorkerRank(f"w{number % 90}", number // 90) for number in range(120)]
    chains = rng.integers(0, 2**64, (40, 60), dtype=np.uint64)
    for step in range(1_500):
        source, chain = ranks[rng.integers(0, 120)], chains[rng.integers(0, 40)]
        end = int(rng.integers(0, 61))
        index.store(source, Tier(int(rng.integers(0, 4))), None, chain[:end])
        if step % 3 == 0:
            index.apply(source, [Removed(chain[end // 2 : end].tobytes()), Stored(chain[:end].tobytes(), 5)])
        if step % 50 == 0:
            index.remove_worker(source.worker)
            index.sweep(200)
        if step % 400 == 0:
            for chunk in index.snapshot(50):
                copy.restore(chunk)
                index.remove(source, Tier.GPU, chunk.hashes)
        index.match(chain)
    for source in index.ranks():
        index.remove_worker(source.worker)
    while index.sweep():
        pass
    check_invariants(index)
    check_invariants(copy)
    assert index.statistics().num_blocks == 0
print("done")
"""


@pytest.mark.xdist_group("checked bounds")
def test_a_fleets_life_stays_within_every_array(tmp_path: Path, checked_bounds: dict[str, str]) -> None:
    script = tmp_path / "life.py"
    script.write_text(LIFE)
    environment = {**os.environ, **checked_bounds, "PYTHONPATH": str(Path(index_invariants.__file__).parent)}
    result = subprocess.run([sys.executable, str(script)], env=environment, check=True, stdout=subprocess.PIPE)
    assert result.stdout.split() == [b"checked", b"done"]
