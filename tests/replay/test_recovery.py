"""What a recorder asks of a stream, and where the answers stand: any history, heard from anywhere, is exact."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from index_invariants import check_invariants

from kvist.events import Batch, Cleared, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.events.codec import encode_batch, encode_snapshot_part, is_snapshot_part
from kvist.events.session import SourceState
from kvist.events.snapshot import HeldBlocks, Snapshot, blocks_digest, snapshot_parts
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import Holding
from kvist.radix import RadixIndex
from kvist.replay import RecordingReader
from kvist.replay.blocks import SentBuffer
from kvist.replay.envelope import read_envelope
from kvist.replay.indexing import IndexPlayer
from kvist.replay.numbering import Numbering
from kvist.replay.recovery import SILENCE_S, SourceRecovery
from kvist.replay.script import Line, Moment, Script, Selection
from kvist.replay.statistics import StatisticsCollector

RANK, TOPIC = WorkerRank("w", 0), b"kv/w/0"
S = 1_000_000_000


class Publisher:
    """A model of a publisher: what it said, and what it held before each batch."""

    def __init__(self, rng, num_kept):
        self.rng = rng
        self.num_kept = num_kept
        self.epoch = 7
        self.held = {}  # block: (depth, tiers)
        self.batches = []
        self.before = {}  # (epoch, sequence): holding
        self.blocks = itertools.count(1)
        self._note()

    def restart(self):
        self.epoch += 1
        self.held, self.batches = {}, []
        self._note()

    def say(self):
        """Store a chain behind a held block or none, remove some blocks, or clear; return the message."""
        draw = self.rng.random()
        if draw < 0.6 or not self.held:
            parent = self.rng.choice([None, *self.held])
            depth = 0 if parent is None else self.held[parent][0] + 1
            tier = self.rng.choice([Tier.GPU, Tier.GPU, Tier.HOST])
            chain = [next(self.blocks) for _ in range(self.rng.randint(1, 5))]
            for place, block in enumerate(chain):
                self.held[block] = depth + place, 1 << tier
            event = Stored(np.array(chain, np.uint64).tobytes(), parent, tier)
        elif draw < 0.98:
            tier = Tier((self.rng.choice([*self.held.values()])[1] & 3) - 1)
            of_tier = [block for block, (_, tiers) in self.held.items() if tiers == 1 << tier]
            gone = self.rng.sample(of_tier, self.rng.randint(1, min(3, len(of_tier))))
            for block in gone:
                del self.held[block]
            event = Removed(np.array(gone, np.uint64).tobytes(), tier)
        else:
            self.held.clear()
            event = Cleared()
        message = self._message(len(self.batches), event)
        self.batches.append(message)
        self._note()
        return message

    @property
    def holding(self):
        of_tiers = [[block for block, (_, tiers) in self.held.items() if tiers >> tier & 1] for tier in Tier]
        digest = sum(blocks_digest(blocks, tier) for tier, blocks in zip(Tier, of_tiers, strict=True)) % 2**64
        return sum(map(len, of_tiers)), digest

    def heartbeat(self):
        return self._message(len(self.batches), Heartbeat(*self.holding))

    def replay(self, request):
        """Answer as publishers do: a range where it is kept, else a snapshot of some moment and the range behind it."""
        start = request.start_sequence if request.epoch == self.epoch else 0
        first_kept = max(0, len(self.batches) - self.num_kept)
        if start < first_kept:
            return [*self.snapshot(), self.heartbeat()]
        return self.batches[start:]

    def snapshot(self):
        held = HeldBlocks(
            np.array([*self.held], np.uint64),
            np.array([depth for depth, _ in self.held.values()], np.uint32),
            np.array([tiers for _, tiers in self.held.values()], np.uint8),
        )
        snapshot = Snapshot(RANK, self.epoch, len(self.batches), 4, Holding(*self.holding), (held,))
        return [Message(TOPIC, part.sequence, encode_snapshot_part(part)) for part in snapshot_parts(snapshot)]

    def _message(self, sequence, event):
        return Message(TOPIC, sequence, encode_batch(Batch(*RANK, self.epoch, sequence, 4, 1.5, (event,))))

    def _note(self):
        self.before[self.epoch, len(self.batches)] = self.holding


class Tape:
    """Records a model publisher through `SourceRecovery`, as `follow` does: nothing is received during a question."""

    def __init__(self, publisher):
        self.publisher = publisher
        self.recovery = SourceRecovery("w", self._write)
        self.written = []
        self.times_ns = []
        self.now_ns = 100 * S
        self.question = None
        self._questions = iter(())
        self._queue = []

    def _write(self, message):
        self.written.append(message)
        self.times_ns.append(self.now_ns)

    def hear(self, *messages):
        self.now_ns += S // 1000
        self._queue += messages
        self._go_on()

    def _go_on(self):
        """Receive and ask until there is an answer to wait for."""
        while self.question is None and self._queue:
            messages, self._queue = self._queue, []
            for _ in self.recovery.receive_all(messages, self.now_ns * 1e-9):
                pass
            self._questions = self.recovery.questions(self.now_ns * 1e-9)
            self.question = next(self._questions, None)

    def settle(self, messages):
        """Take an answer to what is asked, None for silence."""
        for _ in self.recovery.on_answer(self.question, messages, self.now_ns * 1e-9):
            pass
        self.question = next(self._questions, None)
        if self.question is None:  # an answer about another epoch is followed by a further question
            self._questions = self.recovery.questions(self.now_ns * 1e-9)
            self.question = next(self._questions, None)
        self._go_on()

    def end(self):
        """Hear heartbeats, and have them answered, until nothing is asked any more."""
        for _ in range(3):
            self.now_ns += 60 * S
            self.hear(self.publisher.heartbeat())
            while self.question is not None:
                self.settle(self.publisher.replay(self.question.request))

    def records(self, make):
        return [
            record._replace(time_ns=time_ns + S)
            for message, time_ns in zip(self.written, self.times_ns, strict=True)
            for record in make.records(message)
        ]

    def total(self, name):
        return sum(getattr(session, name) for session in self.recovery.sessions)


def indexed(records):
    """Return the rank's report, None if it was never heard of, and the report of all."""
    index = RadixIndex()
    player = IndexPlayer(index)
    for record in records:
        player.apply([Line(0, record)])
    report = player.report()
    check_invariants(index)
    return next(iter(report.ranks), None), report


