"""Snapshots of a publisher against the sum of its batches, at the sequence that they name, and when one is made."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events import Removed, Stored, Tier, WorkerRank
from kvist.events.codec import decode_batch, decode_snapshot_part, encode_batch, is_snapshot_part
from kvist.events.engine_events import EngineCleared, EngineRemoved, EngineStored
from kvist.events.snapshot import Snapshot, SnapshotAssembly
from kvist.events.transports import Message, ReplayRequest
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.publisher import snapshot as snapshots
from kvist.publisher.buffers import ReplayBuffer
from kvist.publisher.residency import Chain
from kvist.publisher.snapshot import ReplayResponder
from kvist.publisher.stream import RankStream

EPOCH, BLOCK_SIZE, TOPIC = 7, 4, b"kv/w/0"


class Publisher:
    """One rank's stream and its answers, without a thread: what is to be done between events is done at once."""

    def __init__(self, num_kept: int = 1000, first_sequence: int = 0) -> None:
        self.stream = RankStream(WorkerRank("w", 0), BLOCK_SIZE, EPOCH)
        self.stream.next_sequence = first_sequence
        self.buffer = ReplayBuffer(num_kept, 1 << 30)
        self.answers = ReplayResponder("w", EPOCH, {0: self.stream}, self.buffer, self._call_between_batches)
        self.messages: list[Message] = []
        self.num_copies = 0

    def _call_between_batches(self, function) -> Future[object]:
        self.num_copies += 1
        result: Future[object] = Future()
        result.set_result(function({0: self.stream}))
        return result

    def report(self, *events) -> None:
        for event in events:
            self.stream.admit(event)
        for batch in self.stream.close_batches(1.0):
            self.messages.append(Message(TOPIC, batch.sequence, encode_batch(batch)))
            self.buffer.append(self.messages[-1])

    def ask(self, start: int = 0, epoch: int | None = EPOCH, topic: bytes | None = TOPIC) -> list[Message]:
        return list(self.answers.replay(ReplayRequest(topic, start, epoch)))


def chain(first: int, num_blocks: int, parent: int | None = None, tier: Tier = Tier.GPU) -> EngineStored:
    """Return the storing of blocks `first`, `first + 1` and so on, which consist of their numbers."""
    numbers = range(first, first + num_blocks)
    tokens = [token for number in numbers for token in [number] * BLOCK_SIZE]
    return EngineStored(list(numbers), tokens, BLOCK_SIZE, parent_block_hash=parent, tier=tier)


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


def split(answer: list[Message]) -> tuple[Snapshot | None, list[Message]]:
    """Return an answer's snapshot, if it has one, and the messages behind it."""
    assembly = SnapshotAssembly("test")
    parts = [message for message in answer if is_snapshot_part(message.payload)]
    assert answer[: len(parts)] == parts
    for message in parts:
        part = decode_snapshot_part(message.payload, "test")
        assert (message.topic, message.sequence) == (TOPIC, part.sequence)
        assert (part.worker, part.rank, part.block_size) == ("w", 0, BLOCK_SIZE)
        assembly.add(part)
    return (assembly.snapshot() if parts else None), answer[len(parts) :]


def held_of(snapshot: Snapshot) -> dict[tuple[int, int], int]:
    """Return the (hash, tier) pairs with their depths."""
    return {
        (block_hash, tier): depth
        for held in snapshot.slices
        for block_hash, depth, tiers in zip(*(column.tolist() for column in held), strict=True)
        for tier in Tier
        if tiers >> tier & 1
    }


def sum_of(messages: list[Message]) -> dict[tuple[int, int], int]:
    """Return what batches add up to, by brute force; the depth of a block is one more than its parent had."""
    held: dict[tuple[int, int], int] = {}
    depth_of: dict[int | None, int] = {None: -1}
    for message in messages:
        for event in decode_batch(message.payload, "test").batch.events:
            if isinstance(event, Stored):
                parent = event.parent
                for block_hash in memoryview(event.hashes).cast("Q"):
                    depth_of[block_hash] = depth_of[parent] + 1
                    held[block_hash, event.tier] = depth_of[block_hash]
                    parent = block_hash
            elif isinstance(event, Removed):
                for block_hash in memoryview(event.hashes).cast("Q"):
                    held.pop((block_hash, event.tier), None)
            else:
                held.clear()
    return held


numbers = st.integers(0, 30)
tiers = st.sampled_from([Tier.GPU, Tier.HOST])
events = st.one_of(
    st.builds(chain, numbers, st.integers(1, 5), st.none() | numbers, tiers),
    st.builds(lambda number, tier: EngineStored([number], [], 0, tier=tier), numbers, tiers),
    st.builds(lambda gone, tier: EngineRemoved(gone, tier=tier), st.lists(numbers, max_size=4), tiers),
    st.just("ask"),
    st.just(EngineCleared()),
)


