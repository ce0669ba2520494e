"""The end that has blocks: how long it holds a request's, for whom it writes, and when they are free.

A request is held from its first chunk on, until every rank of the receiver has its part, until one of them fails or
cancels, or until nobody has come. What is computed of it is written at once; a transfer waits for the rest. Blocks are
freed once, and only while no write reads them. No I/O and no clock is in here: methods take what happened and return
what is to be done, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from kvist.errors import InvalidValueError
from kvist.transfer.commands import Computed, TransferLimits
from kvist.transfer.messages import Cancel, Progress, ReceiveRequest, Refusal, RefusalReason, Result, ResultStatus

K = TypeVar("K")


class StartWrite(NamedTuple):
    """Write what is computed of what a receiver asks for, behind the blocks that are written, then call `written`."""

    receiver: str
    request: ReceiveRequest
    num_written: int = 0


class Answer(NamedTuple):
    """Tell a receiver how far its transfer is; but for progress, nothing is under way for it any more, or will be."""

    receiver: str
    message: Result | Refusal | Progress


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
class _Transfer:
    """What one receiver asks for, and how many of the prompt's blocks were written; while none is, it waits."""

    request: ReceiveRequest
    deadline_s: float
    num_written: int = 0
    is_writing: bool = True


@dataclass(slots=True)
class _Held:
    """One request's blocks; `num_receivers` is known from the first that asks, and each of them asks once.

    More than `num_computed` blocks come, unless it `is_whole`. What `is_given_up` waits for the ends of its writes.
    """

    deadline_s: float
    num_computed: int = 0
    is_whole: bool = False
    first_token_id: int | None = None
    num_receivers: int | None = None
    receivers: set[str] = field(default_factory=set)
    num_fetched: int = 0
    is_given_up: bool = False
    transfers: dict[TransferKey, _Transfer] = field(default_factory=dict)

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

    def computed(self, computed: Computed, num_blocks: int, now_s: float) -> list[SenderAction]:
        """Take note of how many blocks are filled; nothing if it has ended."""
        request_id = computed.remote_request_id
        held = self._held.get(request_id)
        if held is None:
            return []
        held.num_computed, held.is_whole, held.first_token_id = num_blocks, computed.is_whole, computed.first_token_id
        held.deadline_s = now_s + self._limits.hold_timeout_s
        for transfer in held.transfers.values():
            transfer.deadline_s = now_s + self._limits.transfer_timeout_s
        return [each for key in list(held.transfers) for each in self._go_on(key)]

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
        held.transfers[key] = _Transfer(request, now_s + self._limits.transfer_timeout_s)
        self._request_ids[key] = request.request_id
        return [StartWrite(receiver, request)]

    def written(self, receiver: str, transfer_id: int, status: ResultStatus, num_written: int) -> list[SenderAction]:
        """Take note that a write has ended, how, and how many blocks were written: none is under way for it now."""
        key = TransferKey(receiver, transfer_id)
        request_id = self._request_ids.get(key)
        if request_id is None:
            return []
        held = self._held[request_id]
        transfer = held.transfers[key]
        transfer.num_written, transfer.is_writing = num_written, False
        if held.is_given_up:
            return [self._end(key, ResultStatus.CANCELLED), *self._free_if_done(request_id)]
        if status is ResultStatus.FAILED:
            return [self._end(key, status), *self.give_up(request_id)]
        if not held.is_whole or num_written < held.num_computed:
            return [Answer(receiver, Progress(transfer_id)), *self._go_on(key)]
        held.num_fetched += 1
        return [self._end(key, status), *self._free_if_done(request_id)]

    def rejected(self, receiver: str, transfer_id: int, reason: RefusalReason) -> list[SenderAction]:
        """Take note that a write could not be begun because of what its request asks for: the receiver hears why."""
        refusal = Answer(receiver, Refusal(reason, transfer_id))
        actions = self.written(receiver, transfer_id, ResultStatus.FAILED, 0)
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
        waiting = [key for key, transfer in held.transfers.items() if not transfer.is_writing]
        return [*(self._end(key, ResultStatus.CANCELLED) for key in waiting), *self._free_if_done(request_id)]

    def receiver_gone(self, receiver: str) -> list[SenderAction]:
        """Take note that a receiver's process has ended: what it was fetching is given up."""
        request_ids = dict.fromkeys(rid for key, rid in self._request_ids.items() if key.receiver == receiver)
        return [action for request_id in request_ids for action in self.give_up(request_id)]

    def tick(self, now_s: float) -> list[SenderAction]:
        """Notice requests that nobody comes for and writes that take too long; call it every second or so."""
        late = [
            request_id
            for request_id, held in self._held.items()
            if now_s >= min((each.deadline_s for each in held.transfers.values()), default=held.deadline_s)
        ]
        return [action for request_id in late for action in self.give_up(request_id)]

    @property
    def num_held(self) -> int:
        """Return how many requests' blocks are held."""
        return len(self._held)

    @property
    def num_writing(self) -> int:
        """Return how many transfers are under way."""
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

    def _go_on(self, key: TransferKey) -> list[SenderAction]:
        """Write what was computed since a transfer began to wait; nothing is no work."""
        held = self._held[self._request_ids[key]]
        transfer = held.transfers[key]
        if transfer.is_writing or held.is_given_up or transfer.num_written == held.num_computed:
            return []
        transfer.is_writing = True
        return [StartWrite(key.receiver, transfer.request, transfer.num_written)]

    def _end(self, key: TransferKey, status: ResultStatus) -> Answer:
        held = self._held[self._request_ids.pop(key)]
        del held.transfers[key]
        self._remember(self._ended, key)
        is_written = status in (ResultStatus.SUCCESS, ResultStatus.BOUNCED)
        return Answer(key.receiver, Result(key.transfer_id, status, held.first_token_id if is_written else None))

    def _free_if_done(self, request_id: str) -> list[SenderAction]:
        held = self._held[request_id]
        is_fetched = held.num_fetched == held.num_receivers
        if held.transfers or not (held.is_given_up or is_fetched):
            return []
        del self._held[request_id]
        self._remember(self._freed, request_id)
        return [Free(request_id, is_fetched)]

    def _remember(self, latest: OrderedDict[K, None], key: K) -> None:
        latest[key] = None
        if len(latest) > self._limits.max_remembered:
            latest.popitem(last=False)