def assert_known_or_partial(publisher, records):
    """What a replay believes to be exact is what the publisher held before the message that comes next.

    An answer that was cut short is continued by what was heard before it.
    """
    rank, _ = indexed(records)
    numbering = Numbering()
    ends = []
    for record in records:
        numbering.on_message(read_envelope(record.message.payload), record)
        session = numbering.sessions[RANK]
        ends.append((session.epoch, session.expected_sequence))
    if rank is not None and rank.state is SourceState.LIVE:
        assert (rank.num_blocks, rank.digest) in (publisher.before[ends[-1]], publisher.before[max(ends)])
        collector = StatisticsCollector()
        for record in records:
            collector.add(record)
        assert collector.result().ranks[RANK].num_live == rank.num_blocks
    return rank


HISTORIES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def taped(rng, num_messages, num_kept, *, is_faulty):
    """Return a tape of a stream that began before it was heard, lost messages, was restarted, and answered or not."""
    publisher = Publisher(rng, num_kept)
    for _ in range(rng.randint(0, num_messages)):
        publisher.say()
    tape = Tape(publisher)
    is_losing = False
    for _ in range(num_messages):
        draw = rng.random()
        if draw < 0.03:
            is_losing = not is_losing
        elif draw < 0.04:
            publisher.restart()
        message = publisher.say() if rng.random() < 0.8 else publisher.heartbeat()
        if not is_losing:
            tape.hear(*[message] * (1 + (rng.random() < 0.05)))
        if tape.question is not None and rng.random() < 0.3:
            answer = publisher.replay(tape.question.request)
            if is_faulty and rng.random() < 0.5:
                answer = rng.choice([None, [], answer[1:], answer[:-1], [Message(TOPIC, 0, b"\xc1")], answer * 2])
            tape.settle(answer)
    return publisher, tape


@HISTORIES
@given(seed=st.integers(0, 2**32), num_messages=st.integers(1, 120), num_kept=st.sampled_from([0, 3, 20, 1000]))
def test_any_history_heard_from_anywhere_is_exact_once_its_questions_are_answered(make, seed, num_messages, num_kept):
    publisher, tape = taped(random.Random(seed), num_messages, num_kept, is_faulty=False)
    tape.end()
    records = tape.records(make)
    rank, _ = indexed(records)
    assert (rank.state, (rank.num_blocks, rank.digest)) == (SourceState.LIVE, publisher.holding)
    assert tape.recovery.partial == []
    collector = StatisticsCollector()
    for record in records:
        collector.add(record)
    statistics = collector.result()
    assert statistics.ranks[RANK].num_live == statistics.spans[-1].num_live == publisher.holding[0]