@given(st.lists(st.lists(events, max_size=6), max_size=12), st.integers(1, 5))
def test_a_snapshot_is_the_sum_of_the_batches_before_it(batches, num_kept):
    publisher = Publisher(num_kept)
    for batch in batches:
        publisher.report(*(event for event in batch if event != "ask"))
        if "ask" in batch:
            snapshot, behind = split(publisher.ask())
            if snapshot is not None:
                assert snapshot.epoch == EPOCH
                assert held_of(snapshot) == sum_of(publisher.messages[: snapshot.sequence])
                depths = [depth for held in snapshot.slices for depth in held.depths.tolist()]
                assert depths == sorted(depths)
            assert behind == publisher.messages[0 if snapshot is None else snapshot.sequence :]


def test_who_has_nothing_gets_the_range_unless_a_snapshot_is_smaller(publisher, monkeypatch):
    monkeypatch.setattr(snapshots, "MIN_SAVED_BYTES", 100)
    publisher.report(chain(0, 5))
    assert split(publisher.ask()) == (None, publisher.messages)
    for _ in range(20):
        publisher.report(EngineCleared())
        publisher.report(chain(0, 5))
    snapshot, behind = split(publisher.ask())
    assert snapshot.sequence == len(publisher.messages)
    assert behind == []


def test_who_was_away_gets_the_range_even_if_a_snapshot_is_smaller(publisher, monkeypatch):
    for _ in range(20):
        publisher.report(EngineCleared())
        publisher.report(chain(0, 5))
    assert split(publisher.ask(start=3)) == (None, publisher.messages[3:])
    assert publisher.num_copies == 0
    monkeypatch.setattr(snapshots, "MAX_RANGE_BYTES", 100)
    snapshot, _ = split(publisher.ask(start=3))
    assert snapshot is not None


def test_a_range_that_is_not_whole_any_more_becomes_a_snapshot():
    publisher = Publisher(num_kept=2)
    for first in range(0, 50, 5):
        publisher.report(chain(first, 5))
    assert split(publisher.ask(start=8)) == (None, publisher.messages[8:])
    snapshot, behind = split(publisher.ask(start=7))
    assert held_of(snapshot) == sum_of(publisher.messages)
    assert behind == []


def test_a_stream_that_begins_with_blocks_is_told_by_a_snapshot_though_nothing_was_sent():
    publisher = Publisher(first_sequence=1)
    publisher.stream.residency.hold(Chain([1, 2], [11, 12], None, Tier.GPU))
    snapshot, behind = split(publisher.ask())
    assert (snapshot.sequence, held_of(snapshot)) == (1, {(11, 0): 0, (12, 0): 1})
    assert split(publisher.ask(start=1)) == (None, [])
    publisher.report(chain(50, 1))
    snapshot, behind = split(publisher.ask())
    assert (snapshot.sequence, behind) == (1, publisher.messages)


def test_a_stream_with_nothing_in_it_has_nothing_to_tell(publisher):
    assert publisher.ask() == []
    assert publisher.num_copies == 0


def test_a_question_about_an_earlier_epoch_is_answered_from_the_beginning(publisher):
    for first in range(0, 50, 5):
        publisher.report(chain(first, 5))
    assert split(publisher.ask(start=8, epoch=EPOCH - 1)) == (None, publisher.messages)


def test_a_snapshot_is_shared_until_what_followed_it_is_gone():
    publisher = Publisher(num_kept=3)
    for first in range(0, 50, 5):
        publisher.report(chain(first, 5))
    first, _ = split(publisher.ask())
    publisher.report(chain(60, 5))
    second, behind = split(publisher.ask())
    assert (second.sequence, behind) == (first.sequence, publisher.messages[-1:])
    assert publisher.num_copies == 1
    for first_number in range(70, 90, 5):
        publisher.report(chain(first_number, 5))
    third, behind = split(publisher.ask())
    assert (third.sequence, behind) == (len(publisher.messages), [])
    assert publisher.num_copies == 2
    publisher.answers.drop_old_copies(now_s=float("inf"))
    publisher.ask()
    assert publisher.num_copies == 3


def test_without_an_epoch_only_what_is_kept_is_told():
    publisher = Publisher(num_kept=2)
    for first in range(0, 50, 5):
        publisher.report(chain(first, 5))
    assert publisher.ask(epoch=None) == publisher.ask(epoch=None, topic=None) == publisher.messages[-2:]


