"""A rank's half that sends: greets receivers, writes held blocks into their memory, and reports."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.agents import PeerId, PeerUnreachableError, TransferAgent, Write, WriteState
from kvist.transfer.bounce import Bounce, BouncedWrite
from kvist.transfer.handoff import HoldTimes, OfferedBlocks, TransferObserver, WriteTimes
from kvist.transfer.memory import Int64s, KvMemory
from kvist.transfer.messages import (
    MESSAGE,
    PING,
    REPORT,
    Cancel,
    ForeignHello,
    Hello,
    ReceiveRequest,
    Refusal,
    RefusalReason,
    decode_message,
    encode_message,
    judge_hello,
)
from kvist.transfer.results import BounceTail, Result, ResultStatus, encode_report
from kvist.transfer.sender import Free, Sender, SenderAction, SendRefusal, SendResult, StartWrite
from kvist.transfer.slices import BlockCountMismatchError
from kvist.transfer.states import TransferLimits

logger = logging.getLogger(__name__)

_MAX_RECEIVERS = 1024
_MAX_REASON_LEN = 256
_MAX_MESSAGES_READ = 256  # in a turn, so that writes are polled however many come


@dataclass(frozen=True, slots=True)
class _Receiver:
    """A rank that has greeted, and how its memory is reached."""

    greeting: bytes
    hello: Hello
    peer: PeerId


class _Offer(NamedTuple):
    """Blocks that are held, and since when."""

    blocks: OfferedBlocks
    began_s: float


@dataclass(frozen=True, slots=True)
class _Write:
    receiver: str
    transfer_id: int
    request_id: str
    write: Write
    began_s: float

    def times(self, ended_s: float) -> WriteTimes:
        """Return what is told of the write, which has just ended."""
        write, is_bounced, error = self.write, isinstance(self.write, BouncedWrite), None
        if write.state is not WriteState.DONE:
            error = write.reason or write.state.value
        counts = (write.size_bytes, write.num_fragments)
        return WriteTimes(self.request_id, self.began_s, ended_s, *counts, is_bounced, error)

    @property
    def tail(self) -> BounceTail | None:
        """Return what a bounced write has left in the receiver's region."""
        return self.write.tail if isinstance(self.write, BouncedWrite) else None


