from __future__ import annotations

import itertools

import pytest
from memory_invariants import check_memory

from kvist.events import FULL
from kvist.kvcache import BlockHashChain, KvCacheManager, SequenceBlocks


def admit(manager: KvCacheManager, token_ids: list[int], chain: BlockHashChain | None = None) -> SequenceBlocks:
    """Open a sequence with room for all its tokens."""
    chain = chain or BlockHashChain(manager.block_size)
    sequence = manager.open(manager.match(chain, token_ids), chain, token_ids, len(token_ids))
    assert sequence is not None
    return sequence


def test_a_second_request_reuses_all_full_blocks_but_never_the_last_token(make_groups, run_sequence) -> None:
    manager = KvCacheManager(make_groups(FULL), [16], 4)
    tokens = list(range(12))
    assert run_sequence(manager, tokens) == 0
    assert run_sequence(manager, tokens) == 8
    assert run_sequence(manager, [*tokens, 99]) == 12


def test_adapters_and_salts_do_not_share_blocks(make_groups) -> None:
    manager = KvCacheManager(make_groups(FULL), [16], 4)
    tokens = list(range(9))
    admit(manager, tokens, BlockHashChain(4, cache_salt="mine"))
    assert manager.match(BlockHashChain(4, cache_salt="mine"), tokens).num_tokens == 8
    assert manager.match(BlockHashChain(4), tokens).num_tokens == 0
    assert manager.match(BlockHashChain(4, lora_name="mine"), tokens).num_tokens == 0


@pytest.mark.parametrize(("block_size", "prompt_len", "chunk"), [(4, 64, 1000), (4, 67, 16), (8, 64, 24), (16, 79, 7)])
def test_a_prompt_stays_reusable_after_a_decode_slid_past_it(
    make_groups, run_sequence, block_size: int, prompt_len: int, chunk: int
) -> None:
    window = 16
    manager = KvCacheManager(make_groups(FULL, window), [64, 64], block_size)
    system = list(range(1000, 1000 + prompt_len))
    first = system + list(range(2 * window))
    assert run_sequence(manager, first, num_decodes=2 * window, chunk=chunk) == 0
    cached = run_sequence(manager, [*system, 7, 8, 9])
    assert cached is not None
    assert cached >= prompt_len - 2 * block_size


def test_a_stale_block_is_reported_removed_only_when_its_slot_is_reused(make_groups, run_sequence, follower) -> None:
    manager = KvCacheManager(make_groups(4), [8], 4, follower)
    run_sequence(manager, list(range(24)), num_decodes=20)
    assert follower.removed_hashes == []
    assert manager.statistics().pools[0].num_cached == 6
    run_sequence(manager, list(range(100, 120)), num_decodes=16)
    assert len(follower.removed_hashes) == 3
    follower.assert_equals(manager)


def test_opening_is_all_or_nothing_over_the_groups(make_groups) -> None:
    manager = KvCacheManager(make_groups(FULL, 100), [8, 2], 4)
    tokens, chain = list(range(12)), BlockHashChain(4)
    hit = manager.match(chain, tokens)
    assert manager.open(hit, chain, tokens, 12) is None
    assert [pool.num_free for pool in manager.pools] == [8, 2]
    sequence = manager.open(hit, chain, tokens, 8)
    assert sequence is not None
    assert not manager.grow(sequence, tokens, 9)
    assert [pool.num_free for pool in manager.pools] == [6, 0]
    check_memory(manager, [sequence])


def test_a_hit_on_free_blocks_counts_against_the_free_blocks(make_groups, run_sequence) -> None:
    manager = KvCacheManager(make_groups(FULL), [4], 4)
    run_sequence(manager, list(range(8)))
    tokens, chain = list(range(20)), BlockHashChain(4)
    hit = manager.match(chain, tokens)
    assert hit.num_tokens == 8
    assert manager.open(hit, chain, tokens, 20) is None
    assert manager.open(hit, chain, tokens, 16) is not None


def test_sequences_of_one_step_share_what_the_first_of_them_computes(make_groups, follower) -> None:
    manager = KvCacheManager(make_groups(FULL, 8), [16, 16], 4, follower)
    first, second = admit(manager, list(range(10))), admit(manager, list(range(10)))
    assert [list(table.block_ids[:2]) for table in second.tables] == [list(t.block_ids[:2]) for t in first.tables]
    assert manager.statistics().num_hit_tokens == 8
    assert [table.adopted for table in second.tables] == [[], []], "what is not computed is not written"
    check_memory(manager, [first, second])
    follower.assert_equals(manager)


