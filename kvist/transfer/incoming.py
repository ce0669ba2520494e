"""A worker's half that receives: greets the workers that hold prompts, asks for blocks, and hears how that went."""

from __future__ import annotations

import itertools
import logging
import socket
from contextlib import closing
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvist.errors import MalformedMessageError
from kvist.transfer.bounce import Bounce, Lease, Scattering
from kvist.transfer.frames import decode_report, plan_scatter
from kvist.transfer.handoff import TransferReports, WantedBlocks
from kvist.transfer.memory import KvMemory
from kvist.transfer.messages import (
    Cancel,
    ForeignHello,
    Hello,
    ReceiveRequest,
    Refusal,
    decode_message,
    encode_message,
)
from kvist.transfer.outgoing import judge_greeting
from kvist.transfer.receiver import (
    Complete,
    Fail,
    Fetch,
    Receiver,
    ReceiverAction,
    Release,
    SendCancel,
    SendRequest,
    StartScatter,
)
from kvist.transfer.sessions import TransferLimits
from kvist.transfer.slices import TokenRange, raw_cached_tokens, slice_of_tables
from kvist.transfer.wire import MAX_MESSAGE_BYTES, MESSAGE, PING, REPORT

logger = logging.getLogger(__name__)

_MAX_SOURCES = 256
_PROBE_TIMEOUT_S = 0.2
_LOST = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)


@dataclass(slots=True)
class _Source:
    """A worker to fetch from. It is suspect while there is no connection."""

    endpoint: str
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    is_greeted: bool = False
    is_suspect: bool = False
    unstarted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Fetching:
    wanted: WantedBlocks
    block_ids_per_group: tuple[tuple[int, ...], ...]
    num_bytes: int
    began_s: float
    lease: Lease | None
    has_failed: bool = False


