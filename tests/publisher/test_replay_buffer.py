from __future__ import annotations

import pytest

from kvist.events.transports import Message, ReplayRequest
from kvist.publisher.buffers import ReplayBuffer


def filled(buffer: ReplayBuffer, num_messages: int, topic: bytes = b"t") -> list[Message]:
    messages = [Message(topic, sequence, bytes(100)) for sequence in range(num_messages)]
    for message in messages:
        buffer.append(message)
    return messages


def test_replay_starts_at_the_sequence_asked_for():
    buffer = ReplayBuffer(10, 10_000)
    messages = filled(buffer, 6)
    assert buffer.replay(ReplayRequest(b"t", 0)) == messages
    assert buffer.replay(ReplayRequest(b"t", 4)) == messages[4:]
    assert buffer.replay(ReplayRequest(b"t", 6)) == []


@pytest.mark.parametrize("start_sequence", [7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_nothing_is_kept_from_beyond_the_newest_on_however_far(start_sequence):
    buffer = ReplayBuffer(10, 10_000)
    filled(buffer, 6)
    assert buffer.replay(ReplayRequest(b"t", start_sequence)) == []
    assert buffer.first_sequence(b"t") == 0


def test_an_empty_topic_means_all_and_an_unknown_one_nothing():
    buffer = ReplayBuffer(10, 10_000)
    messages = filled(buffer, 3, b"a") + filled(buffer, 2, b"b")
    assert buffer.replay(ReplayRequest(b"", 1)) == [*messages[1:3], messages[4]]
    assert buffer.replay(ReplayRequest(b"c", 0)) == []


@pytest.mark.parametrize(("max_batches", "max_bytes"), [(4, 10_000), (100, 400)])
def test_the_oldest_are_forgotten_at_either_bound(max_batches, max_bytes):
    buffer = ReplayBuffer(max_batches, max_bytes)
    messages = filled(buffer, 10)
    assert buffer.replay(ReplayRequest(b"t", 0)) == messages[6:]
    assert buffer.replay(ReplayRequest(b"t", 8)) == messages[8:]
    assert buffer.first_sequence(b"t") == 6


def test_a_busy_topic_does_not_push_out_a_quiet_one():
    buffer = ReplayBuffer(4, 10_000)
    quiet = filled(buffer, 2, b"quiet")
    filled(buffer, 100, b"busy")
    assert buffer.replay(ReplayRequest(b"quiet", 0)) == quiet


def test_how_far_back_messages_are_kept_is_known_from_the_first_on():
    buffer = ReplayBuffer(4, 10_000)
    assert buffer.first_sequence(b"t") is None
    filled(buffer, 3)
    assert buffer.first_sequence(b"t") == 0


def test_a_buffer_too_small_for_one_message_still_knows_how_far_it_is():
    buffer = ReplayBuffer(4, 10)
    filled(buffer, 3)
    assert buffer.first_sequence(b"t") == 3


def test_the_last_heartbeat_of_each_topic_is_kept():
    buffer = ReplayBuffer(1, 1)
    beats = [Message(topic, sequence, b"beat") for sequence in range(2) for topic in (b"a", b"b")]
    for beat in beats:
        buffer.keep_heartbeat(beat)
    assert buffer.heartbeats() == beats[2:]
    assert buffer.heartbeats(b"b") == beats[3:]
    assert buffer.heartbeats(b"c") == []
