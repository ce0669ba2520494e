"""Residency on an index against `kvist.publisher.residency`, which keeps all of it in Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_invariants import check_invariants

from kvist.events import Stored, Tier, WorkerRank
from kvist.events.types import Holding
from kvist.indexer.compiled.engine_blocks import PLACE_BITS
from kvist.indexer.engine_rank import EngineResidency, Table
from kvist.publisher.residency import NO_SCOPE, Chain, Residency, Scope
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import ROW

SOURCE, OTHER = WorkerRank("w", 0), WorkerRank("v", 1)


BLOCKS = [1, 2, 5 << 32 | 3, 5 << 32 | 4, 3 << 62 | 9]
NAMES = (*range(6), b"\x07")
TIERS = (Tier.GPU, Tier.HOST)
names = st.one_of(st.integers(0, 5), st.just(b"\x07"))
blocks = st.sampled_from(BLOCKS)
tiers = st.sampled_from(TIERS)
pairs = st.lists(st.tuples(names, blocks), max_size=4, unique_by=(lambda pair: pair[0], lambda pair: pair[1]))
steps = st.one_of(
    st.tuples(st.just("hold"), pairs, tiers, st.sampled_from([NO_SCOPE, NO_SCOPE, NO_SCOPE, Scope("sql", None)])),
    st.tuples(st.just("release"), st.lists(names, max_size=4), tiers, st.none()),
    st.tuples(st.just("other"), st.lists(blocks, max_size=2), tiers, st.booleans()),
    st.tuples(st.just("clear"), st.none(), st.none(), st.none()),
)


def play(history, index, *residencies) -> None:
    """Do what the history says with each of the residencies; between steps they hold and say the same."""
    scope_of: dict[int, Scope] = {}
    for step, items, tier, detail in history:
        if step == "hold":
            if any(scope_of.setdefault(block, detail) != detail for _, block in items):
                continue  # a scope is part of what a block's hash is made from
            for each in residencies:
                each.hold(Chain([name for name, _ in items], [block for _, block in items], None, tier, detail))
        elif step == "release":
            for each in residencies:
                each.release(items, tier)
        elif step == "other":  # another rank's blocks make no difference
            for block in items:
                if detail:
                    index.store(OTHER, tier, None, np.array([block], np.uint64))
                else:
                    index.remove(OTHER, tier, np.array([block], np.uint64))
        else:
            for each in residencies:
                each.clear()
        check(*residencies)


def check(residency: EngineResidency, model: Residency | None = None) -> None:
    """Assert that both hold the same."""
    if model is None:
        return
    assert residency._index.digest(SOURCE) == Holding(model.num_blocks, model.digest)
    for name in NAMES:
        assert residency.find(name) == model.find(name)
    for block in BLOCKS:
        assert residency.holds(block) == model.holds(block)
        if model.holds(block):
            assert residency.scope(block) == model.scope(block)


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=25), st.booleans())
def test_it_holds_and_says_what_the_other_does(history, counts_copies):
    index = RadixIndex(seed=1, segment_bits=0)
    residency, model = EngineResidency(index, SOURCE), Residency()
    residency.counts_copies = model.counts_copies = counts_copies
    play(history, index, residency, model)
    check_invariants(index)
    for name in NAMES:
        for tier in TIERS:
            while name in model.names(tier):
                model.release([name], tier)
                residency.release([name], tier)
                check(residency, model)
            residency.release([name], tier)
            check(residency, model)
    assert index.digest(SOURCE).num_blocks == len(residency.names) == len(residency.counts) == 0


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=25), st.integers(1, 3))
def test_what_names_tell_is_held_by_another_index_in_the_same_way(history, seed):
    index, other = (RadixIndex(seed=number, segment_bits=0) for number in (1, seed))
    residency, copied = EngineResidency(index, SOURCE), EngineResidency(other, SOURCE)
    residency.counts_copies = copied.counts_copies = True
    play(history, index, residency)
    told = list(residency.dump_names())
    held = {(block, tier) for block in BLOCKS for tier in Tier if residency.tiers(block) >> tier & 1}
    triples = [(int(n), names.tier, int(b)) for names in told for n, b in zip(*names[1:], strict=True)]
    if residency.are_names_complete:
        assert {(block, tier) for _, tier, block in triples} == held
    copied.load_copies(residency.dump_copies())
    for _, tier, block in triples:
        other.apply(SOURCE, [Stored(block.to_bytes(8, "little"), None, tier)])
    for names in told:
        copied.load_names(names)
    for name, tier, block in triples:
        while residency.tiers(block) >> tier & 1:
            assert copied.tiers(block) >> tier & 1
            for each in (residency, copied):
                each.release([name], tier)
        assert not copied.tiers(block) >> tier & 1
    assert other.digest(SOURCE).num_blocks == 0
    check_invariants(other)


def told_by(residency: EngineResidency) -> dict[tuple[Tier, int], int]:
    return {(n.tier, int(e)): int(b) for n in residency.dump_names() for e, b in zip(*n[1:], strict=True)}


def test_a_block_is_told_under_its_name_in_each_tier_and_not_at_all_if_it_has_two_in_one():
    residency = EngineResidency(RadixIndex(seed=1), SOURCE)
    residency.hold(Chain([1], [11], None, Tier.GPU))
    residency.hold(Chain([2], [11], None, Tier.HOST))
    assert residency.are_names_complete
    residency.hold(Chain([3, 4], [33, 44], None, Tier.GPU))
    residency.hold(Chain([5], [33], None, Tier.GPU))
    assert told_by(residency) == {(Tier.GPU, 1): 11, (Tier.HOST, 2): 11, (Tier.GPU, 4): 44}
    assert not residency.are_names_complete


def test_a_block_whose_hash_is_0_is_left_out_and_leaves_nothing_behind():
    index = RadixIndex(seed=1)
    residency = EngineResidency(index, SOURCE)
    residency.hold(Chain([1, 2, 3], [11, 0, 33], None, Tier.GPU))
    residency.hold(Chain([1], [0], None, Tier.GPU))
    assert [residency.find(name) for name in (1, 2, 3)] == [None, None, 33]
    residency.release([1, 2, 3], Tier.GPU)
    assert len(residency.names) == index.statistics().num_blocks == 0


def test_scopes_of_blocks_that_are_gone_are_forgotten_as_others_come():
    residency = EngineResidency(RadixIndex(seed=1), SOURCE)
    for block in range(1, 2000):
        residency.hold(Chain([block], [block], None, Tier.GPU, Scope("sql", None)))
        residency.release([block - 10], Tier.GPU)
    assert len(residency._scopes) < 30
    assert residency.scope(1995) == Scope("sql", None)


def test_copies_that_no_engine_can_have_are_bounded_whatever_a_dump_says():
    residency = EngineResidency(RadixIndex(seed=1), SOURCE)
    told = np.array([[1, 0, 2**64 - 1], [1, 0, 2**63], [2, 2**64 - 64, 1], [3, 0, 1], [4, 36, 7]], "<u8").tobytes()
    residency.load_copies(told + b"and some more")
    assert [residency.counts.get(name) >> PLACE_BITS for name in (1, 2, 3, 4)] == [1 << 32, 0, 1, 0]
    assert len(residency.counts) == 2


@pytest.fixture
def table() -> Table:
    return Table()


def put(table: Table, keys: range, value: int) -> None:
    table.put(np.array(keys, np.uint64), np.full(len(keys), value, np.uint64))


def test_a_row_takes_less_than_24_bytes(table):
    put(table, range(200_000), 1)
    assert len(table) == 200_000
    assert table.segments["room"].sum() * ROW.itemsize / len(table) < 24
    assert all(table.get(key) == 1 for key in range(0, 200_000, 1000))


def test_a_table_that_is_cleared_is_empty(table):
    put(table, range(50_000), 1)
    put(table, range(1000, 50_000), 0)
    assert all(table.get(key) == 1 for key in range(1000))
    assert not table.get(1000)
    table.clear()
    assert len(table) == 0


def test_names_are_told_some_at_a_time_while_the_table_grows():
    residency = EngineResidency(RadixIndex(seed=1), SOURCE)
    hashes = np.random.default_rng(2).integers(1, 2**63, 60_000, dtype=np.uint64)
    blocks = hashes.tolist()

    def hold(some: list[int]) -> None:
        residency.hold(Chain([block ^ 1 for block in some], some, None, Tier.GPU))

    hold(blocks[:50_000])
    told, num_parts = [], 0
    for number, names in enumerate(residency.dump_names()):
        assert len(names.blocks) <= 4096
        assert (names.engine_hashes ^ np.uint64(1) == names.blocks).all()
        told += names.blocks.tolist()
        num_parts += 1
        hold(blocks[50_000 + number * 500 :][:500])  # segments grow, the one that is told among them
    assert num_parts > 12
    assert len(told) == len(set(told))
    assert set(blocks[:50_000]) <= set(told)
