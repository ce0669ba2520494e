"""A rank's half that receives: greets the ranks that hold prompts, asks each for its part, and hears how that went."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import zmq

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer import commands, messages
from kvist.transfer import receiver_protocol as protocol
from kvist.transfer.bounce import Bounce, Lease
from kvist.transfer.heads import Part
from kvist.transfer.memory import KvMemory, Share
from kvist.transfer.sender_connections import SenderConnection, SenderConnections
from kvist.transfer.tails import Extent

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetching:
    """A fetch under way; it is started once none of its ranks is still to greet."""

    fetch: commands.Fetch
    block_ids_per_group: tuple[tuple[int, ...], ...]
    num_bytes: int
    lease: Lease | None
    rooms: tuple[Extent | None, ...]
    ungreeted: set[str]
    began_s: float
    greeted_s: float | None = None
    arrived_s: float | None = None
    has_failed: bool = False

    def times(self, ended_s: float, error: str | None) -> commands.FetchTimes:
        """Return what is told of the fetch, which has just ended."""
        arrived_s = ended_s if self.arrived_s is None and error is None else self.arrived_s
        steps_s = (self.began_s, self.greeted_s, arrived_s, ended_s)
        return commands.FetchTimes(self.fetch.request_id, *steps_s, self.num_bytes, len(self.fetch.endpoints), error)

    def misfit(self, sender: SenderConnection) -> str | None:
        """Return why a rank that has greeted is not the one that is wanted there."""
        endpoints = self.fetch.endpoints
        expected = Part(endpoints.index(sender.endpoint), len(endpoints))
        if sender.hello is None or sender.hello.part == expected:
            return None
        told = (f"rank {part.rank} of {part.num_ranks}" for part in (sender.hello.part, expected))
        return "{} is {}, expected {}".format(sender.endpoint, *told)


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
        self._hello = memory.hello
        self._report = report
        self._protocol = protocol.ReceiverProtocol(limits)
        self._senders = SenderConnections(context, poller, self._hello.worker.encode())
        self._fetching: dict[int, _Fetching] = {}
        self._transfer_ids: dict[str, int] = {}
        self._scatterings: dict[int, Future[None]] = {}
        self._ids = itertools.count()
        self._num_refused = 0
        self.num_malformed = 0
        self.bytes_received = 0
        self.fetch_seconds = 0.0
        self.observer = commands.TransferObserver()

    @property
    def quarantined_bytes(self) -> int:
        """Return the bytes of blocks that have failed to be filled, and may still be written to. Any thread may ask."""
        fetching = list(self._fetching.values())  # at once: others come and go meanwhile
        return sum(each.num_bytes for each in fetching if each.has_failed)

    @property
    def has_scatters(self) -> bool:
        """Return whether `poll_scatters` has something to look at."""
        return bool(self._scatterings)

    def statistics(self) -> protocol.ReceiverStatistics:
        """Return the counters; fetches that could not be begun have failed as well."""
        statistics = self._protocol.statistics()
        return replace(statistics, num_failed=statistics.num_failed + self._num_refused)

    def fetch(self, fetch: commands.Fetch, now_s: float) -> None:
        """Begin to fetch; what comes of it is reported."""
        block_ids = self._memory.missing(fetch.block_ids_per_group, fetch.num_tokens, fetch.num_cached_tokens)
        try:
            commands.check_endpoints(fetch.endpoints)
            shares = self._memory.shares(block_ids, len(fetch.endpoints))
        except InvalidValueError as error:
            self._num_refused += 1
            self._report(commands.FetchFailed(fetch.request_id, str(error)))
            self._report(commands.FetchReleased(fetch.request_id))
            return
        transfer_id = next(self._ids)
        lease, rooms = self._reserve(shares)
        fetching = _Fetching(fetch, block_ids, self._memory.num_bytes(block_ids), lease, rooms, set(), now_s)
        self._fetching[transfer_id] = fetching
        self._transfer_ids[fetch.request_id] = transfer_id
        destinations = () if lease is None else self._memory.extents(block_ids)
        self._protocol.open(protocol.TransferPlan(transfer_id, fetch.endpoints, rooms, destinations), now_s)
        self._greet(transfer_id, fetching, now_s)

    def cancel(self, request_id: str, now_s: float) -> None:
        """End a fetch that nobody waits for; one that has ended is no error."""
        transfer_id = self._transfer_ids.get(request_id)
        if transfer_id is not None:
            self._do(self._protocol.fail(transfer_id, "cancelled", now_s), now_s)

    def receive(self, now_s: float) -> None:
        """Take every message that has arrived."""
        for sender in self._senders:
            has_lost = sender.has_newly_lost()
            for frames in sender.received():
                try:
                    if len(frames) != 1:
                        raise MalformedMessageError(sender.endpoint, f"{len(frames)} frames, expected a message")
                    self._handle(sender, frames[0], now_s)
                except MalformedMessageError as error:
                    self.num_malformed += 1
                    logger.warning("malformed transfer message source=%s reason=%s", error.source, error.reason)
                    if sender.hello is None:  # it may have been the greeting that is waited for
                        refusal = messages.Refusal(messages.RefusalReason.MALFORMED, None, "a message", error.reason)
                        self._refuse(sender, f"refused by us: {refusal}", now_s)
            if has_lost:  # what it said before counts
                self.tick(now_s)

    def poll_scatters(self, now_s: float) -> None:
        """Go on with the transfers whose bytes have come out of the bounce region."""
        for transfer_id, scattering in list(self._scatterings.items()):
            if scattering.done():
                del self._scatterings[transfer_id]
                error = scattering.exception()
                reason = None if error is None else str(error)
                self._do(self._protocol.scattered(transfer_id, reason, now_s), now_s)

    def tick(self, now_s: float) -> None:
        """Notice what takes too long, and workers that have died; what is not there and not needed is not dialled."""
        self._do(self._protocol.tick(now_s), now_s)
        for sender in self._senders:
            if not sender.is_suspect:
                continue
            transfer_ids = self._ids_of(sender.endpoint)
            if not transfer_ids:
                self._senders.drop(sender)
                continue
            probe = self._senders.pop_probe(sender, transfer_ids)
            if probe is not None and probe.has_ended:
                sender.hello = None
                self._do(self._protocol.sender_gone(sender.endpoint, probe.transfer_ids, now_s), now_s)

    def fail_all(self, reason: str) -> None:
        """Report what is under way as failed, for good: its blocks stay out of use."""
        for each in self._fetching.values():
            if not each.has_failed:
                self._report(commands.FetchFailed(each.fetch.request_id, reason))

    def _reserve(self, shares: Sequence[Share]) -> tuple[Lease | None, tuple[Extent | None, ...]]:
        """Return room to bounce through, and which part of it is whose; none for who writes nothing."""
        lease = None
        if self._bounce is not None and self._memory.has_equal_shares(shares):
            num_writers = sum(share.num_bytes > 0 for share in shares)
            num_bytes, num_pieces = (sum(counts) for counts in zip(*shares, strict=True))
            lease = self._bounce.reserve(num_bytes, num_pieces, num_writers)
        if lease is None:
            return None, (None,) * len(shares)
        extents = iter(lease.extents)
        return lease, tuple(next(extents) if share.num_bytes else None for share in shares)

    def _greet(self, transfer_id: int, fetching: _Fetching, now_s: float) -> None:
        """Greet the ranks that have not greeted, or as another rank: it may be another process by now."""
        busy = {endpoint for each in self._fetching.values() for endpoint in each.fetch.endpoints}
        for endpoint in fetching.fetch.endpoints:
            try:
                sender = self._senders.connect(endpoint, busy)
            except zmq.ZMQError as error:
                reason = f"cannot connect to {endpoint!r}: {error}"
                self._do(self._protocol.fail(transfer_id, reason, now_s), now_s)
                return
            if sender.hello is None or fetching.misfit(sender) is not None:
                fetching.ungreeted.add(endpoint)
                sender.send(self._hello)
        self._start(transfer_id, fetching, now_s)

    def _start(self, transfer_id: int, fetching: _Fetching, now_s: float) -> None:
        if not fetching.ungreeted:
            fetching.greeted_s = now_s
            self._do(self._protocol.start(transfer_id), now_s)

    def _handle(self, sender: SenderConnection, payload: bytes, now_s: float) -> None:
        match messages.decode_message(payload, sender.endpoint):
            case messages.Result() as result:
                self._do(self._protocol.reported(sender.endpoint, result, now_s), now_s)
            case messages.Ping():
                pass
            case messages.Hello() | messages.ForeignHello() as hello:
                refusal = messages.judge_hello(self._hello, hello)
                if refusal is None and isinstance(hello, messages.Hello):
                    sender.hello = hello
                    self._greeted(sender, now_s)
                else:
                    self._refuse(sender, f"refused by us: {refusal}", now_s)
            case messages.Refusal(transfer_id=None) as refusal:
                self._refuse(sender, f"refused by {sender.endpoint}: {refusal}", now_s)
            case messages.Refusal(transfer_id=int(transfer_id)) as refusal:
                self._do(self._protocol.refused(sender.endpoint, transfer_id, str(refusal), now_s), now_s)
            case _:
                raise MalformedMessageError(sender.endpoint, "a message for a sender")

    def _greeted(self, sender: SenderConnection, now_s: float) -> None:
        """Go on with the fetches that have waited for a greeting; all fail that want another rank there.

        Those that have not waited may have asked another process than had greeted: it greets before it serves them.
        """
        for transfer_id in self._ids_of(sender.endpoint):
            fetching = self._fetching[transfer_id]
            misfit = fetching.misfit(sender)
            if misfit is not None:
                self._do(self._protocol.fail(transfer_id, misfit, now_s), now_s)
            elif sender.endpoint in fetching.ungreeted:
                fetching.ungreeted.discard(sender.endpoint)
                self._start(transfer_id, fetching, now_s)

    def _refuse(self, sender: SenderConnection, reason: str, now_s: float) -> None:
        """Fail the fetches that have waited for a greeting."""
        sender.hello = None
        for transfer_id in self._ids_of(sender.endpoint):
            if sender.endpoint in self._fetching[transfer_id].ungreeted:
                self._do(self._protocol.fail(transfer_id, reason, now_s), now_s)
        if not self._ids_of(sender.endpoint):
            self._senders.drop(sender)

    def _ids_of(self, endpoint: str) -> list[int]:
        return [item for item, fetching in self._fetching.items() if endpoint in fetching.fetch.endpoints]

    def _do(self, actions: list[protocol.ReceiverAction], now_s: float) -> None:
        for action in actions:
            transfer_id, fetching = action.transfer_id, self._fetching[action.transfer_id]
            request_id, lease, bounce = fetching.fetch.request_id, fetching.lease, self._bounce
            match action:
                case protocol.SendRequest(rank=rank) | protocol.SendCancel(rank=rank):
                    self._send(transfer_id, fetching, rank, isinstance(action, protocol.SendCancel))
                case protocol.StartScatter() if bounce is not None and lease is not None:
                    fetching.arrived_s = now_s
                    self._scatterings[transfer_id] = bounce.scatter(lease, action.copies)
                case protocol.Fail(reason=reason):
                    fetching.has_failed = True
                    if bounce is not None and lease is not None:
                        bounce.quarantine(lease)
                    self.observer.fetched(fetching.times(now_s, reason))
                    self._report(commands.FetchFailed(request_id, reason))
                case protocol.Release():
                    if bounce is not None and lease is not None:
                        bounce.release(lease)
                    if fetching.has_failed:
                        self._forget(transfer_id)
                        self._report(commands.FetchReleased(request_id))
                case protocol.Complete():
                    self._forget(transfer_id)
                    self.bytes_received += fetching.num_bytes
                    self.fetch_seconds += now_s - fetching.began_s
                    self.observer.fetched(fetching.times(now_s, None))
                    self._report(commands.FetchCompleted(request_id))
                case _:
                    pass

    def _forget(self, transfer_id: int) -> None:
        del self._transfer_ids[self._fetching.pop(transfer_id).fetch.request_id]

    def _send(self, transfer_id: int, fetching: _Fetching, rank: int, is_cancel: bool) -> None:
        """Ask a rank, or ask it to stop; the greeting before is for whoever is another process by now."""
        fetch = fetching.fetch
        sender = self._senders.get(fetch.endpoints[rank])
        if sender is None:
            return
        if is_cancel:
            sender.send(messages.Cancel(transfer_id, fetch.remote_request_id))
            return
        sender.send(self._hello)
        sender.send(
            messages.ReceiveRequest(
                transfer_id,
                fetch.remote_request_id,
                fetch.num_tokens,
                fetching.block_ids_per_group,
                num_receivers=self._hello.tensor_parallel_size,
                room=fetching.rooms[rank],
            )
        )
