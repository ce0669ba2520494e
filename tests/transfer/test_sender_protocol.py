from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.errors import InvalidValueError
from kvist.transfer.commands import Computed, TransferLimits
from kvist.transfer.heads import WHOLE
from kvist.transfer.messages import (
    Cancel,
    Hello,
    Progress,
    ReceiveRequest,
    Refusal,
    RefusalReason,
    Result,
    ResultStatus,
)
from kvist.transfer.sender_protocol import Answer, Free, SenderAction, SenderProtocol, StartWrite

LIMITS = TransferLimits(transfer_timeout_s=10.0, hold_timeout_s=20.0)
D, D1 = "decode-0", "decode-0 rank 1"

Input = Callable[[SenderProtocol], list[SenderAction]]


def request(transfer_id: int = 7, request_id: str = "r", num_receivers: int = 1) -> ReceiveRequest:
    hello = Hello("d", "tiny", 4, 7, (), num_receivers, 0, "any", b"", ())
    return ReceiveRequest(3, transfer_id, hello, WHOLE, request_id, 4, ((1,),))


def asks(transfer_id: int = 7, request_id: str = "r", num_receivers: int = 1, name: str = D) -> Input:
    return lambda sender: sender.requested(name, request(transfer_id, request_id, num_receivers), 1.0)


def written(
    transfer_id: int = 7, status: ResultStatus = ResultStatus.SUCCESS, name: str = D, num_written: int = 9
) -> Input:
    return lambda sender: sender.written(name, transfer_id, status, num_written)


def computed(num_blocks: int = 9, first_token_id: int | None = 300, now_s: float = 0.0) -> Input:
    told = Computed("r", (), first_token_id is not None, first_token_id)
    return lambda sender: sender.computed(told, num_blocks, now_s)


def rejected(sender: SenderProtocol) -> list[SenderAction]:
    return sender.rejected(D, 7, RefusalReason.BLOCK_COUNT_MISMATCH)


def cancels(transfer_id: int = 7, request_id: str = "r") -> Input:
    return lambda sender: sender.cancelled(D, Cancel(transfer_id, request_id))


def ticks(now_s: float) -> Input:
    return lambda sender: sender.tick(now_s)


def withdrawn(sender: SenderProtocol) -> list[SenderAction]:
    return sender.give_up("r")


def gone(sender: SenderProtocol) -> list[SenderAction]:
    return sender.receiver_gone(D)


def result(status: ResultStatus, transfer_id: int = 7, name: str = D) -> Answer:
    is_whole = status in (ResultStatus.SUCCESS, ResultStatus.BOUNCED)
    return Answer(name, Result(transfer_id, status, 300 if is_whole else None))


def refusal(reason: RefusalReason, transfer_id: int = 7) -> Answer:
    return Answer(D, Refusal(reason, transfer_id))


SUCCESS, FAILED, CANCELLED, BOUNCED = ResultStatus
FETCHED, GIVEN_UP = Free("r", True), Free("r", False)
ENDED = refusal(RefusalReason.ALREADY_ENDED)
UNKNOWN = refusal(RefusalReason.UNKNOWN_REQUEST)

# How to come into each state of a held request "r" and its transfer 7.
WAYS: dict[str, list[Input]] = {
    "held": [],
    "active": [asks()],
    "active, one of two": [asks(num_receivers=2), asks(8, num_receivers=2, name=D1), written(8, name=D1)],
    "waiting for the second": [asks(num_receivers=2), written()],
    "quarantined": [asks(), cancels()],
    "completed": [asks(), written()],
    "failed": [asks(), written(status=FAILED)],
    "expired": [ticks(20)],
}

