"""Combines the transfers of all ranks of a worker: commands go to each rank, and their reports are merged into one.

Every rank moves its own heads, by a service of its own. Rank 0 has the engine; the others, its followers, get commands
over a pipe each, and send their reports back. An offer is in every rank's pipe before another worker can know the
prompt, and a follower's service reads its pipe before it handles requests: so no rank is asked for a prompt that it
does not know. Blocks have the same ids on all ranks, so they are free only when no rank needs them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, TypeVar, cast

from kvist.transfer import commands
from kvist.transfer.service import Channel, KvTransferService, TransferStatistics

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Shared:
    """An offer or fetch of all ranks; memory of ranks in `unended` may be read or written to."""

    unended: set[int]
    has_failed: bool = False

    def fail(self, rank: int) -> bool:
        """Mark it as failed; return False if it had failed before, or if this rank had ended it."""
        is_first = rank in self.unended and not self.has_failed
        self.has_failed |= is_first
        return is_first


class Ranks:
    """Tracks the offers and fetches of all ranks; each ends once, for all of them. No I/O.

    When one rank releases an offer unfetched, it is withdrawn from the others; when one rank fails a fetch, it is
    cancelled on the others. What a lost rank had not ended never ends: its blocks stay out of use.
    """

    def __init__(
        self, num_ranks: int, send: Callable[[int, commands.Command], None], report: Callable[[commands.Report], None]
    ) -> None:
        """Commands go to a rank by `send`, merged reports to the engine by `report`."""
        self._all = frozenset(range(num_ranks))
        self._send = send
        self._report = report
        self._lost: list[int] = []
        self._offers: dict[str, _Shared] = {}
        self._fetches: dict[str, _Shared] = {}

    def command(self, command: commands.Command) -> None:
        """Send an engine's command to the ranks that have not ended its offer or fetch; with a rank lost, all fail."""
        match command:
            case commands.Offer(name) if self._lost:
                self._report(commands.OfferReleased(name, False))
                return
            case commands.Fetch(name) if self._lost:
                self._report(commands.FetchFailed(name, self._lost_reason()))
                self._report(commands.FetchReleased(name))
                return
            case commands.Offer(name):
                shared = self._offers[name] = _Shared(set(self._all))
            case commands.Fetch(name):
                shared = self._fetches[name] = _Shared(set(self._all))
            case commands.Computed(name) | commands.WithdrawOffer(name):
                shared = self._offers.get(name, _Shared(set()))
            case commands.CancelFetch(name):
                shared = self._fetches.get(name, _Shared(set()))
        self._send_all(shared.unended, command)

    def on_report(self, rank: int, report: commands.Report) -> None:
        match report:
            case commands.OfferReleased(name, is_fetched):
                if not is_fetched:
                    self._withdraw(rank, name)
                offer = _pop_ended(self._offers, rank, name)
                if offer is not None:
                    self._report(commands.OfferReleased(name, not offer.has_failed))
            case commands.FetchFailed(name, reason):
                self._fail(rank, name, reason if len(self._all) == 1 else f"at rank {rank}: {reason}")
            case commands.FetchCompleted(name) | commands.FetchReleased(name):
                fetch = _pop_ended(self._fetches, rank, name)
                if fetch is not None:
                    self._report(commands.FetchReleased(name) if fetch.has_failed else report)
            case commands.TransfersStopped() if rank not in self._lost:
                self._on_lost(rank)

    @property
    def is_whole(self) -> bool:
        return not self._lost

    def _on_lost(self, rank: int) -> None:
        logger.critical("transfers of a rank have stopped rank=%d", rank)
        self._lost.append(rank)
        for name in list(self._offers):
            self._withdraw(rank, name)
        for name in list(self._fetches):
            self._fail(rank, name, self._lost_reason())

    def _withdraw(self, rank: int, name: str) -> None:
        """Withdraw an offer from the other ranks, once, if this rank has not released it."""
        offer = self._offers.get(name)
        if offer is not None and offer.fail(rank):
            self._send_all(offer.unended - {rank}, commands.WithdrawOffer(name))

    def _fail(self, rank: int, name: str, reason: str) -> None:
        """Fail a fetch and cancel it on the other ranks, once, if this rank has not ended it."""
        fetch = self._fetches.get(name)
        if fetch is not None and fetch.fail(rank):
            self._report(commands.FetchFailed(name, reason))
            self._send_all(fetch.unended - {rank}, commands.CancelFetch(name))

    def _send_all(self, ranks: set[int], command: commands.Command) -> None:
        for rank in sorted(ranks.difference(self._lost)):
            self._send(rank, command)

    def _lost_reason(self) -> str:
        return f"rank {self._lost[0]}'s transfers have stopped"


