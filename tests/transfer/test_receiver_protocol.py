from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.errors import InvalidValueError
from kvist.transfer.commands import TransferLimits
from kvist.transfer.messages import Result, ResultStatus
from kvist.transfer.receiver_protocol import (
    Complete,
    Fail,
    ReceiverAction,
    ReceiverProtocol,
    Receiving,
    Release,
    SendCancel,
    SendRequest,
    StartScatter,
    TransferPlan,
    TransferState,
)
from kvist.transfer.tails import BounceTail, EncodedTail, Extent

INIT, ACTIVE, SCATTERING = TransferState.INIT, TransferState.ACTIVE, TransferState.SCATTERING
COMPLETED, FAILED, QUARANTINED = TransferState.COMPLETED, TransferState.FAILED, TransferState.QUARANTINED
LIMITS = TransferLimits(transfer_timeout_s=10.0, cancel_retry_s=1.0)
ID = 7
ROOMS = (Extent(0x1000, 128), Extent(0x1080, 128))
BLOCKS = (Extent(0x8000, 128), Extent(0x9000, 128))
TAILS = {0: BounceTail((0x8000, 0x9000), (64, 64), 0x1000), 1: BounceTail((0x8040, 0x9040), (64, 64), 0x1080)}
SENDERS = ("p0", "p1")
BOUNCED = TransferPlan(ID, SENDERS, ROOMS, BLOCKS)
DIRECT = TransferPlan(ID, SENDERS, (None, None), BLOCKS)
Input = Callable[[Receiving], list[ReceiverAction]]


def report(rank: int, status: ResultStatus = ResultStatus.SUCCESS, tail: BounceTail | None = None) -> Result:
    return Result(rank, ID, status, None if tail is None else tail.encode())


def hears(one: Result, now_s: float = 1.0) -> Input:
    return lambda transfer: transfer.reported(one, now_s)


def bounced(rank: int) -> Input:
    return hears(report(rank, tail=TAILS[rank]))


def direct(rank: int) -> Input:
    return hears(report(rank))


def failed(rank: int) -> Input:
    return hears(report(rank, ResultStatus.FAILED))


def cancelled_by(rank: int) -> Input:
    return hears(report(rank, ResultStatus.CANCELLED))


def quiet(rank: int) -> Input:
    return lambda transfer: transfer.quieted(rank, "gone", 1.0)


def scattered(error: str | None = None) -> Input:
    return lambda transfer: transfer.scattered(error, 1.0)


def ticks(now_s: float) -> Input:
    return lambda transfer: transfer.tick(now_s)


def cancel(transfer: Receiving) -> list[ReceiverAction]:
    return transfer.fail("client left", 1.0)


def start(transfer: Receiving) -> list[ReceiverAction]:
    return transfer.start()


# How to come into each state, and what is then still open: senders to report, a scatter to land.
WAYS: dict[str, tuple[TransferPlan, list[Input], TransferState]] = {
    "init": (BOUNCED, [], INIT),
    "active": (BOUNCED, [start], ACTIVE),
    "active, one reported": (BOUNCED, [start, bounced(1)], ACTIVE),
    "active, direct": (DIRECT, [start, direct(1)], ACTIVE),
    "scattering": (BOUNCED, [start, bounced(1), bounced(0)], SCATTERING),
    "completed": (BOUNCED, [start, bounced(1), bounced(0), scattered()], COMPLETED),
    "failed": (DIRECT, [start, direct(0), failed(1)], FAILED),
    "quarantined": (BOUNCED, [start, cancel], QUARANTINED),
    "quarantined, one reported": (BOUNCED, [start, bounced(1), cancel], QUARANTINED),
    "quarantined, scattering": (BOUNCED, [start, bounced(1), bounced(0), cancel], QUARANTINED),
}

CANCELS = [SendCancel(ID, 0), SendCancel(ID, 1)]
LEFT = Fail(ID, "client left")
LATE = Fail(ID, "no completion within 10 s")
GONE = Fail(ID, "gone")
REPORTS_FAILED = Fail(ID, "rank 0 reports FAILED")
REPORTS_CANCELLED = Fail(ID, "rank 0 reports CANCELLED")
RELEASE = Release(ID)

