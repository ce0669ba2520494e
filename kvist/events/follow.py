"""Following subscriptions: the asyncio shell around `Follower`s, which decide and do no I/O.

Long work on the event loop is done in turns, a slice at a time, and all sockets are looked at between two slices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvist.events.transports import Message, ReplayRequest, Subscription
from kvist.events.transports.base import Direct

TICK_S = 0.2
"""How often those who wait for a message are looked at: questions fall due and peers connect without one."""
REPLAY_TIMEOUT_S = 2.0
"""How long a publisher may be silent, after a question and between replies."""
FEW_MESSAGES = 8
"""So few are taken where they arrive whatever else goes on: a quiet stream does not wait for a flood beside it."""
LOOK_S = 0.01
"""How often, at most, it is looked for questions while messages come that are taken where they arrive."""
SLICE_S = 0.0002
"""How long one turn is, but for the piece of work that ends it."""
SLICE_SHARE = 1.0
"""A turn may be as long as all others had just before it, times this: where 64 chats fill each turn of the event loop,
0.2 ms between two of them let events come 40 s late, and ever later (2026-11-23)."""


class Question(NamedTuple):
    """What to ask the publisher; `rank` is the asker's own note of whom it is about."""

    request: ReplayRequest
    rank: int = 0
    is_caught_up: bool = False
    """Whether, when the answer was there, nothing was left unread of what the connection brought, and it stood."""


class Follower(Protocol):
    """Decides what becomes of one subscription's messages."""

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        """Take one receive's messages, a `MessageBlock` for this call alone; yields wherever others may have a turn."""

    def on_reconnect(self, now_s: float) -> None:
        """Take note that a peer connected; what comes next may be another process's."""

    def on_departure(self) -> None:
        """Take note that the peer is known to be gone; called again whenever something happens meanwhile."""

    def questions(self, now_s: float) -> list[Question]:
        """Return what to ask now, the same until `on_answer` or something else happens; called in every round."""

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Take the answer, None for silence; yields between pieces of work, wherever others may have a turn."""


class Turns:
    """Does the work of many, in pieces, without anybody else on the event loop waiting longer than for one turn.

    However busy the loop is with others, a third of it or so is for what is to be done here.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # which who waited longest gets
        self._ends_at_s = 0.0
        self._is_over = False

    def begin(self, *, is_small: bool) -> float | None:
        """Return until when work can be done on the spot, None if that must wait for a turn, in `run_in_turns`.

        To be called when a socket was found ready; those who are called after the same look share one turn. What is
        small, less work than handing it over, is done whatever else goes on.
        """
        now_s = time.monotonic()
        if self._is_over or self._turn.locked():
            return now_s + SLICE_S if is_small else None
        if now_s >= self._ends_at_s:
            self._ends_at_s = now_s + SLICE_S
        return self._ends_at_s

    def is_over(self, ends_at_s: float) -> bool:
        """Return whether work on the spot that was to last until then must stop: what is left is to be worked off."""
        if time.monotonic() < ends_at_s:
            return False
        self._is_over = True  # until somebody was served, and so all sockets were looked at
        return True

    async def run_in_turns(self, pieces: Iterator[None]) -> None:
        """Return once all pieces are done, in turns with those of others; an error in one of them is raised."""
        is_mine = not (self._is_over or self._turn.locked()) and time.monotonic() < self._ends_at_s
        if is_mine and self._is_finished(pieces):  # in what is left of this turn, without waiting for another
            return
        while True:
            async with self._turn:
                # With the one below, twice: what the event loop finds ready comes behind what was called for before it
                # looked.
                begins_at_s = time.monotonic()
                await asyncio.sleep(0)
                self._is_over, now_s = False, time.monotonic()
                self._ends_at_s = now_s + max(SLICE_S, SLICE_SHARE * (now_s - begins_at_s))
                if self._is_finished(pieces):
                    return
            await asyncio.sleep(0)

    def _is_finished(self, pieces: Iterator[None]) -> bool:
        """Do pieces, one at least, until the turn is over; return whether those were all."""
        return all(time.monotonic() < self._ends_at_s for _ in pieces)


