from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.errors import InvalidValueError
from kvist.transfer.receiver import (
    Complete,
    Fail,
    Fetch,
    Receiver,
    ReceiverAction,
    Receiving,
    Release,
    SendCancel,
    SendRequest,
    StartScatter,
)
from kvist.transfer.results import BounceTail, Extent, Report, Result, ResultStatus
from kvist.transfer.states import TransferLimits, TransferState

INIT, ACTIVE, SCATTERING = TransferState.INIT, TransferState.ACTIVE, TransferState.SCATTERING
COMPLETED, FAILED, QUARANTINED = TransferState.COMPLETED, TransferState.FAILED, TransferState.QUARANTINED
LIMITS = TransferLimits(transfer_timeout_s=10.0, cancel_retry_s=1.0)
ID = 7
REGIONS = (Extent(0x1000, 128), Extent(0x1080, 128))
BLOCKS = (Extent(0x8000, 128), Extent(0x9000, 128))
TAILS = {0: BounceTail((0x8000, 0x9000), (64, 64), 0x1000), 1: BounceTail((0x8040, 0x9040), (64, 64), 0x1080)}
SENDERS = ("p0", "p1")
BOUNCED = Fetch(ID, SENDERS, REGIONS, BLOCKS)
DIRECT = Fetch(ID, SENDERS, (None, None), BLOCKS)
Input = Callable[[Receiving], list[ReceiverAction]]


def report(
    rank: int,
    status: ResultStatus = ResultStatus.SUCCESS,
    tail: BounceTail | None = None,
    *,
    slice_id: int = 0,
    is_last: bool = True,
    defect: str | None = None,
) -> Report:
    size_bytes = None if tail is None else int(tail.sizes_bytes.sum())
    return Report(Result(rank, ID, slice_id, is_last, status, size_bytes), tail, defect)


def hears(one: Report, now_s: float = 1.0) -> Input:
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
    return transfer.cancel("client left", 1.0)


def start(transfer: Receiving) -> list[ReceiverAction]:
    return transfer.start()


