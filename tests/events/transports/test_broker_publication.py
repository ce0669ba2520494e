"""What a publisher's thread hands over arrives in order, or is refused; nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from kvist.errors import InvalidValueError
from kvist.events.transports import Message
from kvist.events.transports.broker_publication import CAPACITY, CAPACITY_BYTES, BrokerLoop


class Served:
    """A loop whose `serve` collects what it takes, once it is let."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.may_take = threading.Event()
        self.error: BaseException | None = None
        self.loop = BrokerLoop("a stream", self._serve)

    async def _serve(self) -> None:
        if self.error is not None:
            raise self.error
        self.loop.opened()
        await asyncio.to_thread(self.may_take.wait)
        while messages := await self.loop.receive():
            self.taken += messages


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.may_take.set()
    served.loop.close(1)


def message(sequence: int, size_bytes: int = 1) -> Message:
    return Message(b"t", sequence, bytes(size_bytes))


def fill(loop: BrokerLoop, message_of: Callable[[int], Message]) -> int:
    """Put messages until one is refused; return how many were taken."""
    for sequence in range(CAPACITY + 1):
        try:
            loop.put(message_of(sequence))
        except BlockingIOError:
            return sequence
    raise AssertionError("it took more than its capacity")


def test_messages_arrive_in_order_and_closing_waits_for_them(served) -> None:
    served.loop.start()
    sent = [message(sequence) for sequence in range(CAPACITY)]
    for each in sent:
        served.loop.put(each)
    served.may_take.set()
    served.loop.close(5)
    assert served.taken == sent


def test_a_full_hand_over_refuses_by_number_and_by_bytes(served) -> None:
    served.loop.start()
    assert fill(served.loop, message) == CAPACITY
    other = Served()
    other.loop.start()
    assert fill(other.loop, lambda sequence: message(sequence, CAPACITY_BYTES // 4)) == 4
    other.may_take.set()
    other.loop.close(5)


def test_a_single_message_may_be_larger_than_the_bound(served) -> None:
    served.loop.start()
    served.loop.put(message(0, CAPACITY_BYTES + 1))
    with pytest.raises(BlockingIOError):
        served.loop.put(message(1))


def test_after_closing_nothing_is_taken_and_closing_again_is_allowed(served) -> None:
    served.loop.start()
    served.may_take.set()
    served.loop.close(5)
    served.loop.close(5)
    with pytest.raises(BrokenPipeError, match="a stream is closed"):
        served.loop.put(message(0))
    served.loop.call(lambda: pytest.fail("the loop has ended"))


def test_what_does_not_drain_in_time_is_ended(served) -> None:
    served.loop.start()

    async def serve_for_ever() -> None:
        stuck.opened()
        await asyncio.Event().wait()

    stuck = BrokerLoop("stuck", serve_for_ever)
    stuck.start()
    stuck.close(0.01)
    assert not stuck._thread.is_alive()


def test_an_error_that_the_caller_can_mend_is_raised_by_start(served) -> None:
    served.error = InvalidValueError("endpoint", "x", "y")
    with pytest.raises(InvalidValueError):
        served.loop.start()


def test_a_later_error_is_raised_by_whoever_sends() -> None:
    async def serve() -> None:
        loop.opened()
        await loop.receive()
        raise ConnectionError("the broker is no more")

    loop = BrokerLoop("a stream", serve)
    loop.start()
    loop.put(message(0))
    loop._thread.join(60)
    with pytest.raises(OSError, match="cannot send: the broker is no more"):
        loop.put(message(1))
