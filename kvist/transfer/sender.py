"""The sending half of a rank: holds prompts' blocks, writes them into receivers' memory, and frees them.

A prompt is held from its first chunk on until every rank of the receiver has its part, one of them fails or cancels, or
nobody asks in time. Blocks that are computed are written at once; a transfer waits for the rest. Blocks are freed once,
and only while no write reads them. Times are arguments; the module reads no clock.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import zmq

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer import commands, messages
from kvist.transfer.agents import PeerId, PeerUnreachableError, TransferAgent, Write, WriteFailedError, finish
from kvist.transfer.bounce import Bounce
from kvist.transfer.memory import BlockCountMismatchError, outgoing_fragments
from kvist.transfer.messages import Progress, Refusal, RefusalReason, Result, ResultStatus

logger = logging.getLogger(__name__)

K = TypeVar("K")

_MAX_RECEIVERS = 1024
_MAX_REASON_LEN = 256
_MAX_MESSAGES_READ = 256  # at a time, so that writes are polled however many messages arrive


class _Receiver(NamedTuple):
    """A rank that has asked, and its agent's id."""

    hello: messages.Hello
    peer: PeerId


class _TransferKey(NamedTuple):
    """Identifies a transfer at its sender, since each receiver numbers its own."""

    receiver: str
    transfer_id: int


@dataclass(slots=True, eq=False)
class _Held:
    """An offered prompt; the first receiver that asks says how many will, and each of them asks once.

    More blocks will be computed unless it `is_whole`. When it `is_withdrawn`, only its writes are awaited.
    """

    request_id: str
    num_tokens: int
    tables: commands.BlockLists
    deadline_s: float
    is_whole: bool = False
    first_token_id: int | None = None
    num_receivers: int | None = None
    receivers: set[str] = field(default_factory=set)
    num_fetched: int = 0
    is_withdrawn: bool = False
    transfers: list[_Transfer] = field(default_factory=list)

    @property
    def num_computed(self) -> int:
        """Return how many blocks all groups have; windowed groups may have more, which begin with unneeded ones."""
        return min(map(len, self.tables))

    @property
    def has_all_receivers(self) -> bool:
        return len(self.receivers) == self.num_receivers


@dataclass(slots=True, eq=False)
class _Transfer:
    """One receiver's request, and how many of the prompt's blocks were written; it waits unless it `is_writing`."""

    key: _TransferKey
    request: messages.ReceiveRequest
    held: _Held
    deadline_s: float
    num_written: int = 0
    is_writing: bool = False


@dataclass(frozen=True, slots=True)
class _Write:
    transfer: _Transfer
    steps: Write
    num_written: int
    is_bounced: bool
    began_s: float


