"""Asking a publisher for what it still keeps: a fresh DEALER socket for each question."""

from __future__ import annotations

import asyncio

import zmq

from kvist.events.transports import base
from kvist.events.transports.answers import Collected
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.frames import MalformedCounter, message_of
from kvist.events.transports.zmq_socket import LoopSocket, connect

MAX_REPLIES_WAITING = 1_000
"""Replies that wait to be read; the publisher waits with those beyond."""
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence of the reply that ends a replay."""


class ReplayClient:
    """Asks the replay socket of one endpoint."""

    def __init__(self, endpoint: Endpoint, malformed: MalformedCounter) -> None:
        # An engine that may connect from anywhere has told nobody where it can be asked.
        self._address = None if _is_wildcard(endpoint.replay_address) else endpoint.replay_address
        self._malformed = malformed

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask with a fresh socket, so that a late answer to an abandoned request cannot be taken for this one's."""
        if self._address is None or await _is_refused(self._address, timeout_s):
            return None
        dealer = LoopSocket(zmq.DEALER)
        try:
            dealer.socket.setsockopt(zmq.RCVHWM, MAX_REPLIES_WAITING)
            connect(dealer.socket, self._address)
            dealer.socket.send_multipart(_frames(request), zmq.NOBLOCK)
            async with asyncio.timeout(base.MAX_ANSWER_S):
                return await self._collect(dealer, timeout_s)
        except TimeoutError:
            return None
        finally:
            dealer.close()

    async def _collect(self, dealer: LoopSocket, timeout_s: float) -> list[Message] | None:
        answer = Collected()
        while True:
            async with asyncio.timeout(timeout_s):
                replies = await dealer.receive()
            for frames in replies:
                if len(frames) >= 3 and frames[-2] == END:
                    return answer
                message = message_of(frames[1:] if len(frames) == 4 else frames, self._malformed)
                if message is not None and not answer.takes(message):
                    return None


def _frames(request: ReplayRequest) -> tuple[bytes, ...]:
    """Return a request's frames: those that an engine does not understand only for who asks with a topic."""
    start = request.start_sequence.to_bytes(8, "big")
    if request.topic is None:
        return b"", start
    return b"", start, request.topic, *(() if request.epoch is None else (request.epoch.to_bytes(8, "big"),))


def _is_wildcard(address: str | None) -> bool:
    return address is not None and address.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"))


async def _is_refused(address: str, timeout_s: float) -> bool:
    """Return whether nobody listens at a TCP address: ZeroMQ would try again without a word, and waste the wait.

    Stock engines serve no replay unless they are told to.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://"):
        return False
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
