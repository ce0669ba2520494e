"""The end that asks for blocks: when a transfer is complete, when it has failed, and when its memory is free.

    asked ──► scattering ──► complete      scattering only where a write was bounced
      │           │
      └───────────┴──► quarantined ──► released

A transfer ends once: complete only when every sender has reported success and what was bounced lies in its blocks,
failed at the first failure. One that fails says so at once, and is quarantined: its *memory* may still be written to,
and must not be used again until it is released. Time alone never releases it: every sender has to report, or be known
to be dead, and no scatter may run. No I/O and no clock is in here: methods take what happened and return what is to be
done, in order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvist.transfer.commands import TransferLimits
from kvist.transfer.messages import Result, ResultStatus


class SendCancel(NamedTuple):
    """Ask one rank of the sender to stop and to report."""

    transfer_id: int
    rank: int


class StartScatter(NamedTuple):
    """Copy out of the region what these ranks have put there, then call `scattered`."""

    transfer_id: int
    ranks: tuple[int, ...]


class Release(NamedTuple):
    """Nobody writes for this transfer any more: its region is free, and after a failure so are its blocks."""

    transfer_id: int


class Complete(NamedTuple):
    """Every byte is in its block, and this is the prompt's first token."""

    transfer_id: int
    first_token_id: int | None


class Fail(NamedTuple):
    """The transfer will not complete; its blocks are free only after `Release`."""

    transfer_id: int
    reason: str


ReceiverAction: TypeAlias = SendCancel | StartScatter | Release | Complete | Fail


@dataclass(slots=True)
class _Transfer:
    """One transfer: `unreported` ranks may be writing, `bounced` ones have filled their room, which not all have."""

    senders: tuple[str, ...]
    ranks_with_room: Collection[int]
    deadline_s: float
    unreported: set[int]
    bounced: list[int] = field(default_factory=list)
    first_token_id: int | None = None
    is_scattering: bool = False
    has_failed: bool = False


class ReceiverProtocol:
    """All transfers of a worker that receives; nothing a peer sends makes it raise, or hold memory twice."""

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self._transfers: dict[int, _Transfer] = {}

    def open(self, transfer_id: int, senders: tuple[str, ...], ranks_with_room: Collection[int], now_s: float) -> None:
        """Begin a transfer that each sender is asked for: its time runs from now on, and its id is never used again."""
        assert senders, "nobody would ever report"
        assert transfer_id not in self._transfers, "an id that is in use"
        deadline_s = now_s + self._limits.transfer_timeout_s
        self._transfers[transfer_id] = _Transfer(senders, ranks_with_room, deadline_s, set(range(len(senders))))

    def reported(self, sender: str, result: Result, now_s: float) -> list[ReceiverAction]:
        """Take a sender's own result; one of a transfer that has ended, or that it has reported, changes nothing."""
        transfer, rank = self._find(sender, result.transfer_id)
        if transfer is None:
            return []
        is_bounced = result.status is ResultStatus.BOUNCED
        if result.status is not ResultStatus.SUCCESS and not (is_bounced and rank in transfer.ranks_with_room):
            return self._quiet(result.transfer_id, rank, f"rank {rank} reports {result.status.name}", now_s)
        if is_bounced:
            transfer.bounced.append(rank)
        transfer.unreported.discard(rank)
        transfer.first_token_id = result.first_token_id
        return self._go_on(result.transfer_id)

    def progressed(self, sender: str, transfer_id: int, now_s: float) -> None:
        """Give a transfer more time: its sender has written what it had, and computes the rest."""
        transfer, _ = self._find(sender, transfer_id)
        if transfer is not None and not transfer.has_failed:
            transfer.deadline_s = now_s + self._limits.transfer_timeout_s

    def refused(self, sender: str, transfer_id: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Take a refusal: the sender will not write."""
        transfer, rank = self._find(sender, transfer_id)
        return [] if transfer is None else self._quiet(transfer_id, rank, reason, now_s)

    def sender_gone(self, sender: str, transfer_ids: Collection[int], now_s: float) -> list[ReceiverAction]:
        """Note that a sender's process has ended since it was asked for these; a lost connection does not prove it."""
        actions: list[ReceiverAction] = []
        for transfer_id in transfer_ids:
            transfer, rank = self._find(sender, transfer_id)
            if transfer is not None:
                actions += self._quiet(transfer_id, rank, f"rank {rank} at {sender} is gone", now_s)
        return actions

    def scattered(self, transfer_id: int, error: str | None, now_s: float) -> list[ReceiverAction]:
        """Take note that the scatter has landed, or failed and does not run any more."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or not transfer.is_scattering:
            return []
        transfer.is_scattering = False
        failed = [] if error is None else self.fail(transfer_id, f"scatter: {error}", now_s)
        return failed or self._go_on(transfer_id)

    def fail(self, transfer_id: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Fail a transfer that cannot be, or that nobody waits for any more; what is under way is waited for."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.has_failed:
            return []
        transfer.has_failed = True
        cancels = self._cancels(transfer_id, transfer, now_s)
        return [Fail(transfer_id, reason), *cancels, *self._go_on(transfer_id)]

    def tick(self, now_s: float) -> list[ReceiverAction]:
        """Fail what takes too long, and remind who has not reported of it; call it every second or so."""
        actions: list[ReceiverAction] = []
        for transfer_id, transfer in list(self._transfers.items()):
            if now_s >= transfer.deadline_s:
                late = self.fail(transfer_id, f"no completion within {self._limits.transfer_timeout_s:g} s", now_s)
                actions += late or self._cancels(transfer_id, transfer, now_s)
        return actions

    @property
    def num_active(self) -> int:
        """Return how many transfers have not ended, quarantined ones among them."""
        return len(self._transfers)

    def _find(self, sender: str, transfer_id: int) -> tuple[_Transfer | None, int]:
        """Return the transfer that this sender has not reported of, if there is one, and which of its ranks it is."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or sender not in transfer.senders:
            return None, 0
        rank = transfer.senders.index(sender)
        return (transfer, rank) if rank in transfer.unreported else (None, 0)

    def _quiet(self, transfer_id: int, rank: int, reason: str, now_s: float) -> list[ReceiverAction]:
        """Take note that a sender does not write, and never will, though it has not."""
        self._transfers[transfer_id].unreported.discard(rank)
        return self.fail(transfer_id, reason, now_s) or self._go_on(transfer_id)

    def _go_on(self, transfer_id: int) -> list[ReceiverAction]:
        """Scatter what was bounced when nobody writes any more, or end."""
        transfer = self._transfers[transfer_id]
        if transfer.unreported or transfer.is_scattering:
            return []
        if transfer.bounced and not transfer.has_failed:
            transfer.is_scattering = True
            ranks, transfer.bounced = tuple(sorted(transfer.bounced)), []
            return [StartScatter(transfer_id, ranks)]
        del self._transfers[transfer_id]
        if transfer.has_failed:
            return [Release(transfer_id)]
        return [Release(transfer_id), Complete(transfer_id, transfer.first_token_id)]

    def _cancels(self, transfer_id: int, transfer: _Transfer, now_s: float) -> list[ReceiverAction]:
        transfer.deadline_s = now_s + self._limits.cancel_retry_s
        return [SendCancel(transfer_id, rank) for rank in sorted(transfer.unreported)]
