"""The answer's text, for few ranks and for many, is the same answer."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from kvist.events import Tier, WorkerRank
from kvist.indexer.service import answers
from kvist.radix import RadixIndex

BLOCK_SIZE = 16


def expected(match, doubted=frozenset()):
    """Return the answer that the peer's rule gives, one rank after the other."""
    scores, instances = {}, {}
    for source, depths in match.to_dict().items():
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


@pytest.mark.parametrize("num_streams", [0, 1, 2, 8, 9, 40, 300])
def test_few_and_many_ranks_are_answered_by_one_rule(num_streams):
    rng = random.Random(num_streams)
    index, hashes = RadixIndex(seed=1), np.arange(1, 65, dtype=np.uint64)
    for number in range(num_streams):
        # Instances of one and of several streams, which may tell of one rank or of several, on any tier.
        source = WorkerRank(answers.stream_name(number // rng.choice([1, 1, 3]), number), rng.randrange(3))
        for tier in rng.sample(list(Tier), rng.randint(1, 3)):
            index.store(source, tier, None, hashes[: rng.randint(1, 64)])
    match = index.match(hashes)
    doubted = {source for source in match if rng.random() < 0.1}
    for left_out in (set(), doubted, set(match)):
        answer = msgspec.json.decode(answers.render_match(match, BLOCK_SIZE, left_out))
        assert answer == expected(match, left_out)


def test_many_ranks_without_a_block_on_the_gpu_have_no_score():
    index, hashes = RadixIndex(seed=1), np.arange(1, 9, dtype=np.uint64)
    for number in range(20):
        index.store(WorkerRank(answers.stream_name(number, 0), 0), Tier.HOST, None, hashes)
    answer = msgspec.json.decode(answers.render_match(index.match(hashes), BLOCK_SIZE, set()))
    assert answer["scores"] == {}
    assert len(answer["instances"]) == 20
    assert answer["instances"]["0"] == {"longest_matched": 128, "gpu": 0, "dp": {"0": 0}, "cpu": 128, "disk": 128}
