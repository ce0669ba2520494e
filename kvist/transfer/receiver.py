"""The end that asks for blocks: when a transfer is complete, when it has failed, and when its memory is free.

A task ends once: complete only when every sender has reported success and what was bounced lies in its blocks, failed
at the first failure. Memory is released once: when every sender has reported, or is dead, and no scatter runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from numpy.typing import ArrayLike

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.results import (
    BounceTail,
    Extent,
    Int64s,
    Report,
    ResultStatus,
    check_disjoint,
    check_tail,
    plan_scatter,
)
from kvist.transfer.states import Tombstones, TransferLimits, TransferState

_MAX_SLICES = 1 << 16  # a prompt of a million tokens in chunks of 16


@dataclass(frozen=True, slots=True)
class Fetch:
    """What to receive: from whom, by rank, each with its part of a bounce region, if any, and into where.

    `destinations` are the reserved blocks, as `check_tail` takes them; nothing else is ever scattered to.
    """

    transfer_id: int
    senders: tuple[str, ...]
    regions: tuple[Extent | None, ...]
    destinations: ArrayLike = ()

    def __post_init__(self) -> None:
        """Raise InvalidValueError without senders, as nobody would ever report, or if one is named twice."""
        if not self.senders or len(set(self.senders)) < len(self.senders):
            raise InvalidValueError("senders", self.senders, "at least one, each once")
        if len(self.regions) != len(self.senders):
            raise InvalidValueError("regions", len(self.regions), f"{len(self.senders)}, as senders")


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


class Receiving:
    """One transfer at its receiver."""

    def __init__(self, fetch: Fetch, limits: TransferLimits, now_s: float) -> None:
        self.fetch = fetch
        self.state = TransferState.INIT
        self._limits = limits
        self._deadline_s = now_s + limits.transfer_timeout_s
        self._unreported = set(range(len(fetch.senders)))
        self._slices: list[set[int]] = [set() for _ in fetch.senders]
        self._num_slices: dict[int, int] = {}
        self._tails: list[BounceTail] = []
        self._is_scattering = False

    def start(self) -> list[ReceiverAction]:
        """Ask every sender, once."""
        if self.state is not TransferState.INIT:
            return []
        self.state = TransferState.ACTIVE
        return [SendRequest(self.fetch.transfer_id, rank) for rank in range(len(self.fetch.senders))]

    def reported(self, report: Report, now_s: float) -> list[ReceiverAction]:
        """Take a rank's own report; one that has reported all, and a slice that was reported, are not heard again."""
        rank = report.result.rank
        if rank not in self._unreported or self.state is TransferState.INIT:
            return []
        if report.result.status is not ResultStatus.SUCCESS:
            return self._quiet(rank, f"rank {rank} reports {report.result.status.name}", now_s)
        if report.result.slice_id in self._slices[rank]:
            return []
        defect = self._defect(report)
        if defect is None:
            self._slices[rank].add(report.result.slice_id)
            if report.result.is_last:
                self._num_slices[rank] = report.result.slice_id + 1
            if report.tail is not None and not report.tail.is_empty:
                self._tails.append(report.tail)
            is_all = len(self._slices[rank]) == self._num_slices.get(rank)
            return self._quiet(rank, None, now_s) if is_all else []
        reason = f"rank {rank}: {defect}"
        is_only = report.result.is_last and report.result.slice_id == 0
        return self._quiet(rank, reason, now_s) if is_only else self._fail(reason, now_s)

    def quieted(self, rank: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Take note that a sender does not write, and never will: it refused, or its process has ended."""
        return self._quiet(rank, reason, now_s) if rank in self._unreported else []

    def scattered(self, error: str | None, now_s: float) -> list[ReceiverAction]:
        """Take note that the scatter has landed, or failed and does not run any more."""
        if not self._is_scattering:
            return []
        self._is_scattering = False
        if self.state is TransferState.QUARANTINED:
            return self._release()
        if error is not None:
            return self._fail(f"scatter: {error}", now_s)
        return self._complete()

    def cancel(self, reason: str, now_s: float) -> list[ReceiverAction]:
        """Fail the transfer, if it has not ended; what is under way is waited for."""
        return self._fail(reason, now_s)

    def tick(self, now_s: float) -> list[ReceiverAction]:
        """Notice that it takes too long; while quarantined, remind the senders that have not reported."""
        if self.state.is_ended or now_s < self._deadline_s:
            return []
        if self.state is not TransferState.QUARANTINED:
            return self._fail(f"no completion within {self._limits.transfer_timeout_s:g} s", now_s)
        return self._cancels(now_s)

    def _quiet(self, rank: int, reason: str | None, now_s: float) -> list[ReceiverAction]:
        """Count a sender as one that does not write any more, and fail for a reason."""
        self._unreported.discard(rank)
        if reason is not None and self.state is not TransferState.QUARANTINED:
            return self._fail(reason, now_s)
        if self._unreported:
            return []
        return self._release() if self.state is TransferState.QUARANTINED else self._land(now_s)

    def _land(self, now_s: float) -> list[ReceiverAction]:
        """Go on to the scatter, or complete if nothing was bounced."""
        if not self._tails:
            return self._complete()
        try:
            check_disjoint(self._tails, ", ".join(self.fetch.senders))
        except MalformedMessageError as error:
            return self._fail(error.reason, now_s)
        self.state = TransferState.SCATTERING
        self._is_scattering = True
        return [StartScatter(self.fetch.transfer_id, tuple(self._tails))]

    def _complete(self) -> list[ReceiverAction]:
        self.state = TransferState.COMPLETED
        return [Release(self.fetch.transfer_id), Complete(self.fetch.transfer_id)]

    def _fail(self, reason: str, now_s: float) -> list[ReceiverAction]:
        """Fail once, and release at once if nobody can be writing."""
        if self.state.is_ended or self.state is TransferState.QUARANTINED:
            return []
        fail = Fail(self.fetch.transfer_id, reason)
        if self.state is TransferState.INIT:  # nobody has been asked, or will be: they may stop holding the blocks
            cancels = self._cancels(now_s)
            self._unreported.clear()
            return [fail, *cancels, *self._release()]
        if not self._unreported and not self._is_scattering:
            return [fail, *self._release()]
        self.state = TransferState.QUARANTINED
        return [fail, *self._cancels(now_s)]

    def _release(self) -> list[ReceiverAction]:
        self.state = TransferState.FAILED
        return [Release(self.fetch.transfer_id)]

    def _cancels(self, now_s: float) -> list[ReceiverAction]:
        self._deadline_s = now_s + self._limits.cancel_retry_s
        return [SendCancel(self.fetch.transfer_id, rank) for rank in sorted(self._unreported)]

    def _defect(self, report: Report) -> str | None:
        """Return why a report of success cannot be believed."""
        result, tail = report.result, report.tail
        region = self.fetch.regions[result.rank]
        if report.defect is not None:
            return report.defect
        if result.slice_id >= self._num_slices.get(result.rank, _MAX_SLICES):
            return f"slice {result.slice_id} is behind the last one"
        if result.is_last and max(self._slices[result.rank], default=0) > result.slice_id:
            return f"slice {result.slice_id} is not the last one"
        if tail is None or tail.is_empty:
            return None
        if region is None:
            return "a tail, but there is no region to bounce through"
        if not result.is_last or result.slice_id > 0:
            return "a tail in one of several slices, which cannot share a region"
        try:
            check_tail(tail, result.size_bytes, region, self.fetch.destinations, self.fetch.senders[result.rank])
        except MalformedMessageError as error:
            return error.reason
        return None


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """What a receiver has under way and has seen."""

    num_active: int
    num_quarantined: int
    num_completed: int
    num_failed: int
    num_late: int
    num_unknown: int


class Receiver:
    """All transfers of a worker that receives; nothing a peer sends makes it raise, or hold memory twice."""

    def __init__(self, limits: TransferLimits | None = None) -> None:
        self._limits = TransferLimits() if limits is None else limits
        self._transfers: dict[int, Receiving] = {}
        self._tombstones: Tombstones[int, TransferState] = Tombstones(self._limits.max_tombstones)
        self._num_completed = self._num_failed = self._num_late = self._num_unknown = 0

    def open(self, fetch: Fetch, now_s: float) -> None:
        """Begin a transfer whose memory is reserved; its time runs from now on.

        Raises InvalidValueError for an id that is in use, or was lately.
        """
        if fetch.transfer_id in self._transfers or fetch.transfer_id in self._tombstones:
            raise InvalidValueError("transfer_id", fetch.transfer_id, "an id never used before")
        self._transfers[fetch.transfer_id] = Receiving(fetch, self._limits, now_s)

    def start(self, transfer_id: int) -> list[ReceiverAction]:
        """Ask the senders: the handshake with them is done. Nothing to ask if the transfer has failed meanwhile."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else transfer.start()

    def reported(self, sender: str, report: Report, now_s: float) -> list[ReceiverAction]:
        """Take a report; one of a transfer that ended, or from another than that rank, changes nothing and is counted.

        A rank that spoke for another could have its memory released while the other still writes there.
        """
        found = self._of(sender, report.result.transfer_id)
        if found is None:
            return []
        transfer, rank = found
        if rank != report.result.rank:
            self._num_unknown += 1
            return []
        return self._after(transfer, transfer.reported(report, now_s))

    def refused(self, sender: str, transfer_id: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Take a refusal: the sender will not write."""
        found = self._of(sender, transfer_id)
        if found is None:
            return []
        transfer, rank = found
        return self._after(transfer, transfer.quieted(rank, reason, now_s))

    def sender_gone(self, sender: str, transfer_ids: Collection[int], now_s: float) -> list[ReceiverAction]:
        """Take note that a sender cannot write for these transfers any more: the process it was when asked has ended.

        A lost connection does not prove that.
        """
        actions: list[ReceiverAction] = []
        for transfer_id in transfer_ids:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and sender in transfer.fetch.senders:
                rank = transfer.fetch.senders.index(sender)
                actions += self._after(transfer, transfer.quieted(rank, f"rank {rank} at {sender} is gone", now_s))
        return actions

    def scattered(self, transfer_id: int, error: str | None, now_s: float) -> list[ReceiverAction]:
        """Take note of a scatter's end."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._after(transfer, transfer.scattered(error, now_s))

    def cancel(self, transfer_id: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Fail a transfer that nobody waits for any more."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._after(transfer, transfer.cancel(reason, now_s))

    def tick(self, now_s: float) -> list[ReceiverAction]:
        """Notice what takes too long; call it every second or so."""
        transfers = list(self._transfers.values())
        return [action for transfer in transfers for action in self._after(transfer, transfer.tick(now_s))]

    def statistics(self) -> ReceiverStatistics:
        """Return the counters; quarantined transfers are not among the active ones. Any thread may ask."""
        transfers = list(self._transfers.values())  # at once: others come and go meanwhile
        num_quarantined = sum(t.state is TransferState.QUARANTINED for t in transfers)
        return ReceiverStatistics(
            num_active=len(transfers) - num_quarantined,
            num_quarantined=num_quarantined,
            num_completed=self._num_completed,
            num_failed=self._num_failed,
            num_late=self._num_late,
            num_unknown=self._num_unknown,
        )

    def _of(self, sender: str, transfer_id: int) -> tuple[Receiving, int] | None:
        """Return the transfer, and which of its ranks the sender is."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and sender in transfer.fetch.senders:
            return transfer, transfer.fetch.senders.index(sender)
        is_late = transfer_id in self._tombstones
        self._num_late += is_late
        self._num_unknown += not is_late
        return None

    def _after(self, transfer: Receiving, actions: list[ReceiverAction]) -> list[ReceiverAction]:
        """Bury a transfer that has ended."""
        self._num_completed += any(isinstance(action, Complete) for action in actions)
        self._num_failed += any(isinstance(action, Fail) for action in actions)
        if transfer.state.is_ended:
            self._transfers.pop(transfer.fetch.transfer_id)
            self._tombstones.bury(transfer.fetch.transfer_id, transfer.state)
        return actions
