"""Snapshots: what is cut into parts is put together again, and nothing else is believed."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import MalformedMessageError
from kvist.events import snapshot as snapshots
from kvist.events.codec import decode_snapshot_part, encode_snapshot_part, is_canonical, is_snapshot_part
from kvist.events.snapshot import HeldBlocks, Holding, Snapshot, SnapshotAssembly, block_digest, snapshot_parts
from kvist.events.types import SnapshotPart, Tier, WorkerRank

PART = SnapshotPart("worker-0", 1, 2**63, 7, 16, 0, 1, 3, 2**64 - 1, bytes(range(16)), bytes(range(8)), b"\x01\x0f")
GOLDEN = bytes.fromhex(
    "9d"  # an array of thirteen
    "ae6b766973742d736e617073686f74"  # "kvist-snapshot"
    "a8776f726b65722d30"  # worker
    "01"  # rank
    "cf8000000000000000"  # epoch
    "07"  # sequence
    "10"  # block size
    "00"  # the first part
    "01"  # of one
    "03"  # (block, tier) pairs
    "cfffffffffffffffff"  # digest
    "c410000102030405060708090a0b0c0d0e0f"  # two hashes
    "c4080001020304050607"  # two depths
    "c402010f"  # in GPU memory, and in all tiers
)


def held_blocks(num_blocks: int, seed: int = 0) -> HeldBlocks:
    rng = random.Random(seed)
    hashes = [rng.getrandbits(64) for _ in range(num_blocks)]
    return HeldBlocks(
        np.array(hashes, np.uint64),
        np.array([rng.randrange(50) for _ in hashes], np.uint32),
        np.array([rng.randrange(1, 16) for _ in hashes], np.uint8),
    )


def parts_of(held: HeldBlocks) -> list[SnapshotPart]:
    slices = HeldBlocks(*(column[:3] for column in held)), HeldBlocks(*(column[3:] for column in held))
    return list(snapshot_parts(Snapshot(WorkerRank("worker-0", 1), 2**63, 7, 16, held.holding(), slices)))


def put_together(parts) -> Snapshot:
    assembly = SnapshotAssembly("w")
    for part in parts:
        assembly.add(part)
    return assembly.snapshot()


def pairs(slices) -> set[tuple[int, int, int]]:
    return {row for held in slices for row in zip(*(column.tolist() for column in held), strict=True)}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_PART_BLOCKS", 4)


def test_a_part_has_the_documented_bytes():
    assert encode_snapshot_part(PART) == GOLDEN
    assert decode_snapshot_part(GOLDEN, "w") == PART
    assert is_snapshot_part(GOLDEN)
    assert not is_canonical(GOLDEN)


def test_fields_of_later_versions_are_ignored():
    fields = msgspec.msgpack.decode(GOLDEN)
    assert decode_snapshot_part(msgspec.msgpack.encode([*fields, "later"]), "w") == PART


@pytest.mark.parametrize("num_blocks", [0, 1, 4, 5, 40])
def test_parts_in_any_order_and_number_make_the_snapshot(num_blocks):
    held = held_blocks(num_blocks)
    parts = parts_of(held)
    assert len(parts) == max(1, -(-num_blocks // 4))
    shuffled = [*parts, *parts[:2]]
    random.Random(1).shuffle(shuffled)
    snapshot = put_together(decode_snapshot_part(encode_snapshot_part(part), "w") for part in shuffled)
    assert (snapshot.source, snapshot.block_size) == (WorkerRank("worker-0", 1), 16)
    assert (snapshot.epoch, snapshot.sequence, snapshot.holding) == (2**63, 7, held.holding())
    assert pairs(snapshot.slices) == pairs([held])
    depths = [depth for each in snapshot.slices for depth in each.depths.tolist()]
    assert depths == sorted(depths)


def test_the_holding_is_the_sum_over_blocks_and_tiers():
    held = held_blocks(50)
    expected = [
        block_digest(block_hash, tier) for block_hash, _, tiers in pairs([held]) for tier in Tier if tiers >> tier & 1
    ]
    assert held.holding() == Holding(len(expected), sum(expected) % 2**64)


@given(
    st.integers(0, 9), st.sampled_from(["lose", "hash", "tier", "num_blocks", "digest", "sequence", "epoch", "rank"])
)
def test_a_snapshot_that_is_not_whole_or_lies_is_malformed(part_idx, fault):
    parts = parts_of(held_blocks(40))
    part = parts[part_idx]
    if fault == "lose":
        del parts[part_idx]
    elif fault == "hash":
        parts[part_idx] = msgspec.structs.replace(part, hashes=part.hashes[::-1])
    elif fault == "tier":
        parts[part_idx] = msgspec.structs.replace(part, tiers=bytes([part.tiers[0] ^ 8 or 7]) + part.tiers[1:])
    else:
        parts[part_idx] = msgspec.structs.replace(part, **{fault: getattr(part, fault) ^ 1})
    with pytest.raises(MalformedMessageError):
        put_together(parts)


def test_what_all_parts_claim_wrongly_is_malformed_too():
    parts = [msgspec.structs.replace(part, digest=part.digest ^ 1) for part in parts_of(held_blocks(9))]
    with pytest.raises(MalformedMessageError, match=r"a snapshot of Holding.*, expected Holding"):
        put_together(parts)


def test_nothing_at_all_is_no_snapshot():
    with pytest.raises(MalformedMessageError, match="0 parts"):
        put_together([])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worker": ""}, r"\$\[1\]"),
        ({"rank": 8192}, r"\$\[2\]"),
        ({"part_idx": 1}, "part_idx is 1, expected less than 1"),
        ({"num_parts": 0}, r"\$\[7\]"),
        ({"hashes": bytes(15)}, "hashes has 15 bytes, expected 16"),
        ({"depths": bytes(4)}, "depths has 4 bytes, expected 8"),
        ({"tiers": b"\x01"}, "hashes has 16 bytes, expected 8"),
        ({"tiers": b"\x00\x01"}, "tiers"),
        ({"tiers": b"\x10\x01"}, "tiers"),
    ],
)
def test_a_part_that_is_not_as_specified_is_malformed_and_the_error_names_the_field(changes, reason):
    part = msgspec.structs.replace(PART, **changes)
    with pytest.raises(MalformedMessageError, match=reason):
        decode_snapshot_part(encode_snapshot_part(part), "w")


@given(st.integers(0, len(GOLDEN)), st.binary(max_size=40))
def test_any_bytes_are_a_part_or_malformed(keep, garbage):
    with suppress(MalformedMessageError):
        decode_snapshot_part(GOLDEN[:keep] + garbage, "w")


def test_chains_of_any_length_come_by_ascending_depth():
    depths = np.array([70_000, 3, 65_536, 65_535, 0], np.uint32)
    held = HeldBlocks(np.arange(5, dtype=np.uint64), depths, np.ones(5, np.uint8))
    assert [depth for each in put_together(parts_of(held)).slices for depth in each.depths.tolist()] == sorted(depths)
