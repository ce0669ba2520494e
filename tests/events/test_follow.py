# ruff: noqa: ARG002 - the fakes keep the names of the Protocols' arguments

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence

import pytest

from kvist.events.follow import JITTER_S, Question, Turns, follow
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.received import ReplayAnswer


class FakeSubscription:
    """A subscription fed by hand; `replay` answers with `answer`, once `may_answer` is set."""

    def __init__(self) -> None:
        self.num_connects = 0
        self.is_peer_gone = False
        self.is_caught_up = True
        self.inbox: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.asked: list[ReplayRequest] = []
        self.answer: list[Message] | None = None
        self.may_answer = asyncio.Event()

    async def receive(self) -> list[Message]:
        return await self.inbox.get()

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        self.asked.append(request)
        await self.may_answer.wait()
        return self.answer


class Recorder:
    """A follower that writes down what it is told, and asks what it is given."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.due: list[Question] = []
        self.num_looks = 0

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        for message in messages:
            self.log.append((message.sequence, now_s))
            yield

    def on_reconnect(self, now_s: float) -> None:
        self.log.append("connected")

    def on_departure(self) -> None:
        self.log.append("departed")

    def questions(self, now_s: float) -> list[Question]:
        self.num_looks += 1
        return self.due

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        self.due = [each for each in self.due if each.request != question.request]
        for message in messages or ():
            yield
            self.log.append(f"replayed {message.sequence}")
        self.log.append(f"answered {question.rank}")


def message(sequence: int) -> Message:
    return Message(b"t", sequence, b"")


@pytest.fixture
async def start_following(monkeypatch):
    """Return a function that follows a subscription until the test ends, or its result is cancelled; ticks are fast."""
    monkeypatch.setattr("kvist.events.follow.TICK_S", 0.001)
    turns, gate = Turns(), asyncio.Semaphore()
    tasks: list[asyncio.Task[None]] = []

    def start(subscription, recorder, replay_gate=gate):
        following = follow(subscription, recorder, clock=lambda: 7.0, turns=turns, replay_gate=replay_gate)
        tasks.append(asyncio.create_task(following))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result for result in results if not isinstance(result, asyncio.CancelledError)] == []


@pytest.fixture
async def followed(start_following):
    """Return a subscription and its follower, followed until the test ends."""
    subscription, recorder = FakeSubscription(), Recorder()
    start_following(subscription, recorder)
    return subscription, recorder


async def test_no_answer_is_kept_once_it_is_applied(followed, until):
    subscription, recorder = followed
    answer = subscription.answer = ReplayAnswer()
    answer.add(message(5))
    is_kept = weakref.ref(answer)
    del answer
    subscription.may_answer.set()
    recorder.due = [Question(ReplayRequest(b"t", 3, epoch=5), rank=9)]
    await until(lambda: recorder.log == ["replayed 5", "answered 9"])
    subscription.answer = None
    await until(lambda: is_kept() is None)


async def test_questions_of_a_round_wait_for_one_random_moment_at_most(followed, until, monkeypatch):
    bounds = []
    monkeypatch.setattr("random.uniform", lambda *each: bounds.append(each) or 0.0)
    subscription, recorder = followed
    subscription.may_answer.set()
    recorder.due = [Question(ReplayRequest(b"t", 0), rank) for rank in range(3)]
    await until(lambda: len(recorder.log) == 3)
    assert set(bounds) == {(0, JITTER_S)}
    assert len(bounds) < 3


async def test_messages_arrive_in_order_with_the_time(followed, until):
    subscription, recorder = followed
    subscription.inbox.put_nowait([message(0), message(1)])
    await until(lambda: recorder.log == [(0, 7.0), (1, 7.0)])


async def test_a_connection_is_told_before_what_it_brought(followed, until):
    subscription, recorder = followed
    subscription.num_connects = 1
    subscription.inbox.put_nowait([message(0)])
    await until(lambda: recorder.log == ["connected", (0, 7.0)])


async def test_a_connection_is_told_without_any_message(followed, until):
    subscription, recorder = followed
    subscription.num_connects = 1
    await until(lambda: recorder.log == ["connected"])


async def test_a_departure_is_told_once_and_after_the_last_messages(followed, until):
    subscription, recorder = followed
    subscription.is_peer_gone = True
    await until(lambda: recorder.log == ["departed"])
    subscription.inbox.put_nowait([message(0)])
    await until(lambda: recorder.log[1:] == [(0, 7.0), "departed"])
    subscription.is_peer_gone = False
    subscription.inbox.put_nowait([message(1)])
    await until(lambda: recorder.log[3:] == [(1, 7.0)])
    subscription.is_peer_gone = True
    await until(lambda: recorder.log[4:] == ["departed"])


async def test_a_question_is_asked_and_answered_before_the_next_message(followed, until):
    subscription, recorder = followed
    subscription.answer = [message(3), message(4)]
    recorder.due = [Question(ReplayRequest(b"t", 3, epoch=5), rank=9)]
    await until(lambda: subscription.asked == [ReplayRequest(b"t", 3, epoch=5)])
    subscription.inbox.put_nowait([message(5)])
    subscription.may_answer.set()
    await until(lambda: recorder.log == ["replayed 3", "replayed 4", "answered 9", (5, 7.0)])


async def test_silence_is_an_answer_too(followed, until):
    subscription, recorder = followed
    subscription.may_answer.set()
    recorder.due = [Question(ReplayRequest(None, 0))]
    await until(lambda: recorder.log == ["answered 0"])


async def test_the_gate_limits_the_questions_asked_at_once(start_following, until):
    gate = asyncio.Semaphore(1)
    pairs = [(FakeSubscription(), Recorder()) for _ in range(2)]
    for subscription, recorder in pairs:
        recorder.due = [Question(ReplayRequest(None, 0))]
        start_following(subscription, recorder, gate)
    first, second = (subscription for subscription, _ in pairs)
    await until(lambda: gate.locked() and (first.asked or second.asked))
    assert not (first.asked and second.asked)
    first.may_answer.set()
    second.may_answer.set()
    await until(lambda: [recorder.log for _, recorder in pairs] == [["answered 0"]] * 2)


@pytest.mark.parametrize(
    ("request_", "is_for_all"),
    [
        (ReplayRequest(b"t", 0, epoch=5), True),
        (ReplayRequest(b"t", 1, epoch=5), False),
        (ReplayRequest(b"t", 0), False),
    ],
)
async def test_a_question_for_all_that_a_publisher_holds_has_a_gate_of_its_own(request_, is_for_all, until):
    gate, snapshot_gate = asyncio.Semaphore(1), asyncio.Semaphore(1)
    subscription, recorder = FakeSubscription(), Recorder()
    recorder.due = [Question(request_)]
    subscription.inbox.put_nowait([message(0)])
    following = follow(
        subscription,
        recorder,
        clock=lambda: 7.0,
        turns=Turns(),
        replay_gate=gate,
        snapshot_gate=snapshot_gate,
    )
    task = asyncio.create_task(following)
    await until(lambda: subscription.asked)
    assert (snapshot_gate.locked(), gate.locked()) == (is_for_all, not is_for_all)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not snapshot_gate.locked()
    assert not gate.locked()


async def test_cancelling_amid_a_replay_leaves_the_gate_open(start_following, until):
    gate = asyncio.Semaphore(1)
    subscription, recorder = FakeSubscription(), Recorder()
    recorder.due = [Question(ReplayRequest(None, 0))]
    subscription.inbox.put_nowait([message(0)])
    task = start_following(subscription, recorder, gate)
    await until(lambda: subscription.asked)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not gate.locked()


async def test_a_message_that_comes_as_its_stream_is_woken_is_not_lost(followed, until):
    """Whichever comes first, in whatever order: all messages arrive, and each question is answered."""
    subscription, recorder = followed
    subscription.may_answer.set()
    for number in range(50):
        await until(lambda looks=recorder.num_looks: recorder.num_looks > looks)
        recorder.due = [Question(ReplayRequest(None, 0))]
        subscription.inbox.put_nowait([message(number)])
        for _ in range(number % 5):
            await asyncio.sleep(0)
        await until(lambda: recorder.due == [])
    await until(lambda: len(recorder.log) == 100)
    assert [entry[0] for entry in recorder.log if isinstance(entry, tuple)] == list(range(50))


async def test_a_stream_that_ends_is_looked_at_no_more(start_following, until):
    subscription, recorder = FakeSubscription(), Recorder()
    other = Recorder()
    start_following(FakeSubscription(), other)
    task = start_following(subscription, recorder)
    await until(lambda: recorder.num_looks > 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    num_looks = recorder.num_looks
    await until(lambda looks=other.num_looks: other.num_looks > looks + 2)
    assert recorder.num_looks == num_looks


async def test_a_source_that_is_never_waited_for_gives_others_a_turn(start_following, monkeypatch):
    """A follower that takes all at once and a subscription that always has more: yet other tasks run."""
    monkeypatch.setattr("kvist.events.follow.SLICE_S", 0.0)
    monkeypatch.setattr("kvist.events.follow.SLICE_SHARE", 0.0)

    class Endless(FakeSubscription):
        async def receive(self) -> list[Message]:
            return [message(0)]

    class Greedy(Recorder):
        def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
            self.log.append(len(messages))
            return iter(())

    recorder = Greedy()
    task = start_following(Endless(), recorder)
    num_turns = 0
    while len(recorder.log) < 10:
        await asyncio.sleep(0)
        num_turns += 1
        assert len(recorder.log) <= num_turns
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_long_drain_gives_others_a_turn(start_following, monkeypatch):
    """With slices of no length every message ends one: another task runs between any two."""
    monkeypatch.setattr("kvist.events.follow.SLICE_S", 0.0)
    monkeypatch.setattr("kvist.events.follow.SLICE_SHARE", 0.0)
    subscription, recorder = FakeSubscription(), Recorder()
    subscription.inbox.put_nowait([message(sequence) for sequence in range(100)])
    start_following(subscription, recorder)
    seen = []
    while len(recorder.log) < 100:
        await asyncio.sleep(0)
        seen.append(len(recorder.log))
    assert len(set(seen)) >= 100