TABLE: list[tuple[str, Input, list[ReceiverAction] | str, TransferState]] = [
    ("init", start, [SendRequest(ID, 0), SendRequest(ID, 1)], ACTIVE),
    ("init", bounced(0), [], INIT),
    ("init", cancel, [LEFT, *CANCELS, RELEASE], FAILED),
    ("init", quiet(0), [GONE, SendCancel(ID, 1), RELEASE], FAILED),
    ("init", ticks(10), [LATE, *CANCELS, RELEASE], FAILED),
    ("init", scattered(), [], INIT),
    ("active", start, [], ACTIVE),
    ("active", bounced(0), [], ACTIVE),
    ("active", failed(0), [REPORTS_FAILED, SendCancel(ID, 1)], QUARANTINED),
    ("active", cancelled_by(0), [REPORTS_CANCELLED, SendCancel(ID, 1)], QUARANTINED),
    ("active", quiet(0), [GONE, SendCancel(ID, 1)], QUARANTINED),
    ("active", cancel, [LEFT, *CANCELS], QUARANTINED),
    ("active", ticks(9.9), [], ACTIVE),
    ("active", ticks(10), [LATE, *CANCELS], QUARANTINED),
    ("active", scattered(), [], ACTIVE),
    ("active", hears(report(5)), [], ACTIVE),
    ("active, one reported", bounced(1), [], ACTIVE),
    ("active, one reported", failed(1), [], ACTIVE),
    ("active, one reported", bounced(0), "scatter 1 0", SCATTERING),
    ("active, one reported", failed(0), [REPORTS_FAILED, RELEASE], FAILED),
    ("active, one reported", quiet(0), [GONE, RELEASE], FAILED),
    ("active, one reported", quiet(1), [], ACTIVE),
    ("active, one reported", direct(0), "scatter 1", SCATTERING),
    ("active, direct", direct(0), [RELEASE, Complete(ID)], COMPLETED),
    ("scattering", bounced(0), [], SCATTERING),
    ("scattering", failed(0), [], SCATTERING),
    ("scattering", quiet(0), [], SCATTERING),
    ("scattering", scattered(), [RELEASE, Complete(ID)], COMPLETED),
    ("scattering", scattered("bad copy"), [Fail(ID, "scatter: bad copy"), RELEASE], FAILED),
    ("scattering", cancel, [LEFT], QUARANTINED),
    ("scattering", ticks(10), [LATE], QUARANTINED),
    ("quarantined", bounced(0), [], QUARANTINED),
    ("quarantined", failed(0), [], QUARANTINED),
    ("quarantined", quiet(0), [], QUARANTINED),
    ("quarantined", cancel, [], QUARANTINED),
    ("quarantined", scattered(), [], QUARANTINED),
    ("quarantined", ticks(1.9), [], QUARANTINED),
    ("quarantined", ticks(2), CANCELS, QUARANTINED),
    ("quarantined", ticks(1e9), CANCELS, QUARANTINED),
    ("quarantined, one reported", ticks(2), CANCELS[:1], QUARANTINED),
    ("quarantined, one reported", bounced(1), [], QUARANTINED),
    ("quarantined, one reported", bounced(0), [RELEASE], FAILED),
    ("quarantined, one reported", failed(0), [RELEASE], FAILED),
    ("quarantined, one reported", cancelled_by(0), [RELEASE], FAILED),
    ("quarantined, one reported", quiet(0), [RELEASE], FAILED),
    ("quarantined, scattering", quiet(0), [], QUARANTINED),
    ("quarantined, scattering", ticks(1e9), [], QUARANTINED),
    ("quarantined, scattering", scattered(), [RELEASE], FAILED),
    ("quarantined, scattering", scattered("bad copy"), [RELEASE], FAILED),
    *(
        (ended, late, [], state)
        for ended, state in (("completed", COMPLETED), ("failed", FAILED))
        for late in (start, bounced(0), failed(0), quiet(0), cancel, scattered(), scattered("x"), ticks(1e9))
    ),
]


