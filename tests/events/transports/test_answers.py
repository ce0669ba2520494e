"""What answers take while they come in: each has a bound, and so have all of them together."""

from __future__ import annotations

import pytest

from kvist.events.transports import Message
from kvist.events.transports.base import MESSAGE_BYTES
from kvist.events.transports.received import BUDGET, ReplayAnswer

MESSAGE = Message(b"t", 0, bytes(99))
SIZE_BYTES = MESSAGE_BYTES + 100


def test_an_answer_that_does_not_fit_beside_the_others_is_refused_until_they_are_dropped(monkeypatch):
    before_bytes, num_before = BUDGET.taken_bytes, BUDGET.num_refused
    monkeypatch.setattr("kvist.events.transports.received.MAX_ANSWERS_BYTES", before_bytes + 3 * SIZE_BYTES)
    first, second = ReplayAnswer(), ReplayAnswer()
    assert first.add(MESSAGE)
    assert first.add(MESSAGE)
    assert second.add(MESSAGE)
    assert not second.add(MESSAGE)
    assert (second, BUDGET.num_refused) == ([MESSAGE], num_before + 1)
    del first
    assert second.add(MESSAGE)
    del second
    assert BUDGET.taken_bytes == before_bytes


def test_an_answer_that_is_too_large_by_itself_takes_nothing_from_the_others(monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_BYTES", SIZE_BYTES)
    num_before, answer = BUDGET.num_refused, ReplayAnswer()
    assert answer.add(MESSAGE)
    assert not answer.add(MESSAGE)
    assert (len(answer), BUDGET.num_refused) == (1, num_before)


@pytest.mark.parametrize("size_bytes", [0, 1, SIZE_BYTES])
def test_what_was_counted_before_an_answer_has_messages_is_given_back_too(size_bytes):
    before_bytes = BUDGET.taken_bytes
    answer = ReplayAnswer()
    assert answer.reserve(size_bytes)
    assert BUDGET.taken_bytes == before_bytes + size_bytes
    del answer
    assert BUDGET.taken_bytes == before_bytes
