from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pytest

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
from kvist.transfer.ranks import Ranks


class Tell(NamedTuple):
    """A command that a rank is given."""

    rank: int
    command: Command


Done: TypeAlias = list[Tell | Report]
OFFER = Offer("held", 5)
WANT = Fetch("r", ("tcp://p:1", "tcp://p:2"), "held", 5, ((7, 8),))
GIVE_UP = WithdrawOffer("held")
CANCEL = CancelFetch("r")
DONE, FREE = FetchCompleted("r", 300), FetchReleased("r")
LOST = FetchFailed("r", "rank 1's transfers have stopped")


def failed(reason: str = "x") -> FetchFailed:
    return FetchFailed("r", reason)


def released(is_fetched: bool) -> OfferReleased:
    return OfferReleased("held", is_fetched)


def told(reason: str, rank: int) -> FetchFailed:
    return FetchFailed("r", f"at rank {rank}: {reason}")


# After the offer and the fetch have been asked of ranks 0 to 2: who reports what, and what follows of each.
STORIES: dict[str, list[tuple[int, Report | str, Done]]] = {
    "an offer is released when every rank has been read": [
        (1, released(True), []),
        (0, released(True), []),
        (2, released(True), [released(True)]),
    ],
    "the first rank that gives an offer up has it withdrawn from those that hold it": [
        (1, released(True), []),
        (0, released(False), [Tell(2, GIVE_UP)]),
        (2, released(False), [released(False)]),
    ],
    "a rank that was read after all does not make a withdrawn offer a fetched one": [
        (2, released(False), [Tell(0, GIVE_UP), Tell(1, GIVE_UP)]),
        (0, released(True), []),
        (1, released(True), [released(False)]),
    ],
    "a release is heard once": [
        (0, released(True), []),
        (0, released(False), []),
        (1, released(True), []),
        (2, released(True), [released(True)]),
        (2, released(True), []),
    ],
    "a fetch is completed when every rank has its part": [(2, DONE, []), (0, DONE, []), (1, DONE, [DONE])],
    "a fetch fails once, at the first failure, and is free when every rank has ended": [
        (0, DONE, []),
        (2, failed(), [told("x", 2), Tell(1, CANCEL)]),
        (1, failed("cancelled"), []),
        (1, FREE, []),
        (2, FREE, [FREE]),
    ],
    "a rank that completes what is cancelled has ended it": [
        (0, failed(), [told("x", 0), Tell(1, CANCEL), Tell(2, CANCEL)]),
        (2, DONE, []),
        (0, FREE, []),
        (1, DONE, [FREE]),
    ],
    "a completed rank cannot fail": [(0, DONE, []), (0, failed(), []), (1, DONE, []), (2, DONE, [DONE])],
    "what is over is not heard again": [
        (0, DONE, []),
        (1, DONE, []),
        (2, DONE, [DONE]),
        (1, failed(), []),
        (1, FREE, []),
    ],
    "a lost rank's fetch fails and its blocks are never free": [
        (0, DONE, []),
        (1, "lost", [Tell(0, GIVE_UP), Tell(2, GIVE_UP), LOST, Tell(2, CANCEL)]),
        (2, failed("cancelled"), []),
        (2, FREE, []),
        (0, released(False), []),
        (2, released(False), []),
    ],
    "a lost rank that has ended its part changes nothing": [
        (1, DONE, []),
        (1, released(True), []),
        (1, "lost", []),
        (0, DONE, []),
        (2, DONE, [DONE]),
        (0, released(True), []),
        (2, released(True), [released(True)]),
    ],
    "nothing is told to a lost rank": [
        (1, DONE, []),
        (1, released(True), []),
        (1, "lost", []),
        (0, failed(), [told("x", 0), Tell(2, CANCEL)]),
        (0, released(False), [Tell(2, GIVE_UP)]),
    ],
}


def shown(done: Done) -> list[str]:
    """Tell them apart, which as tuples can be equal."""
    return list(map(repr, done))


