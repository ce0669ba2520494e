"""What a further round makes of a recording, and that nothing else is altered."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvist.errors import InvalidValueError
from kvist.events.codec import decode_batch
from kvist.events.session import Clear, Session
from kvist.radix import RadixIndex
from kvist.replay.indexing import IndexPlayer
from kvist.replay.script import Line, Script


@pytest.fixture
def rounds(recording):
    """Return a function that records messages and returns what is played of them, round by round."""

    def play(*messages, num_rounds):
        path = recording(*messages)
        lines = [line for some in Script(path, num_rounds=num_rounds).lines() for line in some]
        return [[line.record.message for line in lines if line.round_idx == idx] for idx in range(num_rounds)]

    return play


def batch_of(message):
    return decode_batch(message.payload, "w").batch


def test_the_first_round_is_what_was_recorded(make, rounds):
    messages = [make.batch(0, make.stored(1)), make.engine_batch(3), make.batch(1)._replace(payload=b"\xc1")]
    assert rounds(*messages, num_rounds=2)[0] == messages


def test_each_round_has_later_epochs_than_the_one_before(make, rounds):
    played = rounds(make.batch(0), make.batch(0, epoch=9), make.batch(0, rank=1, epoch=2**63), num_rounds=3)
    epochs = [[batch_of(message).epoch for message in sent] for sent in played]
    assert epochs[0] == [7, 9, 2**63]
    for (first, second, other), later in itertools.pairwise(epochs):
        assert later == [first + later[1] - second, later[1], other + later[1] - second]
        assert later[0] > second


def test_what_is_not_replaced_stays_byte_for_byte_with_fields_of_later_versions(make, rounds):
    message = make.batch(0, make.stored(1))
    fields = msgspec.msgpack.decode(message.payload, type=list[msgspec.Raw])
    later = message._replace(payload=msgspec.msgpack.encode([*fields, "a field of tomorrow"]))
    sent = msgspec.msgpack.decode(rounds(later, num_rounds=2)[1][0].payload, type=list[msgspec.Raw])
    assert [bytes(field) for field in sent[:3] + sent[4:9]] == [bytes(field) for field in fields[:3] + fields[4:]]
    assert msgspec.msgpack.decode(sent[9]) == "a field of tomorrow"


def test_epochs_that_leave_no_room_for_a_round_are_an_error(make, rounds):
    with pytest.raises(InvalidValueError, match="loop: got 2, expected fewer rounds"):
        rounds(make.batch(0, epoch=2**64 - 1), num_rounds=2)


def test_an_engines_further_round_has_its_numbers_and_is_a_second_later(make, rounds):
    stored = ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU"]
    messages = [make.engine_batch(5, stored), make.engine_batch(6, stored, rank=1)]
    played = rounds(*messages, num_rounds=3)
    assert [message.sequence for sent in played for message in sent] == [5, 6] * 3
    batches = [msgspec.msgpack.decode(message.payload) for sent in played for message in sent]
    assert batches == [[1.5 + idx, [stored], rank] for idx in range(3) for rank in (0, 1)]


def test_an_engine_that_was_restarted_or_repeated_itself_is_exact_in_every_round(make, rounds):
    stored = [make.engine_stored(block, tokens=[block] * 4) for block in range(9)]
    first = [make.engine_batch(idx, stored[idx]) for idx in range(5)]
    second = [make.engine_batch(idx, stored[8 - idx], timestamp_s=9.0) for idx in range(2)]
    played = rounds(*first, first[2], *second, second[0], num_rounds=3)
    for num_rounds in range(1, 4):
        player = IndexPlayer(RadixIndex())
        player.apply(Line(idx, record) for idx in range(num_rounds) for record in make.records(*played[idx]))
        (rank,) = player.report().ranks
        assert (rank.num_blocks, rank.state) == (2, "live")


def test_a_further_round_is_a_new_epoch_to_a_subscriber_and_no_gap(make, rounds):
    session, steps = Session(), []
    for sent in rounds(*(make.batch(sequence, make.stored(sequence)) for sequence in range(5)), num_rounds=3):
        for message in sent:
            batch = batch_of(message)
            steps += session.receive(batch.epoch, batch.sequence, batch, 0.0)
    assert [isinstance(step, Clear) for step in steps].count(True) == 2
    assert (session.num_gaps, session.num_duplicates, session.num_epochs) == (0, 0, 3)
