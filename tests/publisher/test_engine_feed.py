"""An engine's stream without epochs, played to the feed: nothing of a former process is ever believed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvist.events.session import NO_REPLAY, SessionLimits, SourceState
from kvist.events.transports import Message
from kvist.publisher.engine_feed import IDLE_S, EngineFeed


class Copy:
    """A target that keeps the time stamps of the batches applied since it was last cleared."""

    def __init__(self) -> None:
        self.applied: list[float] = []
        self.num_cleared = 0

    def apply(self, batch) -> None:
        self.applied.append(batch.timestamp_s)

    def clear(self) -> None:
        self.applied.clear()
        self.num_cleared += 1


class Engine:
    """A process: numbers from 0, a replay buffer, and a time stamp of its own in each batch."""

    def __init__(self, first_timestamp_s: float, num_kept: int) -> None:
        self.published: list[float] = []
        self._first_timestamp_s = first_timestamp_s
        self._num_kept = num_kept

    def publish(self) -> Message:
        sequence = len(self.published)
        self.published.append(self._first_timestamp_s + sequence)
        return self.message(sequence)

    def message(self, sequence: int) -> Message:
        return Message(b"", sequence, msgspec.msgpack.encode([self.published[sequence], [], 0]))

    def replay(self, start: int) -> list[Message]:
        first_kept = len(self.published) - self._num_kept
        return [self.message(sequence) for sequence in range(max(start, first_kept, 0), len(self.published))]


def answer_with(feed: EngineFeed, *answer) -> None:
    """Do what the feed makes of an answer."""
    for step in feed.judge(*answer):
        feed.apply_step(step)


def exhaust(feed: EngineFeed, engine: Engine, now_s: float) -> None:
    """Answer the feed's questions until it has none, not even a moment later."""
    while questions := feed.questions(now_s := now_s + 0.9 * IDLE_S):
        for question in questions:
            answer_with(feed, question, engine.replay(question.request.start_sequence), now_s)


@example(
    ["lose", "deliver", "silence", *["deliver"] * 4, "lose", "silence", "wait", "silence"],  # healing asks last
    1,
)
@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(["deliver", "deliver", "lose", "restart", "wait", "answer", "silence", "garbage"]), max_size=50
    ),
    st.sampled_from([1, 3, 1000]),
)
def test_what_is_believed_is_always_the_end_of_what_the_present_process_said(choices, num_kept):
    copy, now_s, num_processes = Copy(), 100.0, 1
    feed = EngineFeed("vllm", "test", copy)
    engine = Engine(1000.0, num_kept)
    is_reconnected = True
    feed.on_reconnect(now_s)
    for choice in choices:
        now_s += 0.1
        if choice == "restart":
            num_processes += 1
            engine = Engine(1000.0 * num_processes, num_kept)
            is_reconnected = False
        elif choice == "lose":
            engine.publish()
        elif choice == "wait":
            now_s += IDLE_S
        elif choice == "deliver":
            message = engine.publish()
            if not is_reconnected:  # told before what the connection brings, as the transport promises
                feed.on_reconnect(now_s)
                is_reconnected = True
            feed.receive(message, now_s)
        elif choice == "garbage" and is_reconnected:
            feed.receive(Message(b"", len(engine.published), b"\xff\xff"), now_s)
            engine = Engine(1000.0 * (num_processes := num_processes + 1), num_kept)
            is_reconnected = False
        else:
            for question in feed.questions(now_s):
                answer = None if choice == "silence" else engine.replay(question.request.start_sequence)
                answer_with(feed, question, answer, now_s)
        if is_reconnected and feed.session.state is not SourceState.RESYNCING:
            said = engine.published[: feed.session.expected_sequence]
            assert copy.applied == said[len(said) - len(copy.applied) :]
            if feed.session.state is SourceState.LIVE:
                assert copy.applied == said
    if not is_reconnected:
        feed.on_reconnect(now_s)
    exhaust(feed, engine, now_s + 100 * IDLE_S)
    assert copy.applied == engine.published[len(engine.published) - len(copy.applied) :]


