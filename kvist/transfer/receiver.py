"""The receiving half of a rank: asks each rank that holds a prompt for its part, and reports when all have arrived.

    asked ──► complete
      │
      └──► quarantined ──► released

A fetch ends once: it is complete when every sender has reported success and bounced bytes are in their blocks, and it
fails at the first failure. A failure is reported at once, and quarantines the fetch: its *memory* may still be written
to, and must not be reused until it is released. Time alone never releases it: every sender has to report, or be known
to be dead. Times are arguments; the module reads no clock.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer import commands, messages
from kvist.transfer.agents.base import Int64s
from kvist.transfer.bounce import COPY_ERRORS, Bounce
from kvist.transfer.heads import Part
from kvist.transfer.memory import incoming_pieces, prompt_blocks
from kvist.transfer.messages import MAX_MESSAGE_BYTES, Cancel, ReceiveRequest, encode_message

logger = logging.getLogger(__name__)

_MAX_PROBES = 16
_PROBE_TIMEOUT_S = 0.2
_MAX_IDLE_S = 60.0


class Probe(NamedTuple):
    """A thread's check whether the process at an endpoint has ended.

    The result holds for `transfer_ids`, which were asked for before: later ones may be with a new process there.
    """

    transfer_ids: Collection[int]
    has_ended: Future[bool]
    is_certain: bool = False
    """Whether what the process sent before its end has had time to arrive."""


@dataclass(slots=True, eq=False)
class SenderConnection:
    """A connection to a rank, last used for a fetch at `used_at_s`."""

    endpoint: str
    dealer: zmq.Socket[bytes]
    used_at_s: float
    probe: Probe | None = None

    def send(self, message: ReceiveRequest | Cancel) -> None:
        """Send a message, or lose it if the queue is full: timeouts and repeated cancels make up for that."""
        try:
            self.dealer.send(encode_message(message), zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("transfer message lost endpoint=%s: its queue is full", self.endpoint)

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the messages that have arrived; the connection may be dropped meanwhile."""
        while not self.dealer.closed and self.dealer.poll(0):
            yield self.dealer.recv_multipart()


class SenderConnections:
    """A DEALER socket to each sender, registered with the caller's poller. Not thread-safe."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, identity: bytes) -> None:
        self._context = context
        self._poller = poller
        self._identity = identity
        self._senders: dict[str, SenderConnection] = {}
        self.threads = ThreadPoolExecutor(_MAX_PROBES, "kvist-probe")

    def __iter__(self) -> Iterator[SenderConnection]:
        """Yield every sender; they may be dropped meanwhile."""
        return iter(list(self._senders.values()))

    def connect(self, endpoint: str, now_s: float) -> SenderConnection:
        """Return the connection to an endpoint; raises InvalidValueError, or ZMQError if there are too many sockets."""
        sender = self._senders.get(endpoint)
        if sender is not None:
            sender.used_at_s = now_s
            return sender
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.IDENTITY, self._identity)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close()
            raise InvalidValueError("remote_endpoints", endpoint, f"one to connect to ({error})") from None
        self._poller.register(dealer, zmq.POLLIN)
        sender = self._senders[endpoint] = SenderConnection(endpoint, dealer, now_s)
        return sender

    def drop(self, sender: SenderConnection) -> None:
        del self._senders[sender.endpoint]
        self._poller.unregister(sender.dealer)
        sender.dealer.close()

    def find_lost(self, sender: SenderConnection, transfer_ids: Collection[int]) -> Collection[int]:
        """Return those of the transfers that a sender was asked for before its process ended, as far as is known.

        A check runs in the background; a later call returns the ids for which it was begun. The first call that finds
        the process ended returns nothing, since its last reports may still be on their way.
        """
        if sender.probe is None:
            sender.probe = Probe(transfer_ids, self.threads.submit(has_process_ended, sender.endpoint))
        probe = sender.probe
        if not probe.has_ended.done():
            return ()
        if probe.has_ended.result() and not probe.is_certain:
            sender.probe = probe._replace(is_certain=True)
            return ()
        sender.probe = None
        return probe.transfer_ids if probe.has_ended.result() else ()


def has_process_ended(endpoint: str) -> bool:
    """Return whether the host refuses connections; a worker listens as long as its process lives."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S)):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False


