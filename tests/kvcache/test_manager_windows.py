"""What sequences hold while windows slide over them, and what stays in the cache when they have passed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from memory_invariants import check_memory

from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import (
    ABSENT,
    BlockHashChain,
    BlockTable,
    KvCacheManager,
    KvDtype,
    LayerKv,
    ScratchPolicy,
    num_stale_blocks,
    plan_windows,
    split_memory,
)
from kvist.kvcache.stale import num_blocks_for

WINDOW, BLOCK_SIZE = 64, 32


def by_position(table: BlockTable, num_cached_tokens: int, num_tokens: int) -> list[int]:
    """Return the blocks between two positions that exist: what would be sent of the sequence."""
    ordinals = slice(num_cached_tokens // BLOCK_SIZE, num_blocks_for(num_tokens, BLOCK_SIZE))
    return [block_id for block_id in table.block_ids[ordinals] if block_id != ABSENT]


@pytest.mark.parametrize("chunk", [96, 100, 300])
@pytest.mark.parametrize("scratch", [None, ScratchPolicy()])
def test_what_left_the_front_is_stale_at_each_step_of_a_prompt_in_chunks_and_two_hundred_decodes(
    make_groups: Callable[..., tuple], scratch: ScratchPolicy | None, chunk: int
) -> None:
    manager = KvCacheManager(make_groups(FULL, WINDOW), [20, 20], BLOCK_SIZE, scratch=scratch)
    tokens, chain = [i % 7 for i in range(500)], BlockHashChain(BLOCK_SIZE)
    ends = [*range(chunk, 300, chunk), *range(300, 501)]
    hit = manager.match(chain, tokens[:300])
    sequence = manager.open(hit, chain, tokens, ends[0], is_scratch_allowed=scratch is not None)
    assert sequence is not None
    history = 0
    for end in ends:
        assert end == ends[0] or manager.grow(sequence, tokens, end)
        for pool, table in zip(manager.pools, sequence.tables, strict=True):
            assert table.first_held == num_stale_blocks(history, pool.group.window, BLOCK_SIZE)
            assert len(table.block_ids) == num_blocks_for(end, BLOCK_SIZE)
            held = set(range(table.first_held, len(table.block_ids)))
            if table.scratch is not None:
                held -= set(table.scratch.block_range)
            assert {i for i, block_id in enumerate(table.block_ids) if block_id != ABSENT} == held
        manager.settle()
        for pool, table in zip(manager.pools, sequence.tables, strict=True):
            first_needed = num_stale_blocks(end, pool.group.window, BLOCK_SIZE)
            needed = table.block_ids[first_needed : num_blocks_for(end, BLOCK_SIZE)].tolist()
            assert by_position(table, first_needed * BLOCK_SIZE, end) == needed, "what a next query sees has no holes"
            assert pool.statistics().num_used == len(by_position(table, 0, end)) == len(table.held())
        check_memory(manager, [sequence])
        history = end
    assert 500 - num_stale_blocks(499, WINDOW, BLOCK_SIZE) * BLOCK_SIZE <= WINDOW + BLOCK_SIZE - 1


def test_a_step_of_eight_tokens_drops_blocks_by_the_history_before_it(make_groups) -> None:
    manager = KvCacheManager(make_groups(5), [9], 4)
    tokens, chain = list(range(20)), BlockHashChain(4)
    sequence = manager.open(manager.match(chain, tokens), chain, tokens, 12)
    assert sequence is not None
    manager.settle()
    assert manager.grow(sequence, tokens, 20)
    assert sequence.tables[0].first_held == 2, "block 2 has key 8, which the query at 12 sees"
    assert [block_id != ABSENT for block_id in sequence.tables[0].block_ids] == [False, False, True, True, True]


def test_what_is_reused_is_the_least_that_any_window_can_serve(make_groups, run_sequence) -> None:
    manager = KvCacheManager(make_groups(FULL, 32, 8), [64, 64, 7], 4)
    run_sequence(manager, list(range(20)))
    prompt = list(range(40))
    assert manager.match(BlockHashChain(4), prompt).num_tokens == 20
    assert run_sequence(manager, prompt[:9]) == 8, "blocks 0 and 1 are the last to be reused now"
    run_sequence(manager, list(range(100, 120)))
    assert [pool.statistics().num_cached for pool in manager.pools] == [10, 10, 7]
    hit = manager.match(BlockHashChain(4), prompt)
    assert hit.num_tokens == 8, "the narrowest has blocks 0 and 1 left"
    assert hit.first_held == (0, 0, 0)


def test_memory_is_the_union_of_its_groups(make_groups) -> None:
    manager = KvCacheManager(make_groups(FULL, 8), [12, 7], 4)
    tokens, chain = list(range(16)), BlockHashChain(4)
    assert manager.open(manager.match(chain, tokens), chain, tokens, 16) is not None
    statistics = manager.statistics()
    assert statistics.num_used == 4 + 4
    assert [(pool.num_free, pool.num_used, pool.num_cached, pool.num_scratch) for pool in statistics.pools] == [
        (8, 4, 4, 0),
        (3, 4, 4, 0),
    ]


def test_bounded_pools_keep_the_tail_of_a_prompt_while_every_sequence_fills_its_window(run_sequence) -> None:
    window, size, max_num_seqs, step = 16, 4, 4, 16
    layers = [LayerKv(FULL, 1, 8, KvDtype.FLOAT32)] + [LayerKv(window, 1, 8, KvDtype.FLOAT32)] * 5
    groups = plan_windows(layers, 128).groups
    limits = {"max_model_len": 128, "max_num_seqs": max_num_seqs, "max_step_tokens": step}
    num_blocks = split_memory(groups, size, 126_000, policy="bounded", **limits)
    manager = KvCacheManager(groups, num_blocks, size)
    system = list(range(1000, 1000 + 4 * window))
    run_sequence(manager, system + list(range(2 * window)), num_decodes=2 * window, chunk=step)
    sequences = []
    for i in range(max_num_seqs):
        tokens, chain = [2000 + 100 * i + j for j in range(24)], BlockHashChain(size)
        sequence = manager.open(manager.match(chain, tokens), chain, tokens, step)
        assert sequence is not None
        for end in range(step + 1, 24):
            manager.settle()
            assert manager.grow(sequence, tokens, end)
        sequences.append(sequence)
    assert manager.pools[1].statistics().num_used >= max_num_seqs * (window // size)
    assert manager.match(BlockHashChain(size), [*system, 7, 8, 9]).num_tokens >= len(system) - 2 * size
    check_memory(manager, sequences)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [
        ([8], 4, r"num_blocks: got \(8,\), expected 2 numbers from 1 on"),
        ([8, 0], 4, r"num_blocks: got \(8, 0\)"),
        ([8, 8], 0, "block_size: got 0, expected at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make_groups, num_blocks: list[int], block_size: int, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        KvCacheManager(make_groups(FULL, 8), num_blocks, block_size)
