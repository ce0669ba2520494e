"""A rank's half that sends: judges what receivers ask, writes held blocks into their memory, and reports."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer import commands, messages
from kvist.transfer.agents import PeerId, PeerUnreachableError, TransferAgent, Write, WriteFailedError
from kvist.transfer.bounce import Bounce
from kvist.transfer.memory import BlockCountMismatchError, KvMemory
from kvist.transfer.sender_protocol import Answer, Free, SenderAction, SenderProtocol, StartWrite

logger = logging.getLogger(__name__)

_MAX_RECEIVERS = 1024
_MAX_REASON_LEN = 256
_MAX_MESSAGES_READ = 256  # in a turn, so that writes are polled however many come


class _Receiver(NamedTuple):
    """A rank that has asked, as it has introduced itself, and how its memory is reached."""

    hello: messages.Hello
    peer: PeerId


@dataclass(slots=True)
class _Held:
    """An offered prompt: how much of it was computed, where, and since when it is held."""

    num_tokens: int
    tables: commands.BlockLists
    began_s: float


@dataclass(frozen=True, slots=True)
class _Write:
    receiver: str
    request: messages.ReceiveRequest
    write: Write
    num_written: int
    num_bytes: int
    num_pieces: int
    is_bounced: bool
    began_s: float

    def times(self, ended_s: float, error: str | None) -> commands.WriteTimes:
        counts = (self.num_bytes, self.num_pieces)
        return commands.WriteTimes(self.request.request_id, self.began_s, ended_s, *counts, self.is_bounced, error)


class Sender:
    """Serves receivers on a ROUTER socket, by their own names; an offer is reported once nothing reads its blocks."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        agent: TransferAgent,
        memory: KvMemory,
        limits: commands.TransferLimits,
        report: Callable[[commands.Report], None],
        bounce: Bounce | None,
    ) -> None:
        self._router = router
        self._bounce = bounce
        self._agent = agent
        self._memory = memory
        self._report = report
        self.protocol = SenderProtocol(limits)
        self._held: dict[str, _Held] = {}
        self._receivers: OrderedDict[str, _Receiver] = OrderedDict()
        self._writes: list[_Write] = []
        self.num_malformed = 0
        self.num_refused_greetings = 0
        self.write_seconds = 0.0
        self.observer: commands.Observer = lambda _: None

    @property
    def has_writes(self) -> bool:
        return bool(self._writes)

    def offer(self, offer: commands.Offer, now_s: float) -> None:
        """Hold a prompt's blocks until they are fetched, or nobody has come in time."""
        self._held[offer.remote_request_id] = _Held(offer.num_tokens, ((),) * len(self._memory.hello.groups), now_s)
        self.protocol.hold(offer.remote_request_id, now_s)

    def computed(self, computed: commands.Computed, now_s: float) -> None:
        """Write what is computed to whoever waits for it; to add to an offer that has ended is no error."""
        held = self._held.get(computed.remote_request_id)
        if held is not None:
            held.tables = computed.block_ids_per_group
            self._do(self.protocol.computed(computed, _num_filled(held.tables), now_s), now_s)

    def withdraw(self, request_id: str, now_s: float) -> None:
        """Let an offer be fetched no more; one that has ended is no error."""
        self._do(self.protocol.give_up(request_id), now_s)

    def give_up_all(self, now_s: float) -> None:
        """End every offer; those that are being written from stay out of use."""
        for request_id in list(self._held):
            self.withdraw(request_id, now_s)

    def read(self) -> list[list[bytes]]:
        """Return the messages that have arrived, for `handle`."""
        received: list[list[bytes]] = []
        while len(received) < _MAX_MESSAGES_READ and self._router.poll(0):
            received.append(self._router.recv_multipart())
        return received

    def handle(self, received: list[list[bytes]], now_s: float) -> None:
        """Do what the received messages ask. Whatever was offered before they were read must have been offered here."""
        for frames in received:
            name = frames[0].decode("latin-1")  # whatever bytes it calls itself
            try:
                if len(frames) != 2:
                    raise MalformedMessageError(name, f"{len(frames)} frames, expected a name and a message")
                self._handle_message(name, frames[1], now_s)
            except MalformedMessageError as error:
                self.num_malformed += 1
                logger.warning("malformed transfer message source=%s reason=%s", name, error.reason)
                # If it was to be a request, somebody waits for an answer.
                told = error.reason[:_MAX_REASON_LEN]
                self._send(name, messages.Refusal(messages.RefusalReason.MALFORMED, None, "a message", told))

    def poll_writes(self, now_s: float) -> None:
        for write in [each for each in self._writes if each.write.done()]:
            self._writes.remove(write)
            self.write_seconds += now_s - write.began_s
            error = write.write.exception()
            self.observer(write.times(now_s, None if error is None else str(error)))
            if error is not None:
                logger.warning("kv write failed receiver=%s reason=%s", write.receiver, error)
                self._forget(write.receiver)
            if isinstance(error, WriteFailedError) and not error.is_quiescent:
                self._do(self.protocol.give_up(write.request.request_id), now_s)  # nobody is told that it has ended
                continue
            done = messages.ResultStatus.BOUNCED if write.is_bounced else messages.ResultStatus.SUCCESS
            status = done if error is None else messages.ResultStatus.FAILED
            written = (write.receiver, write.request.transfer_id, status, write.num_written)
            self._do(self.protocol.written(*written), now_s)

    def tick(self, now_s: float) -> None:
        self._do(self.protocol.tick(now_s), now_s)

    def ping(self, now_s: float) -> None:
        """Forget receivers whose connection is gone, and let go of their memory; whoever lives will ask again."""
        for name in list(self._receivers):
            if not self._send(name, messages.Ping()):
                logger.info("receiver gone name=%s", name)
                self._forget(name)
                self._do(self.protocol.receiver_gone(name), now_s)

    def _handle_message(self, name: str, payload: bytes, now_s: float) -> None:
        match messages.decode_message(payload, name):
            case messages.ReceiveRequest() as request:
                self._handle_request(name, request, now_s)
            case messages.Cancel() as cancel:
                self._do(self.protocol.cancelled(name, cancel), now_s)
            case _:
                raise MalformedMessageError(name, "a message for a receiver")

    def _handle_request(self, name: str, request: messages.ReceiveRequest, now_s: float) -> None:
        refusal = messages.judge_request(self._memory.hello, request) or self._reach(name, request)
        if refusal is None:
            self._do(self.protocol.requested(name, request, now_s), now_s)
            return
        self.num_refused_greetings += 1
        logger.warning("request refused name=%s reason=%s", name, refusal)
        self._send(name, refusal)
        # What it will not fetch need not be held.
        self._do(self.protocol.cancelled(name, messages.Cancel(request.transfer_id, request.request_id)), now_s)

    def _reach(self, name: str, request: messages.ReceiveRequest) -> messages.Refusal | None:
        """Connect to a receiver's memory, unless it is known as it is; return why that cannot be reached."""
        known = self._receivers.get(name)
        if known is None or known.hello != request.hello:
            try:
                peer = self._agent.connect(request.hello.agent_metadata)
            except PeerUnreachableError as error:
                return messages.Refusal(
                    messages.RefusalReason.AGENT, request.transfer_id, self._agent.kind, error.reason
                )
            if known is not None and known.peer != peer:
                self._forget(name)
            self._receivers[name] = _Receiver(request.hello, peer)
        self._receivers.move_to_end(name)
        for oldest in list(self._receivers)[: len(self._receivers) - _MAX_RECEIVERS]:
            self._forget(oldest)
        return None

    def _do(self, actions: list[SenderAction], now_s: float) -> None:
        for action in actions:
            match action:
                case StartWrite(receiver=receiver, request=request, num_written=num_written):
                    self._write(receiver, request, num_written, now_s)
                case Answer(receiver=receiver, message=message):
                    self._send(receiver, message)
                case Free(request_id=request_id, is_fetched=is_fetched):
                    held = self._held.pop(request_id)
                    self.observer(commands.HoldTimes(request_id, held.began_s, now_s, is_fetched))
                    self._report(commands.OfferReleased(request_id, is_fetched))

    def _write(self, name: str, request: messages.ReceiveRequest, num_written: int, now_s: float) -> None:
        """Write in one piece where that is all, and the receiver has room for it and so have we, else as it is."""
        held, peer, room = self._held[request.request_id], self._receivers[name].peer, request.room
        num_filled = _num_filled(held.tables)
        try:
            fragments = self._memory.fragments(held.tables, held.num_tokens, request, num_written)
            if not len(fragments):
                written = (name, request.transfer_id, messages.ResultStatus.SUCCESS, num_filled)
                self._do(self.protocol.written(*written), now_s)
                return
            bounced = None
            if self._bounce is not None and room is not None and fragments[:, 2].sum() == room.size_bytes:
                bounced = self._bounce.send(peer, fragments, room.base)
            write = bounced or self._agent.write(peer, fragments)
        except (BlockCountMismatchError, InvalidValueError) as error:
            logger.warning("kv write refused receiver=%s reason=%s", name, error)
            is_miscounted = isinstance(error, BlockCountMismatchError)
            reason = (
                messages.RefusalReason.BLOCK_COUNT_MISMATCH if is_miscounted else messages.RefusalReason.UNKNOWN_BLOCK
            )
            self._do(self.protocol.rejected(name, request.transfer_id, reason), now_s)
        else:
            counts = (num_filled, int(fragments[:, 2].sum()), len(fragments))
            self._writes.append(_Write(name, request, write, *counts, bounced is not None, now_s))

    def _forget(self, name: str) -> None:
        """Let go of a receiver that nothing is being written to: of one let go of, NIXL takes every write for over."""
        if any(write.receiver == name for write in self._writes):
            return
        receiver = self._receivers.pop(name, None)
        if receiver is not None and all(each.peer != receiver.peer for each in self._receivers.values()):
            self._agent.disconnect(receiver.peer)

    def _send(self, name: str, message: messages.Message) -> bool:
        """Return whether the receiver is there; one that reads nothing loses the message, and will ask again."""
        try:
            self._router.send_multipart([name.encode("latin-1"), messages.encode_message(message)], zmq.DONTWAIT)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


def _num_filled(tables: commands.BlockLists) -> int:
    """Return how many blocks of a prompt every group has: a window's list may begin with more that nobody wants."""
    return min(map(len, tables))