# How to come into each state, and what is then still open: senders to report, a scatter to land.
WAYS: dict[str, tuple[Fetch, list[Input], TransferState]] = {
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

TABLE: list[tuple[str, Input, list[ReceiverAction], TransferState]] = [
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
    ("active, one reported", bounced(0), [StartScatter(ID, (TAILS[1], TAILS[0]))], SCATTERING),
    ("active, one reported", failed(0), [REPORTS_FAILED, RELEASE], FAILED),
    ("active, one reported", quiet(0), [GONE, RELEASE], FAILED),
    ("active, one reported", quiet(1), [], ACTIVE),
    ("active, one reported", direct(0), [StartScatter(ID, (TAILS[1],))], SCATTERING),
    ("active, direct", direct(0), [RELEASE, Complete(ID)], COMPLETED),
    ("active, direct", hears(report(0, tail=BounceTail((), (), 0))), [RELEASE, Complete(ID)], COMPLETED),
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


@pytest.mark.parametrize(("way", "one_input", "actions", "state"), TABLE)
def test_each_input_in_each_state_does_what_the_table_says(
    way: str, one_input: Input, actions: list[ReceiverAction], state: TransferState
) -> None:
    fetch, inputs, reached = WAYS[way]
    transfer = Receiving(fetch, LIMITS, 0.0)
    for earlier in inputs:
        earlier(transfer)
    assert transfer.state is reached
    assert one_input(transfer) == actions
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
    ("tail", "declared", "named"),
    [
        (BounceTail((0x8000,), (64,), 0x1000), 65, "sizes sum"),
        (BounceTail((0x8000,), (64,), 0x1080), 64, "not within"),  # the other rank's part of the region
        (BounceTail((0x8041,), (64,), 0x1000), 64, "outside"),
        (BounceTail((0x8000, 0x8001), (64, 64), 0x1000), 128, "overlap"),
    ],
)
def test_a_tail_that_does_not_fit_fails_the_task(tail: BounceTail, declared: int, named: str) -> None:
    transfer = Receiving(BOUNCED, LIMITS, 0.0)
    transfer.start()
    bad = Report(Result(0, ID, 0, True, ResultStatus.SUCCESS, declared), tail)
    fail, *others = transfer.reported(bad, 1.0)
    assert isinstance(fail, Fail)
    assert fail.reason.startswith("rank 0: ")
    assert named in fail.reason
    assert others == [SendCancel(ID, 1)], "a sender that reported success has written; the other may be writing"
    assert transfer.reported(report(1, tail=TAILS[1]), 1.0) == [RELEASE]


def test_a_tail_that_could_not_be_decoded_fails_the_task() -> None:
    transfer = Receiving(BOUNCED, LIMITS, 0.0)
    transfer.start()
    assert transfer.reported(report(0, defect="2 addresses, but 1 sizes"), 1.0) == [
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


def test_a_sender_has_reported_when_all_slices_up_to_the_last_have_in_any_order() -> None:
    transfer = Receiving(Fetch(ID, ("p0",), (None,)), LIMITS, 0.0)
    transfer.start()
    for slice_id, is_last in ((2, True), (0, False), (0, False), (2, True)):
        assert transfer.reported(report(0, slice_id=slice_id, is_last=is_last), 1.0) == []
    assert transfer.reported(report(0, slice_id=1, is_last=False), 1.0) == [RELEASE, Complete(ID)]


@pytest.mark.parametrize(
    ("reports", "named"),
    [
        ([report(0, slice_id=1), report(0, slice_id=2, is_last=False)], "slice 2 is behind the last one"),
        ([report(0, slice_id=2, is_last=False), report(0, slice_id=1)], "slice 1 is not the last one"),
        ([report(0, slice_id=1 << 16)], "slice 65536 is behind the last one"),
        ([report(0, tail=TAILS[0], is_last=False)], "a tail in one of several slices"),
        ([report(0, tail=TAILS[0], slice_id=1)], "a tail in one of several slices"),
    ],
)
def test_slices_that_contradict_each_other_or_share_a_region_fail_the_task(reports: list[Report], named: str) -> None:
    transfer = Receiving(Fetch(ID, ("p0",), REGIONS[:1], BLOCKS), LIMITS, 0.0)
    transfer.start()
    actions = [action for one in reports for action in transfer.reported(one, 1.0)]
    assert isinstance(actions[0], Fail)
    assert named in actions[0].reason
    assert transfer.state is QUARANTINED
    assert RELEASE not in actions


def test_every_transfer_in_the_registry_is_buried_at_its_end_and_late_reports_are_counted() -> None:
    receiver = Receiver(LIMITS)
    receiver.open(DIRECT, 0.0)
    receiver.start(ID)
    receiver.reported("p0", report(0), 1.0)
    assert receiver.reported("p1", report(1), 1.0) == [RELEASE, Complete(ID)]
    assert receiver.reported("p1", report(1), 1.0) == []
    assert receiver.refused("p1", ID, "late", 1.0) == []
    assert receiver.scattered(ID, None, 1.0) == []
    assert receiver.cancel(ID, "late", 1.0) == []
    statistics = receiver.statistics()
    assert (statistics.num_completed, statistics.num_failed, statistics.num_active) == (1, 0, 0)
    assert (statistics.num_late, statistics.num_unknown) == (2, 0)
    with pytest.raises(InvalidValueError, match="transfer_id"):
        receiver.open(DIRECT, 2.0)


def test_only_a_rank_itself_is_believed_that_it_has_written_or_will_not() -> None:
    receiver = Receiver(LIMITS)
    receiver.open(DIRECT, 0.0)
    receiver.start(ID)
    for sender, rank in (("p9", 0), ("p1", 0), ("p0", 1), ("p0", 2)):
        assert receiver.reported(sender, report(rank), 1.0) == []
        assert receiver.reported(sender, report(rank, ResultStatus.FAILED), 1.0) == []
    assert receiver.refused("p9", ID, "no", 1.0) == receiver.sender_gone("p9", [ID], 1.0) == []
    assert receiver.statistics().num_unknown == 9
    assert receiver.reported("p0", report(0), 1.0) == []
    assert receiver.refused("p1", ID, "busy", 1.0) == [Fail(ID, "busy"), RELEASE]


def test_a_dead_sender_frees_what_waited_for_it_alone_and_fails_nothing_else() -> None:
    receiver = Receiver(LIMITS)
    fetches = {1: ("p0",), 2: ("p0",), 3: ("p1",), 4: ("p1", "p0"), 5: ("p0",)}
    for transfer_id, senders in fetches.items():
        receiver.open(Fetch(transfer_id, senders, (None,) * len(senders)), 0.0)
        receiver.start(transfer_id)
    receiver.cancel(2, "client left", 1.0)
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
    receiver = Receiver(LIMITS)
    receiver.open(DIRECT, 0.0)
    assert receiver.cancel(ID, "client left", 0.1) == [LEFT, *CANCELS, RELEASE]
    assert receiver.start(ID) == []


def test_the_registry_ticks_all_and_remembers_only_the_latest() -> None:
    receiver = Receiver(TransferLimits(transfer_timeout_s=10.0, max_tombstones=2))
    for transfer_id in range(5):
        receiver.open(Fetch(transfer_id, ("p0",), (None,)), 0.0)
    assert len(receiver.tick(10.0)) == 3 * 5
    assert receiver.statistics().num_failed == 5
    receiver.reported("p0", Report(Result(0, 0, 0, True, ResultStatus.SUCCESS)), 11.0)
    receiver.reported("p0", Report(Result(0, 4, 0, True, ResultStatus.SUCCESS)), 11.0)
    assert (receiver.statistics().num_late, receiver.statistics().num_unknown) == (1, 1)


def test_counts_may_be_read_while_transfers_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver(LIMITS)
    receiver.open(DIRECT, 0.0)

    def state(_: Receiving) -> TransferState:
        receiver.open(Fetch(ID + 1, SENDERS, (None, None)), 0.0)  # as the thread that receives may do meanwhile
        return TransferState.ACTIVE

    with monkeypatch.context() as patch:
        patch.setattr(Receiving, "state", property(state, lambda *_: None), raising=False)
        assert receiver.statistics().num_active == 1


@pytest.mark.parametrize("senders", [(), ("p0", "p0")])
def test_a_fetch_from_nobody_or_from_one_in_two_roles_is_refused(senders: tuple[str, ...]) -> None:
    with pytest.raises(InvalidValueError, match="senders"):
        Fetch(1, senders, (None,) * len(senders))


def test_each_sender_has_a_region_or_none() -> None:
    with pytest.raises(InvalidValueError, match="regions"):
        Fetch(1, ("p0", "p1"), (None,))
