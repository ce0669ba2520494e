"""A sidecar ends at any moment and starts again: it believes nothing of its former self that is not so any more."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist.events import FULL, Cleared, EngineStored
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.transports import Endpoint, Message
from kvist.events.types import MAX_RANKS
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.publisher.sidecar import SidecarFeed
from kvist.publisher.state import SidecarState, pack, unpack
from kvist.publisher.stream import RankStream

QUICK = PublisherLimits(coalesce_s=0)


def tokens_of(number: int) -> list[int]:
    return [number * 4 + idx for idx in range(4)]


def block_of(number: int) -> int:
    return int(block_hashes(tokens_of(number), 4)[0])


class Engine:
    """A process: numbers from 0, what it holds, and the last messages that it keeps."""

    def __init__(self, process: int, num_kept: int) -> None:
        self.held: set[int] = set()
        self._process = process
        self._num_kept = num_kept
        self._payloads: list[bytes] = []

    def change(self, number: int) -> Message:
        """Store a block, or remove it if it is held."""
        if number in self.held:
            event: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}
        else:
            event = {
                "type": "BlockStored",
                "block_hashes": [number],
                "parent_block_hash": None,
                "token_ids": tokens_of(number),
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
            }
        self.held ^= {number}
        return self.say(event)

    def say(self, event: dict[str, object]) -> Message:
        """Send an event."""
        timestamp_s = 1000.0 * self._process + len(self._payloads)
        self._payloads.append(msgspec.msgpack.encode([timestamp_s, [event], 0]))
        return Message(b"", len(self._payloads) - 1, self._payloads[-1])

    def replay(self, start: int) -> list[Message]:
        first = max(start, len(self._payloads) - self._num_kept)
        return [Message(b"", idx, self._payloads[idx]) for idx in range(first, len(self._payloads))]


class OneSidecar:
    """A feed and its publisher, without sockets or clocks of their own."""

    def __init__(self, publication: object, saved: bytes | None, now_s: float) -> None:
        self.publisher = KvEventPublisher(publication, worker="w", block_size=4, num_ranks=0, limits=QUICK)
        self.feed = SidecarFeed(Endpoint.parse("tcp://h:1"), self.publisher)
        if saved is not None:
            state = unpack(saved)
            self.feed.restore(state.streams[0], state.ranks, now_s)
        self.feed.on_reconnect(now_s)

    def receive(self, message: Message, now_s: float) -> None:
        for _ in self.feed.receive_all([message], now_s):
            pass

    def settle(self, engine: Engine, now_s: float) -> None:
        """Answer the questions until there are none."""
        while not self.feed.is_settled:
            now_s += 1.0
            for question in self.feed.questions(now_s):
                for _ in self.feed.on_answer(question, engine.replay(question.request.start_sequence), now_s):
                    pass

    def save(self) -> bytes | None:
        """Return what the sidecar would have on disk, None if there is nothing to save."""
        progress = self.feed.progress()
        if progress is None or not self.feed.is_settled:
            return None
        ranks = self.publisher.call_between_batches(
            lambda streams: {rank: stream.state() for rank, stream in streams.items()}
        )
        return pack(SidecarState(4, "", (progress,), ranks.result(20)))

    def held(self) -> set[int]:
        blocks: set[int] = set()
        self.publisher.call_between_batches(
            lambda streams: [blocks.update(stream.residency.places) for stream in streams.values()]
        ).result(20)
        return blocks

    @property
    def state(self) -> SourceState:
        return self.feed.feed.session.state


@pytest.fixture
def start(publication) -> Iterator[object]:
    """Return a function that starts a sidecar; the one before it, if any, has ended without a word."""
    started: list[OneSidecar] = []

    def begin(saved: bytes | None = None, now_s: float = 0.0) -> OneSidecar:
        if started:
            started.pop().publisher.close()
        started.append(OneSidecar(publication, saved, now_s))
        return started[0]

    yield begin
    if started:
        started.pop().publisher.close()


CHOICES = ["change", "change", "change", "lose", "save", "save", "kill", "kill", "engine", "away"]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 5)), max_size=40),
    st.sampled_from([1, 4, 1000]),
)
def test_after_any_history_nothing_is_published_that_the_engine_does_not_hold(start, choices, num_kept):
    engine, num_processes, now_s = Engine(1, num_kept), 1, 0.0
    sidecar, saved = start(), None
    for choice, number in choices:
        now_s += 10.0
        if choice == "change":
            sidecar.receive(engine.change(number), now_s)
        elif choice == "lose":
            engine.change(number)
        elif choice == "save":
            sidecar.settle(engine, now_s)
            saved = sidecar.save() or saved
        elif choice == "kill":
            sidecar = start(saved, now_s)
        elif choice == "away":  # the engine goes on alone, and the sidecar comes back
            for other in range(number):
                engine.change(other)
            sidecar = start(saved, now_s)
        else:  # the engine restarts behind the sidecar's back, and may be further than it was
            num_processes += 1
            engine = Engine(num_processes, num_kept)
            for other in range(10 * number):
                engine.change(other % 6)
            sidecar = start(saved, now_s)
    sidecar.receive(engine.change(7), now_s + 10.0)
    sidecar.settle(engine, now_s + 10.0)
    truth = {block_of(number) for number in engine.held}
    if sidecar.state is SourceState.LIVE:
        assert sidecar.held() == truth
    else:
        assert sidecar.held() <= truth


def test_what_was_saved_is_not_published_before_the_engine_has_answered(start, publication):
    engine = Engine(1, 1000)
    first = start()
    first.receive(engine.change(1), 1.0)
    first.settle(engine, 1.0)
    saved = first.save()
    second = start(saved, 2.0)
    second.receive(engine.change(2), 2.0)
    assert second.held() == set()
    second.settle(engine, 2.0)
    assert second.held() == {block_of(1), block_of(2)}
    assert second.state is SourceState.LIVE
    second.publisher.close()
    sequences = [batch.sequence for batch in publication.batches() if batch.epoch == publication.batches()[-1].epoch]
    assert sequences[0] == 1  # number 0 is left out: a snapshot of what was restored is to be asked for


def test_an_engine_that_never_answers_again_is_cleared(start):
    engine = Engine(1, 1000)
    first = start()
    first.receive(engine.change(1), 1.0)
    first.settle(engine, 1.0)
    second = start(first.save(), 2.0)
    now_s, num_asked = 2.0, 0
    while questions := second.feed.questions(now_s := now_s + 31.0):
        num_asked += 1
        list(second.feed.on_answer(questions[0], None, now_s))
    assert num_asked == 3
    second.receive(engine.change(2), now_s)
    assert (second.held(), second.state) == ({block_of(2)}, SourceState.PARTIAL)


def test_an_engine_restarted_meanwhile_is_noticed_although_it_is_further_than_it_was(start, caplog):
    engine = Engine(1, 1000)
    first = start()
    for number in (1, 2, 3):
        first.receive(engine.change(number), 1.0)
    first.settle(engine, 1.0)
    restarted = Engine(2, 1000)
    for number in (1, 4, 5, 6, 7):
        restarted.change(number)
    second = start(first.save(), 2.0)
    second.settle(restarted, 2.0)
    assert second.held() == {block_of(number) for number in (1, 4, 5, 6, 7)}
    assert second.state is SourceState.LIVE
    assert "saved state discarded" in caplog.text


@pytest.mark.parametrize("has_answer", [True, False])
def test_of_an_engine_restarted_meanwhile_that_stays_silent_it_is_said_that_it_holds_nothing(
    start, publication, has_answer
):
    engine = Engine(1, 1000)
    first = start()
    first.receive(engine.change(1), 1.0)
    first.settle(engine, 1.0)
    second = start(first.save(), 2.0)
    publication.messages.clear()
    for now_s in (33.0, 66.0, 99.0):
        for question in second.feed.questions(now_s):
            list(second.feed.on_answer(question, [] if has_answer else None, now_s))
    seen: list[tuple[int, int, bool]] = []
    second.publisher.call_between_batches(
        lambda streams: seen.extend(
            (rank, each.residency.num_blocks, each.is_complete) for rank, each in streams.items()
        )
    ).result(20)
    assert seen == [(0, 0, has_answer)]
    second.publisher.close()
    assert publication.events() == [Cleared()]


def test_what_is_broken_in_messages_is_counted_and_all_else_published(start, caplog):
    engine, sidecar = Engine(1, 1000), start()
    messages = [engine.change(number) for number in (1, 2)]
    timestamp_s, events, rank = msgspec.msgpack.decode(engine.change(3).payload)
    for sequence, what in ((2, [{"type": 5}, *events, {"type": "BlockMoved"}]), (3, "none"), (4, [])):
        messages.append(Message(b"", sequence, msgspec.msgpack.encode([timestamp_s, what, rank])))
    messages.append(Message(b"", 5, b"no batch"))
    for _ in sidecar.feed.receive_all(messages, 1.0):
        pass
    assert sidecar.held() == {block_of(number) for number in (1, 2, 3)}
    assert (sidecar.feed.feed.num_malformed, sidecar.feed.feed.session.expected_sequence) == (3, 6)
    assert sidecar.feed.feed.num_batches == 4
    assert caplog.text.count("malformed batch skipped") == 1


@pytest.mark.parametrize("has_gap", [False, True])
def test_a_message_without_an_event_announces_no_rank(start, has_gap):
    engine, sidecar = Engine(1, 1000), start()
    messages = [engine.change(1)]
    for events in ("none", [], [{"type": 5}], [{"type": "BlockMoved"}]):
        messages.append(Message(b"", len(messages), msgspec.msgpack.encode([1.0, events, 7])))
    list(sidecar.feed.receive_all(messages[::4] if has_gap else messages, 1.0))
    for question in sidecar.feed.questions(2.0):
        list(sidecar.feed.on_answer(question, messages, 2.0))
    assert sidecar.held() == {block_of(1)}
    assert sidecar.feed.progress().ranks == (0,)
    assert sidecar.publisher.statistics().ranks.keys() == {0}


def test_an_engine_that_was_restarted_with_a_smaller_window_is_published(start):
    def messages(timestamp_s: float, **fields: object) -> list[Message]:
        payloads = []
        for number in (1, 2, 3):
            event = {"type": "BlockStored", "block_hashes": [number], "token_ids": tokens_of(number), "block_size": 4}
            payloads.append(msgspec.msgpack.encode([timestamp_s, [{**event, **fields}], 0]))
        return [Message(b"", sequence, payload) for sequence, payload in enumerate(payloads)]

    sidecar = start()
    list(sidecar.feed.receive_all(messages(1.0, kv_cache_spec_kind="full_attention")[:2], 1.0))
    assert sidecar.held() == {block_of(1), block_of(2)}
    restarted = messages(2.0, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=4096)
    sidecar.feed.on_reconnect(2.0)
    for question in sidecar.feed.questions(3.0):
        list(sidecar.feed.on_answer(question, restarted[:2], 3.0))
    list(sidecar.feed.receive_all(restarted[1:], 4.0))
    assert sidecar.held() == {block_of(1), block_of(2), block_of(3)}
    assert sidecar.feed.is_complete


def test_what_the_publisher_lags_behind_is_not_taken_before_there_is_room_and_nothing_is_lost(publication, monkeypatch):
    monkeypatch.setattr("kvist.publisher.sidecar.MAX_WAITING_EVENTS", 4)
    limits = PublisherLimits(coalesce_s=0, inbox_capacity=8)
    publisher = KvEventPublisher(publication, worker="w", block_size=4, num_ranks=0, limits=limits)
    feed, engine = SidecarFeed(Endpoint.parse("tcp://h:1"), publisher), Engine(1, 1000)
    list(feed.receive_all([engine.change(1)], 1.0))
    for number in range(2, 50):
        engine.change(number)
    list(feed.receive_all([engine.change(50)], 2.0))
    publication.gate.clear()
    (question,) = feed.questions(3.0)
    for steps in (
        feed.on_answer(question, engine.replay(question.request.start_sequence), 3.0),
        feed.receive_all([engine.change(number) for number in range(51, 100)], 4.0),
    ):
        for _ in range(80):
            next(steps)
            assert publisher.num_waiting_events <= 8
        publication.gate.set()
        list(steps)
        publisher.call_between_batches(lambda _: None).result(20)
        publication.gate.clear()
    publication.gate.set()
    publisher.close()
    assert feed.is_complete
    assert feed.feed.num_batches == 99
    assert {block_hash for block_hash, _ in publication.held()} == {block_of(number) for number in engine.held}


def test_a_feed_does_not_wait_for_a_publisher_that_has_failed(publication, monkeypatch, until_true):
    monkeypatch.setattr("kvist.publisher.sidecar.MAX_WAITING_EVENTS", 0)
    publication.refusal = BrokenPipeError("no route")
    publisher = KvEventPublisher(publication, worker="w", block_size=4, num_ranks=0, limits=QUICK)
    feed, engine = SidecarFeed(Endpoint.parse("tcp://h:1"), publisher), Engine(1, 1000)
    feed.feed.receive(engine.change(1), 1.0)
    until_true(lambda: publisher.failure)
    list(feed.receive_all([engine.change(2)], 2.0))
    assert publisher.num_lost_events == 1
    with pytest.raises(BrokenPipeError):
        publisher.close()


def test_a_feed_is_not_settled_before_all_of_an_answer_is_taken(start):
    engine, feed = Engine(1, 1000), start().feed
    list(feed.receive_all([engine.change(1)], 1.0))
    for number in range(2, 5):
        engine.change(number)
    list(feed.receive_all([engine.change(5)], 2.0))
    (question,) = feed.questions(3.0)
    taking = feed.on_answer(question, engine.replay(question.request.start_sequence), 3.0)
    next(taking)
    assert feed.feed.session.state is SourceState.LIVE
    assert not feed.is_settled
    assert list(taking)
    assert feed.is_settled


def test_an_incomplete_rank_says_so_and_stays_it_when_it_is_saved(start, publication):
    engine = Engine(1, 1)
    first = start()
    first.receive(engine.change(1), 1.0)
    engine.change(2)
    engine.change(3)
    first.receive(engine.change(4), 2.0)
    first.settle(engine, 2.0)
    assert first.held() == {block_of(4)}
    second = start(first.save(), 3.0)
    second.settle(engine, 3.0)
    assert (second.held(), second.state) == ({block_of(4)}, SourceState.PARTIAL)
    second.publisher.close()
    assert not publication.heartbeats()[-1].events[0].is_complete


def test_a_rank_is_incomplete_from_its_first_event_on_if_the_engine_has_forgotten_its_beginning(
    start, publication, monkeypatch
):
    seen: list[bool] = []
    admit = RankStream.admit
    monkeypatch.setattr(RankStream, "admit", lambda self, event: (seen.append(self.is_complete), admit(self, event)))
    engine, sidecar = Engine(1, 5), start()
    for number in range(9):
        engine.change(number)
    sidecar.receive(engine.change(9), 1.0)
    sidecar.settle(engine, 1.0)
    sidecar.publisher.close()
    assert seen == [False] * 5
    assert not any(message.events[0].is_complete for message in publication.heartbeats())


def test_a_rank_known_wholly_stays_it_beside_what_its_stream_lacks_when_it_is_saved(start, publication):
    engine = Engine(1, 1)
    first = start()
    first.receive(engine.change(1), 1.0)
    engine.change(2)
    first.receive(engine.say({"type": "AllBlocksCleared"}), 2.0)
    first.settle(engine, 2.0)
    first.receive(engine.change(3), 3.0)
    assert first.state is SourceState.PARTIAL
    second = start(first.save(), 4.0)
    second.settle(engine, 4.0)
    assert (second.held(), second.state) == ({block_of(3)}, SourceState.PARTIAL)
    second.publisher.close()
    assert publication.heartbeats()[-1].events[0].is_complete


@pytest.mark.parametrize("is_restarted", [False, True])
def test_copies_are_counted_from_where_it_is_known_that_a_rank_holds_nothing(publication, is_restarted):
    publisher = KvEventPublisher(publication, worker="w", block_size=4, num_ranks=0, counts_copies=True, limits=QUICK)
    feed, engine = SidecarFeed(Endpoint.parse("tcp://h:1?replay_port=none"), publisher), Engine(1, 1)
    stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": tokens_of(1)}
    engine.change(2)  # which is lost
    messages = [engine.change(3)]
    if is_restarted:
        engine = Engine(2, 1)
    else:
        messages.append(engine.say({"type": "AllBlocksCleared"}))
    messages += [engine.say({**stored, "block_size": 4}) for _ in range(2)]
    messages.append(engine.say({"type": "BlockRemoved", "block_hashes": [1]}))
    for _ in feed.receive_all(messages[:1], 1.0):
        pass
    for question in feed.questions(1.0):
        for _ in feed.on_answer(question, None, 1.0):
            pass
    for _ in feed.receive_all(messages[1:], 2.0):
        pass
    held: list[int] = []
    publisher.call_between_batches(lambda streams: held.append(streams[0].residency.num_blocks)).result(20)
    assert held == [1]
    publisher.close()


def test_a_rank_that_may_have_kept_blocks_beside_the_gpu_is_incomplete_also_when_it_is_saved(start, publication):
    engine = Engine(1, 100)
    offloaded = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": tokens_of(1)}
    first = start()
    first.receive(engine.say({**offloaded, "block_size": 4, "medium": "CPU"}), 1.0)
    first.receive(engine.change(2), 1.0)
    second = start(first.save(), 2.0)
    second.settle(engine, 2.0)
    second.publisher.call_between_batches(lambda streams: [*streams]).result(20)
    for _ in range(2):
        second.receive(engine.say({"type": "AllBlocksCleared"}), 3.0)
    third = start(second.save(), 4.0)
    third.settle(engine, 4.0)
    third.publisher.close()
    assert not publication.heartbeats()[-1].events[0].is_complete


def test_what_a_publisher_learns_of_its_completeness_it_tells_at_once(publication, until_true):
    limits = PublisherLimits(coalesce_s=0, heartbeat_s=1000.0)

    def told() -> list[bool]:
        return [batch.events[0].is_complete for batch in publication.heartbeats()]

    with KvEventPublisher(publication, worker="w", block_size=4, limits=limits) as publisher:
        for is_complete in (False, True):
            publisher.call_between_batches(lambda streams, tell=is_complete: streams[0].set_complete(tell))
            until_true(lambda wanted=is_complete: told()[-1:] == [wanted])


def test_that_a_ranks_groups_cannot_be_followed_exactly_is_told_at_once(publication, until_true):
    limits = PublisherLimits(coalesce_s=0, heartbeat_s=1000.0)
    publisher = KvEventPublisher(publication, worker="w", block_size=4, limits=limits, has_all_groups=True)
    publisher.report(EngineStored([1], tokens_of(1), 4, window=FULL, group=0))
    for size, is_exact in ((4, True), (2, False)):
        publisher.report(EngineStored([size], tokens_of(1)[:size], size, window=8, group=1))

        def is_told(is_exact: bool = is_exact) -> bool:
            rules = [each.events[0] for each in publication.heartbeats() if each.rank == MAX_RANKS]
            return bool(rules and rules[-1].rules and rules[-1].is_complete is is_exact)

        until_true(is_told)
    publisher.close()


def test_a_rank_that_holds_nothing_is_complete_and_another_one_of_its_stream_is_not(publication):
    publisher = KvEventPublisher(publication, worker="w", block_size=4, num_ranks=0, limits=QUICK)
    feed = SidecarFeed(Endpoint.parse("tcp://h:1?replay_port=none"), publisher)
    payload = Engine(1, 1).change(1).payload
    timestamp_s, events, _ = msgspec.msgpack.decode(payload)
    for sequence, what, rank in (
        *((0, events, 0), (1, events, 1), (3, events, 0)),
        *((4, [{"type": "AllBlocksCleared"}], 0), (5, events, 1)),
    ):
        message = Message(b"", sequence, msgspec.msgpack.encode([timestamp_s, what, rank]))
        for _ in feed.receive_all([message], 1.0):
            pass
        for question in feed.questions(1.0):
            for _ in feed.on_answer(question, None, 1.0):
                pass
    seen: dict[int, bool] = {}
    publisher.call_between_batches(
        lambda streams: seen.update({rank: stream.is_complete for rank, stream in streams.items()})
    ).result(20)
    assert seen == {0: True, 1: False}
    publisher.close()


def test_a_rank_that_once_kept_blocks_beside_the_gpu_may_have_some_that_are_not_known_also_when_it_is_saved(
    start, publication
):
    engine = Engine(1, 1)
    offloaded = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": tokens_of(1)}
    first = start()
    first.receive(engine.say({**offloaded, "block_size": 4, "medium": "CPU"}), 1.0)
    for number in (2, 3):
        engine.change(number)  # which are lost, and so what was known of block 1
    first.receive(engine.change(4), 1.0)
    first.settle(engine, 1.0)
    second = start(first.save(), 2.0)
    second.settle(engine, 2.0)
    second.receive(engine.say({"type": "AllBlocksCleared"}), 3.0)
    second.publisher.close()
    assert not publication.heartbeats()[-1].events[0].is_complete


def test_what_sliding_groups_hold_is_published_from_an_engines_first_prompt_on(publication):
    publisher = KvEventPublisher(publication, worker="w", block_size=4, limits=QUICK, has_all_groups=True)
    feed, tokens = SidecarFeed(Endpoint.parse("tcp://h:1?replay_port=none"), publisher), [*range(16)]
    groups = [
        ([3, 4], {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}),
        ([1, 2, 3, 4], {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}),
    ]
    of_all = {"type": "BlockStored", "parent_block_hash": None, "token_ids": tokens, "block_size": 4, "medium": "GPU"}
    payload = msgspec.msgpack.encode([1.5, [of_all | {"block_hashes": names} | group for names, group in groups], 0])
    feed.feed.receive(Message(b"", 0, payload), 1.0)
    publisher.close()
    assert len(publication.held()) == 4
    assert publication.held(MAX_RANKS) == {(int(block_hash), 0) for block_hash in block_hashes(tokens, 4)[2:]}