def shown(actions: list[ReceiverAction]) -> list[ReceiverAction] | str:
    """Return the actions, or of a scatter whose tails there are."""
    if len(actions) == 1 and isinstance(actions[0], StartScatter):
        ranks = {tail.src_base: rank for rank, tail in TAILS.items()}
        return " ".join(["scatter", *(str(ranks[tail.src_base]) for tail in actions[0].tails)])
    return actions


@pytest.mark.parametrize(("way", "one_input", "actions", "state"), TABLE)
def test_each_input_in_each_state_does_what_the_table_says(
    way: str, one_input: Input, actions: list[ReceiverAction] | str, state: TransferState
) -> None:
    plan, inputs, reached = WAYS[way]
    transfer = Receiving(plan, LIMITS, 0.0)
    for earlier in inputs:
        earlier(transfer)
    assert transfer.state is reached
    assert shown(one_input(transfer)) == actions
    assert transfer.state is state


def test_what_two_senders_bounced_is_copied_by_address_in_the_region() -> None:
    transfer = Receiving(BOUNCED, LIMITS, 0.0)
    for earlier in (start, bounced(1)):
        earlier(transfer)
    (scatter,) = bounced(0)(transfer)
    assert isinstance(scatter, StartScatter)
    assert scatter.copies.tolist() == [
        [0x1000, 0x8000, 64],
        [0x1040, 0x9000, 64],
        [0x1080, 0x8040, 64],
        [0x10C0, 0x9040, 64],
    ]


@pytest.mark.parametrize(
    ("tail", "named"),
    [
        (BounceTail((0x8000,), (64,), 0), "expected 128"),
        (BounceTail((0x8041, 0x9000), (64, 64), 0), "outside"),
        (BounceTail((0x8000, 0x8001), (64, 64), 0), "overlap"),
    ],
)
def test_a_tail_that_does_not_fit_fails_the_task(tail: BounceTail, named: str) -> None:
    transfer = Receiving(BOUNCED, LIMITS, 0.0)
    transfer.start()
    fail, *others = transfer.reported(report(0, tail=tail), 1.0)
    assert isinstance(fail, Fail)
    assert fail.reason.startswith("rank 0: ")
    assert named in fail.reason
    assert others == [SendCancel(ID, 1)], "a sender that reported success has written; the other may be writing"
    assert transfer.reported(report(1, tail=TAILS[1]), 1.0) == [RELEASE]


def test_a_tail_that_cannot_be_decoded_fails_the_task() -> None:
    transfer = Receiving(BOUNCED, LIMITS, 0.0)
    transfer.start()
    assert transfer.reported(Result(0, ID, ResultStatus.SUCCESS, EncodedTail(bytes(16), bytes(8))), 1.0) == [
        Fail(ID, "rank 0: 2 addresses, but 1 sizes"),
        SendCancel(ID, 1),
    ]


def test_a_tail_without_a_region_fails_the_task() -> None:
    transfer = Receiving(DIRECT, LIMITS, 0.0)
    transfer.start()
    assert transfer.reported(report(0, tail=TAILS[0]), 1.0)[0] == Fail(
        ID, "rank 0: a tail, but there is no region to bounce through"
    )


def test_two_senders_that_claim_the_same_bytes_fail_the_task_before_anything_is_copied() -> None:
    transfer = Receiving(BOUNCED, LIMITS, 0.0)
    transfer.start()
    transfer.reported(report(0, tail=TAILS[0]), 1.0)
    same = BounceTail(TAILS[0].dst_addresses, (64, 64), 0x1080)
    fail, release = transfer.reported(report(1, tail=same), 1.0)
    assert isinstance(fail, Fail)
    assert "overlap" in fail.reason
    assert release == RELEASE