class Asked:
    """Ranks, and what is done about what they hear."""

    def __init__(self, num_ranks: int) -> None:
        self.done: Done = []
        self.ranks = Ranks(num_ranks, lambda *told: self.done.append(Tell(*told)), self.done.append)

    def by(self, hear: Callable[[Ranks], None]) -> Done:
        self.done.clear()
        hear(self.ranks)
        return self.done.copy()

    def command(self, command: Command) -> Done:
        return self.by(lambda ranks: ranks.command(command))

    def on_report(self, rank: int, report: Report) -> Done:
        return self.by(lambda ranks: ranks.on_report(rank, report))

    def lost(self, rank: int) -> Done:
        return self.on_report(rank, TransfersStopped())


def asked(num_ranks: int) -> Asked:
    ranks = Asked(num_ranks)
    for command in (OFFER, WANT):
        assert ranks.command(command) == [Tell(rank, command) for rank in range(num_ranks)]
    return ranks


@pytest.mark.parametrize("story", STORIES)
def test_each_report_has_the_consequences_that_the_table_says(story: str) -> None:
    ranks = asked(3)
    for rank, report, expected in STORIES[story]:
        actions = ranks.lost(rank) if isinstance(report, str) else ranks.on_report(rank, report)
        assert shown(actions) == shown(expected)


def test_withdrawing_and_cancelling_is_told_to_the_ranks_that_have_not_ended() -> None:
    ranks = asked(3)
    ranks.on_report(0, DONE)
    ranks.on_report(1, released(True))
    assert ranks.command(CANCEL) == [Tell(1, CANCEL), Tell(2, CANCEL)]
    assert ranks.command(GIVE_UP) == [Tell(0, GIVE_UP), Tell(2, GIVE_UP)]
    assert ranks.command(CancelFetch("another")) == ranks.command(WithdrawOffer("another")) == []


def test_with_a_rank_lost_nothing_is_begun() -> None:
    ranks = Asked(2)
    ranks.lost(1)
    assert ranks.lost(1) == []
    assert not ranks.ranks.is_whole
    assert ranks.command(OFFER) == [released(False)]
    assert shown(ranks.command(WANT)) == shown([LOST, FREE])


def test_what_is_ended_by_hand_is_not_told_to_a_lost_rank() -> None:
    ranks = asked(3)
    ranks.lost(1)
    assert ranks.command(CANCEL) == [Tell(0, CANCEL), Tell(2, CANCEL)]
    assert ranks.command(GIVE_UP) == [Tell(0, GIVE_UP), Tell(2, GIVE_UP)]


def test_one_rank_speaks_for_itself() -> None:
    ranks = asked(1)
    assert ranks.on_report(0, failed("why")) == [failed("why")]
    assert shown(ranks.on_report(0, FREE)) == shown([FREE])
    assert ranks.on_report(0, released(True)) == [released(True)]


@pytest.mark.parametrize("seed", range(200))
def test_in_any_order_everything_ends_once_when_all_ranks_have_ended(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randrange(1, 6)
    ranks, seen = asked(num_ranks), []
    todo: list[list[Report]] = []
    for _ in range(num_ranks):
        reports: list[Report] = [DONE] if rng.random() < 0.7 else [failed(), FREE]
        reports.insert(rng.randrange(len(reports) + 1), released(rng.random() < 0.7))
        todo.append(reports)
    all_reports = shown([report for reports in todo for report in reports])
    while any(todo):
        rank = rng.choice([rank for rank in range(num_ranks) if todo[rank]])
        for action in ranks.on_report(rank, todo[rank].pop(0)):
            left = [type(report) for reports in todo for report in reports]
            if isinstance(action, OfferReleased):
                assert OfferReleased not in left
            elif isinstance(action, FetchCompleted | FetchReleased):
                assert not {FetchCompleted, FetchReleased} & set(left)
            if not isinstance(action, Tell):
                seen.append(action)
    assert [each for each in seen if isinstance(each, OfferReleased)] == [
        released(repr(released(False)) not in all_reports)
    ]
    ends = [type(each) for each in seen if not isinstance(each, OfferReleased)]
    assert ends == ([FetchFailed, FetchReleased] if repr(failed()) in all_reports else [FetchCompleted])