@dataclass(slots=True, eq=False)
class _Transfer:
    """A fetch under way; the ranks in `unreported` may be writing.

    `rooms` is the part of `room` into which each rank may write all its `pieces`, None if it may not. `bounced` is what
    is to be copied from there: address, and pieces.
    """

    transfer_id: int
    fetch: commands.Fetch
    senders: list[SenderConnection]
    pieces: list[Int64s]
    num_bytes: int
    room: int | None
    rooms: list[messages.Extent | None]
    unreported: set[int]
    deadline_s: float
    bounced: list[tuple[int, Int64s]] = field(default_factory=list)
    first_token_id: int | None = None
    has_failed: bool = False


class Receiver:
    """Fetches blocks from any number of workers, from each of their ranks over a socket of its own. Not thread-safe.

    Whatever a peer sends, it neither raises nor reuses memory that may still be written to.
    """

    def __init__(
        self,
        senders: SenderConnections,
        hello: messages.Hello,
        limits: commands.TransferLimits,
        report: Callable[[commands.Report], None],
        bounce: Bounce | None,
    ) -> None:
        self._senders = senders
        self._hello = hello
        self._limits = limits
        self._report = report
        self._bounce = bounce
        self._transfers: dict[int, _Transfer] = {}
        self._ids = itertools.count()
        self.num_malformed = 0
        self.bytes_received = 0

    @property
    def quarantined_bytes(self) -> int:
        """Return the bytes of failed fetches' blocks, which may still be written to. Any thread may call it."""
        transfers = list(self._transfers.values())  # a copy, since transfers begin and end meanwhile
        return sum(each.num_bytes for each in transfers if each.has_failed)

    def fetch(self, fetch: commands.Fetch, now_s: float) -> None:
        """Ask every rank that holds the prompt; the outcome is reported."""
        hello, ranks = self._hello, range(len(fetch.endpoints))
        block_ids = tuple(
            prompt_blocks(table, fetch.num_tokens, hello.block_size) for table in fetch.block_ids_per_group
        )
        try:
            commands.check_endpoints(fetch.endpoints)
            pieces = [incoming_pieces(hello, block_ids, Part(rank, len(ranks))) for rank in ranks]
            senders = [self._senders.connect(endpoint, now_s) for endpoint in fetch.endpoints]
        except (InvalidValueError, zmq.ZMQError) as error:  # the latter where no more sockets can be opened
            self._report(commands.FetchFailed(fetch.request_id, str(error)))
            self._report(commands.FetchReleased(fetch.request_id))
            return
        sizes = [int(each[:, 1].sum()) for each in pieces]
        room = None if self._bounce is None else self._bounce.reserve(sum(sizes), sum(map(len, pieces)))
        rooms: list[messages.Extent | None] = [None for _ in ranks]
        if room is not None:
            starts = itertools.accumulate(sizes, initial=room)
            rooms = [messages.Extent(at, size) if size else None for at, size in zip(starts, sizes, strict=False)]
        transfer = _Transfer(
            next(self._ids),
            fetch,
            senders,
            pieces,
            sum(sizes),
            room,
            rooms,
            unreported=set(ranks),
            deadline_s=now_s + self._limits.transfer_timeout_s,
        )
        self._transfers[transfer.transfer_id] = transfer
        for rank, sender in enumerate(senders):
            sender.send(
                messages.ReceiveRequest(
                    messages.PROTOCOL_VERSION,
                    transfer.transfer_id,
                    hello,
                    Part(rank, len(senders)),
                    fetch.remote_request_id,
                    fetch.num_tokens,
                    block_ids,
                    rooms[rank],
                )
            )

    def cancel(self, request_id: str, now_s: float) -> None:
        """Fail a fetch, if it has not ended."""
        for transfer in [each for each in self._transfers.values() if each.fetch.request_id == request_id]:
            self._fail(transfer, "cancelled", now_s)

    def receive(self, now_s: float) -> None:
        for sender in self._senders:
            for frames in sender.receive():
                try:
                    if len(frames) != 1:
                        raise MalformedMessageError(sender.endpoint, f"{len(frames)} frames, expected a message")
                    self._handle(sender, messages.decode_message(frames[0], sender.endpoint), now_s)
                except MalformedMessageError as error:
                    self.num_malformed += 1
                    logger.warning("malformed transfer message source=%s reason=%s", error.source, error.reason)

    def tick(self, now_s: float) -> None:
        """Fail fetches that take too long or whose senders have died, repeat cancels, and drop idle connections."""
        for transfer in list(self._transfers.values()):
            if now_s >= transfer.deadline_s and not transfer.has_failed:
                self._fail(transfer, f"no completion within {self._limits.transfer_timeout_s:g} s", now_s)
            elif now_s >= transfer.deadline_s:
                self._send_cancels(transfer, now_s)
        for sender in self._senders:
            waiting = {each.transfer_id for each, _ in self._unreported(sender)}
            if not waiting and now_s - sender.used_at_s >= _MAX_IDLE_S:
                self._senders.drop(sender)
            lost_ids = self._senders.find_lost(sender, waiting) if waiting else ()
            for transfer, rank in self._unreported(sender):
                if transfer.transfer_id in lost_ids:
                    self._on_rank_ended(rank, transfer, now_s, f"rank {rank} at {sender.endpoint} is gone")

    def _handle(self, sender: SenderConnection, message: messages.Message, now_s: float) -> None:
        """Handle a rank's message; it is ignored for transfers that have ended, or whose end the rank has reported."""
        if isinstance(message, messages.ReceiveRequest | messages.Cancel):
            raise MalformedMessageError(sender.endpoint, "a message for a sender")
        if isinstance(message, messages.Ping):
            return
        for transfer, rank in self._unreported(sender):
            if message.transfer_id not in (None, transfer.transfer_id):
                continue
            match message:
                case messages.Progress() if not transfer.has_failed:
                    transfer.deadline_s = now_s + self._limits.transfer_timeout_s
                case messages.Refusal():
                    self._on_rank_ended(rank, transfer, now_s, str(message))
                case messages.Result(status=status, first_token_id=first_token_id):
                    room, is_written = transfer.rooms[rank], status is messages.ResultStatus.SUCCESS
                    if status is messages.ResultStatus.BOUNCED and room is not None:
                        transfer.bounced.append((room.base, transfer.pieces[rank]))
                        is_written = True
                    transfer.first_token_id = first_token_id
                    failure = None if is_written else f"rank {rank} reports {status.name}"
                    self._on_rank_ended(rank, transfer, now_s, failure)

    def _unreported(self, sender: SenderConnection) -> list[tuple[_Transfer, int]]:
        """Return the transfers whose end a sender has not reported, with its rank."""
        asked = [(each, each.senders.index(sender)) for each in self._transfers.values() if sender in each.senders]
        return [(transfer, rank) for transfer, rank in asked if rank in transfer.unreported]

    def _on_rank_ended(self, rank: int, transfer: _Transfer, now_s: float, failure: str | None) -> None:
        """End the part of a rank that will not write any more."""
        transfer.unreported.discard(rank)
        if failure is None:
            self._end_if_reported(transfer, now_s)
        else:
            self._fail(transfer, failure, now_s)

    def _fail(self, transfer: _Transfer, reason: str, now_s: float) -> None:
        """Report a transfer's failure, once; its memory is released when no rank writes any more."""
        if not transfer.has_failed:
            transfer.has_failed = True
            if self._bounce is not None and transfer.room is not None:
                self._bounce.quarantine(transfer.room)
            self._report(commands.FetchFailed(transfer.fetch.request_id, reason))
            self._send_cancels(transfer, now_s)
        self._end_if_reported(transfer, now_s)

    def _send_cancels(self, transfer: _Transfer, now_s: float) -> None:
        """Cancel at every rank that may be writing; `tick` repeats it until they report."""
        transfer.deadline_s = now_s + self._limits.cancel_retry_s
        for rank in transfer.unreported:
            transfer.senders[rank].send(Cancel(transfer.transfer_id, transfer.fetch.remote_request_id))

    def _end_if_reported(self, transfer: _Transfer, now_s: float) -> None:
        """Scatter bounced bytes and end a transfer, once all ranks have reported."""
        if transfer.unreported:
            return
        if transfer.bounced and not transfer.has_failed:
            assert self._bounce is not None, "there is no room without regions"
            try:
                self._bounce.scatter(transfer.bounced)
            except COPY_ERRORS as error:
                self._fail(transfer, f"scatter: {error}", now_s)
                return
        del self._transfers[transfer.transfer_id]
        request_id = transfer.fetch.request_id
        if self._bounce is not None and transfer.room is not None:
            self._bounce.release(transfer.room)
        if transfer.has_failed:
            self._report(commands.FetchReleased(request_id))
            return
        self.bytes_received += transfer.num_bytes
        self._report(commands.FetchCompleted(request_id, transfer.first_token_id))
