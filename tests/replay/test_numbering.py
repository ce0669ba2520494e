"""What the numbers of a recorded stream show: gaps, what comes twice, restarts, snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.events import WorkerRank
from kvist.events.codec import encode_snapshot_part
from kvist.events.session import Apply, Clear, ClearReason, Restore
from kvist.events.snapshot import HeldBlocks, Snapshot, snapshot_parts
from kvist.events.transports import Message
from kvist.replay.envelope import read_envelope
from kvist.replay.numbering import Numbering

NEW, NOTHING = [Apply(None)], []
LOST, RESTART = [Clear(ClearReason.LOST)], [Clear(ClearReason.NEW_EPOCH)]


def judged(make, *messages):
    numbering = Numbering()
    records = make.records(*messages)
    return numbering, [numbering.on_message(read_envelope(each.message.payload), each) for each in records]


def snapshot(sequence, blocks=(5, 6)):
    held = HeldBlocks(np.array(blocks, np.uint64), np.zeros(len(blocks), np.uint32), np.ones(len(blocks), np.uint8))
    (part,) = snapshot_parts(Snapshot(WorkerRank("w", 0), 7, sequence, 4, held.holding(), (held,)))
    return Message(b"kv/w/0", sequence, encode_snapshot_part(part))


@pytest.mark.parametrize("form", ["batch", "engine_batch"])
def test_gaps_and_duplicates_are_counted(make, form):
    message = getattr(make, form)
    numbering, steps = judged(make, *(message(sequence) for sequence in (3, 4, 4, 7, 4, 8, 10)))
    assert steps == [NEW, NEW, NOTHING, LOST + NEW, NOTHING, NEW, LOST + NEW]
    assert (numbering.total("num_gaps"), numbering.total("num_duplicates"), numbering.total("num_epochs")) == (2, 2, 1)
    assert not numbering.is_from_start
    assert not any(session.is_complete for session in numbering.sessions.values())


def test_a_message_that_comes_late_is_no_news(make):
    numbering, steps = judged(make, make.batch(0), make.batch(2), make.batch(1))
    assert steps == [NEW, LOST + NEW, NOTHING]
    assert numbering.total("num_duplicates") == 1


def test_each_rank_and_each_companion_has_its_own_numbers(make):
    numbering, _ = judged(make, *(make.batch(sequence, rank=rank) for sequence in range(3) for rank in (0, 1, 4097)))
    assert (len(numbering.sessions), numbering.total("num_gaps", "num_duplicates")) == (3, 0)
    assert numbering.is_from_start


def test_a_heartbeat_takes_no_number_and_shows_that_the_last_message_was_lost(make):
    _, steps = judged(make, make.batch(0), make.heartbeat(1, 0, 0), make.heartbeat(3, 0, 0), make.batch(3))
    assert steps == [NEW, NOTHING, LOST, NEW]


def test_a_later_epoch_is_a_restart_and_begins_at_zero(make):
    numbering, steps = judged(make, make.batch(5), make.batch(1, epoch=8), make.batch(6), make.batch(2, epoch=8))
    assert steps == [NEW, RESTART + LOST + NEW, NOTHING, NEW]
    assert (numbering.total("num_epochs"), numbering.total("num_gaps"), numbering.total("num_stale")) == (2, 1, 1)


def test_other_bytes_under_a_number_are_an_engines_restart(make):
    _, steps = judged(make, make.engine_batch(0), make.engine_batch(1), make.engine_batch(0, timestamp_s=9.0))
    assert steps == [NEW, NEW, RESTART + NEW]


def test_a_snapshot_tells_what_came_before_it(make):
    messages = [snapshot(40), make.batch(39), make.batch(40), snapshot(50), make.batch(50), make.batch(41)]
    numbering, steps = judged(make, *messages)
    assert steps == [[Restore()], NOTHING, NEW, [Restore()], NEW, NOTHING]
    assert (numbering.total("num_gaps"), numbering.total("num_duplicates"), numbering.total("num_snapshots")) == (
        0,
        2,
        2,
    )
    assert numbering.is_from_start
    assert numbering.snapshot.snapshot.sequence == 50


def test_a_snapshot_that_lies_restores_nothing(make):
    lie = snapshot(40)
    numbering, steps = judged(make, make.batch(3), lie._replace(payload=lie.payload.replace(b"\x05", b"\x06")))
    assert steps == [NEW, NOTHING]
    assert (numbering.snapshots.num_malformed, numbering.sessions[("w", 0)].expected_sequence) == (1, 4)


def test_a_snapshot_from_before_the_last_message_is_followed_by_what_was_seen(make):
    numbering, steps = judged(make, make.batch(60), snapshot(50), make.batch(50), make.batch(51))
    assert steps == [NEW, [Restore()], NEW, NEW]
    assert (numbering.total("num_gaps", "num_duplicates"), numbering.is_from_start) == (0, False)
