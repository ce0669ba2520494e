"""The digest of a set of blocks: order-free, reversible, and the same one by one and all at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvist.events.snapshot import block_digest, blocks_digest
from kvist.events.types import Tier

hash_lists = st.lists(st.integers(0, 2**64 - 1), max_size=80)


def test_a_digest_has_the_documented_value():
    assert block_digest(1, Tier.GPU) == 0x5692161D100B05E5
    assert block_digest(1, Tier.HOST) == 0xE4D971771B652C20
    assert blocks_digest([1, 2, 3], Tier.GPU) == sum(block_digest(h, 0) for h in (1, 2, 3)) % 2**64


def test_nothing_has_digest_zero():
    assert blocks_digest([], Tier.GPU) == 0


@given(hash_lists, st.sampled_from(Tier))
def test_many_blocks_contribute_the_sum_of_each(block_hashes, tier):
    assert blocks_digest(block_hashes, tier) == sum(block_digest(h, tier) for h in block_hashes) % 2**64


@given(hash_lists.flatmap(st.permutations))
def test_order_does_not_matter(block_hashes):
    assert blocks_digest(block_hashes, Tier.GPU) == blocks_digest(sorted(block_hashes), Tier.GPU)


@given(st.integers(0, 2**64 - 1))
def test_the_tiers_of_one_block_differ(block_hash):
    assert len({block_digest(block_hash, tier) for tier in Tier}) == len(Tier)
