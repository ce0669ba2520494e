"""Streams over ZeroMQ, in the frames that vLLM and SGLang use: no broker, one PUB and one ROUTER socket a publisher.

    stream     PUB -> SUB        topic, sequence, payload
    request    DEALER -> ROUTER  b"", start sequence [, topic]
    reply      ROUTER -> DEALER  b"", topic, sequence, payload   to a request with a topic
                                 b"", sequence, payload          to one without: what older clients understand
    end        sequence -1 with an empty payload, framed like the replies

Sequences are 8 bytes, big-endian. An empty topic in a request means all topics; engines understand only requests
without one. Losses are by high-water mark: a PUB socket drops for the subscriber that is full and never waits.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeAlias

import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports.base import MAX_DRAIN, Message, ReplaySource
from kvist.events.transports.endpoint import Endpoint

SEND_HWM = 10_000
"""Messages kept for one slow subscriber before it starts to lose them: as many as the replay buffer has for it."""
RECEIVE_HWM = 10_000
"""Messages a subscriber keeps unread; the publisher keeps what does not fit, up to its own mark."""
REPLAY_HWM = 1_000
"""Replies in flight to one client: the replay thread waits for the client beyond that."""
REPLAY_SEND_TIMEOUT_S = 2.0
"""How long one reply may wait for its client; then the rest of that replay is dropped."""
MAX_MESSAGE_BYTES = 64 << 20
"""The payload a subscriber accepts. Not ZeroMQ's own limit, which would end the connection for good."""
MAX_REQUEST_BYTES = 4096
"""A frame of a replay request."""
PING_INTERVAL_S, PING_TIMEOUT_S = 5.0, 15.0
"""When a subscriber gives up a connection whose other end vanished without a word, and connects anew."""
MAX_REPLAY_BYTES = 1 << 30
"""Payload a subscriber accepts in one replay; more is a peer gone wrong."""

_logger = logging.getLogger(__name__)

_Socket: TypeAlias = zmq.Socket[bytes]
_Context: TypeAlias = zmq.Context[_Socket]
_REPLAY_RETRY_MS = 10
_END = (-1).to_bytes(8, "big", signed=True)


class ZmqPublication:
    """The publisher's end: binds a PUB socket for the stream and a ROUTER socket, with its own thread, for replay."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUB)
        self._stream.setsockopt(zmq.SNDHWM, SEND_HWM)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, REPLAY_HWM)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        # Mandatory: a full or vanished client is an error here, instead of a reply that silently disappears.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._server: _ReplayServer | None = None
        try:
            address = _bind(self._stream, endpoint.address)
            replay_address = None if endpoint.replay_address is None else _bind(self._router, endpoint.replay_address)
        except InvalidValueError:
            self._context.destroy(linger=0)
            raise
        self._endpoint = Endpoint(address, replay_address)

    @property
    def endpoint(self) -> str:
        """The URL a subscriber connects to, with real port numbers; a wildcard host stays one."""
        return self._endpoint.url

    def serve_replay(self, source: ReplaySource) -> None:
        """Answer replay requests from `source`, in a thread of its own."""
        if self._endpoint.replay_address is not None:
            self._server = _ReplayServer(self._context, self._router, source)

    def send(self, message: Message) -> None:
        """Hand the message to the socket; never waits."""
        frames = (message.topic, message.sequence.to_bytes(8, "big"), message.payload)
        try:
            self._stream.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as error:
            raise BlockingIOError("the stream is full") from error
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot send to {self._endpoint.address}: {error.strerror}") from error

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait up to `timeout_s` for connected subscribers to take what was sent, then release everything."""
        if self._context.closed:
            return
        if self._server is not None:
            self._server.close()
        self._router.close(linger=0)
        self._stream.close(linger=int(timeout_s * 1000))
        self._context.term()


class _ReplayServer:
    """A thread that answers replay requests on a ROUTER socket until it is closed."""

    def __init__(self, context: _Context, router: _Socket, source: ReplaySource) -> None:
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
        if len(request) not in (3, 4) or len(request[2]) != 8:
            return
        client, start = request[0], int.from_bytes(request[2], "big")
        has_topic = len(request) == 4
        for message in self._source.replay(request[3] if has_topic else b"", start):
            topic = (message.topic,) if has_topic else ()
            self._send((client, b"", *topic, message.sequence.to_bytes(8, "big"), message.payload))
        self._send((client, b"", *((b"",) if has_topic else ()), _END, b""))

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


