"""What the numbers of a stream tell: gaps, what comes twice, restarts."""

from __future__ import annotations

import pytest

from kvist.replay.envelope import SequenceTracker, SourceTracker, read_envelope


def judged(*messages):
    tracker = SourceTracker()
    return tracker, [tracker.on_message(read_envelope(message.payload), message) for message in messages]


@pytest.mark.parametrize("form", ["batch", "engine_batch"])
def test_gaps_and_duplicates_are_counted(make, form):
    message = getattr(make, form)
    tracker, is_new = judged(*(message(sequence) for sequence in (3, 4, 4, 7, 4, 8, 10)))
    assert is_new == [True, True, False, True, False, True, True]
    assert (tracker.total("num_gaps"), tracker.total("num_missing"), tracker.total("num_duplicates")) == (2, 3, 2)
    assert not any(rank.is_from_start for rank in tracker.ranks.values())
    assert tracker.total("num_restarts") == 0


def test_a_message_that_comes_late_is_no_news(make):
    tracker, is_new = judged(make.batch(0), make.batch(2), make.batch(1))
    assert is_new == [True, True, False]
    assert (tracker.total("num_missing"), tracker.total("num_duplicates")) == (1, 1)


def test_each_rank_and_each_companion_has_its_own_numbers(make):
    tracker, _ = judged(*(make.batch(sequence, rank=rank) for sequence in range(3) for rank in (0, 1, 4097)))
    assert (len(tracker.ranks), tracker.total("num_gaps"), tracker.total("num_duplicates")) == (3, 0, 0)
    assert all(rank.is_from_start for rank in tracker.ranks.values())


def test_a_heartbeat_takes_no_number_and_shows_that_the_last_message_was_lost(make):
    tracker, is_new = judged(make.batch(0), make.heartbeat(1, 0, 0), make.heartbeat(3, 0, 0), make.batch(3))
    assert is_new == [True, False, False, True]
    assert (tracker.total("num_gaps"), tracker.total("num_missing"), tracker.num_heartbeats) == (1, 2, 2)


def test_a_later_epoch_is_a_restart_and_begins_at_zero(make):
    tracker, is_new = judged(make.batch(5), make.batch(1, epoch=8), make.batch(6), make.batch(2, epoch=8))
    assert is_new == [True, True, False, True]
    assert (tracker.total("num_restarts"), tracker.total("num_missing"), tracker.total("num_duplicates")) == (
        1,
        1,
        1,
    )


def test_other_bytes_under_a_number_are_an_engines_restart(make):
    tracker, is_new = judged(make.engine_batch(0), make.engine_batch(1), make.engine_batch(0, timestamp_s=9.0))
    assert is_new == [True, True, True]
    assert (tracker.total("num_restarts"), tracker.total("num_duplicates"), tracker.total("num_gaps")) == (
        1,
        0,
        0,
    )


def test_what_is_no_batch_is_counted_and_has_no_number(make):
    tracker, is_new = judged(make.batch(0)._replace(payload=b"\xc1"), make.batch(0)._replace(payload=b""))
    assert is_new == [False, False]
    assert (tracker.num_malformed, tracker.ranks) == (2, {})


def test_a_snapshot_tells_what_came_before_it_and_a_latecomer_is_not_missing():
    tracker = SequenceTracker()
    tracker.on_snapshot(7, 40)
    assert (tracker.is_from_start, tracker.num_gaps) == (True, 0)
    assert [tracker.on_message(7, sequence) for sequence in (38, 39, 40, 41)] == [False, False, True, True]
    assert (tracker.num_duplicates, tracker.num_missing) == (0, 0)
    tracker.on_snapshot(7, 50)  # 42 to 49 were lost, but the last two were on their way
    assert [tracker.on_message(7, sequence) for sequence in (48, 49, 50)] == [False, False, True]
    assert (tracker.num_gaps, tracker.num_missing, tracker.num_duplicates) == (1, 6, 0)
    assert tracker.on_message(7, 41) is False
    assert (tracker.num_duplicates, tracker.num_snapshots) == (1, 2)


def test_a_snapshot_from_before_the_last_message_is_followed_by_what_was_seen():
    tracker = SequenceTracker()
    assert tracker.on_message(7, 60)
    tracker.on_snapshot(7, 50)
    assert [tracker.on_message(7, sequence) for sequence in (50, 51)] == [True, True]
    assert tracker.is_outdated(7, 51)
    assert not tracker.is_outdated(7, 52)
    assert (tracker.num_gaps, tracker.num_duplicates, tracker.is_from_start) == (0, 0, False)