class Sender:
    """Serves receivers on a ROUTER socket, and reports the end of an offer once nothing reads its blocks.

    Whatever a peer sends, it neither raises nor frees blocks in use.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        agent: TransferAgent,
        hello: messages.Hello,
        limits: commands.TransferLimits,
        report: Callable[[commands.Report], None],
        bounce: Bounce | None,
    ) -> None:
        self._router = router
        self._bounce = bounce
        self._agent = agent
        self._hello = hello
        self._limits = limits
        self._report = report
        self._held: dict[str, _Held] = {}
        self._transfers: dict[_TransferKey, _Transfer] = {}
        self._ended: OrderedDict[_TransferKey, None] = OrderedDict()  # only the latest, as of `_freed`
        self._freed: OrderedDict[str, None] = OrderedDict()
        self._receivers: OrderedDict[str, _Receiver] = OrderedDict()
        self._writes: list[_Write] = []
        self.num_malformed = 0
        self.num_refused_greetings = 0
        self.write_seconds = 0.0

    @property
    def num_writing(self) -> int:
        """Return the number of transfers under way."""
        return len(self._transfers)

    @property
    def has_writes(self) -> bool:
        return bool(self._writes)

    def offer(self, offer: commands.Offer, now_s: float) -> None:
        """Hold a prompt's blocks until they are fetched, or the time for that is over."""
        name, deadline_s = offer.remote_request_id, now_s + self._limits.hold_timeout_s
        assert name not in {*self._held, *self._freed}, "an id that was held before"
        self._held[name] = _Held(name, offer.num_tokens, ((),) * len(self._hello.groups), deadline_s)

    def on_computed(self, computed: commands.Computed, now_s: float) -> None:
        """Write newly computed blocks to waiting receivers; blocks of an offer that has ended are ignored."""
        held = self._held.get(computed.remote_request_id)
        if held is None:
            return
        held.tables, held.is_whole = computed.block_ids_per_group, computed.is_whole
        held.first_token_id = computed.first_token_id
        held.deadline_s = now_s + self._limits.hold_timeout_s
        for transfer in list(held.transfers):
            transfer.deadline_s = now_s + self._limits.transfer_timeout_s
            self._resume(transfer, now_s)

    def withdraw(self, request_id: str) -> None:
        """End an offer, if it has not ended, and free its blocks once no write reads them."""
        held = self._held.get(request_id)
        if held is None:
            return
        held.is_withdrawn = True
        for transfer in [each for each in held.transfers if not each.is_writing]:
            self._end_transfer(transfer, ResultStatus.CANCELLED)
        self._free_if_done(held)

    def read(self) -> list[list[bytes]]:
        received: list[list[bytes]] = []
        while len(received) < _MAX_MESSAGES_READ and self._router.poll(0):
            received.append(self._router.recv_multipart())
        return received

    def handle(self, received: list[list[bytes]], now_s: float) -> None:
        """Handle received messages; offers that the engine made before they were read must have been added before."""
        for frames in received:
            name = frames[0].decode("latin-1")  # decodes any bytes
            try:
                if len(frames) != 2:
                    raise MalformedMessageError(name, f"{len(frames)} frames, expected a name and a message")
                match messages.decode_message(frames[1], name):
                    case messages.ReceiveRequest() as request:
                        self._handle_request(name, request, now_s)
                    case messages.Cancel() as cancel:
                        self._handle_cancel(name, cancel)
                    case _:
                        raise MalformedMessageError(name, "a message for a receiver")
            except MalformedMessageError as error:
                self.num_malformed += 1
                logger.warning("malformed transfer message source=%s reason=%s", name, error.reason)
                # It may have been a request, whose receiver waits for an answer.
                self._send(name, Refusal(RefusalReason.MALFORMED, None, "a message", error.reason[:_MAX_REASON_LEN]))

    def advance_writes(self, clock: Callable[[], float]) -> bool:
        """Advance every write by a step; return whether any bytes have moved."""
        has_moved = False
        for write in list(self._writes):
            try:
                has_moved |= next(write.steps)
            except StopIteration:
                self._on_write_end(write, None, clock())
            except WriteFailedError as error:
                self._on_write_end(write, error, clock())
        return has_moved

    def finish_writes(self) -> None:
        """Run the writes of a closing agent to their ends, and report nothing."""
        for write in self._writes:
            with suppress(WriteFailedError):
                finish(write.steps)

    def tick(self, now_s: float) -> None:
        """Withdraw offers that nobody fetches in time, or whose transfers take too long."""
        for held in list(self._held.values()):
            if now_s >= min((each.deadline_s for each in held.transfers), default=held.deadline_s):
                self.withdraw(held.request_id)

    def ping(self) -> None:
        """Disconnect receivers whose connection is gone; those that live will ask again."""
        for name in list(self._receivers):
            if not self._send(name, messages.Ping()):
                logger.info("receiver gone name=%s", name)
                self._withdraw_from(name)
                self._disconnect(name)

    def _on_write_end(self, write: _Write, error: WriteFailedError | None, now_s: float) -> None:
        self._writes.remove(write)
        self.write_seconds += now_s - write.began_s
        transfer = write.transfer
        if error is not None and not error.is_quiescent:
            self.withdraw(transfer.held.request_id)  # this transfer never ends: it may still write
        else:
            done = ResultStatus.BOUNCED if write.is_bounced else ResultStatus.SUCCESS
            self._on_written(transfer, done if error is None else ResultStatus.FAILED, write.num_written, now_s)
        if error is not None:
            logger.warning("kv write failed receiver=%s reason=%s", transfer.key.receiver, error)
            self._disconnect(transfer.key.receiver)

    def _handle_request(self, name: str, request: messages.ReceiveRequest, now_s: float) -> None:
        refusal = messages.check_request(self._hello, request) or self._connect(name, request)
        key = _TransferKey(name, request.transfer_id)
        if refusal is not None:
            self.num_refused_greetings += 1
            logger.warning("request refused name=%s reason=%s", name, refusal)
            self._send(name, refusal)
            # A prompt that it will not fetch need not be held.
            self._handle_cancel(name, messages.Cancel(request.transfer_id, request.request_id))
        elif key in self._transfers:
            pass  # it is being served already
        elif (reason := self._refusal_reason(key, request)) is not None:
            self._send(name, Refusal(reason, request.transfer_id))
        else:
            held = self._held[request.request_id]
            held.num_receivers = held.num_receivers or request.hello.tensor_parallel_size
            held.receivers.add(name)
            transfer = _Transfer(key, request, held, now_s + self._limits.transfer_timeout_s)
            held.transfers.append(transfer)
            self._transfers[key] = transfer
            self._write(transfer, now_s)

    def _refusal_reason(self, key: _TransferKey, request: messages.ReceiveRequest) -> RefusalReason | None:
        held = self._held.get(request.request_id)
        if key in self._ended or request.request_id in self._freed or (held is not None and held.is_withdrawn):
            return RefusalReason.ALREADY_ENDED
        if held is None:
            return RefusalReason.UNKNOWN_REQUEST
        return RefusalReason.BUSY if held.has_all_receivers or key.receiver in held.receivers else None

    def _handle_cancel(self, name: str, cancel: messages.Cancel) -> None:
        """Cancel a transfer, known or not, and send a result once no write is under way for it."""
        key = _TransferKey(name, cancel.transfer_id)
        transfer = self._transfers.get(key)
        if transfer is not None:
            self.withdraw(transfer.held.request_id)
            return
        _remember(self._ended, key, self._limits.max_remembered)
        self._send(name, Result(cancel.transfer_id, ResultStatus.CANCELLED))
        held = self._held.get(cancel.request_id)
        if held is None or not held.has_all_receivers or name in held.receivers:
            self.withdraw(cancel.request_id)

    def _connect(self, name: str, request: messages.ReceiveRequest) -> Refusal | None:
        """Connect to a receiver's memory, unless it is already; return a refusal if it cannot be reached."""
        known = self._receivers.get(name)
        if known is None or known.hello != request.hello:
            try:
                peer = self._agent.connect(request.hello.agent_metadata)
            except PeerUnreachableError as error:
                return Refusal(RefusalReason.AGENT, request.transfer_id, self._agent.kind, error.reason)
            if known is not None and known.peer != peer:
                self._disconnect(name)
            self._receivers[name] = _Receiver(request.hello, peer)
        self._receivers.move_to_end(name)
        for oldest in list(self._receivers)[:-_MAX_RECEIVERS]:
            self._disconnect(oldest)
        return None

    def _resume(self, transfer: _Transfer, now_s: float) -> None:
        """Write what was computed, if anything, since a transfer began to wait."""
        held = transfer.held
        if not transfer.is_writing and not held.is_withdrawn and transfer.num_written < held.num_computed:
            self._write(transfer, now_s)

    def _write(self, transfer: _Transfer, now_s: float) -> None:
        """Begin a write; it is bounced if it is the whole transfer and both sides have room for it."""
        held, request, peer = transfer.held, transfer.request, self._receivers[transfer.key.receiver].peer
        room, num_computed = request.room, held.num_computed
        try:
            fragments = outgoing_fragments(self._hello, held.tables, held.num_tokens, request, transfer.num_written)
            if not len(fragments):
                self._on_written(transfer, ResultStatus.SUCCESS, num_computed, now_s)
                return
            bounced = None
            if self._bounce is not None and room is not None and fragments[:, 2].sum() == room.size_bytes:
                bounced = self._bounce.send(peer, fragments, room.base)
            write = bounced or self._agent.write(peer, fragments)
        except (BlockCountMismatchError, InvalidValueError) as error:
            logger.warning("kv write refused receiver=%s reason=%s", transfer.key.receiver, error)
            is_miscounted = isinstance(error, BlockCountMismatchError)
            reason = RefusalReason.BLOCK_COUNT_MISMATCH if is_miscounted else RefusalReason.UNKNOWN_BLOCK
            self._end_transfer(transfer, reason)
            self.withdraw(held.request_id)
        else:
            transfer.is_writing = True
            self._writes.append(_Write(transfer, write, num_computed, bounced is not None, now_s))

    def _on_written(self, transfer: _Transfer, status: ResultStatus, num_written: int, now_s: float) -> None:
        """Continue or end a transfer whose write has ended; `num_written` of the prompt's blocks are written."""
        held = transfer.held
        transfer.num_written, transfer.is_writing = num_written, False
        if held.is_withdrawn:
            self._end_transfer(transfer, ResultStatus.CANCELLED)
        elif status is ResultStatus.FAILED:
            self._end_transfer(transfer, status)
            self.withdraw(held.request_id)
        elif not held.is_whole or num_written < held.num_computed:
            self._send(transfer.key.receiver, Progress(transfer.key.transfer_id))
            self._resume(transfer, now_s)
        else:
            held.num_fetched += 1
            self._end_transfer(transfer, status)
        self._free_if_done(held)

    def _end_transfer(self, transfer: _Transfer, end: ResultStatus | RefusalReason) -> None:
        """Remove a transfer for which no write is under way, and send the receiver its result."""
        del self._transfers[transfer.key]
        transfer.held.transfers.remove(transfer)
        _remember(self._ended, transfer.key, self._limits.max_remembered)
        receiver, transfer_id = transfer.key
        if isinstance(end, RefusalReason):
            self._send(receiver, Refusal(end, transfer_id))
            return
        is_written = end in (ResultStatus.SUCCESS, ResultStatus.BOUNCED)
        self._send(receiver, Result(transfer_id, end, transfer.held.first_token_id if is_written else None))

    def _free_if_done(self, held: _Held) -> None:
        is_fetched = held.num_fetched == held.num_receivers
        if held.transfers or not (held.is_withdrawn or is_fetched) or held.request_id not in self._held:
            return
        del self._held[held.request_id]
        _remember(self._freed, held.request_id, self._limits.max_remembered)
        self._report(commands.OfferReleased(held.request_id, is_fetched))

    def _disconnect(self, name: str) -> None:
        """Disconnect a receiver unless a write to it is under way, which NIXL would then report as over."""
        if any(write.transfer.key.receiver == name for write in self._writes):
            return
        self._withdraw_from(name)
        receiver = self._receivers.pop(name, None)
        if receiver is not None and all(each.peer != receiver.peer for each in self._receivers.values()):
            self._agent.disconnect(receiver.peer)

    def _withdraw_from(self, name: str) -> None:
        """Withdraw all offers that a receiver is fetching."""
        for transfer in [each for each in self._transfers.values() if each.key.receiver == name]:
            self.withdraw(transfer.held.request_id)

    def _send(self, name: str, message: messages.Message) -> bool:
        """Send a message; return False if the receiver is gone.

        If the receiver's queue is full the message is lost, and the receiver will ask again.
        """
        try:
            self._router.send_multipart([name.encode("latin-1"), messages.encode_message(message)], zmq.DONTWAIT)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


def _remember(latest: OrderedDict[K, None], key: K, max_remembered: int) -> None:
    latest[key] = None
    if len(latest) > max_remembered:
        latest.popitem(last=False)
