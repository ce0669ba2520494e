from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq

from kvist.transfer.commands import Fetch, FetchCompleted, FetchFailed, FetchReleased, TransferLimits
from kvist.transfer.messages import (
    Cancel,
    GroupShape,
    Hello,
    Message,
    PoolPlace,
    Refusal,
    RefusalReason,
    Result,
    ResultStatus,
    encode_message,
)
from kvist.transfer.receiver import Receiver, SenderConnections

LIMITS = TransferLimits(transfer_timeout_s=10.0, cancel_retry_s=1.0)
ENDPOINTS = ("tcp://p:1", "tcp://p:2")
GROUP = GroupShape(None, 2, 1, "float32", 1, (0,))
HELLO = Hello("d", "tiny", 4, 7, (GROUP,), 1, 0, "any", b"", (PoolPlace(0, 32, 8),))
RANK_BYTES = 2 * 16  # two blocks of one head
ROOM_AT = 1024


@dataclass(eq=False)
class Sender:
    """A rank of the sender at the end of a connection, which the test speaks for."""

    endpoint: str
    log: list[Any]
    said: list[list[bytes]] = field(default_factory=list)
    is_dead = False
    used_at_s = 0.0

    def send(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self.log.append(("cancel", message.transfer_id, self.endpoint))

    def receive(self) -> Iterator[list[bytes]]:
        while self.said:
            yield self.said.pop(0)


class Ends:
    """A receiver and all that it has to do with; `log` is what it has done."""

    def __init__(self, *, has_bounce: bool = True) -> None:
        self.log: list[Any] = []
        self.senders = [Sender(endpoint, self.log) for endpoint in ENDPOINTS]
        self.copy_error: RuntimeError | None = None
        bounce: Any = self if has_bounce else None
        self.receiver = Receiver(self, HELLO, LIMITS, self.log.append, bounce)  # type: ignore[arg-type]

    def fetch(self, request_id: str = "r", endpoints: tuple[str, ...] = ENDPOINTS) -> None:
        self.receiver.fetch(Fetch(request_id, endpoints, "held", 8, ((3, 4),)), 0.0)

    # Connections.

    def __iter__(self) -> Iterator[Sender]:
        return iter(self.senders)

    def connect(self, endpoint: str, now_s: float) -> Sender:  # noqa: ARG002
        return next(each for each in self.senders if each.endpoint == endpoint)

    def drop(self, sender: Sender) -> None:
        self.senders.remove(sender)

    def find_lost(self, sender: Sender, transfer_ids: set[int]) -> set[int]:
        return transfer_ids if sender.is_dead else set()

    # Bouncing.

    def reserve(self, size_bytes: int, num_pieces: int) -> int:
        assert (size_bytes, num_pieces) == (2 * RANK_BYTES, 4)
        return ROOM_AT

    def scatter(self, parts: list[tuple[int, Any]]) -> None:
        self.log.append(("scatter", {(address - ROOM_AT) // RANK_BYTES for address, _ in parts}))
        if self.copy_error is not None:
            raise self.copy_error

    def quarantine(self, room: int) -> None:
        assert room == ROOM_AT

    def release(self, room: int) -> None:
        assert room == ROOM_AT
        self.log.append("the room is free")


Input = Callable[[Ends], None]


def says(rank: int, message: Message) -> Input:
    def say(ends: Ends) -> None:
        sender = next((each for each in ends.senders if each.endpoint == ENDPOINTS[rank]), None)
        if sender is not None:
            sender.said.append([encode_message(message)])
        ends.receiver.receive(1.0)

    return say


def reports(rank: int, status: ResultStatus, transfer_id: int = 0) -> Input:
    return says(rank, Result(transfer_id, status, 300))


def bounced(rank: int) -> Input:
    return reports(rank, ResultStatus.BOUNCED)


def direct(rank: int) -> Input:
    return reports(rank, ResultStatus.SUCCESS)


def failed(rank: int) -> Input:
    return reports(rank, ResultStatus.FAILED)


def cancelled_by(rank: int) -> Input:
    return reports(rank, ResultStatus.CANCELLED)


def refused(rank: int) -> Input:
    return says(rank, Refusal(RefusalReason.BUSY, 0))


def copies_badly(ends: Ends) -> None:
    ends.copy_error = RuntimeError("bad copy")


def ticks(now_s: float) -> Input:
    return lambda ends: ends.receiver.tick(now_s)


def cancel(ends: Ends) -> None:
    ends.receiver.cancel("r", 1.0)


# How to come into each state, and which senders have still to report then.
WAYS: dict[str, list[Input]] = {
    "asked": [],
    "asked, one reported": [bounced(1)],
    "asked, one wrote directly": [direct(1)],
    "asked, one reported, copying badly": [bounced(1), copies_badly],
    "completed": [bounced(1), bounced(0)],
    "failed": [direct(0), failed(1)],
    "quarantined": [cancel],
    "quarantined, one reported": [bounced(1), cancel],
}

CANCELS = [("cancel", 0, endpoint) for endpoint in ENDPOINTS]
LEFT = FetchFailed("r", "cancelled")
LATE = FetchFailed("r", "no completion within 10 s")
BUSY = FetchFailed("r", "busy")
BAD_COPY = FetchFailed("r", "scatter: bad copy")
REPORTS_FAILED = FetchFailed("r", "rank 0 reports FAILED")
REPORTS_CANCELLED = FetchFailed("r", "rank 0 reports CANCELLED")
COMPLETE = ["the room is free", FetchCompleted("r", 300)]
RELEASE = ["the room is free", FetchReleased("r")]

TABLE: list[tuple[str, Input, list[Any]]] = [
    ("asked", bounced(0), []),
    ("asked", failed(0), [REPORTS_FAILED, CANCELS[1]]),
    ("asked", cancelled_by(0), [REPORTS_CANCELLED, CANCELS[1]]),
    ("asked", refused(0), [BUSY, CANCELS[1]]),
    ("asked", cancel, [LEFT, *CANCELS]),
    ("asked", ticks(9.9), []),
    ("asked", ticks(10), [LATE, *CANCELS]),
    ("asked, one reported", bounced(1), []),
    ("asked, one reported", failed(1), []),
    ("asked, one reported", bounced(0), [("scatter", {0, 1}), *COMPLETE]),
    ("asked, one reported", failed(0), [REPORTS_FAILED, *RELEASE]),
    ("asked, one reported", refused(0), [BUSY, *RELEASE]),
    ("asked, one reported", refused(1), []),
    ("asked, one reported", direct(0), [("scatter", {1}), *COMPLETE]),
    ("asked, one reported, copying badly", bounced(0), [("scatter", {0, 1}), BAD_COPY, *RELEASE]),
    ("asked, one reported, copying badly", direct(0), [("scatter", {1}), BAD_COPY, *RELEASE]),
    ("asked, one reported, copying badly", failed(0), [REPORTS_FAILED, *RELEASE]),
    ("asked, one wrote directly", direct(0), COMPLETE),
    ("quarantined", bounced(0), []),
    ("quarantined", failed(0), []),
    ("quarantined", refused(0), []),
    ("quarantined", cancel, []),
    ("quarantined", ticks(1.9), []),
    ("quarantined", ticks(2), CANCELS),
    ("quarantined", ticks(1e9), CANCELS),
    ("quarantined, one reported", ticks(2), CANCELS[:1]),
    ("quarantined, one reported", bounced(1), []),
    ("quarantined, one reported", bounced(0), RELEASE),
    ("quarantined, one reported", failed(0), RELEASE),
    ("quarantined, one reported", cancelled_by(0), RELEASE),
    ("quarantined, one reported", refused(0), RELEASE),
    *(
        (ended, late, [])
        for ended in ("completed", "failed")
        for late in (bounced(0), failed(0), refused(0), cancel, ticks(1e9))
    ),
]


def done_by(ends: Ends, one_input: Input) -> list[Any]:
    """Return what an input leads to."""
    ends.log.clear()
    one_input(ends)
    return ends.log


@pytest.mark.parametrize(("way", "one_input", "done"), TABLE)
def test_each_input_in_each_state_does_what_the_table_says(way: str, one_input: Input, done: list[Any]) -> None:
    ends = Ends()
    ends.fetch()
    for earlier in WAYS[way]:
        earlier(ends)
    assert done_by(ends, one_input) == done


def test_a_fetch_fails_alone_where_no_more_ranks_can_be_connected_to() -> None:
    log: list[Any] = []
    with zmq.Context() as context:
        context.max_sockets = 1
        receiver = Receiver(SenderConnections(context, zmq.Poller(), b"me"), HELLO, LIMITS, log.append, None)
        receiver.fetch(Fetch("r", ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), "held", 8, ((3, 4),)), 0.0)
        assert log == [FetchFailed("r", "Too many open files"), FetchReleased("r")]
        context.destroy(linger=0)


def test_who_says_to_have_bounced_without_a_room_has_failed() -> None:
    ends = Ends(has_bounce=False)
    ends.fetch()
    assert done_by(ends, bounced(0)) == [FetchFailed("r", "rank 0 reports BOUNCED"), CANCELS[1]]
    assert done_by(ends, bounced(1)) == [FetchReleased("r")]


def test_every_transfer_is_forgotten_at_its_end_and_what_comes_late_changes_nothing() -> None:
    ends = Ends()
    ends.fetch()
    direct(0)(ends)
    assert done_by(ends, direct(1)) == COMPLETE
    for late in (direct(1), refused(1), cancel):
        assert done_by(ends, late) == []
    assert not ends.receiver._transfers


def test_only_a_rank_itself_is_believed_that_it_has_written_or_will_not() -> None:
    ends = Ends()
    ends.senders.append(Sender("tcp://stranger:1", ends.log))
    ends.fetch()
    ends.log.clear()
    for message in (Result(0, ResultStatus.SUCCESS), Result(0, ResultStatus.FAILED), Refusal(RefusalReason.BUSY, None)):
        ends.senders[-1].said.append([encode_message(message)])
    ends.receiver.receive(1.0)
    for one_input in (direct(0), direct(0)):
        one_input(ends)
    assert ends.log == []
    assert done_by(ends, refused(1)) == [BUSY, *RELEASE]


def test_a_dead_sender_frees_what_waited_for_it_alone_and_fails_nothing_else() -> None:
    ends, (one, other) = Ends(has_bounce=False), ENDPOINTS
    fetches = [("a", (one,)), ("left", (one,)), ("b", (other,)), ("c", (other, one)), ("written", (one, other))]
    for request_id, endpoints in fetches:
        ends.fetch(request_id, endpoints)
    ends.receiver.cancel("left", 1.0)
    reports(0, ResultStatus.SUCCESS, 4)(ends)
    ends.senders[0].is_dead = True
    assert done_by(ends, ticks(1.5)) == [
        FetchFailed("a", f"rank 0 at {one} is gone"),
        FetchReleased("a"),
        FetchReleased("left"),
        FetchFailed("c", f"rank 1 at {one} is gone"),
        ("cancel", 3, other),
    ]
    assert done_by(ends, ticks(1.6)) == []
    assert (len(ends.receiver._transfers), len(ends.senders)) == (3, 2)
    ends.receiver.tick(60.0)
    assert [each.endpoint for each in ends.senders] == [other], "nobody needs it any more"


def test_all_transfers_tick() -> None:
    ends = Ends(has_bounce=False)
    for idx in range(5):
        ends.fetch(f"{idx}", ENDPOINTS[:1])
    assert len(done_by(ends, ticks(10.0))) == 2 * 5
