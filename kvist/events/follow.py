"""Following subscriptions: the asyncio shell around `Follower`s, which decide and do no I/O.

Long work on the event loop is done in turns, a slice at a time, and all sockets are looked at between two slices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, Protocol

from kvist.events.transports import Message, ReplayRequest, Subscription

TICK_S = 0.25
"""How long a message is waited for: questions fall due and peers connect without one."""
REPLAY_TIMEOUT_S = 2.0
"""How long a publisher may be silent, after a question and between replies."""
SLICE_S = 0.0002
"""How long one turn is, but for the piece of work that ends it."""
PAUSE_S = 0.0002
"""After so long without a turn sockets were looked at, so that the next begins without waiting for that."""
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
        """Take one receive's messages, maybe a `MessageBlock`; yields wherever others may have a turn."""

    def on_reconnect(self, now_s: float) -> None:
        """Take note that a peer connected; what comes next may be another process's."""

    def on_departure(self) -> None:
        """Take note that the peer is known to be gone; called again when something comes meanwhile."""

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

    async def run_in_turns(self, pieces: Iterator[None]) -> None:
        """Return once all pieces are done, in turns with those of others; an error in one of them is raised."""
        if self._is_on_the_spot() and self._is_finished(pieces):
            return
        while True:
            async with self._turn:
                # With the one below, twice: what the event loop finds ready comes behind what was called for before it
                # looked.
                begins_at_s = time.monotonic()
                await asyncio.sleep(0)
                now_s = time.monotonic()
                self._ends_at_s = now_s + max(SLICE_S, SLICE_SHARE * (now_s - begins_at_s))
                if self._is_finished(pieces):
                    return
            await asyncio.sleep(0)

    def _is_on_the_spot(self) -> bool:
        """Return whether work may begin without waiting: in what is left of a turn, or long after the last one."""
        if self._turn.locked():
            return False
        now_s = time.monotonic()
        if now_s >= self._ends_at_s + PAUSE_S:
            self._ends_at_s = now_s + SLICE_S
        return now_s < self._ends_at_s

    def _is_finished(self, pieces: Iterator[None]) -> bool:
        """Do pieces, one at least, until the turn is over; return whether those were all."""
        return all(time.monotonic() < self._ends_at_s for _ in pieces)


async def follow(
    subscription: Subscription,
    follower: Follower,
    *,
    clock: Callable[[], float],
    turns: Turns,
    replay_gate: AbstractAsyncContextManager[object],
    snapshot_gate: AbstractAsyncContextManager[object] | None = None,
    num_connects: int = 0,
) -> None:
    """Feed the follower and ask its questions until cancelled; `replay_gate` is entered around each question.

    Around questions for all that a publisher holds it is `snapshot_gate`, if given, and until the answer is taken. The
    first `num_connects` connections are no news to the follower.
    """
    has_departed = False

    def apply(messages: Sequence[Message]) -> Iterator[None]:
        nonlocal num_connects, has_departed
        is_told = has_departed and not messages
        if subscription.num_connects > num_connects:
            num_connects, is_told = subscription.num_connects, False
            follower.on_reconnect(clock())
        if messages:
            yield from follower.receive_all(messages, clock())
        has_departed = subscription.is_peer_gone
        if has_departed and not is_told:  # also after messages: they may be its last
            follower.on_departure()

    while True:
        messages: Sequence[Message] = ()
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                messages = await subscription.receive()
        await turns.run_in_turns(apply(messages))
        for question in follower.questions(clock()):
            is_for_all = question.request.epoch is not None and question.request.start_sequence == 0
            async with snapshot_gate if is_for_all and snapshot_gate is not None else replay_gate:
                answer = await subscription.replay(question.request, REPLAY_TIMEOUT_S)
                question = question._replace(is_caught_up=subscription.is_caught_up)
                await turns.run_in_turns(follower.on_answer(question, answer, clock()))
