"""Following subscriptions: the asyncio loop around `Follower`s, which decide and do no I/O.

Long work on the event loop is done in turns, a slice at a time, and all sockets are polled between two slices.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, Protocol

from kvist.events.transports import Message, ReplayRequest, Subscription

TICK_S = 0.5
"""How long to wait for a message: questions become due and peers connect without one."""
REPLAY_TIMEOUT_S = 2.0
"""How long a publisher may be silent, after a question and between replies."""
JITTER_S = 0.02
"""A question waits up to this long, so that all subscribers of one publisher do not ask at once."""
SLICE_S = 0.0002
"""How long one turn takes; its last piece of work may exceed that."""
PAUSE_S = 0.0002
"""After so long without a turn the sockets have been polled, so the next turn begins without waiting for that."""
SLICE_SHARE = 1.0
"""A turn may take as long as everything else on the loop just took, times this: with 64 chats in each iteration of the
event loop, turns of 0.2 ms made events come 40 s late, and ever later (2026-11-23)."""


class Question(NamedTuple):
    """What to ask the publisher; `rank` is for the follower, which gets the question back with the answer."""

    request: ReplayRequest
    rank: int = 0
    is_caught_up: bool = False
    """Whether, when the answer had come, the connection stood and everything it brought had been read."""


class Follower(Protocol):
    """Decides what to do with one subscription's messages."""

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        """Apply the messages of one receive, maybe a `MessageBlock`; yields wherever others may have a turn."""

    def on_reconnect(self, now_s: float) -> None:
        """Record that a peer connected, which may be another process than before."""

    def on_departure(self) -> None:
        """Record that the peer is known to be gone; called again if something still came from it."""

    def questions(self, now_s: float) -> Iterable[Question]:
        """Return what to ask now, the same until an answer or something else arrives; called in every round.

        The next question is taken once the one before is asked and its answer applied.
        """

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Apply the answer, None for silence; yields wherever others may have a turn."""


class Turns:
    """Runs the work of many followers in pieces, so that everything else on the event loop waits at most one turn.

    However busy the loop is otherwise, this work gets about a third of it.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # the one that waited longest gets it
        self._ends_at_s = 0.0

    async def run_in_turns(self, pieces: Iterator[None]) -> None:
        """Do all pieces, in turns with those of others; raises what one of them raises."""
        if self._may_begin_at_once() and self._is_finished(pieces):
            return
        while True:
            async with self._turn:
                # Together with the sleep below, two iterations: what the event loop finds ready in one runs behind the
                # callbacks that were scheduled before it.
                begins_at_s = time.monotonic()
                await asyncio.sleep(0)
                now_s = time.monotonic()
                self._ends_at_s = now_s + max(SLICE_S, SLICE_SHARE * (now_s - begins_at_s))
                if self._is_finished(pieces):
                    return
            await asyncio.sleep(0)

    def _may_begin_at_once(self) -> bool:
        """Return whether work may begin without waiting: in the rest of a turn, or long enough after the last one."""
        if self._turn.locked():
            return False
        now_s = time.monotonic()
        if now_s >= self._ends_at_s + PAUSE_S:
            self._ends_at_s = now_s + SLICE_S
        return now_s < self._ends_at_s

    def _is_finished(self, pieces: Iterator[None]) -> bool:
        """Do pieces, at least one, until the turn is over; return whether all are done."""
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
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Feed the follower and ask its questions until cancelled; `replay_gate` is held during each question.

    During a question for all that a publisher holds, and until its answer is applied, `snapshot_gate` is held instead,
    if given. The follower already knows of the first `num_connects` connections. `on_round` is called before each wait:
    the follower's state may have changed.
    """
    has_departed = False

    def apply(messages: Sequence[Message]) -> Iterator[None]:
        nonlocal num_connects, has_departed
        was_reported = has_departed and not messages
        if subscription.num_connects > num_connects:
            num_connects, was_reported = subscription.num_connects, False
            follower.on_reconnect(clock())
        if messages:
            yield from follower.receive_all(messages, clock())
        has_departed = subscription.is_peer_gone
        if has_departed and not was_reported:  # also after messages: they may be its last
            follower.on_departure()

    wait_s = TICK_S
    while True:
        messages: Sequence[Message] = ()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                messages = await subscription.receive()
        wait_s = TICK_S
        await turns.run_in_turns(apply(messages))
        for idx, question in enumerate(follower.questions(clock())):
            on_round()
            if idx == 0:
                await asyncio.sleep(random.uniform(0, JITTER_S))
            is_for_all = question.request.epoch is not None and question.request.start_sequence == 0
            async with snapshot_gate if is_for_all and snapshot_gate is not None else replay_gate:
                answer = await subscription.replay(question.request, REPLAY_TIMEOUT_S)
                wait_s = TICK_S if answer is None else 0.0  # it may lead to another question
                question = question._replace(is_caught_up=subscription.is_caught_up)
                await turns.run_in_turns(follower.on_answer(question, answer, clock()))
                del answer  # which counts in the budget of all answers, and may be the last for long
        on_round()
