"""What can be asked for again while a recording is played."""

from __future__ import annotations

import numpy as np

from kvist.events import WorkerRank
from kvist.events.codec import encode_snapshot_part
from kvist.events.snapshot import HeldBlocks, Snapshot, snapshot_parts
from kvist.events.transports import Message, ReplayRequest
from kvist.replay.blocks import SentBuffer


def sequences(buffer, topic, start, epoch=None):
    return [message.sequence for message in buffer.replay(ReplayRequest(topic, start, epoch))]


def filled(*messages, max_bytes=1 << 20):
    buffer = SentBuffer(max_bytes)
    for message in messages:
        buffer.append(message)
    return buffer


def test_a_rank_is_answered_from_the_number_asked_for(make):
    buffer = filled(*(make.batch(i, rank=rank) for i in range(5) for rank in range(2)))
    assert sequences(buffer, b"kv/w/1", 3) == [3, 4]
    assert sequences(buffer, b"", 4) == sequences(buffer, None, 4) == [4, 4]
    assert sequences(buffer, b"kv/other/0", 0) == []
    assert buffer.num_replays == 4


def test_who_asks_for_what_follows_the_end_learns_how_far_each_rank_is(make):
    beat = make.heartbeat(2, 0, 0)
    buffer = filled(make.batch(0), make.batch(1), beat, make.batch(5, rank=1))
    assert list(buffer.replay(ReplayRequest(None, 2**63 - 1))) == [beat, make.batch(5, rank=1)]
    assert list(buffer.replay(ReplayRequest(b"kv/w/0", 2**63 - 1))) == []
    assert list(filled(make.engine_batch(3)).replay(ReplayRequest(None, 2**63 - 1))) == []


def test_only_the_newest_epoch_is_answered_and_from_its_beginning_if_another_is_asked_for(make):
    buffer = filled(make.batch(0), make.batch(1), make.batch(0, epoch=8), make.batch(1, epoch=8))
    assert sequences(buffer, b"kv/w/0", 1, epoch=8) == [1]
    assert sequences(buffer, b"kv/w/0", 1, epoch=7) == [0, 1]
    assert {message.payload for message in buffer.replay(ReplayRequest(None, 0))} == {
        make.batch(i, epoch=8).payload for i in range(2)
    }


def test_heartbeats_duplicates_and_what_is_no_batch_are_not_kept(make):
    broken = make.batch(2)._replace(payload=b"\xc1")
    buffer = filled(make.batch(0), make.heartbeat(1, 0, 0), make.batch(1), make.batch(0), broken)
    assert sequences(buffer, None, 0) == [0, 1]


def test_parts_of_snapshots_are_not_sent_even_if_they_cannot_be_read(make):
    held = HeldBlocks(np.array([5], np.uint64), np.array([0], np.uint32), np.array([1], np.uint8))
    snapshot = Snapshot(WorkerRank("w", 0), 7, 0, 4, held.holding(), (held,))
    (payload,) = map(encode_snapshot_part, snapshot_parts(snapshot))
    for each in (payload, payload[:-1]):
        assert not SentBuffer().append(Message(b"kv/w/0", 0, each))
    assert SentBuffer().append(make.batch(0)._replace(payload=b"\xc1"))


def test_an_engines_restart_makes_what_was_before_it_unanswerable(make):
    buffer = filled(*(make.engine_batch(i) for i in range(3)), make.engine_batch(0, timestamp_s=99.0))
    assert [message.payload for message in buffer.replay(ReplayRequest(None, 0))] == [
        make.engine_batch(0, timestamp_s=99.0).payload
    ]


def test_beyond_its_bound_the_oldest_goes(make):
    messages = [make.batch(i, make.stored(*range(100))) for i in range(10)]
    buffer = filled(*messages, max_bytes=4 * len(messages[0].payload))
    assert sequences(buffer, None, 0) == [6, 7, 8, 9]


def test_the_last_message_of_each_rank_and_of_an_engine_is_known_heartbeats_included(make):
    beat, engines = make.heartbeat(2, 0, 0), [make.engine_batch(4), make.engine_batch(5)]
    buffer = filled(make.batch(0), make.batch(1), beat, make.batch(7, rank=1), *engines)
    assert buffer.last_messages() == [beat, make.batch(7, rank=1), engines[1]]