class ZmqSubscription:
    """A subscriber's end: a SUB socket for all topics, and a fresh DEALER socket for each replay."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_malformed = 0
        self._num_connects = 0
        self._endpoint = endpoint
        # An engine that may connect from anywhere has told nobody where it can be asked.
        self._replay_address = None if _is_wildcard(endpoint.replay_address) else endpoint.replay_address
        self._context: _Context = zmq.Context.instance()

    @property
    def num_connects(self) -> int:
        """How often the peer was connected so far; ZeroMQ announces a connection before it hands out what it brings."""
        with suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                self._num_connects += 1
        return self._num_connects

    async def __aenter__(self) -> Self:
        """Connect (or bind, if the endpoint says so) in the background."""
        self._stream = _LoopSocket(self._context, zmq.SUB)
        self._stream.socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        self._stream.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._stream.socket.setsockopt(zmq.HEARTBEAT_IVL, int(PING_INTERVAL_S * 1000))
        self._stream.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(PING_TIMEOUT_S * 1000))
        self._stream.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._stream.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        self._monitor = self._stream.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            if self._endpoint.is_bound:
                _bind(self._stream.socket, self._endpoint.address)
            else:
                _connect(self._stream.socket, self._endpoint.address)
        except InvalidValueError:
            self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sockets; unread messages are gone."""
        self._release()

    def _release(self) -> None:
        self._stream.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._stream.close()

    async def receive(self) -> list[Message]:
        """Wait for at least one message; return at most `MAX_DRAIN`."""
        while True:
            messages = [message for message in map(self._message, await self._stream.receive()) if message is not None]
            if messages:
                return messages

    async def replay(self, topic: bytes | None, start_sequence: int, timeout_s: float) -> list[Message] | None:
        """Ask with a fresh socket, so that a late answer to an abandoned request cannot be taken for this one's."""
        if self._replay_address is None or await _is_refused(self._replay_address, timeout_s):
            return None
        dealer = _LoopSocket(self._context, zmq.DEALER)
        try:
            dealer.socket.setsockopt(zmq.RCVHWM, REPLAY_HWM)
            _connect(dealer.socket, self._replay_address)
            request = (b"", start_sequence.to_bytes(8, "big"), *(() if topic is None else (topic,)))
            dealer.socket.send_multipart(request, zmq.NOBLOCK)
            return await self._collect(dealer, timeout_s)
        except TimeoutError:
            return None
        finally:
            dealer.close()

    async def _collect(self, dealer: _LoopSocket, timeout_s: float) -> list[Message] | None:
        messages: list[Message] = []
        size_bytes = 0
        while size_bytes <= MAX_REPLAY_BYTES:
            async with asyncio.timeout(timeout_s):
                replies = await dealer.receive()
            for frames in replies:
                if len(frames) >= 3 and frames[-2] == _END:
                    return messages
                message = self._message(frames[1:] if len(frames) == 4 else frames)
                if message is not None:
                    messages.append(message)
                    size_bytes += len(message.payload)
        return None

    def _message(self, frames: list[bytes]) -> Message | None:
        if len(frames) != 3 or len(frames[1]) != 8 or len(frames[2]) > MAX_MESSAGE_BYTES:
            self.num_malformed += 1
            if self.num_malformed == 1:
                sizes = [len(frame) for frame in frames[:4]]
                _logger.warning(
                    "malformed message skipped: not topic, 8 bytes and a payload of at most %d MiB "
                    "source=%s num_frames=%d frame_bytes=%s",
                    MAX_MESSAGE_BYTES >> 20,
                    self._endpoint.address,
                    len(frames),
                    sizes,
                )
            return None
        return Message(frames[0], int.from_bytes(frames[1], "big"), frames[2])


class _LoopSocket:
    """A socket read in bulk from an event loop: one wake-up for many messages, no future for each.

    ZeroMQ's file descriptor is edge-triggered: it is silent about what was there before, so the socket is emptied, and
    asked once more, before waiting.
    """

    def __init__(self, context: _Context, kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = self.socket.FD
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._readable.set()

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
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                await self._readable.wait()

    def close(self) -> None:
        """Stop listening and close the socket."""
        self._loop.remove_reader(self._fd)
        self.socket.close(linger=0)


def _bind(zmq_socket: _Socket, address: str) -> str:
    _refuse_to_steal(address)
    _allow_ipv6(zmq_socket, address)
    bindable = f"{address.removesuffix(':0')}:*" if address.endswith(":0") else address
    try:
        zmq_socket.bind(bindable)
    except zmq.ZMQError as error:
        raise InvalidValueError("endpoint", address, f"an address that can be bound ({error.strerror})") from error
    return zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _refuse_to_steal(address: str) -> None:
    """Raise if somebody listens at an ipc path: ZeroMQ would take it over without a word."""
    if not address.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError, ConnectionRefusedError):
        probe.connect(address.removeprefix("ipc://"))
        raise InvalidValueError("endpoint", address, "a path where nobody listens")


def _connect(zmq_socket: _Socket, address: str) -> None:
    _allow_ipv6(zmq_socket, address)
    try:
        zmq_socket.connect(address)
    except zmq.ZMQError as error:
        raise InvalidValueError("endpoint", address, f"an address to connect to ({error.strerror})") from error


def _allow_ipv6(zmq_socket: _Socket, address: str) -> None:
    """Allow IPv6 where it is written out; a name stays IPv4, for engines listen on that by default."""
    if address.startswith("tcp://["):
        zmq_socket.setsockopt(zmq.IPV6, 1)


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
