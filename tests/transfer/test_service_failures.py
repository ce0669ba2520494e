"""Ranks that die, refuse, lie or are cancelled amid a transfer: no block is used too early, and none is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from kvist.transfer import receiver
from kvist.transfer import sender as sender_module
from kvist.transfer.agents import Write, WriteFailedError
from kvist.transfer.commands import CancelFetch, TransferLimits, WithdrawOffer
from kvist.transfer.messages import Extent, Message, ReceiveRequest, encode_message

NUM_SLOTS = 24  # of each pool
FAST = TransferLimits(transfer_timeout_s=1.0, hold_timeout_s=1.0, cancel_retry_s=0.1)


@pytest.mark.parametrize("has_bounce", [False, True], ids=["as it is", "bounced"])
def test_one_of_two_senders_dies_and_the_blocks_are_free_when_the_other_has_written(
    has_bounce: bool, open_worker: Any, make_prompt: Any, until_true: Any
) -> None:
    source, target = open_worker(2, has_bounce=has_bounce), open_worker(1, has_bounce=has_bounce)
    prompt, (rank,) = make_prompt(), target.ranks
    go_on, _ = (each.hold_writes() for each in source.ranks)
    source.offer(prompt, prompt.tables(1))
    target.fetch(prompt, prompt.tables(2), source.endpoints)
    until_true(lambda: all(each.service.statistics().num_writing for each in source.ranks))
    threading.Thread(target=source.ranks[1].service.close, daemon=True).start()
    reason = rank.reports.wait_for("failed", prompt.name)[2]
    assert reason == f"rank 1 at {source.endpoints[1]} is gone"
    assert ("released", prompt.name) not in rank.reports.heard
    assert rank.service.statistics().quarantined_bytes > 0
    assert (rank.service.statistics().bounce.quarantined_bytes > 0) == has_bounce
    go_on()
    rank.reports.wait_for("released", prompt.name)
    source.ranks[0].reports.wait_for("release", prompt.name)
    for each in (rank, source.ranks[0]):
        each.assert_nothing_left()
    open_worker(2, has_bounce=has_bounce).assert_hands_over(target, make_prompt(1))


@pytest.mark.parametrize("has_bounce", [False, True], ids=["as it is", "bounced"])
def test_one_of_two_senders_refuses_and_the_other_frees_what_it_holds(
    has_bounce: bool, open_worker: Any, make_prompt: Any
) -> None:
    source, target = open_worker(2, has_bounce=has_bounce), open_worker(2, has_bounce=has_bounce)
    prompt = make_prompt()
    source.offer(prompt, prompt.tables(1))
    source.ranks[1].service.command(WithdrawOffer(prompt.name))
    assert source.ranks[1].reports.wait_for("release", prompt.name)[2] is False
    target.fetch(prompt, prompt.tables(2), source.endpoints)
    # Whoever hears of it first cancels at the other sender, which then may have a word for the second as well.
    for rank in target.ranks:
        assert rank.reports.wait_for("failed", prompt.name)[2] in ("already_ended", "rank 0 reports CANCELLED")
        rank.reports.wait_for("released", prompt.name)
    source.ranks[0].reports.wait_for("release", prompt.name)
    for rank in (*source.ranks, *target.ranks):
        rank.assert_nothing_left()
    source.assert_hands_over(target, make_prompt(1))


def test_a_region_that_is_too_small_for_what_it_is_for_is_not_written_to(
    open_worker: Any, make_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(message: Message) -> bytes:
        is_request = isinstance(message, ReceiveRequest)
        return encode_message(replace(message, room=Extent(message.room.base, 16)) if is_request else message)

    monkeypatch.setattr(receiver, "encode_message", encode)
    source, target = open_worker(2, has_bounce=True), open_worker(1, has_bounce=True)
    source.assert_hands_over(target, make_prompt())
    assert [rank.service.statistics().bounce.bytes_sent for rank in source.ranks] == [0, 0]
    monkeypatch.undo()
    source.assert_hands_over(target, make_prompt(1))
    assert all(rank.service.statistics().bounce.bytes_sent for rank in source.ranks)


def test_a_receiver_is_not_let_go_of_while_anything_is_written_to_it(
    open_worker: Any, make_prompt: Any, until_true: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "_MAX_RECEIVERS", 1)
    source, target = open_worker(1), open_worker(1)
    (sender,), (rank,) = source.ranks, target.ranks
    source.assert_hands_over(target, make_prompt(0))
    let_go: list[str] = []
    disconnect = sender.agent.disconnect
    monkeypatch.setattr(sender.agent, "disconnect", lambda peer: (let_go.append(peer), disconnect(peer)))
    failing, lasting = threading.Event(), threading.Event()

    def fails_once(is_late: threading.Event) -> Write:
        while not is_late.is_set():
            yield False
        raise WriteFailedError("late")

    writes = iter((fails_once(failing), fails_once(lasting)))
    monkeypatch.setattr(sender.agent, "write", lambda *_: next(writes))
    for seed in (1, 2):
        prompt = make_prompt(seed)
        source.offer(prompt, prompt.tables(1))
        target.fetch(prompt, prompt.tables(2), source.endpoints)
        until_true(lambda: sender.service.statistics().num_writing == seed)  # noqa: B023
    failing.set()
    rank.reports.wait_for("released", "prompt-1")
    other = open_worker(1)
    other.fetch(make_prompt(3), make_prompt(3).tables(2), source.endpoints)  # one too many, and refused
    other.ranks[0].reports.wait_for("failed", "prompt-3")
    assert not let_go
    lasting.set()
    rank.reports.wait_for("released", "prompt-2")
    until_true(lambda: let_go == [rank.agent.name])


def test_a_fetch_that_nobody_waits_for_is_ended_at_every_rank(
    open_worker: Any, make_prompt: Any, until_true: Any
) -> None:
    source, target = open_worker(2), open_worker(2)
    prompt = make_prompt()
    go_on = [rank.hold_writes() for rank in source.ranks]
    source.offer(prompt, prompt.tables(1))
    target.fetch(prompt, prompt.tables(2), source.endpoints)
    until_true(lambda: [rank.service.statistics().num_writing for rank in source.ranks] == [1, 1])
    for rank in target.ranks:
        rank.service.command(CancelFetch(prompt.name))
        assert rank.reports.wait_for("failed", prompt.name)[2] == "cancelled"
    for each in go_on:
        each()
    for rank in target.ranks:
        rank.reports.wait_for("released", prompt.name)
    for rank in source.ranks:
        rank.reports.wait_for("release", prompt.name)
    for rank in (*source.ranks, *target.ranks):
        rank.assert_nothing_left()


def test_a_fetch_that_is_cancelled_before_anybody_has_heard_of_it_frees_what_is_held(
    open_worker: Any, make_prompt: Any
) -> None:
    source, target = open_worker(2, is_started=False), open_worker(1)
    prompt, (rank,) = make_prompt(), target.ranks
    source.offer(prompt, prompt.tables(1))
    target.fetch(prompt, prompt.tables(2), source.endpoints)
    rank.service.command(CancelFetch(prompt.name))
    assert rank.reports.wait_for("failed", prompt.name)[2] == "cancelled"
    for each in source.ranks:
        each.service.start()
    rank.reports.wait_for("released", prompt.name)
    for each in source.ranks:
        each.reports.wait_for("release", prompt.name)
    for each in (rank, *source.ranks):
        each.assert_nothing_left()


def test_looking_whether_a_sender_has_died_holds_nobody_up(
    open_worker: Any, make_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def has_process_ended(endpoint: str) -> bool:
        asked.set()
        assert go_on.wait(60)
        return has_ended(endpoint)

    has_ended = receiver.has_process_ended
    monkeypatch.setattr(receiver, "has_process_ended", has_process_ended)
    dead, source, target = open_worker(1), open_worker(1), open_worker(1)
    (rank,) = target.ranks
    dead.ranks[0].service.close()
    lost, later = make_prompt(0), make_prompt(1)
    target.fetch(lost, lost.tables(2), dead.endpoints)
    assert asked.wait(60)
    source.hand_over(target, make_prompt(2))
    target.fetch(later, later.tables(2), dead.endpoints)
    assert ("failed", lost.name) not in [each[:2] for each in rank.reports.heard]
    go_on.set()
    for prompt in (lost, later):
        assert rank.reports.wait_for("failed", prompt.name)[2] == f"rank 0 at {dead.endpoints[0]} is gone"
        rank.reports.wait_for("released", prompt.name)
    rank.assert_nothing_left()


def test_who_is_gone_is_not_dialled_for_ever(
    open_worker: Any, make_prompt: Any, until_true: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    drop = receiver.SenderConnections.drop

    def note(self: receiver.SenderConnections, sender: receiver.SenderConnection) -> None:
        dropped.append(sender.endpoint)
        drop(self, sender)

    monkeypatch.setattr(receiver.SenderConnections, "drop", note)
    monkeypatch.setattr(receiver, "_MAX_IDLE_S", 0.0)
    dead, source, target = open_worker(1), open_worker(1), open_worker(1)
    dead.ranks[0].service.close()
    prompt, (rank,) = make_prompt(0), target.ranks
    target.fetch(prompt, prompt.tables(2), dead.endpoints)
    rank.reports.wait_for("released", prompt.name)
    until_true(lambda: dropped == list(dead.endpoints))
    source.assert_hands_over(target, make_prompt(1))


def test_what_a_sender_reported_before_it_died_counts(
    open_worker: Any, make_prompt: Any, until_true: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    source, target = open_worker(2), open_worker(1)
    prompt, (rank,) = make_prompt(), target.ranks
    write = [each.hold_writes() for each in source.ranks]
    source.offer(prompt, prompt.tables(1))
    target.fetch(prompt, prompt.tables(2), source.endpoints)
    until_true(lambda: all(each.service.statistics().num_writing for each in source.ranks))
    monkeypatch.setattr(rank.service._sender, "advance_writes", lambda _: not go_on.wait(60))
    for each, begin in zip(source.ranks, write, strict=True):
        begin()
        each.reports.wait_for("release", prompt.name, True)
        each.service.close()
    go_on.set()
    rank.reports.wait_for("completed", prompt.name)
    assert rank.holds(prompt.whole, prompt.tables(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_that_is_its_last_report(
    open_worker: Any, make_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(now_s: float) -> None:
        raise RuntimeError(f"at {now_s}")

    (rank,) = (worker := open_worker(1, is_started=False)).ranks
    monkeypatch.setattr(rank.service._receiver, "tick", die)
    rank.service.start()
    rank.reports.wait_for("stopped")
    worker.offer(make_prompt(0), make_prompt(0).tables(1))  # which nobody takes, and nobody waits for
    assert rank.reports.heard == [("stopped",)]


@pytest.mark.parametrize("seed", range(6))
def test_a_long_mix_between_ranks_leaves_nothing_behind(seed: int, open_worker: Any, make_prompt: Any) -> None:
    rng = random.Random(seed)
    num_senders, num_receivers = rng.choice([(2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4)])
    source, target = (open_worker(n, has_bounce=bool(seed % 2), limits=FAST) for n in (num_senders, num_receivers))
    num_whole = 0
    for batch in range(8):
        prompts = [make_prompt(4 * batch + i, rng.randint(1, 20)) for i in range(4)]
        rows = [prompt.tables(1) for prompt in prompts], [prompt.tables(2) for prompt in prompts]
        for tables in rows:  # no two of the four may have a block in common
            for group_id in range(len(tables[0])):
                free = rng.sample(range(NUM_SLOTS), NUM_SLOTS)
                for each in tables:
                    each[group_id] = [-1 if block_id < 0 else free.pop() for block_id in each[group_id]]
        moves: list[Callable[[], None]] = []
        for prompt, offered, wanted in zip(prompts, *rows, strict=True):
            source.offer(prompt, offered)
            fetch = [partial(target.fetch_by, rank, prompt, wanted, source.endpoints) for rank in target.ranks]
            rng.shuffle(fetch)
            moves += fetch
            fate = rng.choice(["fetched", "fetched", "fetched", "cancelled", "withdrawn", "withdrawn from one"])
            if fate == "cancelled":
                moves += [partial(rank.service.command, CancelFetch(prompt.name)) for rank in target.ranks]
            elif fate != "fetched":
                ranks = source.ranks if fate == "withdrawn" else [rng.choice(source.ranks)]
                moves += [partial(rank.service.command, WithdrawOffer(prompt.name)) for rank in ranks]
        rng.shuffle(moves)
        for move in moves:
            move()
        for prompt, wanted in zip(prompts, rows[1], strict=True):
            for rank in source.ranks:
                rank.reports.wait_for("release", prompt.name)
            for rank in target.ranks:
                if rank.reports.wait_for_either("completed", "released", prompt.name) == "completed":
                    assert rank.holds(prompt.whole, wanted)
                    num_whole += 1
        for rank in (*source.ranks, *target.ranks):
            rank.assert_nothing_left()
    assert num_whole > 4
