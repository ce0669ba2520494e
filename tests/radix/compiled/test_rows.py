"""A prefix names one row: the first of its prefix to be put in, until that is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvist.events import Tier, WorkerRank
from kvist.radix import RadixIndex, compiled
from kvist.radix.compiled.intrinsics import get32
from kvist.radix.compiled.jit import jit_for
from kvist.radix.compiled.layout import MAX_DEPTH, SECONDARY
from kvist.radix.compiled.rows import find_primary, find_row
from kvist.radix.compiled.table import key_of, segment_of, side_of

jit = jit_for(Path(__file__), Path(compiled.__file__).parent)
KEYS_ARE_HASHES = (1 - 0x9E37_79B9_7F4A_7C15) % 2**64 // 2  # the seed whose multiplier is 1
W0 = WorkerRank("w0", 0)


@jit("u8(i8,u8)", is_entry=True)
def primary_of(control, prefix):  # type: ignore[no-untyped-def]
    """The key of a prefix's primary row, 0 if there is none."""
    row = find_primary(control, prefix)
    return key_of(row) if row else np.uint64(0)


@jit("i8(i8,u8)", is_entry=True)
def side_of_block(control, block_hash):  # type: ignore[no-untyped-def]
    row = find_row(control, block_hash)
    return get32(side_of(segment_of(control, key_of(row)), row))


def store(index: RadixIndex, *hashes: int) -> None:
    for block in hashes:
        index.store(W0, Tier.GPU, None, np.array([block], np.uint64))


def test_of_rows_with_one_prefix_the_first_is_primary_though_they_spread_over_many_lines() -> None:
    index, prefix = RadixIndex(seed=KEYS_ARE_HASHES, segment_bits=2), 0xABCD_0123
    blocks = [prefix << 32 | n for n in range(1, 40)]
    store(index, *[(prefix ^ 1) << 32 | n for n in range(1, 20)], *blocks)
    assert primary_of(index.address, prefix) == blocks[0]
    assert [side_of_block(index.address, block) & SECONDARY != 0 for block in blocks] == [False] + [True] * 38
    index.check_invariants()


def test_a_new_row_is_secondary_while_any_of_its_prefix_is_left_and_growth_changes_nothing() -> None:
    index, prefix = RadixIndex(seed=KEYS_ARE_HASHES, segment_bits=0), 7
    first, second, third = (prefix << 32 | n for n in range(3))
    store(index, first, second)
    index.remove(W0, Tier.GPU, np.array([first], np.uint64))
    assert primary_of(index.address, prefix) == 0
    store(index, third)
    assert primary_of(index.address, prefix) == 0
    index.store(W0, Tier.GPU, None, np.random.default_rng(1).integers(0, 2**64, 20_000, dtype=np.uint64))
    assert side_of_block(index.address, second) == side_of_block(index.address, third) == SECONDARY
    index.remove(W0, Tier.GPU, np.array([second, third], np.uint64))
    store(index, third)
    assert primary_of(index.address, prefix) == third
    index.check_invariants()


def test_a_row_knows_its_depth_up_to_the_greatest() -> None:
    index, chain = RadixIndex(), np.arange(1, MAX_DEPTH + 20, dtype=np.uint64)
    index.store(W0, Tier.GPU, None, chain[:10])
    index.store(W0, Tier.GPU, 10, chain[10:])
    depths = [side_of_block(index.address, block) & MAX_DEPTH for block in chain[[0, 9, 10, 5_000, -20, -1]].tolist()]
    assert depths == [0, 9, 10, 5_000, MAX_DEPTH - 1, MAX_DEPTH]
