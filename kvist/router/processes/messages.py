"""Messages between the keeper and the fronts of a router: frames of msgpack over a Unix socket, in order.

A side that stops reading is disconnected once too much is unsent. When a front connects again, it gets the whole state.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import msgspec

from kvist.router.doors.journal import JournalEntry
from kvist.router.doors.keeper import Answer, Question
from kvist.router.fleet.identity import Identity
from kvist.router.fleet.rendering import Kind
from kvist.router.fleet.worker import Capacity, Change, CircuitState
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
    """The whole state of a worker that fronts need; sent whenever any of it changes."""

    url: str
    configured_event_sources: tuple[str, ...]
    configured_role: Role | None
    registered_by: tuple[str, ...]
    identity: Identity
    is_healthy: bool | None
    is_draining: bool
    last_failure: str | None
    circuit: tuple[CircuitState, int, float]
    """The state, the failures in a row, and when an open circuit may be tried again."""
    capacity: Capacity
    """Its bound as a fixed one, without what that is learnt from."""
    is_bounded: bool
    num_given_up: int
    ranks: list[RankStatus]
    block_size: int | None
    same_tokens: dict[Kind, int]
    """For each kind of chat that it renders differently: how many leading tokens are the same."""


class WorkerGone(Message, frozen=True):
    """The worker was removed."""

    url: str


class IndexJoined(Message, frozen=True):
    """The index can be mapped: it is the file of this path."""

    path: str


class Synced(Message, frozen=True):
    """The front has now received the whole state of the keeper with this process id."""

    pid: int


# --- From a front -----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message. A front that was connected before says to which keeper process, and what that one told it."""

    front: int
    pid: int
    keeper_pid: int | None
    workers: list[WorkerNews]


class CircuitChanged(Message, frozen=True):
    """A request changed the state of a worker's circuit."""

    url: str
    what: Change
    now_s: float


class Paused(Message, frozen=True):
    """The worker asked for no requests until then."""

    url: str
    until_s: float


class ModelUnknown(Message, frozen=True):
    """A request names a model that no worker is known to serve."""


class Used(Message, frozen=True):
    """These blocks were matched: u64 hashes."""

    hashes: bytes


class Computed(Message, frozen=True):
    """A rank of a worker has computed a prompt with these blocks, and its events do not say so."""

    url: str
    hashes: bytes
    rank: int


class ResponseStored(Message, frozen=True):
    """A response that a later request may continue (`kvist.router.conversations`); the keeper forwards it to others."""

    response_id: str
    worker: str
    said: bytes | None


class Ended(Message, frozen=True):
    """Requests that have ended, for `GET /regret`, and some of them as the live page shows them."""

    requests: list[Routed]
    entries: list[JournalEntry] = msgspec.field(name="seen")


# --- From either ------------------------------------------------------------------------------------------------------


class Asked(Message, frozen=True):
    """An operator's question to the keeper; without a question, a request for a front's own metrics."""

    number: int
    question: Question | None


class Answered(Message, frozen=True):
    """The answer to the `Asked` of this number."""

    number: int
    answer: Answer | Families


ToFront: TypeAlias = WorkerNews | WorkerGone | IndexJoined | Synced | ResponseStored | Asked | Answered
ToKeeper: TypeAlias = (
    Hello | CircuitChanged | Paused | ModelUnknown | Used | Computed | ResponseStored | Ended | Asked | Answered
)

encode = msgspec.msgpack.Encoder().encode


class Link:
    """One side of a connection between the keeper and a front."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    def send(self, frame: bytes) -> None:
        """Send an encoded message; close the link if the other side has stopped reading."""
        self._writer.write(_LENGTH.pack(len(frame)) + frame)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()

    async def ask(self, question: Question | None, timeout_s: float) -> Any:
        """Send a question and return the answer; raises TimeoutError, and ConnectionResetError if the link closes."""
        number = next(self._numbers)
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        self.send(encode(Asked(number, question)))
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        finally:
            del self._asked[number]

    def on_answer(self, answered: Answered) -> None:
        """Hand an answer to the caller of `ask` that waits for it, if it still does."""
        if (asked := self._asked.get(answered.number)) is not None and not asked.done():
            asked.set_result(answered.answer)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield each received message, still encoded, until the connection ends."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        """Close the link at once; every pending `ask` fails."""
        self._writer.transport.abort()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ConnectionResetError("the other side is gone"))
