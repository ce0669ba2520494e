"""Following subscriptions: the asyncio shell around `Follower`s, which decide and do no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from kvist.events.transports import Message, ReplayRequest, Subscription

TICK_S = 0.2
"""How often those who wait for a message are looked at: questions fall due and peers connect without one."""
TICKS_A_ROUND = 5
"""How often, in ticks, those are looked at who have waited for a round already: most of a large fleet's streams."""
REPLAY_TIMEOUT_S = 2.0
"""How long a publisher may be silent, after a question and between replies."""
SLICE_S = 0.0005
"""How long messages are applied before the event loop's other tasks get a turn."""


class Question(NamedTuple):
    """What to ask the publisher; `rank` is the asker's own note of whom it is about."""

    request: ReplayRequest
    rank: int = 0


class Follower(Protocol):
    """Decides what becomes of one subscription's messages."""

    def received_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        """Take live messages, in order; yields between pieces of work, wherever others may have a turn.

        They are one receive's: if they are a `MessageBlock`, it is not valid beyond this call.
        """

    def reconnected(self, now_s: float) -> None:
        """Take note that a peer connected; what comes next may be another process's."""

    def questions(self, now_s: float) -> list[Question]:
        """Return what to ask now, the same until `answered` or something else happens; called in every round."""

    def answered(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Take the answer, None for silence; yields between pieces of work, wherever others may have a turn."""


class Ticker:
    """Wakes who waits for a message when there is something else to do: one timer, however many wait."""

    def __init__(self) -> None:
        self._num_ticks = 0
        self._waiting: dict[asyncio.Timeout, Callable[[], bool]] = {}
        self._waiting_long: dict[asyncio.Timeout, Callable[[], bool]] = {}

    async def run(self) -> None:
        """Tick every `TICK_S` until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """Look at those who began to wait in this round, and at its end at everyone."""
        turn = _Turn()
        self._num_ticks += 1
        looked_at = self._waiting
        if self._num_ticks % TICKS_A_ROUND == 0:
            looked_at = self._waiting_long
            looked_at.update(self._waiting)
            self._waiting.clear()
        for wait, is_due in tuple(looked_at.items()):
            if wait in looked_at and is_due():
                del looked_at[wait]
                wait.reschedule(0.0)
            await turn.pass_on()

    async def receive(self, subscription: Subscription, is_due: Callable[[], bool]) -> Sequence[Message]:
        """Wait for messages, and no longer than until a tick finds `is_due`; then return none."""
        wait = asyncio.timeout(None)
        self._waiting[wait] = is_due
        try:
            async with wait:
                return await subscription.receive()
        except TimeoutError:
            return ()
        finally:
            self._waiting.pop(wait, None)
            self._waiting_long.pop(wait, None)


async def follow(
    subscription: Subscription,
    follower: Follower,
    *,
    clock: Callable[[], float],
    ticker: Ticker,
    replay_gate: AbstractAsyncContextManager[object],
    num_connects: int = 0,
) -> None:
    """Feed the follower and ask its questions until cancelled; `replay_gate` is entered around each question.

    The first `num_connects` connections are no news to the follower. Whoever owns the ticker runs it.
    """
    turn = _Turn()

    def is_due() -> bool:
        return subscription.num_connects > num_connects or bool(follower.questions(clock()))

    while True:
        messages = await ticker.receive(subscription, is_due)
        if subscription.num_connects > num_connects:
            num_connects = subscription.num_connects
            follower.reconnected(clock())
        if messages:
            for _ in follower.received_all(messages, clock()):
                await turn.pass_on()
            await turn.pass_on()  # a busy source is never waited for
        for question in follower.questions(clock()):
            async with replay_gate:
                answer = await subscription.replay(question.request, REPLAY_TIMEOUT_S)
            for _ in follower.answered(question, answer, clock()):
                await turn.pass_on()


class _Turn:
    """Gives the event loop's other tasks a turn after each `SLICE_S` of work."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends_at_s = self._loop.time() + SLICE_S

    async def pass_on(self) -> None:
        """Let others run if this turn has lasted long enough."""
        if self._loop.time() >= self._ends_at_s:
            await asyncio.sleep(0)
            self._ends_at_s = self._loop.time() + SLICE_S
