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
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from kvist.transfer import commands
from kvist.transfer.service import Channel, KvTransferService, TransferStatistics

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tell(NamedTuple):
    """Give a command to a rank."""

    rank: int
    command: commands.Command


RanksAction: TypeAlias = Tell | commands.Report  # a report is for the engine


@dataclass(slots=True)
class _Shared:
    """An offer or a fetch: `unended` ranks may be read, or written to; it has failed when the first gives it up."""

    unended: set[int]
    has_failed: bool = False


class Ranks:
    """What is offered and fetched by all ranks; each ends once, for all of them. No I/O.

    The first rank that gives an offer up has it withdrawn from the others, and the first that fails a fetch has it
    cancelled on them. What a lost rank had not ended never ends: its blocks stay out of use.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lost: list[int] = []
        self._offers: dict[str, _Shared] = {}
        self._fetches: dict[str, _Shared] = {}

    def command(self, command: commands.Command) -> list[RanksAction]:
        """Take a command of the engine's: of what has ended, or with a rank lost, nothing is asked of anybody."""
        ranks = set(range(self._num_ranks))
        match command:
            case commands.Offer(name) if self._lost:
                return [commands.OfferReleased(name, False)]
            case commands.Fetch(name) if self._lost:
                return [commands.FetchFailed(name, self._loss()), commands.FetchReleased(name)]
            case commands.Offer(name):
                self._offers[name] = _Shared(set(ranks))
            case commands.Fetch(name):
                self._fetches[name] = _Shared(set(ranks))
            case commands.Computed(name) | commands.WithdrawOffer(name) | commands.CancelFetch(name):
                shared = (self._fetches if isinstance(command, commands.CancelFetch) else self._offers).get(name)
                ranks = set() if shared is None else shared.unended
        return self._tell(ranks, command)

    def reported(self, rank: int, report: commands.Report) -> list[RanksAction]:
        match report:
            case commands.OfferReleased(name, is_fetched):
                given_up = [] if is_fetched else self._given_up(rank, name)
                return given_up + self._offer_ended(rank, name)
            case commands.FetchFailed(name, reason):
                return self._failed(rank, name, reason if self._num_ranks == 1 else f"at rank {rank}: {reason}")
            case commands.FetchCompleted(name) | commands.FetchReleased(name):
                return self._fetch_ended(rank, name, report)

    def lost(self, rank: int) -> list[RanksAction]:
        """Take note that a rank's transfers have stopped: it reports nothing any more."""
        self._lost.append(rank)
        offers = [action for each in list(self._offers) for action in self._given_up(rank, each)]
        return offers + [action for each in list(self._fetches) for action in self._failed(rank, each, self._loss())]

    def _given_up(self, rank: int, name: str) -> list[RanksAction]:
        """Withdraw an offer from the others, once, if this rank has not released it."""
        return self._tell(_fail(self._offers.get(name), rank), commands.WithdrawOffer(name))

    def _failed(self, rank: int, name: str, reason: str) -> list[RanksAction]:
        """Fail a fetch and cancel it on the others, once, if this rank has not ended it."""
        others = _fail(self._fetches.get(name), rank)
        if others is None:
            return []
        return [commands.FetchFailed(name, reason), *self._tell(others, commands.CancelFetch(name))]

    def _offer_ended(self, rank: int, name: str) -> list[RanksAction]:
        offer = _pop_ended(self._offers, rank, name)
        return [] if offer is None else [commands.OfferReleased(name, not offer.has_failed)]

    def _fetch_ended(self, rank: int, name: str, report: commands.Report) -> list[RanksAction]:
        fetch = _pop_ended(self._fetches, rank, name)
        if fetch is None:
            return []
        return [commands.FetchReleased(name) if fetch.has_failed else report]

    def _tell(self, ranks: set[int] | None, command: commands.Command) -> list[RanksAction]:
        return [Tell(rank, command) for rank in sorted((ranks or set()).difference(self._lost))]

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
        self._ranks = Ranks(1 + len(channels))
        self._channels = tuple(channels)
        self._report = report
        self._submit = submit
        self._followers: dict[int, TransferStatistics] = {}
        self._has_lost = False
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
        return self._service.is_alive and not self._has_lost

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
        self._do(self._ranks.command(command))

    def statistics(self) -> TransferStatistics:
        """Return sums over all ranks, followers' a second old; seconds of fetches are rank 0's."""
        own = self._service.statistics()
        return replace(_sum([own, *self._followers.values()]), fetch_seconds=own.fetch_seconds)

    def _on_report(self, rank: int, report: commands.Report) -> None:
        """Take a rank's report, on any thread."""
        self._submit(lambda: self._do(self._ranks.reported(rank, report)))

    def _do(self, actions: Sequence[RanksAction]) -> None:
        """Do what is to be done, on the engine's thread; the engine hears of it after what it is doing."""
        for action in actions:
            if not isinstance(action, Tell):
                self._submit(partial(self._report, action))
            elif action.rank == 0:
                self._service.command(action.command)
            else:
                with suppress(OSError):  # it has ended, which `_read` sees as well
                    self._channels[action.rank - 1].send(action.command)

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
                    self._lose(ranks.pop(channel))
                    continue
                if isinstance(message, TransferStatistics):
                    self._followers[ranks[channel]] = message
                else:
                    self._on_report(ranks[channel], message)

    def _lose(self, rank: int) -> None:
        logger.critical("transfers of a rank have stopped rank=%d", rank)
        self._has_lost = True
        self._submit(lambda: self._do(self._ranks.lost(rank)))


def _fail(shared: _Shared | None, rank: int) -> set[int] | None:
    """Return the other ranks that have not ended what this one is the first to give up; None if it is not."""
    if shared is None or rank not in shared.unended or shared.has_failed:
        return None
    shared.has_failed = True
    return shared.unended - {rank}


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
