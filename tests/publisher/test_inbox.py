"""The inbox: what waits is counted by the memory it takes, and nobody waits for what is dropped."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import Future

from kvist.events import EngineCleared, EngineRemoved
from kvist.publisher.inbox import UNREAD_BYTES, Between, Inbox
from kvist.publisher.sidecar import INBOX_BYTES, LIMITS
from kvist.publisher.unread import Unread

NUM_MESSAGES = 10_000


def test_unread_messages_take_no_more_memory_than_is_counted_however_small_they_are():
    inbox = Inbox()
    tracemalloc.start()
    try:
        for number in range(NUM_MESSAGES):
            inbox.put_unread(Unread(0, number.to_bytes(40, "big"), iter))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes <= inbox.num_bytes <= 2 * num_bytes


def test_a_sidecars_bound_on_unread_messages_leaves_room_for_events():
    assert LIMITS.inbox_capacity >= INBOX_BYTES // UNREAD_BYTES


def test_items_come_out_in_order_and_unread_messages_are_counted_while_they_wait():
    inbox, unread = Inbox(), Unread(0, b"12345", iter)
    inbox.append(EngineRemoved([1]))
    inbox.put_unread(unread)
    inbox.append(EngineCleared())
    assert inbox.num_bytes == UNREAD_BYTES + 5
    assert inbox.take() == EngineRemoved([1])
    assert inbox.num_bytes == UNREAD_BYTES + 5
    assert inbox.take() == unread
    assert inbox.num_bytes == 0
    assert inbox.take() == EngineCleared()


def test_what_is_dropped_is_counted_and_who_waits_for_a_place_in_it_is_told():
    inbox = Inbox()
    is_done: Future[None] = Future()
    inbox.append(EngineRemoved([1]))
    inbox.append(Between(len, is_done))
    inbox.put_unread(Unread(0, b"12345", iter))
    assert inbox.drop() == 2
    assert (len(inbox), inbox.num_bytes, is_done.cancelled()) == (0, 0, True)
