from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.transfer.commands import TransferLimits
from kvist.transfer.messages import Result, ResultStatus
from kvist.transfer.receiver_protocol import (
    Complete,
    Fail,
    ReceiverAction,
    ReceiverProtocol,
    Release,
    SendCancel,
    StartScatter,
)

LIMITS = TransferLimits(transfer_timeout_s=10.0, cancel_retry_s=1.0)
ID = 7
SENDERS = ("p0", "p1")
Input = Callable[[ReceiverProtocol], list[ReceiverAction]]


def reports(rank: int, status: ResultStatus) -> Input:
    return lambda receiver: receiver.reported(f"p{rank}", Result(ID, status, 300), 1.0)


def bounced(rank: int) -> Input:
    return reports(rank, ResultStatus.BOUNCED)


def direct(rank: int) -> Input:
    return reports(rank, ResultStatus.SUCCESS)


def failed(rank: int) -> Input:
    return reports(rank, ResultStatus.FAILED)


def cancelled_by(rank: int) -> Input:
    return reports(rank, ResultStatus.CANCELLED)


def refused(rank: int) -> Input:
    return lambda receiver: receiver.refused(f"p{rank}", ID, "busy", 1.0)


def scattered(error: str | None = None) -> Input:
    return lambda receiver: receiver.scattered(ID, error, 1.0)


def ticks(now_s: float) -> Input:
    return lambda receiver: receiver.tick(now_s)


def cancel(receiver: ReceiverProtocol) -> list[ReceiverAction]:
    return receiver.fail(ID, "client left", 1.0)


# How to come into each state, and what is then still open: senders to report, a scatter to land.
WAYS: dict[str, list[Input]] = {
    "asked": [],
    "asked, one reported": [bounced(1)],
    "asked, one wrote directly": [direct(1)],
    "scattering": [bounced(1), bounced(0)],
    "completed": [bounced(1), bounced(0), scattered()],
    "failed": [direct(0), failed(1)],
    "quarantined": [cancel],
    "quarantined, one reported": [bounced(1), cancel],
    "quarantined, scattering": [bounced(1), bounced(0), cancel],
}

CANCELS = [SendCancel(ID, 0), SendCancel(ID, 1)]
LEFT = Fail(ID, "client left")
LATE = Fail(ID, "no completion within 10 s")
BUSY = Fail(ID, "busy")
REPORTS_FAILED = Fail(ID, "rank 0 reports FAILED")
REPORTS_CANCELLED = Fail(ID, "rank 0 reports CANCELLED")
RELEASE = Release(ID)

TABLE: list[tuple[str, Input, list[ReceiverAction]]] = [
    ("asked", bounced(0), []),
    ("asked", failed(0), [REPORTS_FAILED, SendCancel(ID, 1)]),
    ("asked", cancelled_by(0), [REPORTS_CANCELLED, SendCancel(ID, 1)]),
    ("asked", refused(0), [BUSY, SendCancel(ID, 1)]),
    ("asked", cancel, [LEFT, *CANCELS]),
    ("asked", ticks(9.9), []),
    ("asked", ticks(10), [LATE, *CANCELS]),
    ("asked", scattered(), []),
    ("asked, one reported", bounced(1), []),
    ("asked, one reported", failed(1), []),
    ("asked, one reported", bounced(0), [StartScatter(ID, (0, 1))]),
    ("asked, one reported", failed(0), [REPORTS_FAILED, RELEASE]),
    ("asked, one reported", refused(0), [BUSY, RELEASE]),
    ("asked, one reported", refused(1), []),
    ("asked, one reported", direct(0), [StartScatter(ID, (1,))]),
    ("asked, one wrote directly", direct(0), [RELEASE, Complete(ID, 300)]),
    ("scattering", bounced(0), []),
    ("scattering", failed(0), []),
    ("scattering", refused(0), []),
    ("scattering", scattered(), [RELEASE, Complete(ID, 300)]),
    ("scattering", scattered("bad copy"), [Fail(ID, "scatter: bad copy"), RELEASE]),
    ("scattering", cancel, [LEFT]),
    ("scattering", ticks(10), [LATE]),
    ("quarantined", bounced(0), []),
    ("quarantined", failed(0), []),
    ("quarantined", refused(0), []),
    ("quarantined", cancel, []),
    ("quarantined", scattered(), []),
    ("quarantined", ticks(1.9), []),
    ("quarantined", ticks(2), CANCELS),
    ("quarantined", ticks(1e9), CANCELS),
    ("quarantined, one reported", ticks(2), CANCELS[:1]),
    ("quarantined, one reported", bounced(1), []),
    ("quarantined, one reported", bounced(0), [RELEASE]),
    ("quarantined, one reported", failed(0), [RELEASE]),
    ("quarantined, one reported", cancelled_by(0), [RELEASE]),
    ("quarantined, one reported", refused(0), [RELEASE]),
    ("quarantined, scattering", refused(0), []),
    ("quarantined, scattering", ticks(1e9), []),
    ("quarantined, scattering", scattered(), [RELEASE]),
    ("quarantined, scattering", scattered("bad copy"), [RELEASE]),
    *(
        (ended, late, [])
        for ended in ("completed", "failed")
        for late in (bounced(0), failed(0), refused(0), cancel, scattered(), scattered("x"), ticks(1e9))
    ),
]


