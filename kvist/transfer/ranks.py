"""A worker of several ranks, to its engine: what it says goes to all of them, what they report comes back as one.

Every rank moves its own heads, by a service of its own. Rank 0 has the engine; the others follow its commands over a
pipe each, and send their reports back. An offer is in every rank's pipe before anybody hears of the prompt, and a
follower's service reads its pipe before it looks at what others ask: so no rank is asked for a prompt that it does not
know. Blocks have the same ids on all ranks, so they are free only when no rank needs them.
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
    """An offer or a fetch: `unended` ranks may be read, or written to; it has failed when the first gives it up."""

    unended: set[int]
    has_failed: bool = False

    def is_failed_by(self, rank: int) -> bool:
        """Return whether it fails now: this rank, which has not ended it, is the first to give it up."""
        is_first = rank in self.unended and not self.has_failed
        self.has_failed |= is_first
        return is_first


class Ranks:
    """What is offered and fetched by all ranks; each ends once, for all of them. No I/O.

    The first rank that gives an offer up has it withdrawn from the others, and the first that fails a fetch has it
    cancelled on them. What a lost rank had not ended never ends: its blocks stay out of use.
    """

    def __init__(
        self, num_ranks: int, tell: Callable[[int, commands.Command], None], report: Callable[[commands.Report], None]
    ) -> None:
        """Have `tell` give a rank a command, and `report` the engine what came of it."""
        self._all = frozenset(range(num_ranks))
        self._tell = tell
        self._report = report
        self._lost: list[int] = []
        self._offers: dict[str, _Shared] = {}
        self._fetches: dict[str, _Shared] = {}

    def command(self, command: commands.Command) -> None:
        """Take a command of the engine's: of what has ended, or with a rank lost, nothing is asked of anybody."""
        match command:
            case commands.Offer(name) if self._lost:
                self._report(commands.OfferReleased(name, False))
                return
            case commands.Fetch(name) if self._lost:
                self._report(commands.FetchFailed(name, self._loss()))
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
        self._tell_all(shared.unended, command)

    def reported(self, rank: int, report: commands.Report) -> None:
        match report:
            case commands.OfferReleased(name, is_fetched):
                if not is_fetched:
                    self._give_up(rank, name)
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
                self._lose(rank)

    @property
    def is_whole(self) -> bool:
        return not self._lost

    def _lose(self, rank: int) -> None:
        logger.critical("transfers of a rank have stopped rank=%d", rank)
        self._lost.append(rank)
        for name in list(self._offers):
            self._give_up(rank, name)
        for name in list(self._fetches):
            self._fail(rank, name, self._loss())

    def _give_up(self, rank: int, name: str) -> None:
        """Withdraw an offer from the others, once, if this rank has not released it."""
        offer = self._offers.get(name)
        if offer is not None and offer.is_failed_by(rank):
            self._tell_all(offer.unended - {rank}, commands.WithdrawOffer(name))

    def _fail(self, rank: int, name: str, reason: str) -> None:
        """Fail a fetch and cancel it on the others, once, if this rank has not ended it."""
        fetch = self._fetches.get(name)
        if fetch is not None and fetch.is_failed_by(rank):
            self._report(commands.FetchFailed(name, reason))
            self._tell_all(fetch.unended - {rank}, commands.CancelFetch(name))

    def _tell_all(self, ranks: set[int], command: commands.Command) -> None:
        for rank in sorted(ranks.difference(self._lost)):
            self._tell(rank, command)

    def _loss(self) -> str:
        return f"rank {self._lost[0]}'s transfers have stopped"


class RankedTransfers:
    """All ranks' transfers as one; `report` is called on the engine's thread, by way of `submit`.

    `open_service` makes rank 0's own service, which reports to what it is given. Every follower sends its endpoint
    first (`FollowerInlet`); a constructor that waits for one that has ended raises EOFError.
    """

    def __init__(
        self,
        open_service: Callable[[Callable[[commands.Report], None]], KvTransferService],
        channels: Sequence[Channel],
        report: Callable[[commands.Report], None],
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        # The engine hears of it after what it is doing.
        self._ranks = Ranks(1 + len(channels), self._tell, lambda each: submit(partial(report, each)))
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

    def observe(self, observer: commands.Observer) -> None:
        self._service.observe(observer)

    def start(self) -> None:
        """Begin to serve; the followers have begun."""
        self._service.start()
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Serve no more, here and at the followers, and let go of this rank's memory."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        for channel in self._channels:
            channel.close()
        self._service.close(timeout_s)

    def command(self, command: commands.Command) -> None:
        """Have all ranks do what is asked, on the engine's thread; what comes of it is reported once.

        Rank 0 has sampled a token of an offered prompt's last step, so every rank has its part of the KV: the logits
        came behind a sum over all ranks, to which each adds behind its own writes (on a GPU, in its stream's order).
        """
        self._ranks.command(command)

    def statistics(self) -> TransferStatistics:
        """Return sums over all ranks, followers' a second old; seconds of fetches are rank 0's."""
        own = self._service.statistics()
        return replace(_sum([own, *self._followers.values()]), fetch_seconds=own.fetch_seconds)

    def _on_report(self, rank: int, report: commands.Report) -> None:
        """Take a rank's report, on any thread."""
        self._submit(lambda: self._ranks.reported(rank, report))

    def _tell(self, rank: int, command: commands.Command) -> None:
        if rank == 0:
            self._service.command(command)
            return
        with suppress(OSError):  # it has ended, which `_read` sees as well
            self._channels[rank - 1].send(command)

    def _read(self) -> None:
        """Take what the followers send, until told to stop."""
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
    """Return what this rank is the last to end; None if it is not."""
    each = shared.get(name)
    if each is None:
        return None
    each.unended.discard(rank)
    return None if each.unended else shared.pop(name)


def _sum(values: Sequence[T]) -> T:
    """Return numbers added up, and dataclasses of them field by field."""
    first = values[0]
    if not is_dataclass(first):
        return cast(T, sum(cast(Sequence[float], values)))
    parts = {field.name: _sum([getattr(value, field.name) for value in values]) for field in fields(first)}
    return cast(T, replace(cast(Any, first), **parts))
