"""A worker of several ranks, to its engine: what it says goes to all of them, what they report comes back as one.

Every rank moves its own heads, by a service of its own. Rank 0's engine sends `Command`s, and each rank answers with
`Report`s: its own service by calls, the others' over a pipe (`kvist.transfer.ranked_service`). `Ranks` says what their
reports come to, without I/O. Blocks have the same ids on all ranks, so they are free only when no rank needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvist.transfer.handoff import Cancelled, Command, OfferedBlocks, TransferReports, WantedBlocks, Withdrawn


class Released(NamedTuple):
    """Nobody reads an offer's blocks any more."""

    remote_request_id: str
    is_fetched: bool


class Completed(NamedTuple):
    """Every byte of a fetch is in its block."""

    request_id: str


class Failed(NamedTuple):
    """Some bytes of a fetch will not come."""

    request_id: str
    reason: str


class FetchReleased(NamedTuple):
    """Nobody writes to a failed fetch's blocks any more."""

    request_id: str


Report: TypeAlias = Released | Completed | Failed | FetchReleased


class Tell(NamedTuple):
    """Give a command to a rank."""

    rank: int
    command: Command


RanksAction: TypeAlias = Tell | Report  # a report is for the engine


@dataclass(slots=True)
class _Offer:
    """`unreleased` ranks may be read; `is_fetched` until the first rank has given it up."""

    unreleased: set[int]
    is_fetched: bool = True


@dataclass(slots=True)
class _Fetch:
    """`unended` ranks may be written to."""

    unended: set[int]
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class RanksStatistics:
    """Prompts, each counted once however many ranks have a part of it."""

    num_held: int
    num_active: int
    num_quarantined: int
    num_fetched: int
    num_given_up: int
    num_completed: int
    num_failed: int