def asked() -> ReceiverProtocol:
    receiver = ReceiverProtocol(LIMITS)
    receiver.open(ID, SENDERS, (0, 1), 0.0)
    return receiver


@pytest.mark.parametrize(("way", "one_input", "actions"), TABLE)
def test_each_input_in_each_state_does_what_the_table_says(
    way: str, one_input: Input, actions: list[ReceiverAction]
) -> None:
    receiver = asked()
    for earlier in WAYS[way]:
        earlier(receiver)
    assert one_input(receiver) == actions


def test_who_says_to_have_bounced_without_a_room_has_failed() -> None:
    receiver = ReceiverProtocol(LIMITS)
    receiver.open(ID, SENDERS, (1,), 0.0)
    assert bounced(0)(receiver) == [Fail(ID, "rank 0 reports BOUNCED"), SendCancel(ID, 1)]
    assert bounced(1)(receiver) == [RELEASE]


def test_every_transfer_is_forgotten_at_its_end_and_what_comes_late_changes_nothing() -> None:
    receiver = asked()
    direct(0)(receiver)
    assert receiver.num_active == 1
    assert direct(1)(receiver) == [RELEASE, Complete(ID, 300)]
    for late in (direct(1), refused(1), scattered(), cancel):
        assert late(receiver) == []
    assert receiver.num_active == 0


def test_only_a_rank_itself_is_believed_that_it_has_written_or_will_not() -> None:
    receiver = asked()
    for status in (ResultStatus.SUCCESS, ResultStatus.FAILED):
        assert receiver.reported("p9", Result(ID, status), 1.0) == []
    assert receiver.refused("p9", ID, "no", 1.0) == receiver.sender_gone("p9", [ID], 1.0) == []
    assert direct(0)(receiver) == direct(0)(receiver) == []
    assert refused(1)(receiver) == [BUSY, RELEASE]


def test_a_dead_sender_frees_what_waited_for_it_alone_and_fails_nothing_else() -> None:
    receiver = ReceiverProtocol(LIMITS)
    fetches = {1: ("p0",), 2: ("p0",), 3: ("p1",), 4: ("p1", "p0"), 5: ("p0",)}
    for transfer_id, senders in fetches.items():
        receiver.open(transfer_id, senders, (), 0.0)
    receiver.fail(2, "client left", 1.0)
    assert receiver.num_active == 5
    assert receiver.sender_gone("p0", [1, 2, 3, 4, 9], 1.0) == [
        Fail(1, "rank 0 at p0 is gone"),
        Release(1),
        Release(2),
        Fail(4, "rank 1 at p0 is gone"),
        SendCancel(4, 0),
    ]
    assert receiver.num_active == 3


def test_all_transfers_tick() -> None:
    receiver = ReceiverProtocol(LIMITS)
    for transfer_id in range(5):
        receiver.open(transfer_id, ("p0",), (), 0.0)
    assert len(receiver.tick(10.0)) == 2 * 5