class Ticker:
    """Wakes who waits for a message when there is something else to do: one timer, however many wait."""

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], bool], asyncio.Timeout] = {}
        self.turns = Turns()

    async def run(self) -> None:
        """Tick every `TICK_S` until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        await self.turns.run_in_turns(_look(self._waiting))

    async def receive(self, subscription: Subscription, is_due: Callable[[], bool]) -> Sequence[Message]:
        """Wait for messages, and no longer than until a tick finds `is_due`; then return none."""
        wait = asyncio.timeout(None)
        self._waiting[is_due] = wait
        try:
            async with wait:
                return await subscription.receive()
        except TimeoutError:
            return ()
        finally:
            self._waiting.pop(is_due, None)


async def follow(
    subscription: Subscription,
    follower: Follower,
    *,
    clock: Callable[[], float],
    ticker: Ticker,
    replay_gate: AbstractAsyncContextManager[object],
    snapshot_gate: AbstractAsyncContextManager[object] | None = None,
    num_connects: int = 0,
) -> None:
    """Feed the follower and ask its questions until cancelled; `replay_gate` is entered around each question.

    Around questions for all that a publisher holds it is `snapshot_gate`, if given, and until the answer is taken. The
    first `num_connects` connections are no news to the follower. Whoever owns the ticker runs it.
    """
    following = _Following(subscription, follower, clock, ticker.turns, num_connects)
    if isinstance(subscription, Direct):
        subscription.deliver_with(following.deliver)
    try:
        while True:
            messages = await ticker.receive(subscription, following.is_due)
            await ticker.turns.run_in_turns(following.drain(messages))
            for question in follower.questions(clock()):
                is_for_all = question.request.epoch is not None and question.request.start_sequence == 0
                async with snapshot_gate if is_for_all and snapshot_gate is not None else replay_gate:
                    answer = await subscription.replay(question.request, REPLAY_TIMEOUT_S)
                    question = question._replace(is_caught_up=subscription.is_caught_up)
                    await ticker.turns.run_in_turns(follower.on_answer(question, answer, clock()))
    finally:
        if isinstance(subscription, Direct):
            subscription.deliver_with(None)


@dataclass(slots=True, eq=False)
class _Following:
    """What becomes of the messages of one subscription, whether they are taken where they arrive or received."""

    subscription: Subscription
    follower: Follower
    clock: Callable[[], float]
    turns: Turns
    num_connects: int
    _has_departed: bool = False
    _begun: Iterable[None] = ()
    _look_at_s: float = 0.0

    def is_due(self) -> bool:
        subscription = self.subscription
        if subscription.num_connects > self.num_connects or subscription.is_peer_gone > self._has_departed:
            return True
        return bool(self.follower.questions(self.clock()))

    def deliver(self, messages: Sequence[Message]) -> bool:
        """Take messages where they arrive; return whether nothing is left to do, be it with them or questions.

        That spares a message of its own two turns of the event loop, half of what it costs. Whoever follows does the
        rest, as `drain` tells; and there an error is raised, too, since nobody listens here.
        """
        ends_at_s = self.turns.begin(is_small=len(messages) <= FEW_MESSAGES)
        begun = self._begun = self._apply(messages)
        if ends_at_s is None:
            return False
        try:
            for _ in begun:
                if self.turns.is_over(ends_at_s):
                    return False
        except Exception as error:  # noqa: BLE001 - it is raised again
            self._begun = _raising(error)
            return False
        now_s = self.clock()
        if now_s < self._look_at_s:
            return True
        self._look_at_s = now_s + LOOK_S
        return not self.follower.questions(now_s)

    def drain(self, messages: Sequence[Message]) -> Iterator[None]:
        """Take what was received, behind what is left of what was taken before; yields wherever others may go on."""
        yield from self._begun
        yield from self._apply(messages)

    def _apply(self, messages: Sequence[Message]) -> Iterator[None]:
        if self.subscription.num_connects > self.num_connects:
            self.num_connects = self.subscription.num_connects
            self.follower.on_reconnect(self.clock())
        if messages:
            yield from self.follower.receive_all(messages, self.clock())
        self._has_departed = self.subscription.is_peer_gone
        if self._has_departed:  # also after messages: they may be its last
            self.follower.on_departure()


def _look(waiting: dict[Callable[[], bool], asyncio.Timeout]) -> Iterator[None]:
    for is_due, wait in tuple(waiting.items()):
        if is_due in waiting and is_due():
            del waiting[is_due]
            wait.reschedule(0.0)
        yield


def _raising(error: Exception) -> Iterator[None]:
    yield
    raise error
