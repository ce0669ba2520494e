from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events import FULL, Cleared, EngineCleared, EngineRemoved, EngineStored, Removed, Stored, Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import block_digest
from kvist.publisher.stream import MAX_BATCH_HASH_BYTES, Coalescer, RankStream, new_epoch, topic_of, with_companions

SOURCE = WorkerRank("w", 3)


def packed(*hashes: int) -> bytes:
    return array("Q", hashes).tobytes()


def coalesced(*events):
    coalescer = Coalescer()
    for event in events:
        coalescer.add(event)
    return coalescer.drain()


def stored(engine_hash: int, tokens: list[int], parent: int | None = None) -> EngineStored:
    return EngineStored([engine_hash], tokens, 4, parent, rank=3)


@pytest.mark.parametrize(
    ("events", "joined"),
    [
        ([Stored(packed(1)), Stored(packed(2, 3), 1), Stored(packed(4), 3)], [Stored(packed(1, 2, 3, 4))]),
        ([Stored(packed(2), 1), Stored(packed(3), 2)], [Stored(packed(2, 3), 1)]),
        ([Stored(packed(1)), Stored(packed(2), 7)], [Stored(packed(1)), Stored(packed(2), 7)]),
        ([Stored(packed(1)), Stored(packed(2))], [Stored(packed(1)), Stored(packed(2))]),
        (
            [Stored(packed(1)), Stored(packed(2), 1, Tier.HOST)],
            [Stored(packed(1)), Stored(packed(2), 1, Tier.HOST)],
        ),
        ([Removed(packed(1)), Removed(packed(2))], [Removed(packed(1, 2))]),
        ([Removed(packed(1)), Removed(packed(2), Tier.DISK)], [Removed(packed(1)), Removed(packed(2), Tier.DISK)]),
        (
            [Stored(packed(1)), Removed(packed(1)), Stored(packed(2), 1)],
            [Stored(packed(1)), Removed(packed(1)), Stored(packed(2), 1)],
        ),
        ([Removed(packed(1)), Cleared(), Removed(packed(2))], [Removed(packed(1)), Cleared(), Removed(packed(2))]),
    ],
)
def test_only_neighbours_that_continue_each_other_are_joined(events, joined):
    assert coalesced(*events) == [tuple(joined)]


def test_nothing_added_makes_no_batch():
    assert coalesced() == []


def test_a_flood_is_cut_into_batches_of_bounded_size():
    events = [Removed(packed(idx)) for idx in range(3 * MAX_BATCH_HASH_BYTES // 8)]
    batches = coalesced(*events)
    assert [len(batch) for batch in batches] == [1, 1, 1]
    assert {len(batch[0].hashes) for batch in batches} == {MAX_BATCH_HASH_BYTES}


def test_one_event_larger_than_a_batch_is_cut_along_its_chain():
    num_hashes = 2 * MAX_BATCH_HASH_BYTES // 8 + 5
    batches = coalesced(Stored(packed(*range(1, num_hashes + 1)), 77, Tier.HOST), Removed(packed(*range(num_hashes))))
    stored = [event for batch in batches for event in batch if isinstance(event, Stored)]
    assert b"".join(event.hashes for event in stored) == packed(*range(1, num_hashes + 1))
    assert [event.parent for event in stored] == [77, MAX_BATCH_HASH_BYTES // 8, 2 * MAX_BATCH_HASH_BYTES // 8]
    assert {event.tier for event in stored} == {Tier.HOST}
    assert max(sum(len(event.hashes) for event in batch) for batch in batches) <= MAX_BATCH_HASH_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([Tier.GPU, Tier.HOST])), max_size=40))
def test_coalescing_never_changes_what_the_events_add_up_to(choices):
    events = [
        Stored(packed(number + 1), number or None, tier) if is_store else Removed(packed(number), tier)
        for is_store, number, tier in choices
    ]
    joined = [event for batch in coalesced(*events) for event in batch]

    def flat(events):
        return [(type(event), event.tier, block) for event in events for block in memoryview(event.hashes).cast("Q")]

    assert flat(joined) == flat(events)


def test_batches_are_numbered_from_zero_and_empty_ones_are_never_made():
    stream = RankStream(SOURCE, block_size=4, epoch=77)
    stream.admit(stored(101, [1, 2, 3, 4]))
    stream.admit(stored(102, [5, 6, 7, 8], parent=101))
    (first,) = stream.close_batches(1.5)
    assert stream.close_batches(2.5) == []
    stream.admit(EngineRemoved([999], rank=3))
    assert stream.close_batches(3.5) == []
    stream.admit(EngineCleared(rank=3))
    (second,) = stream.close_batches(4.5)
    chain = tuple(block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4).tolist())
    assert (first.worker, first.rank, first.epoch, first.sequence, first.block_size) == ("w", 3, 77, 0, 4)
    assert first.timestamp_s == 1.5
    assert first.events == (Stored(packed(*chain)),)
    assert (second.sequence, second.events) == (1, (Cleared(),))


def test_a_heartbeat_repeats_the_next_sequence_and_takes_none():
    stream = RankStream(SOURCE, block_size=4, epoch=77)
    stream.admit(stored(101, [1, 2, 3, 4]))
    stream.close_batches(0.0)
    (block_hash,) = block_hashes([1, 2, 3, 4], 4).tolist()
    beats = [stream.heartbeat(1.0), stream.heartbeat(2.0)]
    assert [beat.sequence for beat in beats] == [1, 1]
    assert (beats[0].events[0].num_blocks, beats[0].events[0].digest) == (1, block_digest(block_hash, Tier.GPU))


