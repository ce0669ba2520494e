"""The end that asks for blocks: when a transfer is complete, when it has failed, and when its memory is free.

    INIT ──► ACTIVE ──► SCATTERING ──► COMPLETED      SCATTERING only where a write was bounced
      │        │            │
      │        └────────────┴──► QUARANTINED ──► FAILED
      └──────────────────────────────────────────►─┘

A transfer ends once: complete only when every sender has reported success and what was bounced lies in its blocks,
failed at the first failure. One that fails says so at once; its *memory* may still be written to. QUARANTINED is a
transfer that has failed and whose memory must not be used again, FAILED one whose memory is free. Time alone never
leads from one to the other: every sender has to report, or be known to be dead, and no scatter may run. No I/O and no
clock is in here: methods take what happened and return what is to be done, in order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from numpy.typing import ArrayLike

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.commands import TransferLimits
from kvist.transfer.messages import Result, ResultStatus
from kvist.transfer.tails import BounceTail, Extent, Int64s, check_disjoint, decode_tail, plan_scatter


class TransferState(Enum):
    """How far a transfer is."""

    INIT = "init"
    ACTIVE = "active"
    SCATTERING = "scattering"
    COMPLETED = "completed"
    FAILED = "failed"
    QUARANTINED = "quarantined"

    @property
    def is_ended(self) -> bool:
        """Return whether nothing can happen to it or its memory any more."""
        return self in (TransferState.COMPLETED, TransferState.FAILED)


class SendRequest(NamedTuple):
    """Ask one rank of the sender."""

    transfer_id: int
    rank: int


class SendCancel(NamedTuple):
    """Ask one rank of the sender to stop and to report."""

    transfer_id: int
    rank: int


class StartScatter(NamedTuple):
    """Copy out of the region what the tails say, then call `scattered`."""

    transfer_id: int
    tails: tuple[BounceTail, ...]

    @property
    def copies(self) -> Int64s:
        """Return `[num_pieces, 3]`: source, destination, size."""
        return plan_scatter(self.tails)


class Release(NamedTuple):
    """Nobody writes for this transfer any more: its region is free, and after a failure so are its blocks."""

    transfer_id: int


class Complete(NamedTuple):
    """Every byte is in its block."""

    transfer_id: int


class Fail(NamedTuple):
    """The transfer will not complete; its blocks are free only after `Release`."""

    transfer_id: int
    reason: str


ReceiverAction: TypeAlias = SendRequest | SendCancel | StartScatter | Release | Complete | Fail


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What to receive: from whom, by rank, each with its room in a bounce region, if any, and into where.

    `destinations` are the reserved blocks, as `decode_tail` takes them; nothing else is ever scattered to.
    """

    transfer_id: int
    senders: tuple[str, ...]
    rooms: tuple[Extent | None, ...]
    destinations: ArrayLike = ()

    def __post_init__(self) -> None:
        """Raise InvalidValueError without senders, as nobody would ever report, or if one is named twice."""
        if not self.senders or len(set(self.senders)) < len(self.senders):
            raise InvalidValueError("senders", self.senders, "at least one, each once")
        if len(self.rooms) != len(self.senders):
            raise InvalidValueError("rooms", len(self.rooms), f"{len(self.senders)}, as senders")


