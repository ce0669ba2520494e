"""The workers' ranks that prompts are fetched from: a connection to each, and whether its process has ended."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvist.errors import InvalidValueError
from kvist.transfer.messages import MAX_MESSAGE_BYTES, Cancel, ReceiveRequest, encode_message

logger = logging.getLogger(__name__)

_MAX_SENDERS = 256
_MAX_PROBES = 16
_PROBE_TIMEOUT_S = 0.2
_LOST = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)


class Probe(NamedTuple):
    """Whether whoever listened at an endpoint has ended, found out by a thread.

    That is said of the process that was asked for `transfer_ids`: one that listens there later has not heard of them.
    """

    transfer_ids: Collection[int]
    has_ended: Future[bool]


@dataclass(slots=True, eq=False)
class SenderConnection:
    """A rank to fetch from; it is suspect while there is no connection."""

    endpoint: str
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    is_suspect: bool = False
    probe: Probe | None = None

    def send(self, message: ReceiveRequest | Cancel) -> None:
        """Send, or lose the message where a queue is full: timeouts and repeated cancels get over that."""
        try:
            self.dealer.send(encode_message(message), zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("transfer message lost endpoint=%s: its queue is full", self.endpoint)

    def received(self) -> Iterator[list[bytes]]:
        """Yield the messages that have arrived; it may be dropped meanwhile."""
        while not self.dealer.closed and self.dealer.poll(0):
            yield self.dealer.recv_multipart()

    def has_newly_lost(self) -> bool:
        """Return whether the connection is lost since it was last asked about; it may be dropped meanwhile."""
        has_lost = False
        while not self.monitor.closed and self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_suspect, self.probe = False, None
            elif event in _LOST and not self.is_suspect:
                self.is_suspect = has_lost = True
        return has_lost


class SenderConnections:
    """A DEALER socket to each sender, in the poller of whoever reads them. Not thread-safe."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, identity: bytes) -> None:
        self._context = context
        self._poller = poller
        self._identity = identity
        self._senders: dict[str, SenderConnection] = {}
        self._threads = ThreadPoolExecutor(_MAX_PROBES, "kvist-probe")

    def __iter__(self) -> Iterator[SenderConnection]:
        """Yield every sender; they may be dropped meanwhile."""
        return iter(list(self._senders.values()))

    def get(self, endpoint: str) -> SenderConnection | None:
        return self._senders.get(endpoint)

    def connect(self, endpoint: str, busy: Collection[str]) -> SenderConnection:
        """Return the sender at an endpoint, if need be instead of an idle one; raises InvalidValueError."""
        sender = self._senders.get(endpoint)
        if sender is not None:
            return sender
        idle = next((each for each in self._senders.values() if each.endpoint not in busy), None)
        if len(self._senders) >= _MAX_SENDERS and idle is not None:
            self.drop(idle)
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.IDENTITY, self._identity)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor = dealer.get_monitor_socket()
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            _close(dealer, monitor)
            raise InvalidValueError("remote_endpoints", endpoint, f"one to connect to ({error})") from None
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        sender = self._senders[endpoint] = SenderConnection(endpoint, dealer, monitor)
        return sender

    def drop(self, sender: SenderConnection) -> None:
        del self._senders[sender.endpoint]
        self._poller.unregister(sender.dealer)
        self._poller.unregister(sender.monitor)
        _close(sender.dealer, sender.monitor)

    def asked_before_its_end(self, sender: SenderConnection, transfer_ids: Collection[int]) -> Collection[int]:
        """Return what a suspect was asked for before its process ended; nothing as long as that is not known."""
        if sender.probe is None:
            sender.probe = Probe(transfer_ids, self._threads.submit(has_process_ended, sender.endpoint))
        if not sender.probe.has_ended.done():
            return ()
        probe, sender.probe = sender.probe, None
        return probe.transfer_ids if probe.has_ended.result() else ()


def has_process_ended(endpoint: str) -> bool:
    """Return whether a host says that nothing listens there, as a worker does as long as its process lives."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S)):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False


def _close(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    dealer.disable_monitor()
    monitor.close()
    dealer.close()
