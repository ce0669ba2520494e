from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvist.transfer import sender as module
from kvist.transfer.agents import Write, WriteFailedError
from kvist.transfer.commands import Computed, Offer, OfferReleased, TransferLimits
from kvist.transfer.heads import WHOLE, Part
from kvist.transfer.messages import (
    Cancel,
    Extent,
    GroupShape,
    Hello,
    PoolPlace,
    Progress,
    ReceiveRequest,
    Refusal,
    RefusalReason,
    Result,
    ResultStatus,
    decode_message,
    encode_message,
)
from kvist.transfer.sender import Sender

LIMITS = TransferLimits(transfer_timeout_s=10.0, hold_timeout_s=20.0)
D, D1 = "decode-0", "decode-0 rank 1"
GROUP = GroupShape(None, 2, 1, "float32", 1, (0,))
HEAD_BYTES = GROUP.head_bytes(4)
NUM_TOKENS, TABLE = 36, tuple(range(9))


def hello(part: Part = WHOLE, name: str = "p") -> Hello:
    pools = (PoolPlace(0, GROUP.slot_bytes(4, part), 32),)
    return Hello(name, "tiny", 4, 7, (GROUP,), part.num_ranks, part.rank, "any", name.encode(), pools)


class Ends:
    """A sender and all that it has to do with; `log` is what it has done."""

    kind = "any"

    def __init__(self, limits: TransferLimits = LIMITS, *, has_bounce: bool = False) -> None:
        self.log: list[Any] = []
        self.ends: dict[str, WriteFailedError | None] = {}  # of writes under way that are to end
        ends: Any = self
        bounce = ends if has_bounce else None
        self.sender = Sender(ends, ends, hello(), limits, self.log.append, bounce)

    def offer(self, request_id: str, *, is_whole: bool = True) -> None:
        self.sender.offer(Offer(request_id, NUM_TOKENS), 0.0)
        if is_whole:
            self.sender.on_computed(Computed(request_id, (TABLE,), True, 300), 0.0)

    def send_multipart(self, frames: list[bytes], _: int) -> None:
        self.log.append((frames[0].decode(), decode_message(frames[1], "")))

    def connect(self, metadata: bytes) -> str:
        return metadata.decode()

    def disconnect(self, peer: str) -> None:
        self.log.append(("let go of", peer))

    def write(self, peer: str, fragments: Any) -> Write:
        self.log.append(("write to", peer, int(fragments[:, 2].sum()) // HEAD_BYTES))
        return self.steps(peer)

    def steps(self, peer: str) -> Write:
        while peer not in self.ends:
            yield False
        if (error := self.ends.pop(peer)) is not None:
            raise error

    def send(self, peer: str, fragments: Any, base: int) -> Write:
        assert base == 1 << 20
        return self.write(peer, fragments)


Input = Callable[[Ends], None]


def request(transfer_id: int, request_id: str, part: Part, name: str, num_tokens: int, room: Extent | None) -> bytes:
    asked = ReceiveRequest(3, transfer_id, hello(part, name), WHOLE, request_id, num_tokens, (TABLE,), room)
    return encode_message(asked)


def asks(
    transfer_id: int = 7,
    request_id: str = "r",
    num_receivers: int = 1,
    name: str = D,
    num_tokens: int = NUM_TOKENS,
    room: Extent | None = None,
) -> Input:
    payload = request(transfer_id, request_id, Part(int(name == D1), num_receivers), name, num_tokens, room)
    return lambda ends: ends.sender.handle([[name.encode(), payload]], 1.0)


def written(is_ok: bool = True, name: str = D, *, is_quiescent: bool = True) -> Input:
    def end(ends: Ends) -> None:
        ends.ends[name] = None if is_ok else WriteFailedError("late", is_quiescent=is_quiescent)
        ends.sender.advance_writes(lambda: 1.0)
        ends.ends.clear()

    return end


def computed(num_blocks: int = 9, first_token_id: int | None = 300, now_s: float = 0.0) -> Input:
    told = Computed("r", (TABLE[:num_blocks],), first_token_id is not None, first_token_id)
    return lambda ends: ends.sender.on_computed(told, now_s)


def cancels(transfer_id: int = 7, request_id: str = "r", name: str = D) -> Input:
    payload = encode_message(Cancel(transfer_id, request_id))
    return lambda ends: ends.sender.handle([[name.encode(), payload]], 1.0)


def ticks(now_s: float) -> Input:
    return lambda ends: ends.sender.tick(now_s)


def withdrawn(ends: Ends) -> None:
    ends.sender.withdraw("r")


def gone(ends: Ends) -> None:
    ends.sender._withdraw_from(D)


def starts(num_heads: int, name: str = D) -> Any:
    """Return what it is to begin a write of so many blocks' heads."""
    return ("write to", name, num_heads)


def result(status: ResultStatus, transfer_id: int = 7, name: str = D) -> Any:
    is_whole = status in (ResultStatus.SUCCESS, ResultStatus.BOUNCED)
    return (name, Result(transfer_id, status, 300 if is_whole else None))


def refusal(reason: RefusalReason, transfer_id: int = 7, name: str = D) -> Any:
    return (name, Refusal(reason, transfer_id))


SUCCESS, FAILED, CANCELLED, BOUNCED = ResultStatus
FETCHED, GIVEN_UP = OfferReleased("r", True), OfferReleased("r", False)
ENDED = refusal(RefusalReason.ALREADY_ENDED)
UNKNOWN = refusal(RefusalReason.UNKNOWN_REQUEST)
MISCOUNTED = refusal(RefusalReason.BLOCK_COUNT_MISMATCH)
LET_GO = ("let go of", D)

# How to come into each state of a held request "r" and its transfer 7.
WAYS: dict[str, list[Input]] = {
    "held": [],
    "active": [asks()],
    "active, one of two": [asks(num_receivers=2), asks(8, num_receivers=2, name=D1), written(name=D1)],
    "waiting for the second": [asks(num_receivers=2), written()],
    "quarantined": [asks(), cancels()],
    "completed": [asks(), written()],
    "failed": [asks(), written(False)],
    "expired": [ticks(20)],
}

STATES: list[tuple[str, Input, list[Any]]] = [
    ("held", asks(), [starts(18)]),
    ("held", asks(request_id="other"), [UNKNOWN]),
    ("held", asks(num_tokens=35), [MISCOUNTED, GIVEN_UP]),
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
    ("active", written(False), [result(FAILED), GIVEN_UP, LET_GO]),
    ("active", written(False, is_quiescent=False), [LET_GO]),
    ("active", cancels(), []),
    ("active", cancels(8), [result(CANCELLED, 8)]),
    ("active", cancels(8, name=D1), [result(CANCELLED, 8, D1)]),
    ("active", withdrawn, []),
    ("active", gone, []),
    ("active", ticks(10.9), []),
    ("active", ticks(11), []),
    ("active, one of two", written(), [result(SUCCESS), FETCHED]),
    ("active, one of two", written(False), [result(FAILED), GIVEN_UP, LET_GO]),
    ("active, one of two", cancels(8), [result(CANCELLED, 8)]),
    ("active, one of two", asks(9, name="decode-1"), [refusal(RefusalReason.BUSY, 9, "decode-1")]),
    ("waiting for the second", asks(8, num_receivers=4, name=D1), [starts(9, D1)]),
    ("waiting for the second", asks(8, num_receivers=2), [refusal(RefusalReason.BUSY, 8)]),
    ("waiting for the second", asks(), [ENDED]),
    ("waiting for the second", cancels(8, name=D1), [result(CANCELLED, 8, D1), GIVEN_UP]),
    ("waiting for the second", ticks(20), [GIVEN_UP]),
    ("quarantined", asks(), []),
    ("quarantined", asks(8, num_receivers=2), [refusal(RefusalReason.ALREADY_ENDED, 8)]),
    ("quarantined", written(), [result(CANCELLED), GIVEN_UP]),
    ("quarantined", written(False), [result(CANCELLED), GIVEN_UP, LET_GO]),
    ("quarantined", cancels(), []),
    ("quarantined", withdrawn, []),
    ("quarantined", gone, []),
    ("quarantined", ticks(1e9), []),
    *(
        (ended, one_input, done)
        for ended in ("completed", "failed", "expired")
        for one_input, done in (
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


def held(*inputs: Input, ends: Ends | None = None) -> Ends:
    ends = ends or Ends()
    ends.offer("r", is_whole=False)
    for one_input in (computed(), *inputs):
        one_input(ends)
    return ends


def done_by(ends: Ends, one_input: Input) -> list[Any]:
    """Return what an input leads to."""
    ends.log.clear()
    one_input(ends)
    return ends.log


@pytest.mark.parametrize(("way", "one_input", "done"), STATES)
def test_each_input_in_each_state_does_what_the_table_says(way: str, one_input: Input, done: list[Any]) -> None:
    assert done_by(held(*WAYS[way]), one_input) == done


PROGRESS = (D, Progress(7))
# The same while the prompt is computed: three of its nine blocks are.
CHUNKED: list[tuple[list[Input], Input, list[Any]]] = [
    ([], asks(), [starts(6)]),
    ([asks()], written(), [PROGRESS]),
    ([asks()], computed(), []),
    ([asks(), computed()], written(), [PROGRESS, starts(12)]),
    ([asks(), written()], computed(5, None), [starts(4)]),
    ([asks(), written(), computed()], written(), [result(SUCCESS), FETCHED]),
    ([asks(), written(), computed()], written(False), [result(FAILED), GIVEN_UP, LET_GO]),
    ([asks(), written()], cancels(), [result(CANCELLED), GIVEN_UP]),
    ([asks(), written()], withdrawn, [result(CANCELLED), GIVEN_UP]),
    ([asks(), written()], gone, [result(CANCELLED), GIVEN_UP]),
    ([asks(), written()], ticks(10.9), []),
    ([asks(), written()], ticks(11), [result(CANCELLED), GIVEN_UP]),
    ([asks(), written(), computed(5, None, 5.0)], ticks(14.9), []),
    ([asks(), cancels()], computed(), []),
    ([asks(), cancels(), computed()], written(), [result(CANCELLED), GIVEN_UP]),
    ([computed(3, None, 5.0)], ticks(24.9), []),
    ([withdrawn], computed(), []),
    (
        [asks(num_receivers=2), asks(8, num_receivers=2, name=D1), written()],
        written(False, D1),
        [result(FAILED, 8, D1), result(CANCELLED), GIVEN_UP, ("let go of", D1)],
    ),
]


@pytest.mark.parametrize(("way", "one_input", "done"), CHUNKED)
def test_what_is_computed_is_written_and_the_rest_waited_for(way: list[Input], one_input: Input, done: Any) -> None:
    assert done_by(held(computed(3, None), *way), one_input) == done


def test_what_is_written_in_one_piece_is_said_to_be() -> None:
    room = Extent(1 << 20, 9 * 2 * HEAD_BYTES)
    assert done_by(held(asks(room=room), ends=Ends(has_bounce=True)), written()) == [result(BOUNCED), FETCHED]
    assert done_by(held(asks(room=room)), written()) == [result(SUCCESS), FETCHED]
    ends = held(asks(room=room), cancels(), ends=Ends(has_bounce=True))
    assert done_by(ends, written()) == [result(CANCELLED), GIVEN_UP]


def test_a_request_that_comes_after_its_cancel_writes_nothing() -> None:
    assert done_by(held(cancels()), asks()) == [ENDED]


def test_a_receiver_that_fails_takes_the_writes_of_its_other_ranks_with_it() -> None:
    ends = held(asks(num_receivers=2), asks(8, num_receivers=2, name=D1))
    assert done_by(ends, written(False)) == [result(FAILED), LET_GO]
    last = [result(CANCELLED, 8, D1), GIVEN_UP]
    assert done_by(ends, written(name=D1)) == last, "blocks are freed when the last write has ended"


def test_who_is_let_go_of_gets_no_more_of_what_it_waits_for() -> None:
    ends = held(computed(3, None), asks(), written())
    ends.offer("s")
    asks(8, "s")(ends)
    done = [result(FAILED, 8), OfferReleased("s", False), result(CANCELLED), GIVEN_UP, LET_GO]
    assert done_by(ends, written(False)) == done
    assert done_by(ends, computed()) == []


def test_only_beyond_so_many_receivers_those_that_asked_least_recently_are_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_RECEIVERS", 4)
    ends = Ends()
    for name in ["a", "b", "c", "d", "a", "e", "f"]:
        asks(name=name, request_id="unknown")(ends)
    assert [what for what in ends.log if what[0] == "let go of"] == [("let go of", "b"), ("let go of", "c")]


def test_receivers_may_number_their_transfers_alike() -> None:
    ends, other = held(asks()), "decode-1"
    ends.offer("s")
    assert done_by(ends, asks(7, "s", name=other)) == [starts(18, other)]
    assert done_by(ends, written(name=other)) == [result(SUCCESS, name=other), OfferReleased("s", True)]
    assert done_by(ends, written()) == [result(SUCCESS), FETCHED]


def test_what_ended_long_ago_is_forgotten_and_still_not_served() -> None:
    ends = held(asks(), written(), ends=Ends(TransferLimits(max_remembered=2)))
    assert done_by(ends, asks()) == [ENDED]
    for idx in range(3):
        ends.offer(f"later-{idx}")
        ends.sender.withdraw(f"later-{idx}")
        cancels(100 + idx, "nobody's")(ends)
    assert done_by(ends, asks()) == [UNKNOWN]


def test_what_is_held_and_written_is_counted() -> None:
    ends = held(asks(), written())
    ends.offer("s")
    ends.offer("t")
    asks(9, "t")(ends)
    ends.sender.withdraw("s")
    asks(10, "s")(ends)
    assert (len(ends.sender._held), ends.sender.num_writing) == (1, 1)
    assert done_by(ends, written())[-1] == OfferReleased("t", True)
    assert (len(ends.sender._held), ends.sender.num_writing) == (0, 0)