class Incoming:
    """Fetches blocks from any number of workers, each over a DEALER socket of its own. Not thread-safe."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        memory: KvMemory,
        hello: Hello,
        limits: TransferLimits,
        reports: TransferReports,
        bounce: Bounce,
    ) -> None:
        self._context = context
        self._bounce = bounce
        self._scatterings: dict[int, Scattering] = {}
        self._poller = poller
        self._memory = memory
        self._hello = hello
        self._reports = reports
        self.receiver = Receiver(limits)
        self._sources: dict[str, _Source] = {}
        self._fetching: dict[int, _Fetching] = {}
        self._transfer_ids: dict[str, int] = {}
        self._ids = itertools.count()
        self.num_malformed = 0
        self.bytes_received = 0
        self.fetch_seconds = 0.0

    @property
    def quarantined_bytes(self) -> int:
        """Return the bytes of blocks that have failed to be filled, and may still be written to."""
        return sum(each.num_bytes for each in self._fetching.values() if each.has_failed)

    def fetch(self, wanted: WantedBlocks, now_s: float) -> None:
        """Begin to fetch; what comes of it is reported."""
        transfer_id, endpoint = next(self._ids), wanted.endpoints[0]
        size = self._memory.block_size
        cached = raw_cached_tokens(wanted.num_cached_tokens, len(self._memory.groups), size)
        kv_slice = slice_of_tables(wanted.block_ids_per_group, TokenRange(0, wanted.num_tokens), size, cached)
        block_ids = kv_slice.block_ids_per_group
        num_bytes = self._memory.num_bytes(block_ids)
        lease = self._bounce.reserve(num_bytes, sum(map(len, block_ids)), timeout_s=0.0)
        self._fetching[transfer_id] = _Fetching(wanted, block_ids, num_bytes, now_s, lease)
        self._transfer_ids[wanted.request_id] = transfer_id
        region = None if lease is None else lease.extents[0]
        destinations = () if lease is None else self._memory.extents(block_ids)
        self.receiver.open(Fetch(transfer_id, endpoint, {0: region}, destinations), now_s)
        try:
            source = self._source(endpoint)
        except zmq.ZMQError as error:
            self._do(self.receiver.cancel(transfer_id, f"cannot connect to {endpoint!r}: {error}", now_s), now_s)
            return
        if source.is_greeted:
            self._do(self.receiver.start(transfer_id), now_s)
        else:
            source.unstarted.append(transfer_id)
            self._send(source, self._hello)

    def cancel(self, request_id: str, now_s: float) -> None:
        """End a fetch that nobody waits for; one that has ended is no error."""
        transfer_id = self._transfer_ids.get(request_id)
        if transfer_id is not None:
            self._do(self.receiver.cancel(transfer_id, "cancelled", now_s), now_s)

    def receive(self, now_s: float) -> None:
        """Take every message that has arrived."""
        for source in list(self._sources.values()):
            while source.monitor.poll(0):
                self._watch(source, now_s)
            while not source.dealer.closed and source.dealer.poll(0):
                try:
                    self._take(source, source.dealer.recv_multipart(), now_s)
                except MalformedMessageError as error:
                    self.num_malformed += 1
                    logger.warning("malformed transfer message ignored source=%s reason=%s", *_facts(error))

    @property
    def has_scatters(self) -> bool:
        """Return whether `poll_scatters` has something to look at."""
        return bool(self._scatterings)

    def poll_scatters(self, now_s: float) -> None:
        """Go on with the transfers whose bytes have come out of the bounce region."""
        for transfer_id, scattering in list(self._scatterings.items()):
            if scattering.is_done:
                del self._scatterings[transfer_id]
                self._do(self.receiver.scattered(transfer_id, scattering.error, now_s), now_s)

    def tick(self, now_s: float) -> None:
        """Notice what takes too long, and workers that have died."""
        self._do(self.receiver.tick(now_s), now_s)
        busy = {each.wanted.endpoints[0] for each in self._fetching.values()}
        for source in [source for source in self._sources.values() if source.is_suspect]:
            if source.endpoint in busy and has_process_ended(source.endpoint):
                source.is_greeted = False
                source.unstarted.clear()
                self._do(self.receiver.sender_gone(source.endpoint, 0, now_s), now_s)

    def fail_all(self, reason: str) -> None:
        """Report what is under way as failed, for good: its blocks stay out of use."""
        for each in self._fetching.values():
            if not each.has_failed:
                self._reports.fetch_failed(each.wanted.request_id, reason)

    def _source(self, endpoint: str) -> _Source:
        """Return the source at an endpoint, connected; one that nobody uses goes when there are too many."""
        source = self._sources.get(endpoint)
        if source is not None:
            return source
        busy = {each.wanted.endpoints[0] for each in self._fetching.values()}
        idle = [each for each in self._sources.values() if each.endpoint not in busy]
        if len(self._sources) >= _MAX_SOURCES and idle:
            self._drop(idle[0])
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.IDENTITY, self._hello.worker.encode())
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor = dealer.get_monitor_socket()
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError:
            _close(dealer, monitor)
            raise
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        source = self._sources[endpoint] = _Source(endpoint, dealer, monitor)
        return source

    def _drop(self, source: _Source) -> None:
        del self._sources[source.endpoint]
        self._poller.unregister(source.dealer)
        self._poller.unregister(source.monitor)
        _close(source.dealer, source.monitor)

    def _watch(self, source: _Source, now_s: float) -> None:
        event = recv_monitor_message(source.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            source.is_suspect = False
        elif event in _LOST and not source.is_suspect:
            source.is_suspect = True
            self.tick(now_s)

    def _take(self, source: _Source, frames: list[bytes], now_s: float) -> None:
        match frames:
            case [kind, payload] if kind == MESSAGE:
                self._hear(source, payload, now_s)
            case [kind, *report] if kind == REPORT:
                decoded = decode_report(report, source.endpoint)
                self._do(self.receiver.reported(source.endpoint, decoded, now_s), now_s)
            case [kind, *_] if kind == PING:
                pass
            case _:
                raise MalformedMessageError(source.endpoint, f"{len(frames)} frames of no known kind")

    def _hear(self, source: _Source, payload: bytes, now_s: float) -> None:
        match decode_message(payload, source.endpoint):
            case Hello() | ForeignHello() as hello:
                refusal = judge_greeting(self._hello, hello)
                source.is_greeted = refusal is None
                self._start(source, None if refusal is None else f"refused by us: {refusal}", now_s)
            case Refusal(transfer_id=None) as refusal:
                source.is_greeted = False
                self._start(source, f"refused by {source.endpoint}: {refusal}", now_s)
            case Refusal(transfer_id=int(transfer_id)) as refusal:
                self._do(self.receiver.refused(source.endpoint, 0, transfer_id, str(refusal), now_s), now_s)
            case _:
                raise MalformedMessageError(source.endpoint, "a message for a sender")

    def _start(self, source: _Source, refusal: str | None, now_s: float) -> None:
        """Start what has waited for the greeting, or fail it."""
        unstarted, source.unstarted = source.unstarted, []
        for transfer_id in unstarted:
            if refusal is None:
                self._do(self.receiver.start(transfer_id), now_s)
            else:
                self._do(self.receiver.cancel(transfer_id, refusal, now_s), now_s)
        busy = {each.wanted.endpoints[0] for each in self._fetching.values()}
        if refusal is not None and source.endpoint not in busy:
            self._drop(source)

    def _do(self, actions: list[ReceiverAction], now_s: float) -> None:
        for action in actions:
            fetching = self._fetching[action.transfer_id]
            wanted = fetching.wanted
            source = self._sources.get(wanted.endpoints[0])
            match action:
                case SendRequest(transfer_id=transfer_id) if source is not None:
                    self._send(source, self._hello)  # it may be another process by now
                    self._send(source, _request(transfer_id, fetching))
                case SendCancel(transfer_id=transfer_id) if source is not None:
                    self._send(source, Cancel(transfer_id, wanted.remote_request_id))
                case StartScatter(transfer_id=transfer_id, tails=tails) if fetching.lease is not None:
                    self._scatterings[transfer_id] = self._bounce.scatter(fetching.lease, plan_scatter(tails))
                case Fail(reason=reason):
                    fetching.has_failed = True
                    if fetching.lease is not None:
                        self._bounce.quarantine(fetching.lease)
                    self._reports.fetch_failed(wanted.request_id, reason)
                case Release(transfer_id=transfer_id):
                    if fetching.lease is not None:
                        self._bounce.release(fetching.lease)
                    if fetching.has_failed:
                        self._forget(transfer_id)
                        self._reports.fetch_released(wanted.request_id)
                case Complete(transfer_id=transfer_id):
                    self._forget(transfer_id)
                    self.bytes_received += fetching.num_bytes
                    self.fetch_seconds += now_s - fetching.began_s
                    self._reports.fetch_completed(wanted.request_id)
                case _:
                    pass

    def _forget(self, transfer_id: int) -> None:
        del self._transfer_ids[self._fetching.pop(transfer_id).wanted.request_id]

    def _send(self, source: _Source, message: Hello | ReceiveRequest | Cancel) -> None:
        """Send, or lose the message where a queue is full: timeouts and repeated cancels get over that."""
        try:
            source.dealer.send_multipart([MESSAGE, encode_message(message)], zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("transfer message lost endpoint=%s: its queue is full", source.endpoint)


def has_process_ended(endpoint: str) -> bool:
    """Return whether nothing listens at a `tcp://` endpoint, though its host says so: whoever listened has ended.

    A worker's socket is bound for as long as its process lives. A host that does not answer proves nothing.
    """
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


def _request(transfer_id: int, fetching: _Fetching) -> ReceiveRequest:
    wanted = fetching.wanted
    region = None if fetching.lease is None else fetching.lease.extents[0]
    return ReceiveRequest(
        transfer_id=transfer_id,
        request_id=wanted.remote_request_id,
        token_start=0,
        token_end=wanted.num_tokens,
        prompt_len=wanted.num_tokens,
        block_ids_per_group=fetching.block_ids_per_group,
        bounce_base=None if region is None else region.base,
        bounce_size_bytes=None if region is None else region.size_bytes,
    )


def _facts(error: MalformedMessageError) -> tuple[str, str]:
    return error.source, error.reason