TABLE: list[tuple[str, Input, list[SenderAction]]] = [
    ("held", asks(), [StartWrite(D, request())]),
    ("held", asks(request_id="other"), [UNKNOWN]),
    ("held", written(), []),
    ("held", cancels(), [result(CANCELLED), GIVEN_UP]),
    ("held", cancels(request_id="other"), [result(CANCELLED)]),
    ("held", withdrawn, [GIVEN_UP]),
    ("held", gone, []),
    ("held", ticks(19.9), []),
    ("held", ticks(20), [GIVEN_UP]),
    ("active", asks(), []),
    ("active", asks(8), [refusal(RefusalReason.BUSY, 8)]),
    ("active", written(), [result(SUCCESS), FETCHED]),
    ("active", written(status=BOUNCED), [result(BOUNCED), FETCHED]),
    ("quarantined", written(status=BOUNCED), [result(CANCELLED), GIVEN_UP]),
    ("active", written(status=FAILED), [result(FAILED), GIVEN_UP]),
    ("active", written(8), []),
    ("active", rejected, [refusal(RefusalReason.BLOCK_COUNT_MISMATCH), GIVEN_UP]),
    ("held", rejected, []),
    ("quarantined", rejected, [refusal(RefusalReason.BLOCK_COUNT_MISMATCH), GIVEN_UP]),
    ("active", cancels(), []),
    ("active", cancels(8), [result(CANCELLED, 8)]),
    ("active", lambda sender: sender.cancelled(D1, Cancel(8, "r")), [result(CANCELLED, 8, D1)]),
    ("active", withdrawn, []),
    ("active", gone, []),
    ("active", ticks(10.9), []),
    ("active", ticks(11), []),
    ("active, one of two", written(), [result(SUCCESS), FETCHED]),
    ("active, one of two", written(status=FAILED), [result(FAILED), GIVEN_UP]),
    ("active, one of two", cancels(8), [result(CANCELLED, 8)]),
    ("active, one of two", asks(9, name="decode-1"), [Answer("decode-1", Refusal(RefusalReason.BUSY, 9))]),
    ("waiting for the second", asks(8, num_receivers=9, name=D1), [StartWrite(D1, request(8, num_receivers=9))]),
    ("waiting for the second", asks(8, num_receivers=2), [refusal(RefusalReason.BUSY, 8)]),
    ("waiting for the second", asks(), [ENDED]),
    (
        "waiting for the second",
        lambda sender: sender.cancelled(D1, Cancel(8, "r")),
        [result(CANCELLED, 8, D1), GIVEN_UP],
    ),
    ("waiting for the second", ticks(20), [GIVEN_UP]),
    ("quarantined", asks(), []),
    ("quarantined", asks(8, num_receivers=2), [refusal(RefusalReason.ALREADY_ENDED, 8)]),
    ("quarantined", written(), [result(CANCELLED), GIVEN_UP]),
    ("quarantined", written(status=FAILED), [result(CANCELLED), GIVEN_UP]),
    ("quarantined", cancels(), []),
    ("quarantined", withdrawn, []),
    ("quarantined", gone, []),
    ("quarantined", ticks(1e9), []),
    *(
        (ended, one_input, actions)
        for ended in ("completed", "failed", "expired")
        for one_input, actions in (
            (asks(8), [refusal(RefusalReason.ALREADY_ENDED, 8)]),
            (asks(), [ENDED]),
            (written(), []),
            (cancels(), [result(CANCELLED)]),
            (withdrawn, []),
            (gone, []),
            (ticks(1e9), []),
        )
    ),
]


def held_sender(*inputs: Input, limits: TransferLimits = LIMITS) -> SenderProtocol:
    sender = SenderProtocol(limits)
    sender.hold("r", 0.0)
    for one_input in (computed(), *inputs):
        one_input(sender)
    return sender


@pytest.mark.parametrize(("way", "one_input", "actions"), TABLE)
def test_each_input_in_each_state_does_what_the_table_says(
    way: str, one_input: Input, actions: list[SenderAction]
) -> None:
    assert one_input(held_sender(*WAYS[way])) == actions


