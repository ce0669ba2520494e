"""What the numbers of a stream tell: gaps, what comes twice, restarts."""

from __future__ import annotations

import pytest

from kvist.replay.envelope import Numbering, SourceNumbering, read_envelope


def judged(*messages):
    numbering = SourceNumbering()
    return numbering, [numbering.note_message(read_envelope(message.payload), message) for message in messages]


@pytest.mark.parametrize("form", ["batch", "engine_batch"])
def test_gaps_and_duplicates_are_counted(make, form):
    message = getattr(make, form)
    numbering, is_new = judged(*(message(sequence) for sequence in (3, 4, 4, 7, 4, 8, 10)))
    assert is_new == [True, True, False, True, False, True, True]
    assert (numbering.total("num_gaps"), numbering.total("num_missing"), numbering.total("num_duplicates")) == (2, 3, 2)
    assert not numbering.numberings[0].is_from_start
    assert numbering.total("num_restarts") == 0


def test_a_message_that_comes_late_is_no_news(make):
    numbering, is_new = judged(make.batch(0), make.batch(2), make.batch(1))
    assert is_new == [True, True, False]
    assert (numbering.total("num_missing"), numbering.total("num_duplicates")) == (1, 1)


def test_each_rank_and_each_companion_has_its_own_numbers(make):
    numbering, _ = judged(*(make.batch(sequence, rank=rank) for sequence in range(3) for rank in (0, 1, 4097)))
    assert (len(numbering.ranks), numbering.total("num_gaps"), numbering.total("num_duplicates")) == (3, 0, 0)
    assert all(rank.is_from_start for rank in numbering.ranks.values())


def test_a_heartbeat_takes_no_number_and_shows_that_the_last_message_was_lost(make):
    numbering, is_new = judged(make.batch(0), make.heartbeat(1, 0, 0), make.heartbeat(3, 0, 0), make.batch(3))
    assert is_new == [True, False, False, True]
    assert (numbering.total("num_gaps"), numbering.total("num_missing"), numbering.num_heartbeats) == (1, 2, 2)


def test_a_later_epoch_is_a_restart_and_begins_at_zero(make):
    numbering, is_new = judged(make.batch(5), make.batch(1, epoch=8), make.batch(6), make.batch(2, epoch=8))
    assert is_new == [True, True, False, True]
    assert (numbering.total("num_restarts"), numbering.total("num_missing"), numbering.total("num_duplicates")) == (
        1,
        1,
        1,
    )


def test_other_bytes_under_a_number_are_an_engines_restart(make):
    numbering, is_new = judged(make.engine_batch(0), make.engine_batch(1), make.engine_batch(0, timestamp_s=9.0))
    assert is_new == [True, True, True]
    assert (numbering.total("num_restarts"), numbering.total("num_duplicates"), numbering.total("num_gaps")) == (
        1,
        0,
        0,
    )


def test_what_is_no_batch_is_counted_and_has_no_number(make):
    numbering, is_new = judged(make.batch(0)._replace(payload=b"\xc1"), make.batch(0)._replace(payload=b""))
    assert is_new == [False, False]
    assert (numbering.num_malformed, numbering.numberings) == (2, [])


def test_a_snapshot_tells_what_came_before_it_and_a_latecomer_is_not_missing():
    numbering = Numbering()
    numbering.note_snapshot(7, 40)
    assert (numbering.is_from_start, numbering.num_gaps) == (True, 0)
    assert [numbering.note_message(7, sequence) for sequence in (38, 39, 40, 41)] == [False, False, True, True]
    assert (numbering.num_duplicates, numbering.num_missing) == (0, 0)
    numbering.note_snapshot(7, 50)  # 42 to 49 were lost, but the last two were on their way
    assert [numbering.note_message(7, sequence) for sequence in (48, 49, 50)] == [False, False, True]
    assert (numbering.num_gaps, numbering.num_missing, numbering.num_duplicates) == (1, 6, 0)
    assert numbering.note_message(7, 41) is False
    assert (numbering.num_duplicates, numbering.num_snapshots) == (1, 2)


def test_a_snapshot_from_before_the_last_message_is_followed_by_what_was_seen():
    numbering = Numbering()
    assert numbering.note_message(7, 60)
    numbering.note_snapshot(7, 50)
    assert [numbering.note_message(7, sequence) for sequence in (50, 51)] == [True, True]
    assert numbering.is_behind(7, 51)
    assert not numbering.is_behind(7, 52)
    assert (numbering.num_gaps, numbering.num_duplicates, numbering.is_from_start) == (0, 0, False)
