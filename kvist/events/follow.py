"""Following one subscription: the asyncio shell around a `Follower`, which decides and does no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from kvist.events.transports import Message, Subscription

TICK_S = 0.2
"""The longest a follower goes without being looked at: questions fall due and idleness shows without a message."""
REPLAY_TIMEOUT_S = 2.0
"""How long a publisher may be silent, after a question and between replies."""
SLICE_S = 0.002
"""How long messages are applied before the event loop's other tasks get a turn."""


class Question(NamedTuple):
    """What to ask a replay for; `topic` None means whatever the peer has, in words every engine understands.

    `rank` is the asker's own note of whom the question is about.
    """

    topic: bytes | None
    start_sequence: int
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
        """Return what to ask now; called at least every `TICK_S`."""

    def answered(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Take the answer, None for silence; yields between pieces of work, wherever others may have a turn."""


async def follow(
    subscription: Subscription,
    follower: Follower,
    *,
    clock: Callable[[], float],
    replay_gate: AbstractAsyncContextManager[object],
    num_connects: int = 0,
) -> None:
    """Feed the follower and ask its questions until cancelled; `replay_gate` is entered around each question.

    The first `num_connects` connections are no news to the follower.
    """
    turn = _Turn()
    while True:
        messages = await _receive(subscription)
        if subscription.num_connects > num_connects:
            num_connects = subscription.num_connects
            follower.reconnected(clock())
        if messages:
            for _ in follower.received_all(messages, clock()):
                await turn.pass_on()
            await turn.pass_on()  # a busy source is never waited for
        for question in follower.questions(clock()):
            async with replay_gate:
                answer = await subscription.replay(question.topic, question.start_sequence, REPLAY_TIMEOUT_S)
            for _ in follower.answered(question, answer, clock()):
                await turn.pass_on()


async def _receive(subscription: Subscription) -> Sequence[Message]:
    try:
        async with asyncio.timeout(TICK_S):
            return await subscription.receive()
    except TimeoutError:
        return ()


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