class Ranks:
    """What is offered and fetched by all ranks; each ends once, for all of them.

    The first rank that gives an offer up has it withdrawn from the others, and the first that fails a fetch has it
    cancelled on them. What a lost rank had not ended never ends: its blocks stay out of use.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lost: list[int] = []
        self._offers: dict[str, _Offer] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._num_fetched = self._num_given_up = self._num_completed = self._num_failed = self._num_quarantined = 0

    def command(self, command: Command) -> list[RanksAction]:
        """Take a command of the engine's: of what has ended, or with a rank lost, nothing is asked of anybody."""
        match command:
            case OfferedBlocks(remote_request_id=remote_request_id):
                if self._lost:
                    return [Released(remote_request_id, False)]
                ranks = set(range(self._num_ranks))
                self._offers[remote_request_id] = _Offer(ranks)
            case WantedBlocks(request_id=request_id):
                if self._lost:
                    return [Failed(request_id, self._loss()), FetchReleased(request_id)]
                ranks = set(range(self._num_ranks))
                self._fetches[request_id] = _Fetch(ranks)
            case Withdrawn(remote_request_id=remote_request_id):
                offer = self._offers.get(remote_request_id)
                ranks = set() if offer is None else offer.unreleased
            case Cancelled(request_id=request_id):
                fetch = self._fetches.get(request_id)
                ranks = set() if fetch is None else fetch.unended
        return self._tell(ranks, command)

    def reported(self, rank: int, report: Report) -> list[RanksAction]:
        """Take a rank's report."""
        match report:
            case Released(remote_request_id=remote_request_id, is_fetched=is_fetched):
                return self._released(rank, remote_request_id, is_fetched)
            case Failed(request_id=request_id, reason=reason):
                told = reason if self._num_ranks == 1 else f"at rank {rank}: {reason}"
                return self._failed(rank, request_id, told)
            case Completed(request_id=request_id) | FetchReleased(request_id=request_id):
                return self._ended(rank, request_id)

    def lost(self, rank: int) -> list[RanksAction]:
        """Take note that a rank's transfers have stopped: it reports nothing any more."""
        self._lost.append(rank)
        offers = [action for each in list(self._offers) for action in self._given_up(rank, each)]
        return offers + [action for each in list(self._fetches) for action in self._failed(rank, each, self._loss())]

    def statistics(self) -> RanksStatistics:
        """Return the counts; the held, active and quarantined are those of now."""
        return RanksStatistics(
            num_held=len(self._offers),
            num_active=len(self._fetches) - self._num_quarantined,
            num_quarantined=self._num_quarantined,
            num_fetched=self._num_fetched,
            num_given_up=self._num_given_up,
            num_completed=self._num_completed,
            num_failed=self._num_failed,
        )

    def _released(self, rank: int, remote_request_id: str, is_fetched: bool) -> list[RanksAction]:
        actions = [] if is_fetched else self._given_up(rank, remote_request_id)
        offer = self._offers.get(remote_request_id)
        if offer is None:
            return []
        offer.unreleased.discard(rank)
        if offer.unreleased:
            return actions
        del self._offers[remote_request_id]
        self._num_fetched += offer.is_fetched
        self._num_given_up += not offer.is_fetched
        return [*actions, Released(remote_request_id, offer.is_fetched)]

    def _given_up(self, rank: int, remote_request_id: str) -> list[RanksAction]:
        """Withdraw an offer from the others, once, if this rank has not released it."""
        offer = self._offers.get(remote_request_id)
        if offer is None or rank not in offer.unreleased or not offer.is_fetched:
            return []
        offer.is_fetched = False
        return self._tell(offer.unreleased - {rank}, Withdrawn(remote_request_id))

    def _failed(self, rank: int, request_id: str, reason: str) -> list[RanksAction]:
        """Fail a fetch and cancel it on the others, once, if this rank has not ended it."""
        fetch = self._fetches.get(request_id)
        if fetch is None or rank not in fetch.unended or fetch.has_failed:
            return []
        fetch.has_failed = True
        self._num_failed += 1
        self._num_quarantined += 1
        return [Failed(request_id, reason), *self._tell(fetch.unended - {rank}, Cancelled(request_id))]

    def _ended(self, rank: int, request_id: str) -> list[RanksAction]:
        fetch = self._fetches.get(request_id)
        if fetch is None:
            return []
        fetch.unended.discard(rank)
        if fetch.unended:
            return []
        del self._fetches[request_id]
        self._num_completed += not fetch.has_failed
        self._num_quarantined -= fetch.has_failed
        return [FetchReleased(request_id) if fetch.has_failed else Completed(request_id)]

    def _tell(self, ranks: set[int], command: Command) -> list[RanksAction]:
        return [Tell(rank, command) for rank in sorted(ranks.difference(self._lost))]

    def _loss(self) -> str:
        return f"rank {self._lost[0]}'s transfers have stopped"


class Reporter:
    """A `TransferReports` that makes values of the calls."""

    def __init__(self, put: Callable[[Report], object]) -> None:
        self._put = put

    def release(self, remote_request_id: str, is_fetched: bool) -> None:
        """Say that nobody reads an offer's blocks any more."""
        self._put(Released(remote_request_id, is_fetched))

    def fetch_completed(self, request_id: str) -> None:
        """Say that every byte is in its block."""
        self._put(Completed(request_id))

    def fetch_failed(self, request_id: str, reason: str) -> None:
        """Say that some bytes will not come."""
        self._put(Failed(request_id, reason))

    def fetch_released(self, request_id: str) -> None:
        """Say that nobody writes to a failed fetch's blocks any more."""
        self._put(FetchReleased(request_id))


def deliver(reports: TransferReports, report: Report) -> None:
    """Make the call that a report stands for."""
    match report:
        case Released():
            reports.release(*report)
        case Completed():
            reports.fetch_completed(*report)
        case Failed():
            reports.fetch_failed(*report)
        case FetchReleased():
            reports.fetch_released(*report)
