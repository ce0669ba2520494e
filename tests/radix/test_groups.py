"""Hits of ranks with several groups, against a search through all lengths."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from index_invariants import check_invariants

from kvist.errors import InvalidValueError
from kvist.events import Tier, WorkerRank
from kvist.events.types import GroupRule
from kvist.radix import RadixIndex

PLAIN = WorkerRank("plain", 0)


def hold(index: RadixIndex, source: WorkerRank, tier: Tier, hashes: list[int]) -> None:
    for block_hash in hashes:
        index.store(source, tier, None, np.array([block_hash], np.uint64))


@pytest.mark.parametrize("seed", range(8))
def test_a_hit_is_the_longest_at_whose_end_every_group_has_what_it_needs(longest_hit, seed):
    rng, index = random.Random(seed), RadixIndex(seed=seed)
    for number in range(100):
        source = WorkerRank(f"w{number % 3}", number % 2)
        hashes = [rng.randrange(2, 1 << 63) for _ in range(rng.randint(1, 12))]
        has_ahead = rng.choice([0, 0, 1])
        rules = [GroupRule(rng.choice([0, 0, 2, 3]), 1, has_ahead)]
        rules += [
            GroupRule(rng.randint(1, 4), rng.choice([1, 1, 2, 3]), rng.randint(0, has_ahead))
            for _ in range(rng.randint(0, 4))
        ]
        index.set_groups(source, rules)
        held = []
        for group, share in enumerate(rng.choices([0.5, 0.8, 0.95, 1.0], k=len(rules))):
            blocks = [each for each in hashes if rng.random() < share]
            hold(index, source.companion if group else source, Tier(max(group - 1, 0)), blocks)
            held.append(set(blocks))
        num_plain = rng.randint(0, len(hashes))
        hold(index, PLAIN, Tier.GPU, hashes[:num_plain])
        num_usable = max(0, len(hashes) - rng.choice([0, 0, 1, 2, 12]))
        match = index.match(np.array(hashes, np.uint64), num_usable)
        expected = {source: longest_hit(rules, held, hashes, num_usable), PLAIN: min(num_plain, num_usable)}
        assert {rank: depths.gpu for rank, depths in match.items()} == {r: d for r, d in expected.items() if d}
        depths = match.depths[:, 3].tolist()
        assert depths == sorted(depths)
        index.clear(*PLAIN)
        index.clear(*source)
        if rng.random() < 0.7:
            index.clear(*source.companion)
        else:
            index.remove_worker(source.worker)
        while index.sweep():
            pass
        check_invariants(index)


def test_a_rank_is_of_one_group_again_once_it_or_its_companion_is_cleared():
    index, source, hashes = RadixIndex(), WorkerRank("w", 0), [11, 12, 13]
    for cleared, num_left in ((source.companion, 3), (source, 0)):
        hold(index, source, Tier.GPU, hashes)
        index.set_groups(source, [GroupRule(0), GroupRule(1)])
        assert dict(index.match(np.array(hashes, np.uint64))) == {}
        hold(index, source.companion, Tier(0), hashes[:2])
        assert index.match(np.array(hashes, np.uint64))[source].gpu == 2
        index.clear(*cleared)
        assert dict(index.match(np.array(hashes, np.uint64)).items()).get(source, (0,))[0] == num_left


def test_what_other_ranks_hold_says_nothing_of_a_companion():
    index, hashes = RadixIndex(), [*range(20, 30)]
    ranks = [WorkerRank("w", number) for number in range(40)]
    for rank, (needed, length) in zip(ranks, itertools.cycle([(1, 10), (2, 7), (4, 3), (1, 0)]), strict=False):
        hold(index, rank, Tier.GPU, hashes)
        index.set_groups(rank, [GroupRule(0), GroupRule(needed)])
        hold(index, rank.companion, Tier(0), hashes[:length])
    match = index.match(np.array(hashes, np.uint64))
    assert [match[rank].gpu if rank in match else 0 for rank in ranks] == [10, 7, 3, 0] * 10


def test_no_more_blocks_are_usable_than_are_asked_for():
    for num_usable in (-1, 3):
        with pytest.raises(InvalidValueError, match="num_usable"):
            RadixIndex().match(np.array([1, 2], np.uint64), num_usable)


def test_more_rules_than_there_are_kinds_are_refused():
    with pytest.raises(InvalidValueError, match="rules"):
        RadixIndex().set_groups(PLAIN, [GroupRule(0)] * 6)