class Outgoing:
    """Serves receivers on a bound ROUTER socket; they are known by the name that each gives itself.

    `free` is called for every offer once, when nothing reads its blocks any more. Not thread-safe.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        agent: TransferAgent,
        memory: KvMemory,
        limits: TransferLimits,
        free: Callable[[str, bool], None],
        bounce: Bounce | None,
    ) -> None:
        self._router = router
        self._bounce = bounce
        self._agent = agent
        self._memory = memory
        self._hello = memory.hello
        self._free = free
        self.sender = Sender(limits)
        self._offered: dict[str, _Offer] = {}
        self._receivers: OrderedDict[str, _Receiver] = OrderedDict()
        self._writes: list[_Write] = []
        self.num_malformed = 0
        self.num_refused_greetings = 0
        self.write_seconds = 0.0
        self.observer = TransferObserver()

    @property
    def has_writes(self) -> bool:
        """Return whether `poll_writes` has something to look at."""
        return bool(self._writes)

    def offer(self, offered: OfferedBlocks, now_s: float) -> None:
        """Hold blocks until they are fetched, or nobody has come in time."""
        self._offered[offered.remote_request_id] = _Offer(offered, now_s)
        self.sender.hold(offered.remote_request_id, now_s)

    def withdraw(self, request_id: str, now_s: float) -> None:
        """Let an offer be fetched no more; one that has ended is no error."""
        self._do(self.sender.withdraw(request_id), now_s)

    def give_up_all(self, now_s: float) -> None:
        """End every offer; those that are being written from stay out of use."""
        for request_id in list(self._offered):
            self.withdraw(request_id, now_s)

    def read(self) -> list[list[bytes]]:
        """Return the messages that have arrived, for `handle`."""
        messages: list[list[bytes]] = []
        while len(messages) < _MAX_MESSAGES_READ and self._router.poll(0):
            messages.append(self._router.recv_multipart())
        return messages

    def handle(self, messages: list[list[bytes]], now_s: float) -> None:
        """Do what the messages ask. Whatever was offered before they were read must have been offered here."""
        for frames in messages:
            name = frames[0].decode("latin-1")  # whatever bytes it calls itself
            try:
                if len(frames) != 3 or frames[1] != MESSAGE:
                    raise MalformedMessageError(name, f"{len(frames)} frames, expected a name, a kind and a message")
                self._handle_message(name, frames[2], now_s)
            except MalformedMessageError as error:
                self.num_malformed += 1
                logger.warning("malformed transfer message source=%s reason=%s", name, error.reason)
                # If it was to be a greeting, somebody waits for an answer.
                told = error.reason[:_MAX_REASON_LEN]
                self._send_message(name, Refusal(RefusalReason.MALFORMED, None, "a message", told))

    def poll_writes(self, now_s: float) -> None:
        """Report the writes that have ended."""
        for write in list(self._writes):
            state = write.write.state
            if state is WriteState.PENDING:
                continue
            self._writes.remove(write)
            self.write_seconds += now_s - write.began_s
            self.observer.written(write.times(now_s))
            if state is not WriteState.DONE:
                reason = write.write.reason
                logger.warning("kv write %s receiver=%s reason=%s", state.value, write.receiver, reason)
                self._forget(write.receiver)
            if state is WriteState.ABANDONED:  # it may still run, so nobody is told that it does not
                self._do(self.sender.withdraw(write.request_id), now_s)
                continue
            is_ok = state is WriteState.DONE
            self._do(self.sender.written(write.receiver, write.transfer_id, is_ok=is_ok), now_s, write.tail)

    def tick(self, now_s: float) -> None:
        """Give up what nobody comes for."""
        self._do(self.sender.tick(now_s), now_s)

    def ping(self, now_s: float) -> None:
        """Forget receivers whose connection is gone, and let go of their memory; whoever lives greets again."""
        for name in list(self._receivers):
            if not self._send(name, [PING]):
                logger.info("receiver gone name=%s", name)
                self._forget(name)
                self._do(self.sender.receiver_gone(name), now_s)

    def _handle_message(self, name: str, payload: bytes, now_s: float) -> None:
        match decode_message(payload, name):
            case Hello() | ForeignHello() as hello:
                self._greet(name, payload, hello)
            case ReceiveRequest() as request if name in self._receivers:
                self._do(self.sender.requested(name, request, now_s), now_s)
            case ReceiveRequest(transfer_id=transfer_id):
                self._send_message(name, Refusal(RefusalReason.AGENT, transfer_id, "a greeting first", "no greeting"))
            case Cancel() as cancel:
                self._do(self.sender.cancelled(name, cancel), now_s)
            case Refusal() as refusal:
                logger.warning("receiver refuses us name=%s reason=%s", name, refusal)

    def _greet(self, name: str, payload: bytes, hello: Hello | ForeignHello) -> None:
        known = self._receivers.get(name)
        if known is not None and known.greeting == payload:
            self._receivers.move_to_end(name)
            self._send_message(name, self._hello)
            return
        refusal = judge_hello(self._hello, hello)
        if refusal is None and isinstance(hello, Hello):
            try:
                peer = self._agent.connect(hello.agent_metadata)
            except PeerUnreachableError as error:
                refusal = Refusal(RefusalReason.AGENT, None, self._hello.agent, error.reason)
            else:
                if known is not None and known.peer != peer:
                    self._forget(name)
                self._receivers[name] = _Receiver(payload, hello, peer)
                for oldest in list(self._receivers)[: len(self._receivers) - _MAX_RECEIVERS]:
                    self._forget(oldest)
                self._send_message(name, self._hello)
                return
        if refusal is not None:
            self.num_refused_greetings += 1
            logger.warning("greeting refused name=%s reason=%s", name, refusal)
            self._send_message(name, refusal)

    def _do(self, actions: list[SenderAction], now_s: float, tail: BounceTail | None = None) -> None:
        """Do what is to be done; `tail` is that of the write whose result is among it."""
        for action in actions:
            match action:
                case StartWrite(receiver=receiver, request=request):
                    self._write(receiver, request, now_s)
                case SendResult(receiver=receiver, transfer_id=transfer_id, status=status):
                    if status is not ResultStatus.SUCCESS:
                        tail = None
                    num_bytes = None if tail is None else int(tail.sizes_bytes.sum())
                    result = Result(self._hello.tensor_parallel_rank, transfer_id, 0, True, status, num_bytes)
                    self._send(receiver, [REPORT, *encode_report(result, tail)])
                case SendRefusal(receiver=receiver, refusal=refusal):
                    self._send_message(receiver, refusal)
                case Free(request_id=request_id, is_fetched=is_fetched):
                    offer = self._offered.pop(request_id, None)
                    if offer is not None:
                        self.observer.released(HoldTimes(request_id, offer.began_s, now_s, is_fetched))
                        self._free(request_id, is_fetched)
                case _:  # a write cannot be ended early: it is short, and its end is waited for
                    pass

    def _write(self, name: str, request: ReceiveRequest, now_s: float) -> None:
        receiver, offered = self._receivers[name], self._offered[request.request_id].blocks
        try:
            fragments = self._memory.fragments(offered.block_ids_per_group, offered.num_tokens, request, receiver.hello)
            write = self._begin(receiver.peer, fragments, request) if len(fragments) else None
        except (BlockCountMismatchError, InvalidValueError) as error:
            logger.warning("kv write refused receiver=%s reason=%s", name, error)
            is_miscounted = isinstance(error, BlockCountMismatchError)
            reason = RefusalReason.BLOCK_COUNT_MISMATCH if is_miscounted else RefusalReason.UNKNOWN_BLOCK
            self._do(self.sender.rejected(name, request.transfer_id, reason), now_s)
            return
        if write is None:
            self._do(self.sender.written(name, request.transfer_id, is_ok=True), now_s)
        else:
            self._writes.append(_Write(name, request.transfer_id, request.request_id, write, now_s))

    def _begin(self, peer: PeerId, fragments: Int64s, request: ReceiveRequest) -> Write:
        """Write in one piece where the receiver has room for that and so have we, else as it is."""
        has_room = request.bounce_base is not None and fragments[:, 2].sum() <= (request.bounce_size_bytes or 0)
        if self._bounce is not None and request.bounce_base is not None and has_room:
            bounced = self._bounce.send(peer, fragments, request.bounce_base)
            if bounced is not None:
                return bounced
        return self._agent.write(peer, fragments)

    def _forget(self, name: str) -> None:
        """Let go of a receiver that nothing is being written to: of one let go of, NIXL takes every write for over."""
        if any(write.receiver == name for write in self._writes):
            return
        receiver = self._receivers.pop(name, None)
        if receiver is not None and all(each.peer != receiver.peer for each in self._receivers.values()):
            self._agent.disconnect(receiver.peer)

    def _send_message(self, name: str, message: Hello | Refusal) -> None:
        self._send(name, [MESSAGE, encode_message(message)])

    def _send(self, name: str, frames: list[bytes]) -> bool:
        """Return whether the receiver is there; one that reads nothing loses the message, and will ask again."""
        try:
            self._router.send_multipart([name.encode("latin-1"), *frames], zmq.DONTWAIT)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