def test_every_transfer_is_forgotten_at_its_end_and_what_comes_late_changes_nothing() -> None:
    receiver = ReceiverProtocol(LIMITS)
    receiver.open(DIRECT, 0.0)
    receiver.start(ID)
    receiver.reported("p0", report(0), 1.0)
    assert receiver.reported("p1", report(1), 1.0) == [RELEASE, Complete(ID)]
    assert receiver.reported("p1", report(1), 1.0) == []
    assert receiver.refused("p1", ID, "late", 1.0) == []
    assert receiver.scattered(ID, None, 1.0) == []
    assert receiver.fail(ID, "late", 1.0) == []
    statistics = receiver.statistics()
    assert (statistics.num_completed, statistics.num_failed, statistics.num_active) == (1, 0, 0)


def test_only_a_rank_itself_is_believed_that_it_has_written_or_will_not() -> None:
    receiver = ReceiverProtocol(LIMITS)
    receiver.open(DIRECT, 0.0)
    receiver.start(ID)
    for sender, rank in (("p9", 0), ("p1", 0), ("p0", 1), ("p0", 2)):
        assert receiver.reported(sender, report(rank), 1.0) == []
        assert receiver.reported(sender, report(rank, ResultStatus.FAILED), 1.0) == []
    assert receiver.refused("p9", ID, "no", 1.0) == receiver.sender_gone("p9", [ID], 1.0) == []
    assert receiver.reported("p0", report(0), 1.0) == []
    assert receiver.refused("p1", ID, "busy", 1.0) == [Fail(ID, "busy"), RELEASE]


def test_a_dead_sender_frees_what_waited_for_it_alone_and_fails_nothing_else() -> None:
    receiver = ReceiverProtocol(LIMITS)
    fetches = {1: ("p0",), 2: ("p0",), 3: ("p1",), 4: ("p1", "p0"), 5: ("p0",)}
    for transfer_id, senders in fetches.items():
        receiver.open(TransferPlan(transfer_id, senders, (None,) * len(senders)), 0.0)
        receiver.start(transfer_id)
    receiver.fail(2, "client left", 1.0)
    assert receiver.statistics().num_quarantined == 1
    assert receiver.sender_gone("p0", [1, 2, 3, 4, 9], 1.0) == [
        Fail(1, "rank 0 at p0 is gone"),
        Release(1),
        Release(2),
        Fail(4, "rank 1 at p0 is gone"),
        SendCancel(4, 0),
    ]
    statistics = receiver.statistics()
    assert (statistics.num_active, statistics.num_quarantined, statistics.num_failed) == (2, 1, 3)


def test_a_transfer_cancelled_during_the_handshake_asks_nobody() -> None:
    receiver = ReceiverProtocol(LIMITS)
    receiver.open(DIRECT, 0.0)
    assert receiver.fail(ID, "client left", 0.1) == [LEFT, *CANCELS, RELEASE]
    assert receiver.start(ID) == []


def test_all_transfers_tick() -> None:
    receiver = ReceiverProtocol(LIMITS)
    for transfer_id in range(5):
        receiver.open(TransferPlan(transfer_id, ("p0",), (None,)), 0.0)
    assert len(receiver.tick(10.0)) == 3 * 5
    assert receiver.statistics().num_failed == 5


def test_counts_may_be_read_while_transfers_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = ReceiverProtocol(LIMITS)
    receiver.open(DIRECT, 0.0)

    def state(_: Receiving) -> TransferState:
        receiver.open(TransferPlan(ID + 1, SENDERS, (None, None)), 0.0)  # as the thread that receives may do meanwhile
        return TransferState.ACTIVE

    with monkeypatch.context() as patch:
        patch.setattr(Receiving, "state", property(state, lambda *_: None), raising=False)
        assert receiver.statistics().num_active == 1


@pytest.mark.parametrize("senders", [(), ("p0", "p0")])
def test_a_fetch_from_nobody_or_from_one_in_two_roles_is_refused(senders: tuple[str, ...]) -> None:
    with pytest.raises(InvalidValueError, match="senders"):
        TransferPlan(1, senders, (None,) * len(senders))


def test_each_sender_has_a_room_or_none() -> None:
    with pytest.raises(InvalidValueError, match="rooms"):
        TransferPlan(1, ("p0", "p1"), (None,))
