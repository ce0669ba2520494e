"""Rank 0 and a follower in one process, with the pipe between them; the services are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from kvist.transfer import service as service_module
from kvist.transfer.bounce import BounceStatistics
from kvist.transfer.commands import (
    CancelFetch,
    Command,
    Fetch,
    FetchCompleted,
    FetchFailed,
    FetchReleased,
    Offer,
    OfferReleased,
    Report,
    TransfersStopped,
    WithdrawOffer,
)
from kvist.transfer.ranks import RankedTransfers
from kvist.transfer.service import FollowerLink, TransferStatistics

OFFER = Offer("held", 5)
WANT = Fetch("r", ("tcp://p:1",), "held", 5, ((7, 8),))


@dataclass
class Service:
    """Notes what it is told, and has counted `count` of everything."""

    endpoint: str
    count: int
    commands: list[Command] = field(default_factory=list)
    is_closed: bool = False

    def command(self, command: Command) -> None:
        self.commands.append(command)

    def statistics(self) -> TransferStatistics:
        n = self.count
        return TransferStatistics(n, n, n, BounceStatistics(n, n), *[n] * 5)

    def start(self) -> None:
        pass

    def close(self, timeout_s: float = 0) -> None:  # noqa: ARG002
        self.is_closed = True


@dataclass
class Pair:
    transfers: RankedTransfers
    reports: list[Report]
    first: Service
    report_of_first: Callable[[Report], None]
    second: Service
    link: FollowerLink


@contextmanager
def pair() -> Iterator[Pair]:
    ours, theirs = Pipe()
    link, reports = FollowerLink(theirs), []
    services, given = (Service("tcp://a:1", 1), Service("tcp://a:2", 10)), []
    theirs.send(services[1].endpoint)

    def open_service(report: Callable[[Report], None]) -> Any:
        given.append(report)
        return services[0]

    transfers = RankedTransfers(open_service, [ours], reports.append, lambda call: call())
    transfers.start()
    try:
        yield Pair(transfers, reports, services[0], given[0], services[1], link)
    finally:
        transfers.close()
        theirs.close()


def test_commands_go_to_every_rank_and_its_reports_become_one(until_true) -> None:
    with pair() as both:
        assert both.transfers.endpoints == ("tcp://a:1", "tcp://a:2")
        both.transfers.command(OFFER)
        both.transfers.command(WANT)
        both.transfers.command(CancelFetch("r"))
        both.transfers.command(WithdrawOffer("held"))
        assert both.link.poll(both.second)
        expected = [OFFER, WANT, CancelFetch("r"), WithdrawOffer("held")]
        assert both.first.commands == both.second.commands == expected
        both.report_of_first(FetchCompleted("r", 300))
        both.report_of_first(OfferReleased("held", True))
        assert both.reports == []
        both.link.report(FetchFailed("r", "no"))
        both.link.report(FetchReleased("r"))
        both.link.report(OfferReleased("held", True))
        until_true(lambda: len(both.reports) == 3)
        assert both.reports == [
            FetchFailed("r", "at rank 1: no"),
            FetchReleased("r"),
            OfferReleased("held", True),
        ]


def test_counts_of_all_ranks_are_added_up(until_true) -> None:
    with pair() as both:
        both.transfers.command(OFFER)
        both.link.poll(both.second)
        until_true(lambda: both.transfers.statistics().bytes_written == 11)
        total = both.transfers.statistics()
        assert (total.bytes_received, total.bounce.bytes_sent, total.bounce.quarantined_bytes) == (11, 11, 0)
        assert total.num_writing == 11


def test_a_follower_says_what_it_has_counted_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, service = [100.0], Service("tcp://a:2", 1)
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    ours, theirs = Pipe()
    with ours, theirs:
        link = FollowerLink(theirs)
        for count, at_s, is_said in ((1, 100.0, True), (2, 100.9, False), (2, 101.0, True), (2, 101.5, False)):
            service.count, now_s[0] = count, at_s
            assert link.poll(service)  # type: ignore[arg-type]
            assert ours.poll() == is_said
            assert not is_said or ours.recv().bytes_received == count


def test_a_follower_whose_transfers_end_is_a_lost_rank(until_true) -> None:
    with pair() as both:
        both.transfers.command(WANT)
        assert both.transfers.is_alive
        both.link.close()
        until_true(lambda: both.reports)
        assert not both.transfers.is_alive
        assert both.reports == [FetchFailed("r", "rank 1's transfers have stopped")]
        assert isinstance(both.first.commands[-1], CancelFetch)
        both.transfers.command(OFFER)
        assert both.reports[1:] == [OfferReleased("held", False)]


def test_rank_0_whose_transfers_end_is_a_lost_rank_too() -> None:
    with pair() as both:
        both.transfers.command(WANT)
        both.report_of_first(TransfersStopped())
        assert not both.transfers.is_alive
        assert both.reports == [FetchFailed("r", "rank 0's transfers have stopped")]
        both.transfers.command(WANT)
        assert both.reports[1:] == [FetchFailed("r", "rank 0's transfers have stopped"), FetchReleased("r")]


def test_when_rank_0_closes_the_follower_is_to_end() -> None:
    with pair() as both:
        both.transfers.close()
        assert not both.link.poll(both.second)
        both.link.report(FetchCompleted("r", 300))  # to nobody


def test_a_follower_that_has_ended_before_it_serves_is_told() -> None:
    ours, theirs = Pipe()
    theirs.close()
    service = Service("tcp://a:1", 1)
    with pytest.raises(EOFError):
        RankedTransfers(lambda _: service, [ours], print, lambda call: call())
    assert service.is_closed
    ours.close()