@HISTORIES
@given(seed=st.integers(0, 2**32), num_messages=st.integers(1, 120), num_kept=st.sampled_from([0, 3, 20, 1000]))
@example(seed=33939, num_messages=21, num_kept=1000)  # a copy is completed from before what heartbeats announced
def test_whatever_is_answered_a_replay_invents_nothing_and_heals(make, seed, num_messages, num_kept):
    publisher, tape = taped(random.Random(seed), num_messages, num_kept, is_faulty=True)
    assert_known_or_partial(publisher, tape.records(make))
    tape.end()
    rank, _ = indexed(tape.records(make))
    assert (rank.state, (rank.num_blocks, rank.digest)) == (SourceState.LIVE, publisher.holding)


@HISTORIES
@given(seed=st.integers(0, 2**32), num_kept=st.sampled_from([0, 5]), place=st.floats(0, 1))
def test_a_recording_cut_at_any_byte_is_exact_up_to_there_or_partial(make, tmp_path, seed, num_kept, place):
    publisher, tape = taped(random.Random(seed), 60, num_kept, is_faulty=False)
    tape.end()
    path = tmp_path / f"{seed}-{num_kept}-{place}"
    path.unlink(missing_ok=True)
    make.write(path, tape.records(make))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * place)])
    with RecordingReader(path) as reader:
        assert_known_or_partial(publisher, list(reader))


PLENTY = 1 << 20


@HISTORIES
@given(
    seed=st.integers(0, 2**32),
    num_messages=st.integers(1, 120),
    num_kept=st.sampled_from([0, 3, 1000]),
    max_bytes=st.sampled_from([1, 300, 2000, PLENTY]),
    is_faulty=st.booleans(),
)
@example(seed=13205, num_messages=63, num_kept=1000, max_bytes=2000, is_faulty=True)  # a heartbeat heals: all is gone
def test_who_asks_what_was_played_is_answered_exactly_or_told_that_too_little_is_kept(
    make, seed, num_messages, num_kept, max_bytes, is_faulty
):
    publisher, tape = taped(random.Random(seed), num_messages, num_kept, is_faulty=is_faulty)
    tape.end()
    buffer = SentBuffer(max_bytes)
    played = [message for message in tape.written if buffer.append(message)]
    assert not any(is_snapshot_part(message.payload) for message in played)
    (last,) = buffer.last_messages()
    half = len(publisher.batches) // 2
    for start, epoch in ((0, publisher.epoch), (0, publisher.epoch - 1), (half, publisher.epoch)):
        answer = list(buffer.replay(ReplayRequest(TOPIC, start, epoch)))
        is_snapshot = bool(answer) and is_snapshot_part(answer[0].payload)
        if start > 0 and not is_snapshot:
            sequences, every = [message.sequence for message in answer], [*range(start, len(publisher.batches))]
            assert sequences == every[0 if max_bytes == PLENTY else len(every) - len(sequences) :]
            continue
        rank, _ = indexed(make.records(*answer, last))
        if rank.state is SourceState.LIVE or max_bytes == PLENTY:
            assert (rank.state, (rank.num_blocks, rank.digest)) == (SourceState.LIVE, publisher.holding)


@HISTORIES
@given(seed=st.integers(0, 2**32), num_kept=st.sampled_from([0, 5]), place=st.floats(0, 1), is_faulty=st.booleans())
def test_a_part_of_a_recording_begins_with_what_was_held_then(make, tmp_path, seed, num_kept, place, is_faulty):
    publisher, tape = taped(random.Random(seed), 60, num_kept, is_faulty=is_faulty)
    tape.end()
    records = tape.records(make)
    since = Moment(place * (records[-1].time_ns - records[0].time_ns) / S, is_unix=False)
    path = tmp_path / f"{seed}-{num_kept}-{place}-{is_faulty}"
    path.unlink(missing_ok=True)
    make.write(path, records)
    player = IndexPlayer(RadixIndex())
    for lines in Script(path, selection=Selection(since=since)).lines():
        player.apply(lines)
    (rank,) = player.report().ranks
    if rank.state is SourceState.LIVE or not is_faulty:
        assert (rank.state, (rank.num_blocks, rank.digest)) == (SourceState.LIVE, publisher.holding)


