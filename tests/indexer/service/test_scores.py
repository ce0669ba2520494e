"""The text that compiled code writes is the answer that the rule gives."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from kvist.events import Tier, WorkerRank
from kvist.indexer.service.scores import MatchWriter, stream_name
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


def answer_of(index, hashes, doubted=frozenset()):
    """Return the answer of a writer that has never answered before."""
    return msgspec.json.decode(MatchWriter(index, BLOCK_SIZE).answer(hashes, doubted))


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
    writer = MatchWriter(index, BLOCK_SIZE)
    for left_out in (set(), doubted, set(match), set()):
        assert msgspec.json.decode(writer.answer(hashes, left_out)) == expected(match, left_out)


def test_ranks_without_a_block_on_the_gpu_have_no_score():
    index, hashes = RadixIndex(seed=1), np.arange(1, 9, dtype=np.uint64)
    for number in range(20):
        index.store(WorkerRank(stream_name(number, 0), 0), Tier.HOST, None, hashes)
    answer = answer_of(index, hashes)
    assert answer["scores"] == {}
    assert len(answer["instances"]) == 20
    assert answer["instances"]["0"] == {"longest_matched": 128, "gpu": 0, "dp": {"0": 0}, "cpu": 128, "disk": 128}


def test_instances_and_their_ranks_are_in_order_and_nothing_is_between():
    index, hashes = RadixIndex(seed=1), np.arange(1, 3, dtype=np.uint64)
    for instance_id, rank in ((10, 0), (2, 1), (2, 0)):
        index.store(WorkerRank(stream_name(instance_id, rank), rank), Tier.GPU, None, hashes)
    two = '"2":{"longest_matched":32,"gpu":32,"dp":{"0":32,"1":32},"cpu":32,"disk":32}'
    ten = '"10":{"longest_matched":32,"gpu":32,"dp":{"0":32},"cpu":32,"disk":32}'
    scores = '"2":{"0":32,"1":32},"10":{"0":32}'
    assert MatchWriter(index, BLOCK_SIZE).answer(hashes, set()).decode() == (
        f'{{"scores":{{{scores}}},"frequencies":[],"instances":{{{two},{ten}}}}}'
    )


@pytest.mark.parametrize("num_digits", range(1, 21))
def test_numbers_of_every_length_are_written(num_digits):
    rng = random.Random(num_digits)
    first, last = (10 ** (num_digits - 1) if num_digits > 1 else 0), min(10**num_digits, 2**64) - 1
    for instance_id in (first, last, *(rng.randint(first, last) for _ in range(20))):
        index, hashes = RadixIndex(seed=1), np.arange(1, 2, dtype=np.uint64)
        index.store(WorkerRank(stream_name(instance_id, 0), 0), Tier.GPU, None, hashes)
        assert answer_of(index, hashes)["scores"] == {str(instance_id): {"0": BLOCK_SIZE}}


def test_a_writer_follows_ranks_that_come_and_go_and_take_the_places_of_others():
    rng = random.Random(3)
    index, hashes = RadixIndex(seed=1), np.arange(1, 65, dtype=np.uint64)
    writer = MatchWriter(index, BLOCK_SIZE)
    for _ in range(400):
        worker = stream_name(rng.randrange(100), 0)
        match rng.choice(["store", "store", "clear", "remove"]):
            case "store":
                index.store(WorkerRank(worker, rng.randrange(2)), Tier.GPU, None, hashes[: rng.randint(1, 64)])
            case "clear":
                index.clear(worker)
            case "remove":
                index.remove_worker(worker)
        if rng.random() < 0.3:
            while index.sweep():
                pass
        doubted = {WorkerRank(stream_name(rng.randrange(100), 0), 0)} if rng.random() < 0.2 else set()
        answer = msgspec.json.decode(writer.answer(hashes, doubted))
        assert answer == expected(index.match(hashes), doubted)


def test_what_is_asked_for_is_kept_under_a_cap():
    index = RadixIndex(seed=1, max_blocks=1000)
    source, asked = WorkerRank(stream_name(1, 0), 0), np.arange(1, 65, dtype=np.uint64)
    index.store(source, Tier.GPU, None, asked)
    for number in range(1, 200):
        index.store(source, Tier.GPU, None, np.arange(number * 100, number * 100 + 64, dtype=np.uint64))
        assert answer_of(index, asked)["scores"] == {"1": {"0": 64 * BLOCK_SIZE}}