PROGRESS = Answer(D, Progress(7))
# The same while the prompt is computed: three of its nine blocks are.
CHUNKED: list[tuple[list[Input], Input, list[SenderAction]]] = [
    ([], asks(), [StartWrite(D, request())]),
    ([asks()], written(num_written=3), [PROGRESS]),
    ([asks()], computed(), []),
    ([asks(), computed()], written(num_written=3), [PROGRESS, StartWrite(D, request(), 3)]),
    ([asks(), written(num_written=3)], computed(5, None), [StartWrite(D, request(), 3)]),
    ([asks(), written(num_written=3), computed()], written(), [result(SUCCESS), FETCHED]),
    ([asks(), written(num_written=3), computed()], written(status=FAILED), [result(FAILED), GIVEN_UP]),
    ([asks(), written(num_written=3)], cancels(), [result(CANCELLED), GIVEN_UP]),
    ([asks(), written(num_written=3)], withdrawn, [result(CANCELLED), GIVEN_UP]),
    ([asks(), written(num_written=3)], gone, [result(CANCELLED), GIVEN_UP]),
    ([asks(), written(num_written=3)], ticks(10.9), []),
    ([asks(), written(num_written=3)], ticks(11), [result(CANCELLED), GIVEN_UP]),
    ([asks(), written(num_written=3), computed(5, None, 5.0)], ticks(14.9), []),
    ([asks(), cancels()], computed(), []),
    ([asks(), cancels(), computed()], written(num_written=3), [result(CANCELLED), GIVEN_UP]),
    ([computed(3, None, 5.0)], ticks(24.9), []),
    ([withdrawn], computed(), []),
    (
        [asks(num_receivers=2), asks(8, num_receivers=2, name=D1), written(num_written=3)],
        written(8, FAILED, D1),
        [result(FAILED, 8, D1), result(CANCELLED), GIVEN_UP],
    ),
]


@pytest.mark.parametrize(("way", "one_input", "actions"), CHUNKED)
def test_what_is_computed_is_written_and_the_rest_waited_for(
    way: list[Input], one_input: Input, actions: list[SenderAction]
) -> None:
    assert one_input(held_sender(computed(3, None), *way)) == actions


def test_a_request_that_comes_after_its_cancel_writes_nothing() -> None:
    sender = held_sender(cancels())
    assert asks()(sender) == [ENDED]


def test_a_receiver_that_fails_takes_the_writes_of_its_other_ranks_with_it() -> None:
    sender = held_sender(asks(num_receivers=2), asks(8, num_receivers=2, name=D1))
    assert written(status=FAILED)(sender) == [result(FAILED)]
    last = [result(CANCELLED, 8, D1), GIVEN_UP]
    assert written(8, name=D1)(sender) == last, "blocks are freed when the last write has ended"


def test_receivers_may_number_their_transfers_alike() -> None:
    sender = held_sender(asks())
    sender.hold("s", 0.0)
    sender.computed(Computed("s", (), True), 9, 0.0)
    assert sender.requested("decode-1", request(7, "s"), 1.0) == [StartWrite("decode-1", request(7, "s"))]
    assert sender.written("decode-1", 7, SUCCESS, 9)[-1] == Free("s", True)
    assert written()(sender) == [result(SUCCESS), FETCHED]


def test_an_id_is_held_once() -> None:
    sender = held_sender()
    with pytest.raises(InvalidValueError, match="request_id"):
        sender.hold("r", 1.0)
    withdrawn(sender)
    with pytest.raises(InvalidValueError, match="request_id"):
        sender.hold("r", 2.0)


def test_what_ended_long_ago_is_forgotten_and_still_not_served() -> None:
    sender = held_sender(asks(), written(), limits=TransferLimits(max_remembered=2))
    assert asks()(sender) == [ENDED]
    for idx in range(3):
        sender.hold(f"later-{idx}", 0.0)
        sender.give_up(f"later-{idx}")
        cancels(100 + idx, "nobody's")(sender)
    assert asks()(sender) == [UNKNOWN]


def test_what_is_held_and_written_is_counted() -> None:
    sender = held_sender(asks(), written())
    sender.hold("s", 0.0)
    sender.hold("t", 0.0)
    asks(9, "t")(sender)
    sender.give_up("s")
    asks(10, "s")(sender)
    rejected(sender)
    assert (sender.num_held, sender.num_writing) == (1, 1)
    assert sender.rejected(D, 9, RefusalReason.UNKNOWN_BLOCK)[-1] == Free("t", False)