class RankedTransfers:
    """All ranks' transfers as one; `report` is called on the engine's thread, through `submit`.

    `open_service` makes rank 0's own service, with a function to report to. Every follower first sends its endpoint
    (`FollowerLink`); the constructor waits for it, and raises EOFError if the follower has ended.
    """

    def __init__(
        self,
        open_service: Callable[[Callable[[commands.Report], None]], KvTransferService],
        channels: Sequence[Channel],
        report: Callable[[commands.Report], None],
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        # By `submit` the engine gets a report after what it is doing.
        self._ranks = Ranks(1 + len(channels), self._send, lambda each: submit(partial(report, each)))
        self._channels = tuple(channels)
        self._submit = submit
        self._followers: dict[int, TransferStatistics] = {}
        self._service = open_service(partial(self._on_report, 0))
        try:
            self.endpoints: tuple[str, ...] = (self._service.endpoint, *(each.recv() for each in self._channels))
        except (EOFError, OSError):
            self._service.close()
            raise EOFError("a follower has ended") from None
        self._stopped, self._stop = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._read, name="kvist-transfer-ranks", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._ranks.is_whole

    def start(self) -> None:
        """Start rank 0's service; the followers have started theirs."""
        self._service.start()
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop all services, and release rank 0's memory."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        for channel in self._channels:
            channel.close()
        self._service.close(timeout_s)

    def command(self, command: commands.Command) -> None:
        """Execute an engine's command on all ranks; call it on the engine's thread. The outcome is reported once.

        When rank 0 has sampled the token that follows an offered prompt, every rank has written its part of the KV: the
        logits depend on a sum over all ranks, to which each adds after its own writes (on a GPU, in its stream's
        order).
        """
        self._ranks.command(command)

    def statistics(self) -> TransferStatistics:
        """Return sums over all ranks, those of followers up to a second old."""
        return _sum([self._service.statistics(), *self._followers.values()])

    def _on_report(self, rank: int, report: commands.Report) -> None:
        """Handle a rank's report; may be called on any thread."""
        self._submit(lambda: self._ranks.on_report(rank, report))

    def _send(self, rank: int, command: commands.Command) -> None:
        if rank == 0:
            self._service.command(command)
            return
        with suppress(OSError):  # the follower has ended, which `_read` handles
            self._channels[rank - 1].send(command)

    def _read(self) -> None:
        """Receive what the followers send, until `close`."""
        ranks = {channel: rank for rank, channel in enumerate(self._channels, 1)}
        while True:
            ready = wait([self._stopped, *ranks])
            if self._stopped in ready:
                return
            for channel in cast(list[Channel], ready):
                try:
                    message: commands.Report | TransferStatistics = channel.recv()
                except (EOFError, OSError):
                    self._on_report(ranks.pop(channel), commands.TransfersStopped())
                    continue
                if isinstance(message, TransferStatistics):
                    self._followers[ranks[channel]] = message
                else:
                    self._on_report(ranks[channel], message)


def _pop_ended(shared: dict[str, _Shared], rank: int, name: str) -> _Shared | None:
    """End a rank's part of an offer or fetch; return it if that was the last part."""
    each = shared.get(name)
    if each is None:
        return None
    each.unended.discard(rank)
    return None if each.unended else shared.pop(name)


def _sum(values: Sequence[T]) -> T:
    """Return the sum of numbers, or of dataclasses of numbers field by field."""
    first = values[0]
    if not is_dataclass(first):
        return cast(T, sum(cast(Sequence[float], values)))
    parts = {field.name: _sum([getattr(value, field.name) for value in values]) for field in fields(first)}
    return cast(T, replace(cast(Any, first), **parts))
