"""The end that has blocks: how long it holds a request's, for whom it writes, and when they are free.

A request is held from the end of its prefill on, until every rank of the receiver has its part, until one of them fails
or cancels, or until nobody has come. Its blocks are freed once, and only while no write reads them. No I/O and no clock
is in here: methods take what happened and return what is to be done, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from kvist.errors import InvalidValueError
from kvist.transfer.commands import TransferLimits
from kvist.transfer.messages import Cancel, ReceiveRequest, Refusal, RefusalReason, Result, ResultStatus

K = TypeVar("K")


class StartWrite(NamedTuple):
    """Write what a receiver asks for, then call `written`."""

    receiver: str
    request: ReceiveRequest


class Answer(NamedTuple):
    """Tell a receiver that nothing is under way for its transfer any more, or will be."""

    receiver: str
    message: Result | Refusal


class Free(NamedTuple):
    """Give a held request's blocks back; `is_fetched` tells whether the receiver has all of them."""

    request_id: str
    is_fetched: bool


SenderAction: TypeAlias = StartWrite | Answer | Free


class TransferKey(NamedTuple):
    """A transfer's name at its sender: receivers number theirs independently."""

    receiver: str
    transfer_id: int


@dataclass(slots=True)
class _Held:
    """One request's blocks; `num_receivers` is known from the first that asks, and each of them asks once.

    `write_deadlines_s` are those of the writes under way. What `is_given_up` has only their ends to wait for.
    """

    deadline_s: float
    num_receivers: int | None = None
    receivers: set[str] = field(default_factory=set)
    num_fetched: int = 0
    is_given_up: bool = False
    write_deadlines_s: dict[TransferKey, float] = field(default_factory=dict)

    @property
    def has_all_receivers(self) -> bool:
        return len(self.receivers) == self.num_receivers


class SenderProtocol:
    """All held requests of a worker that prefills; nothing a peer sends makes it raise, or free blocks in use."""

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self._held: dict[str, _Held] = {}
        self._request_ids: dict[TransferKey, str] = {}
        self._ended: OrderedDict[TransferKey, None] = OrderedDict()  # the latest, as are those freed
        self._freed: OrderedDict[str, None] = OrderedDict()

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
            return [Answer(receiver, Refusal(reason, request.transfer_id))]
        held = self._held[request.request_id]
        held.num_receivers = held.num_receivers or request.hello.tensor_parallel_size
        held.receivers.add(receiver)
        held.write_deadlines_s[key] = now_s + self._limits.transfer_timeout_s
        self._request_ids[key] = request.request_id
        return [StartWrite(receiver, request)]

    def written(self, receiver: str, transfer_id: int, status: ResultStatus) -> list[SenderAction]:
        """Take note that a write has ended, and how: nothing is under way for it any more."""
        key = TransferKey(receiver, transfer_id)
        request_id = self._request_ids.pop(key, None)
        if request_id is None:
            return []
        held = self._held[request_id]
        del held.write_deadlines_s[key]
        if held.is_given_up:
            status = ResultStatus.CANCELLED
        self._remember(self._ended, key)
        result = Answer(receiver, Result(transfer_id, status))
        if status in (ResultStatus.FAILED, ResultStatus.CANCELLED):
            return [result, *self.give_up(request_id)]
        held.num_fetched += 1
        return [result, *self._free_if_done(request_id)]

    def rejected(self, receiver: str, transfer_id: int, reason: RefusalReason) -> list[SenderAction]:
        """Take note that a write could not be begun because of what its request asks for: the receiver hears why."""
        refusal = Answer(receiver, Refusal(reason, transfer_id))
        actions = self.written(receiver, transfer_id, ResultStatus.FAILED)
        return [refusal if isinstance(action, Answer) else action for action in actions]

    def cancelled(self, receiver: str, cancel: Cancel) -> list[SenderAction]:
        """Take a receiver's cancel, also of what was never heard of; it is told once nothing is under way for it."""
        key = TransferKey(receiver, cancel.transfer_id)
        request_id = self._request_ids.get(key)
        if request_id is not None:
            return self.give_up(request_id)
        self._remember(self._ended, key)
        result = Answer(receiver, Result(cancel.transfer_id, ResultStatus.CANCELLED))
        held = self._held.get(cancel.request_id)
        if held is not None and held.has_all_receivers and receiver not in held.receivers:
            return [result]
        return [result, *self.give_up(cancel.request_id)]

    def give_up(self, request_id: str) -> list[SenderAction]:
        """Serve a request no more, and free its blocks when no write reads them; one that has ended is no error."""
        held = self._held.get(request_id)
        if held is None:
            return []
        held.is_given_up = True
        return self._free_if_done(request_id)

    def receiver_gone(self, receiver: str) -> list[SenderAction]:
        """Take note that a receiver's process has ended: what it was fetching is given up."""
        request_ids = dict.fromkeys(rid for key, rid in self._request_ids.items() if key.receiver == receiver)
        return [action for request_id in request_ids for action in self.give_up(request_id)]

    def tick(self, now_s: float) -> list[SenderAction]:
        """Notice requests that nobody comes for and writes that take too long; call it every second or so."""
        late = [
            request_id
            for request_id, held in self._held.items()
            if now_s >= min(held.write_deadlines_s.values(), default=held.deadline_s)
        ]
        return [action for request_id in late for action in self.give_up(request_id)]

    @property
    def num_held(self) -> int:
        """Return how many requests' blocks are held."""
        return len(self._held)

    @property
    def num_writing(self) -> int:
        """Return how many writes are under way."""
        return len(self._request_ids)

    def _refusal_of(self, key: TransferKey, request: ReceiveRequest) -> RefusalReason | None:
        if key in self._ended or request.request_id in self._freed:
            return RefusalReason.ALREADY_ENDED
        held = self._held.get(request.request_id)
        if held is None:
            return RefusalReason.UNKNOWN_REQUEST
        if held.is_given_up:
            return RefusalReason.ALREADY_ENDED
        if held.has_all_receivers or key.receiver in held.receivers:
            return RefusalReason.BUSY
        return None

    def _free_if_done(self, request_id: str) -> list[SenderAction]:
        held = self._held[request_id]
        is_fetched = held.num_fetched == held.num_receivers
        if held.write_deadlines_s or not (held.is_given_up or is_fetched):
            return []
        del self._held[request_id]
        self._remember(self._freed, request_id)
        return [Free(request_id, is_fetched)]

    def _remember(self, latest: OrderedDict[K, None], key: K) -> None:
        latest[key] = None
        if len(latest) > self._limits.max_remembered:
            latest.popitem(last=False)
