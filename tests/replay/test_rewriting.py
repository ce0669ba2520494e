"""What is altered in messages, and that nothing else is."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from kvist.errors import InvalidValueError
from kvist.events import Batch, Cleared, Heartbeat
from kvist.events.codec import decode_batch, encode_snapshot_part
from kvist.events.session import Apply, Clear, Session
from kvist.events.snapshot import HeldBlocks as SnapshotBlocks
from kvist.events.snapshot import blocks_digest, cut
from kvist.events.transports import Message
from kvist.replay.blocks import RankBlocks
from kvist.replay.rewriting import Rewriter


def rewritten(rewriter, make, *messages, round_idx=0, source=None):
    return [
        sent
        for record in make.records(*messages, **({} if source is None else {"source": source}))
        for sent in rewriter.rewritten(record, round_idx)
    ]


def batch_of(message):
    return decode_batch(message.payload, "w").batch


def test_nothing_asked_nothing_altered(make):
    messages = [make.batch(0, make.stored(1)), make.engine_batch(3), make.batch(1)._replace(payload=b"\xc1")]
    assert rewritten(Rewriter(), make, *messages) == messages


def test_a_batch_without_its_left_out_events_keeps_its_number(make):
    messages = [
        make.batch(0, make.stored(1, 2), make.removed(1)),
        make.batch(1, make.removed(2)),
        make.heartbeat(2, 0, 0),
        make.batch(2, Cleared(), make.stored(3)),
    ]
    sent = rewritten(Rewriter(kinds={"stored"}), make, *messages)
    assert [message.sequence for message in sent] == [0, 1, 2]
    assert [batch_of(message).events for message in sent] == [(make.stored(1, 2),), (), (make.stored(3),)]


def test_what_is_kept_is_kept_byte_for_byte_with_fields_of_later_versions(make):
    message = make.batch(0, make.stored(1), Cleared())
    fields = msgspec.msgpack.decode(message.payload, type=list[msgspec.Raw])
    later = message._replace(payload=msgspec.msgpack.encode([*fields, "a field of tomorrow"]))
    (sent,) = rewritten(Rewriter(kinds={"stored"}), make, later)
    read = msgspec.msgpack.decode(sent.payload, type=list[msgspec.Raw])
    assert [bytes(field) for field in read[:7]] == [bytes(field) for field in fields[:7]]
    assert msgspec.msgpack.decode(read[8]) == "a field of tomorrow"
    unfiltered = rewritten(Rewriter(kinds={"stored", "cleared"}), make, later)
    assert unfiltered == [later]


def test_heartbeats_that_stay_say_what_was_played(make):
    messages = [
        make.batch(0, make.stored(1, 2, 3)),
        make.batch(1, make.removed(2)),
        make.heartbeat(2, 2, blocks_digest([1, 3], 0)),
        make.batch(0, make.stored(9), epoch=8),
        make.heartbeat(1, 1, blocks_digest([9], 0), epoch=8),
    ]
    sent = rewritten(Rewriter(kinds={"stored", "heartbeat"}), make, *messages)
    assert batch_of(sent[2]).events == (Heartbeat(3, blocks_digest([1, 2, 3], 0)),)
    assert batch_of(sent[4]).events == (Heartbeat(1, blocks_digest([9], 0)),)
    assert rewritten(Rewriter(kinds={"stored", "removed", "cleared", "heartbeat"}), make, *messages) == messages


def test_a_batch_that_a_snapshot_tells_of_is_not_counted_when_it_comes_behind_it(make):
    """As recorders write them: what was on its way when the publisher was asked."""
    held = RankBlocks()
    held.apply(make.stored(1, 2))
    state = Batch("w", 0, 7, 3, 4, 0.0, (Heartbeat(held.num_blocks, held.digest),))
    blocks = SnapshotBlocks(np.array([1, 2], np.uint64), np.array([0, 1], np.uint32), np.array([1, 1], np.uint8))
    (part,) = cut(state, blocks)
    snapshot = Message(b"kv/w/0", 3, encode_snapshot_part(part))
    messages = [snapshot, make.batch(2, make.stored(9)), make.batch(3, make.stored(4)), make.heartbeat(4, 9, 9)]
    for num_rounds in (1, 2):
        rewriter = Rewriter(kinds={"stored", "heartbeat"}, num_rounds=num_rounds)
        for round_idx in range(num_rounds):
            *_, beat = rewritten(rewriter, make, *messages, round_idx=round_idx)
            assert batch_of(beat).events == (Heartbeat(3, blocks_digest([1, 2, 4], 0)),)


def test_a_worker_gets_its_other_name_in_batch_and_topic(make):
    messages = [make.batch(0, make.stored(1), rank=2), make.batch(0, worker="x"), make.batch(1)._replace(topic=b"")]
    sent = rewritten(Rewriter(names={"w": "pod-7"}), make, *messages)
    assert (sent[0].topic, batch_of(sent[0]).source, batch_of(sent[0]).events) == (
        b"kv/pod-7/2",
        ("pod-7", 2),
        (make.stored(1),),
    )
    assert sent[1] == messages[1]
    assert (sent[2].topic, batch_of(sent[2]).worker) == (b"", "pod-7")


def test_a_name_that_no_topic_can_carry_is_refused():
    with pytest.raises(InvalidValueError, match="worker: got 'a b'"):
        Rewriter(names={"w": "a b"})


def test_each_round_has_later_epochs_than_the_one_before(make):
    messages = [make.batch(0), make.batch(0, epoch=9), make.batch(0, rank=1, epoch=2**63)]
    rewriter = Rewriter(num_rounds=3)
    rounds = [rewritten(rewriter, make, *messages, round_idx=idx) for idx in range(3)]
    assert rounds[0] == messages
    epochs = [[batch_of(message).epoch for message in sent] for sent in rounds]
    for (first, second, other), later in itertools.pairwise(epochs):
        assert later == [first + later[1] - second, later[1], other + later[1] - second]
        assert later[0] > second


def test_epochs_that_leave_no_room_for_a_round_are_an_error(make):
    rewriter = Rewriter(num_rounds=2)
    message = make.batch(0, epoch=2**64 - 1)
    rewritten(rewriter, make, message)
    with pytest.raises(InvalidValueError, match="loop"):
        rewritten(rewriter, make, message, round_idx=1)


@pytest.mark.parametrize("form", ["map", "array"])
def test_an_engines_further_round_goes_on_in_number_behind_a_clearing_of_each_rank(make, form):
    stored = make.engine_stored(1, tokens=[1, 2, 3, 4])
    event = stored if form == "map" else ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU"]
    messages = [make.engine_batch(5, event), make.engine_batch(6, event, rank=1)]
    rewriter = Rewriter(num_rounds=3)
    rounds = [rewritten(rewriter, make, *messages, round_idx=idx) for idx in range(3)]
    sent = [message for each in rounds for message in each]
    assert [message.sequence for message in sent] == list(range(5, 15))
    assert rounds[0] == messages
    clearings = [msgspec.msgpack.decode(message.payload) for message in rounds[1][:2]]
    cleared = {"type": "AllBlocksCleared"} if form == "map" else ["AllBlocksCleared"]
    assert clearings == [[1.5, [cleared], 0], [1.5, [cleared], 1]]
    assert [message.payload for message in rounds[1][2:]] == [message.payload for message in messages]


@pytest.mark.parametrize("form", ["map", "array"])
def test_an_engines_left_out_events_leave_their_batch_and_its_number(make, form):
    events = [make.engine_stored(1, tokens=[1, 2, 3, 4]), make.engine_removed(1), {"type": "AllBlocksCleared"}]
    if form == "array":
        events = [["BlockStored", [1], None, [1], 1, None, "GPU"], ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]]
    message = make.engine_batch(4, *events, rank=3)
    for kind, event in zip(("stored", "removed", "cleared"), events, strict=True):
        (sent,) = rewritten(Rewriter(kinds={kind}), make, message)
        assert (sent.sequence, msgspec.msgpack.decode(sent.payload)) == (4, [1.5, [event], 3])


def test_no_filter_makes_a_gap_for_a_subscriber(make):
    events = [make.stored(1), make.removed(1), Cleared()]
    messages = [make.batch(sequence, events[sequence % 3]) for sequence in range(30)]
    for kinds in ({"stored"}, {"removed"}, {"cleared"}, {"heartbeat"}, {"removed", "heartbeat"}):
        session = Session()
        for message in rewritten(Rewriter(kinds=kinds), make, *messages):
            batch = batch_of(message)
            assert all(isinstance(step, Apply) for step in session.receive(batch.epoch, batch.sequence, batch, 0.0))
        assert (session.num_gaps, session.expected_sequence) == (0, 30)


def test_a_further_round_is_a_new_epoch_to_a_subscriber_and_no_gap(make):
    messages = [make.batch(sequence, make.stored(sequence)) for sequence in range(5)]
    rewriter, session, steps = Rewriter(num_rounds=3), Session(), []
    for round_idx in range(3):
        for message in rewritten(rewriter, make, *messages, round_idx=round_idx):
            batch = batch_of(message)
            steps += session.receive(batch.epoch, batch.sequence, batch, 0.0)
    assert [isinstance(step, Clear) for step in steps].count(True) == 2
    assert (session.num_gaps, session.num_duplicates, session.num_epochs) == (0, 0, 3)


def test_events_of_kinds_that_nobody_knows_go_with_a_filter_only(make):
    message = make.batch(0, make.stored(1))
    fields = msgspec.msgpack.decode(message.payload)
    fields[7].append(["moved", b"12345678"])
    message = message._replace(payload=msgspec.msgpack.encode(fields))
    assert rewritten(Rewriter(names={"x": "y"}), make, message) == [message]
    (sent,) = rewritten(Rewriter(kinds={"stored", "removed"}), make, message)
    assert decode_batch(sent.payload, "w") == ((batch_of(make.batch(0, make.stored(1)))), 0)


def test_a_heartbeat_that_is_none_is_passed_on(make):
    message = make.batch(0)
    fields = msgspec.msgpack.decode(message.payload)
    broken = message._replace(payload=msgspec.msgpack.encode([*fields[:7], [["heartbeat", 5]]]))
    assert rewritten(Rewriter(kinds={"stored", "heartbeat"}), make, broken) == [broken]
