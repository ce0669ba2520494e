"""The end that has blocks: how long it holds a request's, for whom it writes, and when they are free.

A request is held from the end of its prefill on, until every rank of the receiver has its part, until one of them fails
or cancels, or until nobody has come. Its blocks are freed once, and only while no write reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvist.errors import InvalidValueError
from kvist.transfer.messages import Cancel, ReceiveRequest, Refusal, RefusalReason
from kvist.transfer.results import ResultStatus
from kvist.transfer.states import Tombstones, TransferLimits, TransferState


class StartWrite(NamedTuple):
    """Write what a receiver asks for, then call `written`."""

    receiver: str
    request: ReceiveRequest


class AbortWrite(NamedTuple):
    """End a write early if that can be done; `written` is called all the same, once nothing is under way."""

    receiver: str
    transfer_id: int


class SendResult(NamedTuple):
    """Report to a receiver; nothing is under way for it any more."""

    receiver: str
    transfer_id: int
    status: ResultStatus


class SendRefusal(NamedTuple):
    """Answer a request that will not be served."""

    receiver: str
    refusal: Refusal


class Free(NamedTuple):
    """Give a held request's blocks back; `is_fetched` tells whether the receiver has all of them."""

    request_id: str
    is_fetched: bool


SenderAction: TypeAlias = StartWrite | AbortWrite | SendResult | SendRefusal | Free


class TransferKey(NamedTuple):
    """A transfer's name at its sender: receivers number theirs independently."""

    receiver: str
    transfer_id: int


@dataclass(slots=True)
class _Sending:
    """One write; ACTIVE, or QUARANTINED when nobody wants it any more."""

    deadline_s: float
    state: TransferState = TransferState.ACTIVE


@dataclass(slots=True)
class _Held:
    """One request's blocks; `num_receivers` is known from the first that asks, and each of them asks once."""

    deadline_s: float
    num_receivers: int | None = None
    receivers: set[str] = field(default_factory=set)
    num_fetched: int = 0
    is_given_up: bool = False
    writes: dict[TransferKey, _Sending] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """What a sender holds and has seen."""

    num_held: int
    num_writing: int
    num_fetched: int
    num_given_up: int
    num_refused: int