def test_equal_content_computed_twice_is_written_once_and_held_in_one_block(make_groups, follower) -> None:
    manager = KvCacheManager(make_groups(FULL, 8), [16, 16], 4, follower)
    tokens = list(range(10))
    chains = [BlockHashChain(4), BlockHashChain(4)]
    hits = [manager.match(chain, tokens) for chain in chains]
    first, second = (manager.open(hit, chain, tokens, 10) for hit, chain in zip(hits, chains, strict=True))
    assert first is not None
    assert second is not None
    for mine, theirs in zip(first.tables, second.tables, strict=True):
        assert mine.block_ids[:2] == theirs.block_ids[:2]
        assert mine.block_ids[2] != theirs.block_ids[2]
        assert (mine.adopted, theirs.adopted) == ([], [0, 1])
    manager.settle()
    assert manager.grow(second, [*tokens, 10, 11], 11)
    assert [table.adopted for table in second.tables] == [[], []]
    check_memory(manager, [first, second])
    follower.assert_equals(manager)


def test_what_a_failed_step_should_have_filled_is_forgotten(make_groups, run_sequence, follower) -> None:
    manager = KvCacheManager(make_groups(FULL, 8), [16, 16], 4, follower)
    tokens = list(range(20))
    run_sequence(manager, tokens[:9])
    sequence = admit(manager, tokens)
    assert manager.match(BlockHashChain(4), tokens).num_tokens == 16
    manager.close(sequence)
    manager.revoke()
    assert manager.match(BlockHashChain(4), tokens).num_tokens == 8
    follower.assert_equals(manager)
    check_memory(manager, [])


def test_a_block_that_is_kept_outlives_the_failed_step_that_filled_it(make_groups) -> None:
    manager = KvCacheManager(make_groups(FULL), [6], 4)
    sequence = admit(manager, tokens := list(range(6)))
    manager.settle()
    kept = manager.open_empty(sequence.chain, 6)
    manager.share(kept, sequence, 2)
    assert manager.grow(sequence, [*tokens, 6, 7], 8)
    manager.close(sequence)
    manager.revoke()
    check_memory(manager, [], [kept])
    assert manager.match(BlockHashChain(4), [*range(9)]).num_tokens == 4


def test_the_slots_of_a_failed_step_are_used_before_anything_that_is_cached(make_groups, run_sequence) -> None:
    manager = KvCacheManager(make_groups(FULL), [6], 4)
    tokens = list(range(9))
    run_sequence(manager, tokens)
    manager.close(admit(manager, list(range(100, 112))))
    manager.revoke()
    admit(manager, list(range(200, 216)))
    assert manager.match(BlockHashChain(4), tokens).num_tokens == 8


def test_leaf_blocks_go_before_their_parents(make_groups, run_sequence) -> None:
    manager = KvCacheManager(make_groups(FULL), [6], 4)
    run_sequence(manager, list(range(17)))
    run_sequence(manager, list(range(100, 112)))
    assert manager.match(BlockHashChain(4), list(range(17))).num_tokens == 12


def test_flush_clears_everything_at_rest_and_only_free_blocks_otherwise(make_groups, run_sequence, follower) -> None:
    manager = KvCacheManager(make_groups(FULL, 8), [16, 16], 4, follower)
    run_sequence(manager, list(range(20)))
    manager.flush()
    assert follower.num_clears == 1
    follower.assert_equals(manager)
    admit(manager, list(range(8)))
    manager.close(admit(manager, list(range(50, 70))))
    manager.flush()
    assert follower.num_clears == 1
    assert [pool.statistics().num_cached for pool in manager.pools] == [2, 2]
    follower.assert_equals(manager)


def test_without_a_prefix_cache_nothing_is_found_or_reported(make_groups, run_sequence, follower) -> None:
    manager = KvCacheManager(make_groups(FULL), [16], 4, follower, has_prefix_cache=False)
    assert run_sequence(manager, list(range(12))) == 0
    assert run_sequence(manager, list(range(12))) == 0
    assert not follower.held


def test_statistics_count_admitted_and_served_tokens(make_groups, run_sequence) -> None:
    manager = KvCacheManager(make_groups(FULL), [16], 4)
    for _ in itertools.repeat(None, 2):
        run_sequence(manager, list(range(10)))
    statistics = manager.statistics()
    assert (statistics.num_queried_tokens, statistics.num_hit_tokens) == (20, 8)
