"""Sockets of ZeroMQ as the transports here use them, and the two ends of a replay: see `zmq` for its frames."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress
from typing import TypeAlias

import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.base import MAX_DRAIN, Message, ReplayRequest, ReplaySource
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import Collected, MalformedCounter, message_of

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

MAX_REPLIES_WAITING = 1_000
"""Replies that wait to be read; the publisher waits with those beyond."""
REPLAY_SEND_TIMEOUT_S = 2.0
"""How long one reply may wait for its client; then the rest of that replay is dropped."""
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence of the reply that ends a replay."""

_REPLAY_RETRY_MS = 10


class LoopSocket:
    """A socket read in bulk from an event loop: one wake-up for many messages, no future for each.

    ZeroMQ's file descriptor is edge-triggered: it is silent about what was there before, so the socket is emptied, and
    asked once more, before waiting.
    """

    def __init__(self) -> None:
        self.socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def has_messages(self) -> bool:
        """Return whether messages can be received at once, and wake who waits for them: nothing else may any more."""
        is_readable = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if is_readable:
            self._readable.set()
        return is_readable

    def _on_readable(self) -> None:
        self.has_messages()

    async def receive(self) -> list[list[bytes]]:
        """Wait for at least one message; return at most `MAX_DRAIN`, each as its frames."""
        while True:
            messages: list[list[bytes]] = []
            with suppress(zmq.Again):
                while len(messages) < MAX_DRAIN:
                    messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
            if messages:
                return messages
            self._readable.clear()
            if not self.has_messages():
                await self._readable.wait()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self.socket.close(linger=0)


class ReplayServer:
    """A thread that answers replay requests on a ROUTER socket until it is closed."""

    def __init__(self, context: Context, router: Socket, source: ReplaySource) -> None:
        self._router = router
        self._source = source
        address = f"inproc://kvist-stop-{id(self)}"
        self._stop_receiver = context.socket(zmq.PAIR)
        self._stop_receiver.bind(address)
        self._stop_sender = context.socket(zmq.PAIR)
        self._stop_sender.connect(address)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvist-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, also amid a replay."""
        self._is_stopping = True
        self._stop_sender.send(b"")
        self._thread.join()
        self._stop_sender.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stop_receiver, zmq.POLLIN)
        while not self._is_stopping:
            ready = dict(poller.poll())
            if self._router in ready:
                request = self._router.recv_multipart()
                # The client went away, or takes nothing: its next request starts from the beginning.
                with suppress(zmq.ZMQError):
                    self._answer(request)
        self._stop_receiver.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        if len(request) not in (3, 4, 5) or any(len(number) != 8 for number in request[2::2]):
            return
        client, start, *rest = request[0], int.from_bytes(request[2], "big"), *request[3:]
        has_topic = len(rest) > 0
        epoch = int.from_bytes(rest[1], "big") if len(rest) == 2 else None
        ends_at_s = time.monotonic() + base.MAX_ANSWER_S
        for message in self._source.replay(ReplayRequest(rest[0] if has_topic else None, start, epoch)):
            topic = (message.topic,) if has_topic else ()
            self._send((client, b"", *topic, message.sequence.to_bytes(8, "big"), message.payload))
            if time.monotonic() >= ends_at_s:  # others wait, and the client no longer does
                return
        self._send((client, b"", *((b"",) if has_topic else ()), END, b""))

    def _send(self, frames: tuple[bytes, ...]) -> None:
        """Wait for a client that is full, but neither long nor once the thread is to stop."""
        give_up_at_s = time.monotonic() + REPLAY_SEND_TIMEOUT_S
        while True:
            try:
                self._router.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                if self._is_stopping or time.monotonic() >= give_up_at_s:
                    raise
                self._stop_receiver.poll(_REPLAY_RETRY_MS)


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
        dealer = LoopSocket()
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
            try:
                async with asyncio.timeout(timeout_s):
                    replies = await dealer.receive()
            except TimeoutError:
                if dealer.has_messages():  # it was not the peer that was late, but this event loop
                    continue
                raise
            for frames in replies:
                if len(frames) >= 3 and frames[-2] == END:
                    return answer
                message = message_of(frames[1:] if len(frames) == 4 else frames, self._malformed)
                if message is not None and not answer.add(message):
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


def bind(zmq_socket: Socket, address: str) -> str:
    """Bind the socket and return its address with a real port; raises InvalidValueError when it cannot be."""
    refuse_to_steal(address)
    _allow_ipv6(zmq_socket, address)
    bindable = f"{address.removesuffix(':0')}:*" if address.endswith(":0") else address
    try:
        zmq_socket.bind(bindable)
    except zmq.ZMQError as error:
        raise InvalidValueError("endpoint", address, f"an address that can be bound ({error.strerror})") from error
    return zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)


def refuse_to_steal(address: str) -> None:
    """Raise if somebody listens at an ipc path: ZeroMQ would take it over without a word."""
    if not address.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError, ConnectionRefusedError):
        probe.connect(address.removeprefix("ipc://"))
        raise InvalidValueError("endpoint", address, "a path where nobody listens")


def connect(zmq_socket: Socket, address: str) -> None:
    """Connect the socket in the background; raises InvalidValueError when nobody can be there."""
    _allow_ipv6(zmq_socket, address)
    try:
        zmq_socket.connect(address)
    except zmq.ZMQError as error:
        raise InvalidValueError("endpoint", address, f"an address to connect to ({error.strerror})") from error


def _allow_ipv6(zmq_socket: Socket, address: str) -> None:
    """Allow IPv6 where it is written out; a name stays IPv4, for engines listen on that by default."""
    if address.startswith("tcp://["):
        zmq_socket.setsockopt(zmq.IPV6, 1)
