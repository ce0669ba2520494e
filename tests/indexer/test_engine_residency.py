"""Residency on an index against `kvist.publisher.residency`, which keeps all of it in Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.events import Tier, WorkerRank
from kvist.indexer.engine_map import Names
from kvist.indexer.residency import EngineResidency
from kvist.publisher.holdings import NO_SCOPE, Released, Scope
from kvist.publisher.residency import Residency
from kvist.radix import RadixIndex

SOURCE, OTHER = WorkerRank("w", 0), WorkerRank("v", 1)


# Two of them cannot be named by a map, in which they say "nothing" and "irregular".
BLOCKS = [0, 1, 2, 5 << 32 | 3, 5 << 32 | 4, 3 << 62 | 9]
names = st.one_of(st.integers(0, 5), st.just(b"\x07"))
blocks = st.sampled_from(BLOCKS)
tiers = st.sampled_from([Tier.GPU, Tier.HOST])
pairs = st.lists(st.tuples(names, blocks), max_size=4, unique_by=(lambda pair: pair[0], lambda pair: pair[1]))
steps = st.one_of(
    st.tuples(st.just("hold"), pairs, tiers, st.sampled_from([NO_SCOPE, NO_SCOPE, NO_SCOPE, Scope("sql", None)])),
    st.tuples(st.just("release"), st.lists(names, max_size=4), tiers, st.none()),
    st.tuples(st.just("other"), st.lists(blocks, max_size=2), tiers, st.booleans()),
    st.tuples(st.just("clear"), st.none(), st.none(), st.none()),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=25), st.booleans())
def test_it_holds_and_says_what_the_other_does(history, counts_copies):
    index = RadixIndex(seed=1, segment_bits=0)
    residency = EngineResidency(index, SOURCE, lambda events: index.apply(SOURCE, events))
    model = Residency()
    residency.counts_copies = model.counts_copies = counts_copies
    scope_of: dict[int, Scope] = {}
    for step, items, tier, detail in history:
        if step == "hold":
            engine_hashes = [name for name, _ in items]
            block_hashes = [block for _, block in items]
            if any(scope_of.setdefault(block, detail) != detail for block in block_hashes):
                continue  # a scope is part of what a block's hash is made from
            arguments = (engine_hashes, block_hashes, None, tier, detail)
            held, expected = residency.hold(*arguments), model.hold(*arguments)
            assert held.new_idxs == expected.new_idxs
            assert held.displaced == expected.displaced
        elif step == "release":
            assert residency.release(items, tier) == model.release(items, tier)
        elif step == "other":  # another rank's blocks make no difference
            if detail:
                for block in items:
                    index.store(OTHER, tier, None, np.array([block], np.uint64))
            else:
                index.remove(OTHER, tier, np.array(items, np.uint64))
        else:
            residency.clear()
            model.clear()
        check(residency, model)
    index.check_invariants()
    for name in (*range(6), b"\x07"):
        for tier in (Tier.GPU, Tier.HOST):
            while (released := residency.release([name], tier)).not_found == []:
                assert released == model.release([name], tier)
            assert released == model.release([name], tier)
    assert residency.num_blocks == len(residency.map) == 0


def check(residency: EngineResidency, model: Residency) -> None:
    assert residency.num_blocks == model.num_blocks
    assert residency.digest == model.digest
    for name in (*range(6), b"\x07"):
        assert residency.find(name) == model.find(name)
    for block in BLOCKS:
        assert residency.holds(block) == model.holds(block)
        assert residency.scope(block) == model.scope(block)


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=25), st.integers(1, 3))
def test_what_names_tell_is_held_by_another_index_in_the_same_way(history, seed):
    index, other = (RadixIndex(seed=number, segment_bits=0) for number in (1, seed))
    residency = EngineResidency(index, SOURCE, lambda events: index.apply(SOURCE, events))
    residency.counts_copies = True
    scope_of: dict[int, Scope] = {}
    for step, items, tier, detail in history:
        if step == "hold" and all(scope_of.setdefault(block, detail) == detail for _, block in items):
            residency.hold([name for name, _ in items], [block for _, block in items], None, tier, detail)
        elif step == "release":
            residency.release(items, tier)
        elif step == "clear":
            residency.clear()
    told = {int(n): int(b) for names in residency.names() for n, b in zip(*names, strict=True)}
    held = {
        block: {tier for tier in Tier if residency.map.tiers(block, residency.slot) >> tier & 1} for block in BLOCKS
    }
    if residency.is_told_by_names:
        assert set(told.values()) == {block for block, where in held.items() if where}
    copied = EngineResidency(other, SOURCE, lambda events: other.apply(SOURCE, events))
    copied.counts_copies = True
    rows = np.frombuffer(residency.told_copies(), "<u8").reshape(-1, 3).tolist()
    copies = {(name, tier): num_copies for name, tier, num_copies in rows}
    copied.resume_copies(residency.told_copies())
    for block in set(told.values()):
        for tier in held[block]:
            other.store(SOURCE, tier, None, np.array([block], np.uint64))
    for name, block in told.items():
        copied.resume(Names(np.array([name], np.uint64), np.array([block], np.uint64)))
    for name, block in told.items():
        assert copied.find(name) == residency.find(name) == block
        for tier in held[block]:
            for _ in range(copies.get((name, tier), 0)):
                assert copied.release([name], tier) == Released([], [])
            assert copied.release([name], tier) == Released([block], [])
    assert copied.num_blocks == 0
    assert len(set(told.values())) == len(told)
    other.check_invariants()


def test_a_block_with_another_name_in_another_tier_is_told_under_neither():
    index = RadixIndex(seed=1)
    residency = EngineResidency(index, SOURCE, lambda events: index.apply(SOURCE, events))
    residency.hold([1], [11], None, Tier.GPU)
    residency.hold([2], [11], None, Tier.HOST)
    residency.hold([3], [33], None, Tier.GPU)
    told = {int(name): int(block) for names in residency.names() for name, block in zip(*names, strict=True)}
    assert told == {3: 33}
    assert not residency.is_told_by_names


def test_copies_that_no_engine_can_have_are_bounded_whatever_a_dump_says():
    index = RadixIndex(seed=1)
    residency = EngineResidency(index, SOURCE, lambda events: index.apply(SOURCE, events))
    told = np.array([[1, 0, 2**64 - 1], [1, 0, 2**63], [2, 2**64 - 64, 1]], "<u8").tobytes()
    residency.resume_copies(told + b"and some more")
    assert [residency.copies.of(1, Tier.GPU), residency.copies.of(2, Tier.GPU)] == [2 << 32, 1]
