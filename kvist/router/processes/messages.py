"""What the keeper and the fronts of a router tell each other: frames of msgpack over a Unix socket, each in order.

Whoever cannot be told any more, as it takes nothing, is taken for gone: what it missed it gets when it comes back.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import msgspec

from kvist.router.doors.journal import Seen
from kvist.router.doors.keeper import Answer, Question
from kvist.router.fleet.identity import Identity
from kvist.router.fleet.rendering import Kind
from kvist.router.fleet.worker import Change, CircuitState
from kvist.router.index import RankStatus
from kvist.router.policy.decision import Role
from kvist.router.regret import Routed

MAX_UNSENT_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")

Families: TypeAlias = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
"""Metrics: name, help, type, and samples, each with its own name, labels and value."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """One frame."""


# --- From the keeper --------------------------------------------------------------------------------------------------


class WorkerNews(Message, frozen=True):
    """All that fronts need to know of a worker, whenever some of it changes."""

    url: str
    configured_event_sources: tuple[str, ...]
    configured_role: Role | None
    wanted_by: tuple[str, ...]
    identity: Identity
    is_healthy: bool | None
    is_draining: bool
    last_failure: str | None
    circuit: tuple[CircuitState, int, float]
    """State, failures in a row, and when it may be tried again."""
    max_requests: int | None
    paused_until_s: float
    warms_from: int | None
    ends_a_second: float
    is_bounded: bool
    num_given_up: int
    ranks: list[RankStatus]
    block_size: int | None
    same_tokens: dict[Kind, int]
    """Of chats that it renders otherwise, by their kind."""


class WorkerGone(Message, frozen=True):
    """The worker was removed."""

    url: str


class IndexJoined(Message, frozen=True):
    """The index can be mapped: it is the file of this path."""

    path: str


class AllTold(Message, frozen=True):
    """That was all there is to know, as of now."""

    pid: int


# --- From a front -----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Comes first. Who was told of workers before says by which process, as the keeper may have been started anew."""

    front: int
    pid: int
    told_by: int | None
    workers: list[WorkerNews]


class Happened(Message, frozen=True):
    """What a request made of a worker's circuit."""

    url: str
    what: Change
    now_s: float


class Paused(Message, frozen=True):
    """The worker asks to be spared."""

    url: str
    until_s: float


class Used(Message, frozen=True):
    """These blocks were matched: u64 hashes."""

    hashes: bytes


class Computed(Message, frozen=True):
    """A worker that no stream tells of has computed a prompt with these blocks."""

    url: str
    hashes: bytes


class Said(Message, frozen=True):
    """A response that a later request may go on with (`kvist.router.conversations`); the keeper tells other fronts."""

    response_id: str
    worker: str
    said: bytes | None


class Ended(Message, frozen=True):
    """What came of requests, for `GET /regret`, and some of them as the live page shows them."""

    requests: list[Routed]
    seen: list[Seen]


# --- From either ------------------------------------------------------------------------------------------------------


class Asked(Message, frozen=True):
    """An operator's question to the keeper or, without one, the wish for a front's own metrics."""

    number: int
    question: Question | None


class Answered(Message, frozen=True):
    """The answer to what was asked under this number."""

    number: int
    answer: Answer | Families


ToFront: TypeAlias = WorkerNews | WorkerGone | IndexJoined | AllTold | Said | Asked | Answered
ToKeeper: TypeAlias = Hello | Happened | Paused | Used | Computed | Said | Ended | Asked | Answered

encode = msgspec.msgpack.Encoder().encode


class Link:
    """One side of a connection between the keeper and a front."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    def tell(self, frame: bytes) -> None:
        """Send an encoded message; a link whose other side takes nothing is closed."""
        self._writer.write(_LENGTH.pack(len(frame)) + frame)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()

    async def ask(self, question: Question | None, timeout_s: float) -> Any:
        """Return what the other side answers; raises TimeoutError, and ConnectionResetError where it is gone."""
        number = next(self._numbers)
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        self.tell(encode(Asked(number, question)))
        try:
            return await asyncio.wait_for(asked, timeout_s)
        finally:
            del self._asked[number]

    def on_answer(self, answered: Answered) -> None:
        """Take the answer to what was asked, unless nobody waits for it any more."""
        if (asked := self._asked.get(answered.number)) is not None and not asked.done():
            asked.set_result(answered.answer)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield what comes until the other side is gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return

    @property
    def is_closed(self) -> bool:
        """Return whether it has ended."""
        return self._writer.is_closing()

    def close(self) -> None:
        """End it at once."""
        self._writer.transport.abort()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ConnectionResetError("the other side is gone"))
