"""What is told of transfers once they have ended."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvist.transfer.commands import FetchTimes, HoldTimes, WithdrawOffer, WriteTimes


def observe(worker: Any) -> list[Any]:
    """Return the list of everything that will be told."""
    told: list[Any] = []
    for rank in worker.ranks:
        rank.service.set_observer(told.append)
    return told


@pytest.mark.parametrize("has_bounce", [False, True], ids=["as it is", "bounced"])
def test_both_ends_tell_how_long_each_step_took_and_of_how_many_bytes(
    has_bounce: bool, open_worker: Any, make_prompt: Any
) -> None:
    source, target, prompt = open_worker(1, has_bounce=has_bounce), open_worker(1, has_bounce=has_bounce), make_prompt()
    theirs, ours = observe(source), observe(target)
    began_s = time.monotonic()
    source.offer(prompt, prompt.tables(1))
    target.fetch(prompt, prompt.tables(2), source.endpoints)
    target.ranks[0].reports.wait_for("completed", prompt.name)
    source.ranks[0].reports.wait_for("release", prompt.name)
    (fetch,), (write, hold) = ours, theirs
    assert [type(each) for each in (fetch, write, hold)] == [FetchTimes, WriteTimes, HoldTimes]
    steps_s = [began_s, fetch.began_s, fetch.arrived_s, fetch.ended_s, time.monotonic()]
    assert steps_s == sorted(steps_s)
    assert began_s <= hold.began_s <= write.began_s <= write.ended_s <= hold.ended_s
    assert (fetch.request_id, write.remote_request_id, hold.remote_request_id) == (prompt.name,) * 3
    assert fetch.num_bytes == write.num_bytes > 0
    assert (fetch.error, write.error, hold.is_fetched) == (None, None, True)
    assert (write.is_bounced, write.num_pieces > 1, fetch.num_senders) == (has_bounce, True, 1)
    assert not has_bounce or fetch.arrived_s < fetch.ended_s


def test_what_came_to_nothing_is_told_with_how_far_it_got(open_worker: Any, make_prompt: Any) -> None:
    source, target, prompt, other = open_worker(1), open_worker(1), make_prompt(), make_prompt(1)
    theirs, ours = observe(source), observe(target)
    target.fetch(prompt, prompt.tables(2), source.endpoints)  # which nobody has offered
    target.ranks[0].reports.wait_for("failed", prompt.name)
    source.offer(other, other.tables(1))
    source.ranks[0].service.command(WithdrawOffer(other.name))
    source.ranks[0].reports.wait_for("release", other.name)
    (fetch,) = ours
    assert (type(fetch), fetch.error, fetch.arrived_s) == (FetchTimes, "unknown_request", None)
    assert fetch.began_s <= fetch.ended_s
    (hold,) = theirs
    assert (type(hold), hold.is_fetched) == (HoldTimes, False)