@pytest.mark.parametrize("has_all_groups", [False, True])
@pytest.mark.parametrize("windows", [(FULL,), (FULL, 8), (8,)])
def test_a_heartbeat_says_where_hits_need_what_is_not_told(windows, has_all_groups):
    stream = RankStream(SOURCE, block_size=4, epoch=77, has_all_groups=has_all_groups)
    for group, window in enumerate(windows):
        stream.admit(EngineStored([101], [1, 2, 3, 4], 4, window=window, group=group))
    (heartbeat,) = stream.heartbeat(1.0).events
    assert heartbeat.is_upper_bound == (windows != (FULL,) and not has_all_groups)


def test_statistics_tell_events_and_batches():
    stream = RankStream(SOURCE, block_size=4, epoch=77)
    stream.admit(stored(101, [1, 2, 3, 4]))
    stream.admit(stored(102, [1, 2]))
    stream.close_batches(0.0)
    statistics = stream.statistics()
    assert (statistics.num_events, statistics.num_batches) == (2, 1)
    assert (statistics.num_blocks, statistics.num_passed, statistics.num_filtered) == (1, 2, 0)


def test_a_removal_of_what_is_no_hash_clears_the_rank_and_is_warned_of_once(caplog):
    stream = RankStream(SOURCE, block_size=4, epoch=77)
    stream.admit(stored(101, [1, 2, 3, 4]))
    stream.close_batches(0.0)
    for _ in range(2):
        stream.admit(EngineRemoved([101, ["102"]], rank=3))
    stream.admit(stored(103, [5, 6, 7, 8]))
    (batch,) = stream.close_batches(0.0)
    assert [type(event) for event in batch.events] == [Cleared, Cleared, Stored]
    assert stream.heartbeat(0.0).events[0].num_blocks == 1
    assert stream.statistics().num_malformed == 2
    assert caplog.text.count("malformed event") == 1


@pytest.mark.parametrize("worker", ["", "a b", "a/b", "a#", "a*", "a>", "a\n"])
def test_a_worker_name_that_no_topic_can_carry_is_refused(worker):
    with pytest.raises(InvalidValueError, match="worker"):
        topic_of(WorkerRank(worker, 0))


def test_a_topic_names_worker_and_rank():
    assert topic_of(WorkerRank("node-1:8000", 2)) == b"kv/node-1:8000/2"


def test_a_later_start_has_a_larger_epoch_within_u63():
    rng = random.Random(1)
    epochs = [new_epoch(now_s, rng) for now_s in (1.0, 1.001, 1.7e9, 1.7e9 + 0.002, 4e9)]
    assert epochs == sorted(set(epochs))
    assert epochs[-1] < 1 << 63
    assert new_epoch(1.7e9, rng) != new_epoch(1.7e9, rng)


def test_copies_are_counted_as_long_as_the_stream_is_complete():
    stream = RankStream(SOURCE, block_size=4, epoch=77, counts_copies=True)
    stored, removed = EngineStored([1], [1, 2, 3, 4], 4), EngineRemoved([1])
    for event, num_blocks in ((stored, 1), (stored, 1), (removed, 1), (stored, 1)):
        stream.admit(event)
        assert stream.residency.num_blocks == num_blocks
    stream.set_complete(False)
    stream.admit(removed)
    assert stream.residency.num_blocks == 0
    stream.admit(stored)
    stream.admit(stored)
    stream.admit(removed)
    assert stream.residency.num_blocks == 0


@pytest.mark.parametrize(("options", "is_upper_bound"), [({}, False), ({"num_ahead": 1}, True)])
def test_who_does_not_tell_that_hits_need_a_block_more_says_that_they_may_be_shorter(options, is_upper_bound):
    for has_all_groups in (False, True):
        stream = RankStream(SOURCE, 4, 0, has_all_groups=has_all_groups, **options)
        stream.admit(stored(1, [1, 2, 3, 4]))
        (heartbeat,) = stream.heartbeat(0.0).events
        assert heartbeat.is_upper_bound == (is_upper_bound and not has_all_groups)


def test_streams_may_come_while_another_thread_lists_them():
    streams: dict[int, Any] = {}

    class OneMore:
        @property
        def companion(self):
            streams.setdefault(len(streams), RankStream(SOURCE, 4, 0))

    streams[0] = OneMore()
    assert [*with_companions(streams)] == [0]
    assert [*streams] == [0, 1]


def test_blocks_beside_the_gpu_are_forgotten_with_a_reset_of_it_and_may_be_there_once_that_is_restored_too():
    first = RankStream(SOURCE, 4, 0, counts_copies=True)
    for name, tier in ((1, Tier.HOST), (2, Tier.GPU)):
        first.admit(EngineStored([name], [name] * 4, 4, rank=3, tier=tier))
    first.admit(EngineCleared(3, Tier.GPU))
    assert (first.is_exact, first.residency.num_blocks) == (False, 0)
    second = RankStream(SOURCE, 4, 1, counts_copies=True)
    second.resume(first.state())
    assert not second.is_exact
    second.admit(EngineCleared(3))
    assert second.is_exact