def test_an_idle_engine_is_asked_more_and_more_rarely_until_it_speaks():
    feed = EngineFeed("vllm", "test", Copy())
    engine = Engine(1000.0, 1000)
    feed.receive(engine.publish(), 0.0)
    now_s = 0.0
    kept = engine.replay(0)
    for wait, answer in [(1, kept), (2, kept), (4, None), (8, None), (16, kept), (8, kept)]:
        assert feed.questions(now_s + wait * IDLE_S - 0.1) == []
        now_s += wait * IDLE_S
        (question,) = feed.questions(now_s)
        answer_with(feed, question, answer, now_s)
    feed.receive(engine.publish(), now_s)
    assert feed.questions(now_s + IDLE_S)


def test_an_idle_engine_that_does_not_answer_is_believed():
    copy = Copy()
    feed = EngineFeed("vllm", "test", copy)
    engine = Engine(1000.0, 1000)
    feed.receive(engine.publish(), 0.0)
    feed.on_reconnect(0.0)
    exhaust(feed, engine, 0.0)
    (question,) = feed.questions(2 * IDLE_S)
    assert feed.judge(question, None, 2 * IDLE_S) == []
    assert feed.session.state is SourceState.LIVE
    assert copy.applied == engine.published


@pytest.mark.parametrize("payload", [b"", b"\xff", msgspec.msgpack.encode([1.0, [], 4096])])
def test_a_malformed_batch_is_counted_and_its_number_used_up(payload, caplog):
    copy = Copy()
    feed = EngineFeed("vllm", "test", copy)
    feed.receive(Message(b"", 0, payload), 0.0)
    feed.receive(Message(b"", 1, payload + b" "), 0.0)
    feed.receive(Message(b"", 2, msgspec.msgpack.encode([5.0, [], 0])), 0.0)
    assert copy.applied == [5.0]
    assert feed.num_malformed == 2
    assert caplog.text.count("malformed batch skipped") == 1


def ask(feed: EngineFeed, engine: Engine | None, now_s: float, *, is_caught_up: bool = False) -> int:
    """Answer what is asked, or be silent; return the number of questions."""
    questions = feed.questions(now_s)
    for question in questions:
        answer = None if engine is None else engine.replay(question.request.start_sequence)
        answer_with(feed, question._replace(is_caught_up=is_caught_up), answer, now_s)
    return len(questions)


def test_what_is_left_unread_of_a_process_before_is_not_believed_behind_another_ones_answer():
    copy = Copy()
    feed = EngineFeed("vllm", "test", copy)
    first, second = Engine(1000.0, 1000), Engine(2000.0, 1000)
    feed.on_reconnect(0.0)
    feed.receive(first.publish(), 0.0)
    unread = [first.publish() for _ in range(4)]
    second.publish()
    second.publish()
    feed.receive(unread[1], 1.0)  # one is lost, so that it is asked, and the other process answers
    assert ask(feed, second, 2.0)
    for now_s, message in enumerate(unread[1:], 3):
        feed.receive(message, now_s)
        assert copy.applied == second.published
        assert ask(feed, second, now_s + 0.5) == 1
        assert (feed.session.state, copy.applied) == (SourceState.LIVE, second.published)
    feed.on_reconnect(8.0)
    second.publish()
    exhaust(feed, second, 9.0)
    feed.receive(second.publish(), 100.0)
    exhaust(feed, second, 101.0)
    assert (feed.session.state, copy.applied) == (SourceState.LIVE, second.published)


def test_a_connection_that_stands_while_its_process_answers_is_asked_about_no_more():
    feed, engine = EngineFeed("vllm", "test", copy := Copy()), Engine(1000.0, 1000)
    engine.publish()
    feed.on_reconnect(0.0)
    assert ask(feed, engine, 1.0, is_caught_up=True) == 1
    feed.receive(engine.publish(), 2.0)
    assert (feed.session.state, copy.applied) == (SourceState.LIVE, engine.published)


