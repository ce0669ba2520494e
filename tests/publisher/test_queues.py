from __future__ import annotations

from concurrent.futures import Future

import pytest

from kvist.events import EngineRemoved
from kvist.events.transports import Message
from kvist.publisher.buffers import Call, Inbox, Outbox


def message(sequence: int) -> Message:
    return Message(b"t", sequence, b"x" * 10)


def test_messages_leave_in_the_order_they_came(publication):
    outbox = Outbox(10)
    for sequence in range(5):
        outbox.put(message(sequence))
    outbox.flush(publication)
    assert [sent.sequence for sent in publication.messages] == [0, 1, 2, 3, 4]
    assert (len(outbox), outbox.num_sent, outbox.num_sent_bytes, outbox.num_dropped) == (0, 5, 50, 0)


def test_a_full_outbox_drops_the_oldest_and_counts_it():
    outbox = Outbox(3)
    for sequence in range(5):
        outbox.put(message(sequence))
    assert (len(outbox), outbox.num_dropped) == (3, 2)


def test_what_the_transport_refuses_for_now_is_kept_and_sent_later(publication):
    outbox = Outbox(3)
    outbox.put(message(0))
    publication.refusal = BlockingIOError("full")
    outbox.flush(publication)
    assert len(outbox) == 1
    publication.refusal = None
    outbox.flush(publication)
    assert publication.messages == [message(0)]


def test_a_broken_transport_raises(publication):
    outbox = Outbox(3)
    outbox.put(message(0))
    publication.refusal = BrokenPipeError("gone")
    with pytest.raises(BrokenPipeError):
        outbox.flush(publication)


def test_what_is_dropped_is_counted_and_who_waits_for_a_place_in_it_is_told():
    inbox = Inbox()
    result: Future[int] = Future()
    inbox.append(EngineRemoved([1]))
    inbox.append(Call(len, result))
    inbox.append(EngineRemoved([2]))
    assert inbox.drop() == 2
    assert (len(inbox), result.cancelled()) == (0, True)