def test_messages_wait_for_the_answer_and_stand_behind_it():
    publisher = Publisher(random.Random(1), num_kept=0)
    for _ in range(50):
        publisher.say()
    tape = Tape(publisher)
    first, second = publisher.heartbeat(), publisher.say()
    tape.hear(first, second)
    assert tape.written == []
    assert tape.question.request == ReplayRequest(TOPIC, 0, 7)
    answer = publisher.replay(tape.question.request)
    tape.settle(answer)
    parts = [message for message in answer if is_snapshot_part(message.payload)]
    assert tape.written == parts  # which tell what both of them do
    third = publisher.say()
    tape.hear(second)
    tape.hear(third)
    assert tape.written == [*parts, third]
    assert tape.total("num_duplicates") == 0


def test_what_waits_is_written_behind_the_answer_and_what_comes_again_as_it_came():
    publisher = Publisher(random.Random(1), num_kept=50)
    messages = [publisher.say() for _ in range(20)]
    tape = Tape(publisher)
    tape.hear(*messages[10:12])
    tape.hear(*messages[12:14])  # waits in the subscription
    assert tape.written == []
    tape.settle(messages[:13])
    assert tape.written == messages[:14]
    tape.hear(messages[14], messages[3])
    assert tape.written[14:] == [messages[14], messages[3]]
    assert (tape.total("num_gaps"), tape.total("num_duplicates"), tape.total("num_recovered")) == (0, 1, 13)


def test_a_range_stands_in_the_place_of_what_was_lost_each_message_once(make):
    publisher = Publisher(random.Random(2), num_kept=1000)
    messages = [publisher.say() for _ in range(10)]
    tape = Tape(publisher)
    tape.hear(*messages[:3])
    tape.hear(*messages[7:])
    tape.settle(publisher.replay(tape.question.request))
    assert tape.written == messages
    assert (tape.total("num_gaps"), tape.total("num_recovered"), tape.total("num_snapshots")) == (1, 7, 0)
    collector = StatisticsCollector()
    for record in tape.records(make):
        collector.add(record)
    (source,) = collector.result().sources
    assert (source.num_gaps, source.num_duplicates, source.is_from_start) == (0, 0, True)


def test_a_source_that_does_not_answer_is_recorded_as_it_is_and_asked_nothing_for_a_while(make):
    """Else each of its ranks would stop the reception for as long as a question takes."""
    live = [make.batch(sequence, make.stored(rank), rank=rank) for sequence in (3, 4) for rank in range(4)]
    tape = Tape(None)
    tape.hear(*live)
    assert tape.written == []
    tape.settle(None)
    assert tape.question is None
    assert sorted(tape.written) == sorted(live)
    assert tape.recovery.partial == [f"w/{rank}" for rank in range(4)]
    beats = [make.heartbeat(5, 1, 1, rank=rank) for rank in range(4)]
    tape.hear(*beats)
    assert (tape.question, len(tape.written)) == (None, len(live))
    tape.now_ns += round(SILENCE_S * S)
    tape.hear(beats[1])
    assert tape.question.request == ReplayRequest(b"kv/w/1", 0, 7)
    tape.settle(None)
    tape.recovery.on_reconnect(tape.now_ns * 1e-9)
    tape.hear(make.batch(8, rank=2))
    assert tape.question.request == ReplayRequest(b"kv/w/2", 5, 7)


def test_what_waits_of_an_epoch_that_ends_is_written_before_the_next(make):
    messages = [make.batch(3), make.batch(0, epoch=8), make.batch(5, epoch=8)]
    tape = Tape(None)
    tape.hear(*messages)
    assert tape.written == messages[:2]
    assert tape.question.request == ReplayRequest(b"kv/w/0", 1, 8)
    tape.settle(None)
    assert tape.written == messages


def test_a_restart_behind_an_answer_is_written_though_its_numbers_are_smaller():
    publisher = Publisher(random.Random(4), num_kept=0)
    for _ in range(9):
        publisher.say()
    tape = Tape(publisher)
    tape.hear(publisher.heartbeat())
    tape.settle(publisher.replay(tape.question.request))
    publisher.restart()
    messages = [publisher.heartbeat(), publisher.say(), publisher.say()]
    tape.hear(*messages)
    assert tape.written[-3:] == messages