def test_who_asks_for_what_is_yet_to_come_learns_how_far_the_publisher_is(publisher):
    heartbeat = Message(TOPIC, 5, b"heartbeat")
    publisher.buffer.keep_heartbeat(Message(TOPIC, 4, b"an earlier one"))
    publisher.buffer.keep_heartbeat(heartbeat)
    assert publisher.ask(start=2**63 - 1, epoch=None, topic=None) == [heartbeat]
    assert publisher.ask(start=2**63 - 1, epoch=None) == []


def test_an_unknown_topic_has_no_answer_and_an_empty_one_means_all(publisher):
    publisher.report(chain(0, 5))
    assert publisher.ask(topic=b"kv/other/0") == []
    assert publisher.ask(topic=b"") == publisher.messages


def test_a_publisher_that_has_ended_tells_only_what_is_kept():
    publisher = Publisher(num_kept=2)
    for first in range(0, 50, 5):
        publisher.report(chain(first, 5))

    def cancel(_) -> Future[None]:
        done: Future[None] = Future()
        done.cancel()
        done.set_running_or_notify_cancel()
        return done

    publisher.answers._call_between_batches = cancel
    assert publisher.ask() == publisher.messages[-2:]


def test_who_waits_for_a_snapshot_hears_a_sign_of_life(monkeypatch):
    monkeypatch.setattr(snapshots, "KEEP_ALIVE_S", 0.001)
    publisher = Publisher(num_kept=1)
    for first in range(0, 50, 5):
        publisher.report(chain(first, 5))
    publisher.buffer.keep_heartbeat(Message(TOPIC, 4, b"heartbeat"))
    copying: Future[object] = Future()
    to_do = []

    def copy_later(function) -> Future[object]:
        to_do.append(function)
        return copying

    publisher.answers._call_between_batches = copy_later
    answer = publisher.answers.replay(ReplayRequest(TOPIC, 0, EPOCH))
    assert [next(answer).payload for _ in range(3)] == [b"heartbeat"] * 3
    (copy,) = to_do
    copying.set_result(copy({0: publisher.stream}))
    rest = [message for message in answer if message.payload != b"heartbeat"]
    assert split(rest)[0] is not None


@pytest.mark.usefixtures("make_snapshots_small")
def test_snapshots_of_a_busy_publisher_are_sums_of_its_batches(publication):
    """The publisher's own threads, while an engine reports: every snapshot is what the batches before it add up to."""
    limits = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.01, replay_max_batches=2)
    is_over = threading.Event()
    with KvEventPublisher(publication, worker="w", block_size=BLOCK_SIZE, limits=limits) as publisher:

        def work() -> None:
            for round_idx in count():
                if is_over.is_set():
                    return
                publisher.report(chain(round_idx * 3 % 500, 4))
                publisher.report(EngineRemoved([round_idx * 7 % 500]))
                while publisher.statistics().num_waiting_events > 20:
                    is_over.wait(0.001)

        engine = threading.Thread(target=work)
        engine.start()
        taken = []
        while len({snapshot.sequence for snapshot in taken}) < 5:
            publisher._responder.drop_old_copies(float("inf"))
            answer = publication.source.replay(ReplayRequest(TOPIC, 0, publisher._epoch))
            parts = [message for message in answer if is_snapshot_part(message.payload)]
            if parts:
                taken.append(split(parts)[0])
        is_over.set()
        engine.join()
    sent = [message for message in publication.messages if b"heartbeat" not in message.payload]
    assert [message.sequence for message in sent] == list(range(len(sent)))
    for snapshot in taken:
        assert held_of(snapshot).keys() == sum_of(sent[: snapshot.sequence]).keys()
    assert publisher.statistics().num_snapshots >= 5


@pytest.fixture
def make_snapshots_small(monkeypatch):
    monkeypatch.setattr("kvist.events.snapshot.MAX_PART_BLOCKS", 64)
    monkeypatch.setattr("kvist.publisher.residency._NUM_BLOCKS_A_SLICE", 32)


def test_closing_does_not_wait_for_who_asks(publication):
    limits = PublisherLimits(coalesce_s=0.0, replay_max_batches=1)
    publisher = KvEventPublisher(publication, worker="w", block_size=BLOCK_SIZE, limits=limits)
    for first in range(0, 100, 5):
        publisher.report(chain(first, 5))
    answers: list[list[Message]] = []
    askers = [
        threading.Thread(
            target=lambda: answers.append(list(publication.source.replay(ReplayRequest(TOPIC, 0, publisher._epoch))))
        )
        for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    publisher.close()
    for asker in askers:
        asker.join(60)
    assert len(answers) == 4
