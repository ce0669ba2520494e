"""Scratch slots in the manager: how many are really taken, what is lost with them, and that all come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from memory_invariants import check_memory

from kvist.errors import InvalidValueError
from kvist.events import FULL, Window
from kvist.kvcache import (
    ABSENT,
    BlockHashChain,
    BlockTable,
    KvCacheManager,
    KvDtype,
    KvGroup,
    LayerKv,
    ScratchPolicy,
    SequenceBlocks,
)
from kvist.kvcache.sequences import event_hash

SCRATCH = ScratchPolicy()


@pytest.fixture
def make_manager() -> Callable[..., KvCacheManager]:
    """Build a manager with one group a window, of `num_layers` layers each."""

    def make(
        *windows: Window, num_layers: int = 32, num_blocks: int = 100, block_size: int = 32, **options: Any
    ) -> KvCacheManager:
        layers = range(num_layers)
        groups = [
            KvGroup(i, LayerKv(window, 1, 8, KvDtype.FLOAT32), tuple(len(layers) * i + layer for layer in layers))
            for i, window in enumerate(windows)
        ]
        return KvCacheManager(groups, [num_blocks] * len(groups), block_size, **({"scratch": SCRATCH} | options))

    return make


def start(manager: KvCacheManager, tokens: list[int], end: int, *, is_allowed: bool = True) -> SequenceBlocks | None:
    chain = BlockHashChain(manager.block_size)
    hit = manager.match(chain, tokens)
    return manager.open(hit, chain, tokens, end, is_scratch_allowed=is_allowed)


def must_start(manager: KvCacheManager, tokens: list[int], end: int) -> SequenceBlocks:
    sequence = start(manager, tokens, end)
    assert sequence is not None
    return sequence


def num_taken(table: BlockTable) -> int:
    """Count the slots that are really taken."""
    ordinary = [slot_id for slot_id in table.block_ids if slot_id != ABSENT]
    return len({*ordinary, *(() if table.scratch is None else table.scratch.slot_ids)})


@pytest.mark.parametrize(
    ("num_tokens", "rewind", "expected", "saved_percent"),
    [(1024, 0, 5, 84.375), (1000, 0, 6, 81.25), (1024, 8, 6, 81.25)],
)
def test_a_prompt_in_thirty_two_sliding_layers_takes_a_few_slots_instead_of_one_a_block(
    make_manager, num_tokens: int, rewind: int, expected: int, saved_percent: float
) -> None:
    manager = make_manager(128, scratch=ScratchPolicy(rewind))
    sequence = must_start(manager, list(range(num_tokens)), num_tokens)
    assert num_taken(sequence.tables[0]) == expected
    (pool,) = manager.statistics().pools
    assert (pool.num_used, pool.num_scratch, pool.num_free) == (expected, 1, 100 - expected)
    assert 100 * (1 - expected / 32) == saved_percent
    without = start(make_manager(128), list(range(num_tokens)), num_tokens, is_allowed=False)
    assert without is not None
    assert num_taken(without.tables[0]) == 32


@pytest.mark.parametrize(("window", "rewind", "expected"), [(32, 0, 2), (32, 64, 4)])
def test_eight_layers_and_a_rewind_take_the_written_number_of_slots(
    make_manager, window: int, rewind: int, expected: int
) -> None:
    manager = make_manager(window, num_layers=8, scratch=ScratchPolicy(rewind))
    assert num_taken(must_start(manager, list(range(256)), 256).tables[0]) == expected


@pytest.mark.parametrize(
    ("window", "rewind", "expected"),
    [(64, 0, [(3, 2), (5, 4)]), (64, 32, [(4, 3), (5, 5)]), (256, 0, [(8, 8), (11, 11)])],
)
def test_a_prompt_in_chunks_takes_the_written_number_of_slots_each_time(
    make_manager, window: int, rewind: int, expected: list[tuple[int, int]]
) -> None:
    manager = make_manager(window, num_layers=8, scratch=ScratchPolicy(rewind))
    tokens = list(range(352))
    sequence = must_start(manager, tokens, 256)
    taken = [(num_taken(sequence.tables[0]), len(sequence.tables[0].held()))]
    manager.settle()
    assert manager.grow(sequence, tokens, 352)
    taken.append((num_taken(sequence.tables[0]), len(sequence.tables[0].held())))
    assert taken == expected
    check_memory(manager, [sequence])


def test_only_newly_begun_blocks_are_taken_and_freed_scratch_slots_serve_first(make_manager) -> None:
    manager = make_manager(64, num_layers=1)
    tokens = list(range(352))
    sequence = must_start(manager, tokens, 256)
    (table,) = sequence.tables
    assert table.scratch is not None
    first_scratch, first_held = set(table.scratch.slot_ids), set(table.held())
    assert (len(first_scratch), len(first_held)) == (6, 2)
    manager.settle()
    assert manager.grow(sequence, tokens, 352)
    assert table.scratch is not None
    second_scratch, second_held = set(table.scratch.slot_ids), set(table.held())
    assert (len(second_scratch), len(second_held)) == (1, 4), "6 scratch slots to 1, 2 blocks more: 3 fewer in all"
    assert second_held > first_held
    assert second_scratch | (second_held - first_held) <= first_scratch, "what was given back is taken again"


def test_scratch_content_is_never_found_again(make_manager, follower) -> None:
    tokens = list(range(1024))
    manager = make_manager(128, sink=follower)
    sequence = must_start(manager, tokens, 1024)
    manager.settle()
    assert sequence.tables[0].block_ids[:28].tolist() == [ABSENT] * 28
    manager.close(sequence)
    assert manager.statistics().pools[0].num_cached == 4
    follower.assert_equals(manager)
    chain = BlockHashChain(32)
    assert manager.match(chain, tokens).num_tokens == 0, "the last token's query needs block 27, which was scratch"
    assert manager.match(BlockHashChain(32), [*tokens, 7]).num_tokens == 1024, "the next turn needs only the tail"
    manager = make_manager(128)
    kept = start(manager, tokens, 1024, is_allowed=False)
    assert kept is not None
    manager.settle()
    assert manager.match(BlockHashChain(32), tokens).num_tokens == 992


def test_stored_events_skip_scratch_blocks_and_say_whose_child_the_first_kept_block_is(make_manager, follower) -> None:
    manager = make_manager(FULL, 8, num_layers=2, block_size=4, sink=follower)
    tokens, chain = list(range(32)), BlockHashChain(4)
    sequence = manager.open(manager.match(chain, tokens), chain, tokens, 32, is_scratch_allowed=True)
    assert sequence is not None
    hashes = [{event_hash(digest) for digest in pool._cached} for pool in manager.pools]
    assert [len(each) for each in hashes] == [8, 2]
    assert hashes[1] < hashes[0]
    follower.assert_equals(manager)
    (first_kept, *_) = follower.held[1]
    parent, block_tokens = follower.held[1][first_kept]
    assert parent in hashes[0] - hashes[1]
    assert block_tokens == (24, 25, 26, 27)


@pytest.mark.parametrize("leave", ["settle", "revoke", "close"])
def test_scratch_slots_come_back_on_every_way_out(make_manager, leave: str) -> None:
    manager = make_manager(FULL, 16, num_layers=2, block_size=4)
    sequence = must_start(manager, list(range(64)), 64)
    assert manager.statistics().pools[1].num_scratch > 0
    if leave != "settle":
        manager.close(sequence)
    if leave == "revoke":
        manager.revoke()
    if leave == "settle":
        manager.settle()
        assert sequence.tables[1].scratch is None
        check_memory(manager, [sequence])
        manager.close(sequence)
    assert [pool.num_scratch for pool in manager.statistics().pools] == [0, 0]
    assert manager.statistics().num_used == 0
    check_memory(manager, [])
    manager.settle()
    check_memory(manager, [])


def snapshot(manager: KvCacheManager, *sequences: SequenceBlocks) -> object:
    """Return all that a call could have changed, as bytes and numbers."""
    return (
        manager.statistics(),
        [(list(pool._free), bytes(pool._num_references), dict(pool._cached)) for pool in manager.pools],
        [
            (bytes(table.block_ids), table.first_held, list(table.adopted), table.scratch, each.num_tokens)
            for each in sequences
            for table in each.tables
        ],
        [(each.num_final_tokens, list(each.chain.digests)) for each in sequences],
    )


@pytest.mark.parametrize("num_free", [0, 1, 3])
def test_growing_without_enough_room_changes_nothing_at_all(make_manager, follower, num_free: int) -> None:
    manager = make_manager(FULL, 16, num_layers=1, num_blocks=24 + num_free, block_size=4, sink=follower)
    tokens = list(range(400))
    sequence = must_start(manager, tokens, 64)
    manager.settle()
    other = must_start(manager, list(range(1000, 1032)), 32)
    manager.settle()
    before, events = snapshot(manager, sequence, other), {group: dict(held) for group, held in follower.held.items()}
    assert not manager.grow(sequence, tokens, 64 + 4 * num_free + 1)
    assert snapshot(manager, sequence, other) == before, "also the stale blocks are where they were"
    assert follower.held == events
    manager.close(other)
    assert manager.grow(sequence, tokens, 64 + 4 * num_free + 1)


def test_opening_without_enough_room_changes_nothing_at_all(make_manager) -> None:
    manager = make_manager(FULL, 16, num_layers=1, num_blocks=20, block_size=4)
    running = must_start(manager, list(range(48)), 48)
    manager.settle()
    before = snapshot(manager, running)
    assert start(manager, [*range(32), *range(900, 960)], 92) is None
    assert snapshot(manager, running) == before


def test_a_sequence_lives_off_the_blocks_that_leave_it_when_nothing_else_is_free(make_manager) -> None:
    manager = make_manager(16, num_layers=1, num_blocks=5, block_size=4)
    tokens = list(range(100))
    sequence = start(manager, tokens, 20, is_allowed=False)
    assert sequence is not None
    for end in range(21, 60):
        manager.settle()
        assert manager.grow(sequence, tokens, end)
        check_memory(manager, [sequence])


def test_a_sequence_may_refuse_scratch_but_cannot_have_it_against_the_engine(make_manager) -> None:
    sequence = start(make_manager(16), list(range(256)), 256, is_allowed=False)
    assert sequence is not None
    assert sequence.tables[0].scratch is None
    with pytest.raises(InvalidValueError, match=r"is_scratch_allowed: got True, expected False"):
        start(make_manager(16, scratch=None), list(range(256)), 256)


def test_guessed_tokens_can_be_taken_back_and_others_written_in_their_place(make_manager, follower) -> None:
    manager = make_manager(FULL, 6, num_layers=2, block_size=4, scratch=ScratchPolicy(5), sink=follower)
    tokens = list(range(30))
    sequence = must_start(manager, tokens, 24)
    manager.settle()
    assert len(sequence.chain.digests) == 7, "match has hashed the prompt"
    assert [pool.statistics().num_cached for pool in manager.pools] == [4, 1], "blocks 4 and 5 may still change"
    manager.rewind(sequence, 19)
    check_memory(manager, [sequence])
    assert [len(table.block_ids) for table in sequence.tables] == [5, 5]
    assert all(table.block_ids[3] >= 0 for table in sequence.tables), "token 14, which the next query sees"
    assert manager.grow(sequence, [*tokens[:19], 70, 71], 21)
    check_memory(manager, [sequence])
    follower.assert_equals(manager)


def test_the_chain_hashes_no_guess(make_manager) -> None:
    manager = make_manager(FULL, num_layers=1, block_size=4, scratch=ScratchPolicy(4))
    tokens = list(range(10))
    sequence = must_start(manager, tokens, 10)
    manager.settle()
    assert manager.grow(sequence, [*tokens, 70, 71, 72, 73], 14)
    manager.settle()
    manager.rewind(sequence, 11)
    final = [*tokens, 70, 80, 81, 82, 83, 84, 85, 86]
    for end in (15, 18):
        assert manager.grow(sequence, final, end)
        manager.settle()
    fresh = BlockHashChain(4)
    fresh.extend(final)
    assert sequence.chain.digests == fresh.digests[: len(sequence.chain.digests)]
    assert len(sequence.chain.digests) == 3
    assert manager.match(BlockHashChain(4), final).num_tokens == 12


@pytest.mark.parametrize("num_tokens", [9, 13, 19])
def test_more_than_the_policy_or_the_last_step_is_never_taken_back(make_manager, num_tokens: int) -> None:
    manager = make_manager(16, num_layers=1, block_size=4, scratch=ScratchPolicy(4))
    tokens = list(range(40))
    sequence = must_start(manager, tokens, 14)
    manager.settle()
    assert manager.grow(sequence, tokens, 18)
    manager.settle()
    with pytest.raises(InvalidValueError, match=f"num_tokens: got {num_tokens}, expected 14 to 18"):
        manager.rewind(sequence, num_tokens)
    manager.rewind(sequence, 14)
    with pytest.raises(InvalidValueError, match="expected 14 to 14"):
        manager.rewind(sequence, 13)


def test_a_memory_without_groups_serves_models_that_cache_nothing() -> None:
    manager = KvCacheManager([], [], 4)
    sequence = start(manager, list(range(9)), 9, is_allowed=False)
    assert sequence is not None
    assert manager.grow(sequence, list(range(10)), 10)
    manager.settle()
    manager.close(sequence)
    assert manager.statistics().pools == ()
