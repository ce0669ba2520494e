"""Residency against its definition: for each tier, the set of blocks that some engine hash names, or a copy of it."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events.snapshot import blocks_digest
from kvist.events.types import Tier
from kvist.publisher.residency import NO_SCOPE, Chain, Residency, Scope

tiers = st.sampled_from([Tier.GPU, Tier.HOST])
names = st.integers(0, 5)
blocks = st.integers(100, 103)
chains = st.lists(st.tuples(names, blocks), max_size=4, unique_by=(lambda pair: pair[0], lambda pair: pair[1]))
steps = st.one_of(
    st.tuples(st.just("hold"), chains, tiers),
    st.tuples(st.just("release"), st.lists(names, max_size=4), tiers),
    st.tuples(st.just("clear"), st.none(), st.none()),
)


@given(st.lists(steps, max_size=20))
@pytest.mark.parametrize("counts_copies", [False, True], ids=["set", "counted"])
@pytest.mark.parametrize("scope", [NO_SCOPE, Scope("sql", None)])
def test_what_is_held_is_what_the_engines_hashes_name(scope, counts_copies, history):
    residency = Residency()
    residency.counts_copies = counts_copies
    model: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
    copies: Counter[tuple[int, Tier]] = Counter()
    for step, pairs, tier in history:
        before = None if tier is None else set(model[tier].values())
        if step == "hold":
            held = residency.hold(Chain([n for n, _ in pairs], [b for _, b in pairs], None, tier, scope))
            for name, block in pairs:
                copies[name, tier] = copies[name, tier] + 1 if counts_copies and model[tier].get(name) == block else 1
            model[tier].update(pairs)
            now = set(model[tier].values())
            new = {pairs[idx][1] for idx in held.new_idxs}
            assert (before - set(held.displaced)) | new == now
        elif step == "release":
            released = residency.release(pairs, tier)
            for name in pairs:
                copies[name, tier] -= 1
                if copies[name, tier] <= 0:
                    model[tier].pop(name, None)
            assert before - set(released) == set(model[tier].values())
        else:
            residency.clear()
            model = {tier: {} for tier in Tier}
        told = {tier: {**residency.names(tier)} for tier in Tier}
        parts = {**residency.copies}, {**residency.places}, {**residency.scopes}, residency.digest
        same = Residency.of(told, *parts)
        for each in (residency, residency.copy(), same):
            check(each, model, scope)
            assert each.copies == {key: num - 1 for key, num in copies.items() if num > 1 and key[0] in model[key[1]]}


def check(residency, model, scope) -> None:
    held = {(block_hash, tier) for tier, named in model.items() for block_hash in named.values()}
    assert residency.num_blocks == len(held)
    digest = sum(blocks_digest([block_hash], tier) for block_hash, tier in held) % 2**64
    assert residency.digest == digest
    told = {
        (block_hash, tier)
        for each in residency.slices()
        for block_hash, tiers in zip(each.hashes.tolist(), each.tiers.tolist(), strict=True)
        for tier in Tier
        if tiers >> tier & 1
    }
    assert told == held
    for name in range(6):
        named = [model[tier][name] for tier in Tier if name in model[tier]]
        assert residency.find(name) == (named[0] if named else None)
    for block_hash in range(100, 104):
        is_held = any(block_hash == held_hash for held_hash, _ in held)
        assert residency.holds(block_hash) == is_held
        assert residency.scope(block_hash) == (scope if is_held else NO_SCOPE)


def test_the_parent_of_a_held_block_outlives_the_parent_itself():
    residency = Residency()
    residency.hold(Chain([1, 2], [11, 12], None, Tier.GPU))
    residency.release([1], Tier.GPU)
    assert residency.parent(12) == 11
    assert not residency.holds(11)
    with pytest.raises(KeyError):
        residency.parent(11)


def depths_of(residency) -> dict[int, int]:
    return {
        block_hash: depth
        for held in residency.slices()
        for block_hash, depth in zip(held.hashes.tolist(), held.depths.tolist(), strict=True)
    }


def test_a_depth_counts_the_blocks_before_it_whatever_becomes_of_them():
    residency = Residency()
    residency.hold(Chain([1, 2, 3], [11, 12, 13], None, Tier.GPU))
    residency.release([1, 2], Tier.GPU)
    residency.hold(Chain([4], [14], 13, Tier.HOST))
    residency.hold(Chain([3], [13], 12, Tier.DISK))
    assert depths_of(residency) == {13: 2, 14: 3}
    assert (residency.parent(13), residency.parent(14)) == (12, 13)
    residency.hold(Chain([1], [11], None, Tier.EXTERNAL))
    assert residency.parent(11) is None
    assert depths_of(residency) == {11: 0, 13: 2, 14: 3}


def test_what_is_held_is_told_in_slices(monkeypatch):
    monkeypatch.setattr("kvist.publisher.residency._NUM_BLOCKS_A_SLICE", 10)
    residency = Residency()
    chain = list(range(100, 125))
    residency.hold(Chain(chain, chain, None, Tier.GPU))
    assert [len(held.hashes) for held in residency.slices()] == [10, 10, 5]
    assert depths_of(residency) == {block_hash: idx for idx, block_hash in enumerate(chain)}


def test_a_chain_whose_names_and_blocks_differ_in_number_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Residency().hold(Chain([1], [11, 12], None, Tier.GPU))


def test_a_digest_is_that_of_what_is_held():
    residency = Residency()
    for start in range(0, 40, 4):
        hashes, tier = range(start, start + 4), Tier(start // 4 % 4)
        residency.hold(Chain(hashes, [100 + name for name in hashes], None, tier))
        residency.release(hashes[1:3], tier)
        (held,) = residency.slices()
        assert residency.digest == residency.copy().digest == held.holding().digest
    residency.clear()
    assert residency.digest == 0


def test_blocks_that_come_and_go_leave_nothing_behind():
    residency, num_blocks = Residency(), 1 << 16
    tracemalloc.start()
    try:
        for number in range(num_blocks):
            assert residency.hold(Chain([number], [number << 20], None, Tier.GPU)) == ([0], [])
            assert residency.release([number], Tier.GPU) == [number << 20]
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 8 * num_blocks