def test_what_waits_is_written_when_the_recorder_ends(make):
    tape = Tape(None)
    tape.hear(make.batch(3))
    tape.recovery.close(tape.now_ns * 1e-9)
    assert tape.written == [make.batch(3)]


def test_a_snapshot_that_lies_is_no_answer():
    publisher = Publisher(random.Random(5), num_kept=0)
    for _ in range(30):
        publisher.say()
    tape = Tape(publisher)
    tape.hear(publisher.heartbeat())
    (part,) = publisher.snapshot()
    tape.settle([part._replace(payload=part.payload.replace(b"\x01", b"\x02"))])
    assert (tape.total("num_snapshots"), tape.recovery.partial) == (0, ["w/0"])
    assert not any(is_snapshot_part(message.payload) for message in tape.written)


def test_an_engines_replay_stands_in_front_with_the_topic_of_its_stream(make):
    messages = [make.engine_batch(n, make.engine_stored(n, tokens=[n] * 4)) for n in range(8)]
    live = [message._replace(topic=b"kv-events") for message in messages]
    tape = Tape(None)
    tape.hear(*live[5:7])
    assert tape.question.request == ReplayRequest(None, 0)
    tape.settle(messages)
    tape.hear(live[7])
    assert tape.written == live
    rank, report = indexed(tape.records(make))
    assert (rank.state, rank.num_blocks, report.num_cleared) == (SourceState.LIVE, 8, 0)


def test_an_engine_that_keeps_too_little_stays_partial(make):
    messages = [make.engine_batch(n, make.engine_stored(n, tokens=[n] * 4)) for n in range(8)]
    tape = Tape(None)
    tape.hear(messages[7])
    tape.settle(messages[3:])
    assert tape.written == messages[3:]
    assert tape.recovery.partial == ["w"]
    assert indexed(tape.records(make))[0].state is SourceState.PARTIAL


def test_an_engine_that_was_away_is_asked_whether_it_is_the_same(make):
    before = [make.engine_batch(n, make.engine_stored(n, tokens=[n] * 4)) for n in range(5)]
    after = [make.engine_batch(n, make.engine_stored(n + 50, tokens=[n] * 4), timestamp_s=99.0) for n in range(9)]
    tape = Tape(None)
    tape.hear(*before)
    tape.recovery.on_reconnect(tape.now_ns * 1e-9)
    tape.hear(after[7])
    assert tape.question.request == ReplayRequest(None, 4)
    while tape.question is not None:
        tape.settle(after[tape.question.request.start_sequence : 8])
    tape.hear(after[8])
    while tape.question is not None:
        tape.settle(after[tape.question.request.start_sequence :])
    assert tape.written == before + after
    assert tape.recovery.partial == []


def test_what_an_engine_sent_before_its_restart_and_comes_behind_the_answer_is_no_further_restart(make):
    before = [make.engine_batch(n, make.engine_stored(n, tokens=[n] * 4)) for n in range(20)]
    after = [make.engine_batch(n, make.engine_stored(n + 50, tokens=[n] * 4), timestamp_s=99.0) for n in range(10)]
    tape = Tape(None)
    tape.hear(*before[:5])
    tape.recovery.on_reconnect(tape.now_ns * 1e-9)
    tape.hear(before[5])
    for late in (before[6], before[15]):
        while tape.question is not None:
            tape.settle(after[tape.question.request.start_sequence : 9])
        tape.hear(late)
    tape.hear(after[9])
    while tape.question is not None:
        tape.settle(after[tape.question.request.start_sequence :])
    assert tape.written == before[:5] + after
    assert (tape.recovery.sessions[0].num_epochs, tape.recovery.partial) == (2, [])


@pytest.mark.parametrize("seed", range(3))
def test_a_script_of_a_late_recording_plays_into_an_index_as_a_file_too(make, tmp_path, seed):
    publisher, tape = taped(random.Random(seed), 100, 0, is_faulty=False)
    tape.end()
    path = make.write(tmp_path / "r", tape.records(make))
    player = IndexPlayer(RadixIndex())
    for lines in Script(path).lines():
        player.apply(lines)
    assert player.report().ranks[0].digest == publisher.holding[1]