class Receiving:
    """One transfer at its receiver."""

    def __init__(self, plan: TransferPlan, limits: TransferLimits, now_s: float) -> None:
        self.plan = plan
        self.state = TransferState.INIT
        self._limits = limits
        self._deadline_s = now_s + limits.transfer_timeout_s
        self._unreported = set(range(len(plan.senders)))
        self._tails: list[BounceTail] = []
        self._is_scattering = False

    def start(self) -> list[ReceiverAction]:
        """Ask every sender, once."""
        if self.state is not TransferState.INIT:
            return []
        self.state = TransferState.ACTIVE
        return [SendRequest(self.plan.transfer_id, rank) for rank in range(len(self.plan.senders))]

    def reported(self, result: Result, now_s: float) -> list[ReceiverAction]:
        """Take a rank's own result; one that has reported is not heard again."""
        rank = result.rank
        if rank not in self._unreported or self.state is TransferState.INIT:
            return []
        if result.status is not ResultStatus.SUCCESS:
            return self.quieted(rank, f"rank {rank} reports {result.status.name}", now_s)
        try:
            self._take_tail(result)
        except MalformedMessageError as error:
            return self.quieted(rank, f"rank {rank}: {error.reason}", now_s)
        return self._quiet(rank, now_s)

    def quieted(self, rank: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Take note that a sender does not write, and never will, though it has not: it refused, or has ended."""
        if rank not in self._unreported:
            return []
        if self.state is TransferState.QUARANTINED:
            return self._quiet(rank, now_s)
        self._unreported.discard(rank)
        return self.fail(reason, now_s)

    def scattered(self, error: str | None, now_s: float) -> list[ReceiverAction]:
        """Take note that the scatter has landed, or failed and does not run any more."""
        if not self._is_scattering:
            return []
        self._is_scattering = False
        if self.state is TransferState.QUARANTINED:
            return self._release()
        return self._complete() if error is None else self.fail(f"scatter: {error}", now_s)

    def fail(self, reason: str, now_s: float) -> list[ReceiverAction]:
        """Fail the transfer, if it has not ended, and release at once if nobody can be writing."""
        if self.state.is_ended or self.state is TransferState.QUARANTINED:
            return []
        fail = Fail(self.plan.transfer_id, reason)
        if self.state is TransferState.INIT:  # nobody has been asked, or will be: they may stop holding the blocks
            cancels = self._cancels(now_s)
            self._unreported.clear()
            return [fail, *cancels, *self._release()]
        if not self._unreported and not self._is_scattering:
            return [fail, *self._release()]
        self.state = TransferState.QUARANTINED
        return [fail, *self._cancels(now_s)]

    def tick(self, now_s: float) -> list[ReceiverAction]:
        """Notice that it takes too long; while quarantined, remind the senders that have not reported."""
        if self.state.is_ended or now_s < self._deadline_s:
            return []
        if self.state is not TransferState.QUARANTINED:
            return self.fail(f"no completion within {self._limits.transfer_timeout_s:g} s", now_s)
        return self._cancels(now_s)

    def _quiet(self, rank: int, now_s: float) -> list[ReceiverAction]:
        """Count a sender as one that does not write any more; behind the last go on to what follows."""
        self._unreported.discard(rank)
        if self._unreported:
            return []
        if self.state is TransferState.QUARANTINED:
            return self._release()
        if not self._tails:
            return self._complete()
        try:
            check_disjoint(self._tails, ", ".join(self.plan.senders))
        except MalformedMessageError as error:
            return self.fail(error.reason, now_s)
        self.state = TransferState.SCATTERING
        self._is_scattering = True
        return [StartScatter(self.plan.transfer_id, tuple(self._tails))]

    def _complete(self) -> list[ReceiverAction]:
        self.state = TransferState.COMPLETED
        return [Release(self.plan.transfer_id), Complete(self.plan.transfer_id)]

    def _release(self) -> list[ReceiverAction]:
        self.state = TransferState.FAILED
        return [Release(self.plan.transfer_id)]

    def _cancels(self, now_s: float) -> list[ReceiverAction]:
        self._deadline_s = now_s + self._limits.cancel_retry_s
        return [SendCancel(self.plan.transfer_id, rank) for rank in sorted(self._unreported)]

    def _take_tail(self, result: Result) -> None:
        """Note what a successful rank has bounced; raises MalformedMessageError for what cannot be believed."""
        sender, room = self.plan.senders[result.rank], self.plan.rooms[result.rank]
        if result.tail is None:
            return
        if room is None:
            raise MalformedMessageError(sender, "a tail, but there is no region to bounce through")
        self._tails.append(decode_tail(result.tail, room, self.plan.destinations, sender))


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """What a receiver has under way and has seen."""

    num_active: int
    num_quarantined: int
    num_completed: int
    num_failed: int


class ReceiverProtocol:
    """All transfers of a worker that receives; nothing a peer sends makes it raise, or hold memory twice."""

    def __init__(self, limits: TransferLimits | None = None) -> None:
        self._limits = TransferLimits() if limits is None else limits
        self._transfers: dict[int, Receiving] = {}
        self._num_completed = self._num_failed = 0

    def open(self, plan: TransferPlan, now_s: float) -> None:
        """Begin a transfer whose memory is reserved; its time runs from now on, and its id is never used again."""
        assert plan.transfer_id not in self._transfers, "an id that is in use"
        self._transfers[plan.transfer_id] = Receiving(plan, self._limits, now_s)

    def start(self, transfer_id: int) -> list[ReceiverAction]:
        """Ask the senders: the handshake with them is done. Nothing to ask if the transfer has failed meanwhile."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else transfer.start()

    def reported(self, sender: str, result: Result, now_s: float) -> list[ReceiverAction]:
        """Take a result; one of a transfer that has ended, or from another than that rank, changes nothing.

        A rank that spoke for another could have its memory released while the other still writes there.
        """
        transfer, rank = self._find(sender, result.transfer_id)
        if transfer is None or rank != result.rank:
            return []
        return self._after(transfer, transfer.reported(result, now_s))

    def refused(self, sender: str, transfer_id: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Take a refusal: the sender will not write."""
        transfer, rank = self._find(sender, transfer_id)
        return [] if transfer is None else self._after(transfer, transfer.quieted(rank, reason, now_s))

    def sender_gone(self, sender: str, transfer_ids: Collection[int], now_s: float) -> list[ReceiverAction]:
        """Take note that a sender cannot write for these transfers any more: the process it was when asked has ended.

        A lost connection does not prove that.
        """
        actions: list[ReceiverAction] = []
        for transfer_id in transfer_ids:
            transfer, rank = self._find(sender, transfer_id)
            if transfer is not None:
                actions += self._after(transfer, transfer.quieted(rank, f"rank {rank} at {sender} is gone", now_s))
        return actions

    def scattered(self, transfer_id: int, error: str | None, now_s: float) -> list[ReceiverAction]:
        """Take note of a scatter's end."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._after(transfer, transfer.scattered(error, now_s))

    def fail(self, transfer_id: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Fail a transfer that cannot be, or that nobody waits for any more; what is under way is waited for."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._after(transfer, transfer.fail(reason, now_s))

    def tick(self, now_s: float) -> list[ReceiverAction]:
        """Notice what takes too long; call it every second or so."""
        transfers = list(self._transfers.values())
        return [action for transfer in transfers for action in self._after(transfer, transfer.tick(now_s))]

    def statistics(self) -> ReceiverStatistics:
        """Return the counters; quarantined transfers are not among the active ones. Any thread may ask."""
        transfers = list(self._transfers.values())  # at once: others come and go meanwhile
        num_quarantined = sum(t.state is TransferState.QUARANTINED for t in transfers)
        num_active = len(transfers) - num_quarantined
        return ReceiverStatistics(num_active, num_quarantined, self._num_completed, self._num_failed)

    def _find(self, sender: str, transfer_id: int) -> tuple[Receiving | None, int]:
        """Return the transfer, if it is under way and from that sender, and which of its ranks the sender is."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or sender not in transfer.plan.senders:
            return None, 0
        return transfer, transfer.plan.senders.index(sender)

    def _after(self, transfer: Receiving, actions: list[ReceiverAction]) -> list[ReceiverAction]:
        """Count what has ended, and forget a transfer that has."""
        self._num_completed += any(isinstance(action, Complete) for action in actions)
        self._num_failed += any(isinstance(action, Fail) for action in actions)
        if transfer.state.is_ended:
            self._transfers.pop(transfer.plan.transfer_id, None)
        return actions
