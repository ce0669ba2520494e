# ruff: noqa: ARG002 - the fakes keep the names of the Protocols' arguments

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from kvist.events.follow import Question, follow
from kvist.events.transports import Message


class FakeSubscription:
    """A subscription fed by hand; `replay` answers with `answer`, once `may_answer` is set."""

    def __init__(self) -> None:
        self.num_connects = 0
        self.inbox: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.asked: list[tuple[bytes | None, int]] = []
        self.answer: list[Message] | None = None
        self.may_answer = asyncio.Event()

    async def receive(self) -> list[Message]:
        return await self.inbox.get()

    async def replay(self, topic: bytes | None, start_sequence: int, timeout_s: float) -> list[Message] | None:
        self.asked.append((topic, start_sequence))
        await self.may_answer.wait()
        return self.answer


class Recorder:
    """A follower that writes down what it is told, and asks what it is given."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.due: list[Question] = []

    def received_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        for message in messages:
            self.log.append((message.sequence, now_s))
            yield

    def reconnected(self, now_s: float) -> None:
        self.log.append("connected")

    def questions(self, now_s: float) -> list[Question]:
        due, self.due = self.due, []
        return due

    def answered(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        for message in messages or ():
            yield
            self.log.append(f"replayed {message.sequence}")
        self.log.append(f"answered {question.rank}")


def message(sequence: int) -> Message:
    return Message(b"t", sequence, b"")


@pytest.fixture
async def followed(monkeypatch):
    """Return a subscription and its follower, followed until the test ends."""
    monkeypatch.setattr("kvist.events.follow.TICK_S", 0.01)
    subscription, recorder = FakeSubscription(), Recorder()
    task = asyncio.create_task(follow(subscription, recorder, clock=lambda: 7.0, replay_gate=asyncio.Semaphore()))
    yield subscription, recorder
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


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


async def test_a_question_is_asked_and_answered_before_the_next_message(followed, until):
    subscription, recorder = followed
    subscription.answer = [message(3), message(4)]
    recorder.due = [Question(b"t", 3, rank=9)]
    await until(lambda: subscription.asked == [(b"t", 3)])
    subscription.inbox.put_nowait([message(5)])
    subscription.may_answer.set()
    await until(lambda: recorder.log == ["replayed 3", "replayed 4", "answered 9", (5, 7.0)])


async def test_silence_is_an_answer_too(followed, until):
    subscription, recorder = followed
    subscription.may_answer.set()
    recorder.due = [Question(None, 0)]
    await until(lambda: recorder.log == ["answered 0"])


async def test_the_gate_limits_the_questions_asked_at_once(until, monkeypatch):
    monkeypatch.setattr("kvist.events.follow.TICK_S", 0.01)
    gate = asyncio.Semaphore(1)
    pairs = [(FakeSubscription(), Recorder()) for _ in range(2)]
    tasks = []
    for subscription, recorder in pairs:
        recorder.due = [Question(None, 0)]
        tasks.append(asyncio.create_task(follow(subscription, recorder, clock=lambda: 0.0, replay_gate=gate)))
    first, second = (subscription for subscription, _ in pairs)
    await until(lambda: first.asked and gate.locked())
    assert second.asked == []
    first.may_answer.set()
    second.may_answer.set()
    await until(lambda: second.asked and pairs[1][1].log == ["answered 0"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_cancelling_amid_a_replay_leaves_the_gate_open(until):
    gate = asyncio.Semaphore(1)
    subscription, recorder = FakeSubscription(), Recorder()
    recorder.due = [Question(None, 0)]
    subscription.inbox.put_nowait([message(0)])
    task = asyncio.create_task(follow(subscription, recorder, clock=lambda: 0.0, replay_gate=gate))
    await until(lambda: subscription.asked)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not gate.locked()


async def test_a_source_that_is_never_waited_for_gives_others_a_turn(monkeypatch):
    """A follower that takes all at once and a subscription that always has more: yet other tasks run."""
    monkeypatch.setattr("kvist.events.follow.SLICE_S", 0.0)

    class Endless(FakeSubscription):
        async def receive(self) -> list[Message]:
            return [message(0)]

    class Greedy(Recorder):
        def received_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
            self.log.append(len(messages))
            return iter(())

    recorder = Greedy()
    task = asyncio.create_task(follow(Endless(), recorder, clock=lambda: 0.0, replay_gate=asyncio.Semaphore()))
    for num_receives in range(1, 10):
        await asyncio.sleep(0)
        assert len(recorder.log) == num_receives
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_long_drain_gives_others_a_turn(monkeypatch):
    """With slices of no length every message ends one: another task runs between any two."""
    monkeypatch.setattr("kvist.events.follow.SLICE_S", 0.0)
    subscription, recorder = FakeSubscription(), Recorder()
    subscription.inbox.put_nowait([message(sequence) for sequence in range(100)])
    gate = asyncio.Semaphore()
    task = asyncio.create_task(follow(subscription, recorder, clock=lambda: 0.0, replay_gate=gate))
    seen = []
    while len(recorder.log) < 100:
        await asyncio.sleep(0)
        seen.append(len(recorder.log))
    assert len(set(seen)) >= 100
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