def test_a_message_that_the_answer_has_shows_whose_the_connection_is():
    feed, engine = EngineFeed("vllm", "test", copy := Copy()), Engine(1000.0, 1000)
    last = engine.publish()
    feed.on_reconnect(0.0)
    assert ask(feed, engine, 1.0) == 1
    feed.receive(last, 2.0)
    feed.receive(engine.publish(), 2.0)
    assert (feed.session.state, copy.applied) == (SourceState.LIVE, engine.published)


def be_lost(feed: EngineFeed, engine: Engine) -> float:
    """Have the feed miss a message while nobody answers; return the time."""
    feed.on_reconnect(0.0)
    exhaust(feed, engine, 0.0)
    feed.receive(engine.publish(), 50.0)
    engine.publish()
    feed.receive(engine.publish(), 100.0)
    for now_s in (101.0, 103.0, 106.0):
        assert ask(feed, None, now_s) == 1
    assert feed.session.state is SourceState.PARTIAL
    return 106.0


def test_an_engine_that_could_not_be_asked_is_asked_for_everything_once_it_can_be():
    feed, engine = EngineFeed("vllm", "test", copy := Copy()), Engine(1000.0, 1000)
    now_s = be_lost(feed, engine)
    assert feed.questions(now_s) == []  # not at once
    assert ask(feed, None, now_s + 1.0) == 1
    assert feed.session.state is SourceState.PARTIAL  # what is there counts meanwhile
    feed.receive(engine.publish(), now_s + 1.5)
    assert ask(feed, engine, now_s + 4.0) == 1
    assert (feed.session.state, copy.applied) == (SourceState.LIVE, engine.published)


def test_an_engine_that_has_forgotten_the_beginning_is_asked_for_it_once():
    feed, engine = EngineFeed("vllm", "test", copy := Copy()), Engine(1000.0, 2)
    now_s = be_lost(feed, engine)
    assert ask(feed, engine, now_s + 1.0) == 1
    assert (feed.session.state, copy.applied) == (SourceState.PARTIAL, engine.published[-1:])
    assert not any(question.request.start_sequence == 0 for question in feed.questions(now_s + 1000.0))


def test_an_engine_that_is_away_for_good_is_asked_for_everything_so_often_and_no_more():
    feed, engine = EngineFeed("vllm", "test", Copy()), Engine(1000.0, 2)
    now_s, num_questions = be_lost(feed, engine), 0
    for second in range(1000):
        heals = [question for question in feed.questions(now_s + second) if question.request.start_sequence == 0]
        num_questions += len(heals)
        for question in heals:
            answer_with(feed, question, None, now_s + second)
    assert num_questions == SessionLimits().max_heals


@pytest.mark.parametrize("is_shown", [True, False])
def test_what_was_taken_over_in_doubt_is_believed_without_a_replay_once_the_connection_brings_some_of_it(is_shown):
    engine, peer = Engine(1000.0, 0), EngineFeed("vllm", "test", Copy())
    messages = [engine.publish() for _ in range(4)]
    for message in messages[:3]:
        peer.receive(message, 0.0)
    copy = Copy()
    feed = EngineFeed("vllm", "test", copy, NO_REPLAY)
    feed.resume(3, peer.restarts.remembered(), 1.0, is_complete=True)
    feed.on_reconnect(1.0)
    for message in messages[2 if is_shown else 3 :]:
        feed.receive(message, 1.0)
    assert feed.session.state is SourceState.RESYNCING
    assert ask(feed, None, 1.0) == 1
    assert feed.session.state is (SourceState.LIVE if is_shown else SourceState.PARTIAL)
    assert (copy.num_cleared, copy.applied) == (0 if is_shown else 1, engine.published[3:])
