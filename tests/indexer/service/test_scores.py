"""An answer is what the rule gives."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from kvist.events import Tier, WorkerRank
from kvist.indexer.service.bodies import encode_answer
from kvist.indexer.service.registry import stream_name
from kvist.radix import RadixIndex

BLOCK_SIZE = 16


def expected(match, doubted=frozenset()):
    """Return the answer that the peer's rule gives, one rank after the other."""
    scores, instances = {}, {}
    for source, depths in match.items():
        if source in doubted:
            continue
        instance, rank = source.worker.partition(":")[0], str(source.rank)
        gpu, cpu, _, longest = (depth * BLOCK_SIZE for depth in depths)
        known = instances.setdefault(instance, {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0})
        for name, tokens in (("longest_matched", longest), ("gpu", gpu), ("cpu", cpu), ("disk", longest)):
            known[name] = max(known[name], tokens)
        known["dp"][rank] = max(known["dp"].get(rank, 0), gpu)
        if gpu:
            score = scores.setdefault(instance, {})
            score[rank] = max(score.get(rank, 0), gpu)
    return {"scores": scores, "frequencies": [], "instances": instances}


def answer_of(index, hashes, doubted=frozenset()):
    return msgspec.json.decode(encode_answer([index.match(hashes)], BLOCK_SIZE, doubted))


@pytest.mark.parametrize("num_streams", [0, 1, 2, 8, 9, 40, 300, 1000])
def test_few_and_many_ranks_are_answered_by_one_rule(num_streams):
    rng = random.Random(num_streams)
    index, hashes = RadixIndex(seed=1), np.arange(1, 65, dtype=np.uint64)
    for number in range(num_streams):
        # Instances of one and of several streams, which may tell of one rank or of several, on any tier.
        instance_id = rng.choice([number, number // 3, 2**64 - 1 - number // 2, 10**8 + number])
        source = WorkerRank(stream_name(instance_id, number), rng.choice([0, 1, 2, 65535]))
        for tier in rng.sample(list(Tier), rng.randint(1, 3)):
            index.store(source, tier, None, hashes[: rng.randint(1, 64)])
    match = index.match(hashes)
    doubted = {source for source in match if rng.random() < 0.1}
    for left_out in (set(), doubted, set(match)):
        assert answer_of(index, hashes, left_out) == expected(match, left_out)


def test_ranks_without_a_block_on_the_gpu_have_no_score():
    index, hashes = RadixIndex(seed=1), np.arange(1, 9, dtype=np.uint64)
    for number in range(20):
        index.store(WorkerRank(stream_name(number, 0), 0), Tier.HOST, None, hashes)
    answer = answer_of(index, hashes)
    assert answer["scores"] == {}
    assert len(answer["instances"]) == 20
    assert answer["instances"]["0"] == {"longest_matched": 128, "gpu": 0, "dp": {"0": 0}, "cpu": 128, "disk": 128}


def test_of_several_matches_the_most_counts():
    index, hashes, others = RadixIndex(seed=1), *np.arange(1, 9, dtype=np.uint64).reshape(2, 4)
    index.store(WorkerRank("1:0", 0), Tier.GPU, None, hashes[:2])
    index.store(WorkerRank("1:0", 0), Tier.GPU, None, others)
    index.store(WorkerRank("2:0", 0), Tier.GPU, None, others[:1])
    answer = msgspec.json.decode(encode_answer([index.match(hashes), index.match(others)], BLOCK_SIZE, frozenset()))
    assert answer["scores"] == {"1": {"0": 64}, "2": {"0": 16}}


def test_what_is_asked_for_is_kept_under_a_cap():
    index = RadixIndex(seed=1, max_blocks=1000)
    source, asked = WorkerRank(stream_name(1, 0), 0), np.arange(1, 65, dtype=np.uint64)
    index.store(source, Tier.GPU, None, asked)
    for number in range(1, 200):
        index.store(source, Tier.GPU, None, np.arange(number * 100, number * 100 + 64, dtype=np.uint64))
        assert answer_of(index, asked)["scores"] == {"1": {"0": 64 * BLOCK_SIZE}}
