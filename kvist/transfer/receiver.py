"""A rank's half that receives: asks each rank that holds a prompt for its part, and hears how that went."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer import commands, messages
from kvist.transfer import receiver_protocol as protocol
from kvist.transfer.bounce import Bounce, Lease
from kvist.transfer.heads import Part
from kvist.transfer.memory import KvMemory, Share
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


@dataclass(slots=True)
class _Fetching:
    """A fetch under way; `rooms` is where each rank may put all of its part, None for who must not."""

    fetch: commands.Fetch
    block_ids_per_group: tuple[tuple[int, ...], ...]
    num_bytes: int
    lease: Lease | None
    rooms: tuple[messages.Extent | None, ...]
    began_s: float
    arrived_s: float | None = None
    has_failed: bool = False

    def times(self, ended_s: float, error: str | None) -> commands.FetchTimes:
        arrived_s = ended_s if self.arrived_s is None and error is None else self.arrived_s
        counts = (self.num_bytes, len(self.fetch.endpoints))
        return commands.FetchTimes(self.fetch.request_id, self.began_s, arrived_s, ended_s, *counts, error)


class Receiver:
    """Fetches blocks from any number of workers, from each of their ranks over a socket of its own. Not thread-safe."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        memory: KvMemory,
        limits: commands.TransferLimits,
        report: Callable[[commands.Report], None],
        bounce: Bounce | None,
    ) -> None:
        self._bounce = bounce
        self._memory = memory
        self._report = report
        self.protocol = protocol.ReceiverProtocol(limits)
        self._senders = SenderConnections(context, poller, memory.hello.worker.encode())
        self._fetching: dict[int, _Fetching] = {}
        self._transfer_ids: dict[str, int] = {}
        self._scatterings: dict[int, Future[None]] = {}
        self._ids = itertools.count()
        self.num_malformed = 0
        self.bytes_received = 0
        self.fetch_seconds = 0.0
        self.observer: commands.Observer = lambda _: None

    @property
    def quarantined_bytes(self) -> int:
        """Return the bytes of blocks that have failed to be filled, and may still be written to. Any thread may ask."""
        fetching = list(self._fetching.values())  # at once: others come and go meanwhile
        return sum(each.num_bytes for each in fetching if each.has_failed)

    @property
    def has_scatters(self) -> bool:
        return bool(self._scatterings)

    def fetch(self, fetch: commands.Fetch, now_s: float) -> None:
        """Ask every rank that holds the prompt; what comes of it is reported."""
        block_ids = self._memory.missing(fetch.block_ids_per_group, fetch.num_tokens)
        busy = {endpoint for each in self._fetching.values() for endpoint in each.fetch.endpoints}
        try:
            commands.check_endpoints(fetch.endpoints)
            shares = self._memory.shares(block_ids, len(fetch.endpoints))
            senders = [self._senders.connect(endpoint, busy.union(fetch.endpoints)) for endpoint in fetch.endpoints]
        except InvalidValueError as error:
            self._report(commands.FetchFailed(fetch.request_id, str(error)))
            self._report(commands.FetchReleased(fetch.request_id))
            return
        transfer_id = next(self._ids)
        lease, rooms = self._reserve(shares)
        fetching = _Fetching(fetch, block_ids, self._memory.num_bytes(block_ids), lease, rooms, now_s)
        self._fetching[transfer_id] = fetching
        self._transfer_ids[fetch.request_id] = transfer_id
        ranks_with_room = [rank for rank, room in enumerate(rooms) if room is not None]
        self.protocol.open(transfer_id, fetch.endpoints, ranks_with_room, now_s)
        for rank, (sender, room) in enumerate(zip(senders, rooms, strict=True)):
            sender.send(
                messages.ReceiveRequest(
                    messages.PROTOCOL_VERSION,
                    transfer_id,
                    self._memory.hello,
                    Part(rank, len(senders)),
                    fetch.remote_request_id,
                    fetch.num_tokens,
                    block_ids,
                    room,
                )
            )

    def cancel(self, request_id: str, now_s: float) -> None:
        """End a fetch that nobody waits for; one that has ended is no error."""
        transfer_id = self._transfer_ids.get(request_id)
        if transfer_id is not None:
            self._do(self.protocol.fail(transfer_id, "cancelled", now_s), now_s)

    def receive(self, now_s: float) -> None:
        for sender in self._senders:
            has_lost = sender.has_newly_lost()
            for frames in sender.received():
                try:
                    if len(frames) != 1:
                        raise MalformedMessageError(sender.endpoint, f"{len(frames)} frames, expected a message")
                    self._handle(sender.endpoint, frames[0], now_s)
                except MalformedMessageError as error:
                    self.num_malformed += 1
                    logger.warning("malformed transfer message source=%s reason=%s", error.source, error.reason)
            if has_lost:  # what it said before counts
                self.tick(now_s)

    def poll_scatters(self, now_s: float) -> None:
        """Go on with the transfers whose bytes have come out of the bounce region."""
        for transfer_id, scattering in list(self._scatterings.items()):
            if scattering.done():
                del self._scatterings[transfer_id]
                error = scattering.exception()
                reason = None if error is None else str(error)
                self._do(self.protocol.scattered(transfer_id, reason, now_s), now_s)

    def tick(self, now_s: float) -> None:
        """Notice what takes too long, and workers that have died; what is not there and not needed is not dialled."""
        self._do(self.protocol.tick(now_s), now_s)
        for sender in self._senders:
            if not sender.is_suspect:
                continue
            transfer_ids = self._ids_of(sender.endpoint)
            if not transfer_ids:
                self._senders.drop(sender)
                continue
            ended_ids = self._senders.asked_before_its_end(sender, transfer_ids)
            self._do(self.protocol.sender_gone(sender.endpoint, ended_ids, now_s), now_s)

    def fail_all(self, reason: str) -> None:
        """Report what is under way as failed, for good: its blocks stay out of use."""
        for each in self._fetching.values():
            if not each.has_failed:
                self._report(commands.FetchFailed(each.fetch.request_id, reason))

    def _reserve(self, shares: Sequence[Share]) -> tuple[Lease | None, tuple[messages.Extent | None, ...]]:
        """Return room to bounce through, and which part of it is whose; none for who writes nothing."""
        lease = None
        if self._bounce is not None:
            num_bytes, num_pieces = (sum(counts) for counts in zip(*shares, strict=True))
            lease = self._bounce.reserve(num_bytes, num_pieces, sum(share.num_bytes > 0 for share in shares))
        if lease is None:
            return None, (None,) * len(shares)
        ends = itertools.accumulate((share.num_bytes for share in shares), initial=lease.address)
        rooms = (messages.Extent(base, share.num_bytes) for base, share in zip(ends, shares, strict=False))
        return lease, tuple(room if room.size_bytes else None for room in rooms)

    def _handle(self, endpoint: str, payload: bytes, now_s: float) -> None:
        match messages.decode_message(payload, endpoint):
            case messages.Result() as result:
                self._do(self.protocol.reported(endpoint, result, now_s), now_s)
            case messages.Progress(transfer_id=transfer_id):
                self.protocol.progressed(endpoint, transfer_id, now_s)
            case messages.Ping():
                pass
            case messages.Refusal(transfer_id=transfer_id) as refusal:
                for each in self._ids_of(endpoint) if transfer_id is None else [transfer_id]:
                    self._do(self.protocol.refused(endpoint, each, str(refusal), now_s), now_s)
            case _:
                raise MalformedMessageError(endpoint, "a message for a sender")

    def _ids_of(self, endpoint: str) -> list[int]:
        return [item for item, fetching in self._fetching.items() if endpoint in fetching.fetch.endpoints]

    def _do(self, actions: list[protocol.ReceiverAction], now_s: float) -> None:
        for action in actions:
            transfer_id, fetching = action.transfer_id, self._fetching[action.transfer_id]
            request_id, lease, bounce = fetching.fetch.request_id, fetching.lease, self._bounce
            match action:
                case protocol.SendCancel(rank=rank):
                    sender = self._senders.get(fetching.fetch.endpoints[rank])
                    if sender is not None:
                        sender.send(messages.Cancel(transfer_id, fetching.fetch.remote_request_id))
                case protocol.StartScatter(ranks=ranks) if bounce is not None:
                    fetching.arrived_s = now_s
                    self._scatterings[transfer_id] = self._scatter(bounce, fetching, ranks)
                case protocol.Fail(reason=reason):
                    fetching.has_failed = True
                    if bounce is not None and lease is not None:
                        bounce.quarantine(lease)
                    self.observer(fetching.times(now_s, reason))
                    self._report(commands.FetchFailed(request_id, reason))
                case protocol.Release():
                    if bounce is not None and lease is not None:
                        bounce.release(lease)
                    if fetching.has_failed:
                        self._forget(transfer_id)
                        self._report(commands.FetchReleased(request_id))
                case protocol.Complete(first_token_id=first_token_id):
                    self._forget(transfer_id)
                    self.bytes_received += fetching.num_bytes
                    self.fetch_seconds += now_s - fetching.began_s
                    self.observer(fetching.times(now_s, None))
                    self._report(commands.FetchCompleted(request_id, first_token_id))
                case _:
                    pass

    def _scatter(self, bounce: Bounce, fetching: _Fetching, ranks: Sequence[int]) -> Future[None]:
        """Copy what these ranks have put into their rooms to where it belongs."""
        parts, num_ranks = [], len(fetching.rooms)
        for rank in ranks:
            room = fetching.rooms[rank]
            assert room is not None, "only who has room can have bounced"
            parts.append((room.base, self._memory.pieces_of(fetching.block_ids_per_group, Part(rank, num_ranks))))
        return bounce.scatter(parts)

    def _forget(self, transfer_id: int) -> None:
        del self._transfer_ids[self._fetching.pop(transfer_id).fetch.request_id]