class Sender:
    """All held requests of a worker that prefills; nothing a peer sends makes it raise, or free blocks in use."""

    def __init__(self, limits: TransferLimits | None = None) -> None:
        self._limits = TransferLimits() if limits is None else limits
        self._held: dict[str, _Held] = {}
        self._request_ids: dict[TransferKey, str] = {}
        self._ended: Tombstones[TransferKey, ResultStatus] = Tombstones(self._limits.max_tombstones)
        self._freed: Tombstones[str, bool] = Tombstones(self._limits.max_tombstones)
        self._num_fetched = self._num_given_up = self._num_refused = 0

    def hold(self, request_id: str, now_s: float) -> None:
        """Hold a request's blocks; raises InvalidValueError for an id that is held, or was lately."""
        if request_id in self._held or request_id in self._freed:
            raise InvalidValueError("request_id", request_id, "an id never held before")
        self._held[request_id] = _Held(now_s + self._limits.hold_timeout_s)

    def requested(self, receiver: str, request: ReceiveRequest, now_s: float) -> list[SenderAction]:
        """Take a request: write for it, or say why not. One that is being served already changes nothing."""
        key = TransferKey(receiver, request.transfer_id)
        if key in self._request_ids:
            return []
        reason = self._refusal_of(key, request)
        if reason is not None:
            self._num_refused += 1
            return [SendRefusal(receiver, Refusal(reason, request.transfer_id))]
        held = self._held[request.request_id]
        held.num_receivers = held.num_receivers or request.num_receivers
        held.receivers.add(receiver)
        held.writes[key] = _Sending(now_s + self._limits.transfer_timeout_s)
        self._request_ids[key] = request.request_id
        return [StartWrite(receiver, request)]

    def written(self, receiver: str, transfer_id: int, *, is_ok: bool) -> list[SenderAction]:
        """Take note that a write has ended, well or not: nothing is under way for it any more."""
        key = TransferKey(receiver, transfer_id)
        request_id = self._request_ids.pop(key, None)
        if request_id is None:
            return []
        held = self._held[request_id]
        if held.writes.pop(key).state is TransferState.QUARANTINED:
            status = ResultStatus.CANCELLED
        else:
            status = ResultStatus.SUCCESS if is_ok else ResultStatus.FAILED
        self._ended.bury(key, status)
        result = SendResult(receiver, transfer_id, status)
        if status is not ResultStatus.SUCCESS:
            return [result, *self._give_up(request_id)]
        held.num_fetched += 1
        return [result, *self._free_if_done(request_id)]

    def rejected(self, receiver: str, transfer_id: int, reason: RefusalReason) -> list[SenderAction]:
        """Take note that a write could not be begun because of what its request asks for: the receiver hears why."""
        refusal = SendRefusal(receiver, Refusal(reason, transfer_id))
        self._num_refused += TransferKey(receiver, transfer_id) in self._request_ids
        actions = self.written(receiver, transfer_id, is_ok=False)
        return [refusal if isinstance(action, SendResult) else action for action in actions]

    def cancelled(self, receiver: str, cancel: Cancel) -> list[SenderAction]:
        """Take a receiver's cancel: it is told at once if nothing is under way, else when the write has ended.

        Also for a transfer never heard of: its request may still be on the way, and will find that it has ended. Who
        comes when all ranks of another receiver have asked ends nothing of theirs.
        """
        key = TransferKey(receiver, cancel.transfer_id)
        request_id = self._request_ids.get(key)
        if request_id is not None:
            return self._give_up(request_id)
        self._ended.bury(key, ResultStatus.CANCELLED)
        result = SendResult(receiver, cancel.transfer_id, ResultStatus.CANCELLED)
        held = self._held.get(cancel.request_id)
        if held is not None and len(held.receivers) == held.num_receivers and receiver not in held.receivers:
            return [result]
        return [result, *self._give_up(cancel.request_id)]

    def withdraw(self, request_id: str) -> list[SenderAction]:
        """Stop holding a request that nobody will fetch: its client has left."""
        return self._give_up(request_id)

    def receiver_gone(self, receiver: str) -> list[SenderAction]:
        """Take note that a receiver's process has ended: what it was fetching is given up."""
        request_ids = dict.fromkeys(rid for key, rid in self._request_ids.items() if key.receiver == receiver)
        return [action for request_id in request_ids for action in self._give_up(request_id)]

    def tick(self, now_s: float) -> list[SenderAction]:
        """Notice requests that nobody comes for and writes that take too long; call it every second or so."""
        late = [
            request_id
            for request_id, held in self._held.items()
            if (not held.writes and now_s >= held.deadline_s)
            or any(now_s >= write.deadline_s for write in held.writes.values())
        ]
        return [action for request_id in late for action in self._give_up(request_id)]

    def statistics(self) -> SenderStatistics:
        """Return the counters; requests are counted as fetched or given up once their blocks are free."""
        return SenderStatistics(
            num_held=len(self._held),
            num_writing=len(self._request_ids),
            num_fetched=self._num_fetched,
            num_given_up=self._num_given_up,
            num_refused=self._num_refused,
        )

    def _refusal_of(self, key: TransferKey, request: ReceiveRequest) -> RefusalReason | None:
        if key in self._ended or request.request_id in self._freed:
            return RefusalReason.ALREADY_ENDED
        held = self._held.get(request.request_id)
        if held is None:
            return RefusalReason.UNKNOWN_REQUEST
        if held.is_given_up:
            return RefusalReason.ALREADY_ENDED
        is_complete = len(held.receivers) == held.num_receivers
        if is_complete or key.receiver in held.receivers:
            return RefusalReason.BUSY
        return None

    def _give_up(self, request_id: str) -> list[SenderAction]:
        """Serve a request no more: end its writes, and free its blocks when they have ended."""
        held = self._held.get(request_id)
        if held is None:
            return []
        held.is_given_up = True
        aborts: list[SenderAction] = []
        for key, write in held.writes.items():
            if write.state is TransferState.ACTIVE:
                write.state = TransferState.QUARANTINED
                aborts.append(AbortWrite(key.receiver, key.transfer_id))
        return aborts + self._free_if_done(request_id)

    def _free_if_done(self, request_id: str) -> list[SenderAction]:
        held = self._held[request_id]
        is_fetched = held.num_fetched == held.num_receivers
        if held.writes or not (held.is_given_up or is_fetched):
            return []
        del self._held[request_id]
        self._freed.bury(request_id, is_fetched)
        self._num_fetched += is_fetched
        self._num_given_up += not is_fetched
        return [Free(request_id, is_fetched)]
