"""Services that stand for ranks of two workers, in one process: every byte of every head arrives where it belongs."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import zmq

from kvist.errors import InvalidValueError
from kvist.transfer.agents import SharedMemoryAgent
from kvist.transfer.commands import Computed, Fetch, Offer, WithdrawOffer
from kvist.transfer.heads import Part
from kvist.transfer.messages import GroupShape, PoolPlace, Refusal, RefusalReason, encode_message
from kvist.transfer.service import KvTransferService, make_hello

TWO_HEADS = (GroupShape(None, 2, 8, "float32", 2, (0, 1)),)
SIX_HEADS = (GroupShape(None, 6, 8, "float32", 2, (0, 1)),)


@pytest.mark.parametrize("has_bounce", [False, True], ids=["as it is", "bounced"])
@pytest.mark.parametrize(
    ("num_senders", "num_receivers", "of_shapes"),
    [
        (1, 1, None),
        (2, 1, None),
        (1, 2, None),
        (2, 2, None),
        (4, 2, TWO_HEADS),
        (2, 4, TWO_HEADS),
        (4, 1, None),  # the second group has copies of its heads, the first has not
        (3, 2, SIX_HEADS),  # one writes twice as much as the other
    ],
)
def test_every_head_goes_to_every_rank_that_has_it(
    num_senders: int,
    num_receivers: int,
    of_shapes: Sequence[GroupShape] | None,
    has_bounce: bool,
    shapes: tuple[GroupShape, ...],
    open_worker: Callable[..., Any],
    make_prompt: Callable[..., Any],
) -> None:
    options = {"of_shapes": of_shapes or shapes, "has_bounce": has_bounce}
    source, target = open_worker(num_senders, **options), open_worker(num_receivers, **options)
    for seed in range(3):
        source.assert_hands_over(target, make_prompt(seed, 20 + 5 * seed, options["of_shapes"]))
    num_bytes = [rank.service.statistics().bytes_received for rank in target.ranks]
    assert sum(num_bytes) == sum(rank.service.statistics().bytes_written for rank in source.ranks) > 0
    assert sum(rank.service.statistics().bounce.bytes_sent for rank in source.ranks) == has_bounce * sum(num_bytes)
    assert sum(rank.service.statistics().write_seconds for rank in source.ranks) > 0


@pytest.mark.parametrize("has_bounce", [False, True], ids=["as it is", "bounced"])
def test_two_ranks_write_to_one_over_nixl(has_bounce: bool, open_worker: Any, make_prompt: Any) -> None:
    source, target = (open_worker(n, kind="nixl", has_bounce=has_bounce) for n in (2, 1))
    for seed in range(2):
        source.assert_hands_over(target, make_prompt(seed))
    assert all((rank.service.statistics().bounce.bytes_sent > 0) == has_bounce for rank in source.ranks)


@pytest.mark.parametrize(
    ("endpoints", "named"),
    [
        (("inproc://x",), "remote_endpoints: got 'inproc://x', expected tcp://host:port"),
        (("ipc:///tmp/x",), "remote_endpoints: got 'ipc:///tmp/x', expected tcp://host:port"),
        (("tcp://127.0.0.1:99999",), "expected tcp://host:port"),
        (("tcp://127.0.0.1:0",), "expected tcp://host:port"),
        (("tcp://127.0.0.1",), "expected tcp://host:port"),
        (("tcp://127.0.0.1:1;127.0.0.1:2",), "expected tcp://host:port"),
        (("tcp://*:5",), "expected tcp://host:port"),
        (("tcp://127.0.0.1:5", "tcp://127.0.0.1:5"), "expected 1 to 64, each once"),
        ((), "expected 1 to 64, each once"),
        (tuple(f"tcp://127.0.0.1:{port}" for port in range(1, 66)), "expected 1 to 64, each once"),
        (tuple(f"tcp://127.0.0.1:{port}" for port in (1, 2, 3)), "tensor_parallel_size: got 3, expected a divisor"),
    ],
)
def test_what_are_no_endpoints_of_a_workers_ranks_is_refused_by_name_at_once(
    endpoints: tuple[str, ...], named: str, open_worker: Any, make_prompt: Any
) -> None:
    (rank,) = (target := open_worker(1)).ranks
    prompt = make_prompt()
    target.fetch(prompt, prompt.tables(2), endpoints)
    assert named in rank.reports.wait_for("failed", prompt.name)[2]
    rank.reports.wait_for("released", prompt.name)
    rank.assert_nothing_left()


def test_ranks_in_another_order_or_not_all_of_them_are_refused_by_name(open_worker: Any, make_prompt: Any) -> None:
    source, target = open_worker(2), open_worker(1)
    (rank,), (first, second) = target.ranks, source.endpoints
    for seed, endpoints in enumerate([(second, first), (first,)]):
        prompt = make_prompt(seed)
        target.fetch(prompt, prompt.tables(2), endpoints)
        reason = rank.reports.wait_for("failed", prompt.name)[2]
        assert reason.startswith("rank: ours=rank ")
        assert reason.endswith((f"theirs=rank 0 of {len(endpoints)}", "theirs=rank 1 of 2"))
        rank.reports.wait_for("released", prompt.name)
    source.assert_hands_over(target, make_prompt(3))


def test_a_worker_that_was_started_again_with_other_ranks_is_asked_as_these(open_worker: Any, make_prompt: Any) -> None:
    target, earlier = open_worker(1), open_worker(2)
    endpoints = earlier.endpoints
    earlier.assert_hands_over(target, make_prompt(0))
    for rank in earlier.ranks:
        rank.service.close()
    open_worker(1, endpoints=endpoints[:1]).assert_hands_over(target, make_prompt(1))


def test_ranks_that_are_known_in_another_order_are_not_asked(open_worker: Any, make_prompt: Any) -> None:
    source, target = open_worker(2), open_worker(1)
    (rank,), prompt = target.ranks, make_prompt(1)
    source.assert_hands_over(target, make_prompt(0))
    source.offer(prompt, prompt.tables(1))
    target.fetch(prompt, prompt.tables(2), source.endpoints[::-1])
    assert "of 2 theirs=rank " in rank.reports.wait_for("failed", prompt.name)[2]
    rank.reports.wait_for("released", prompt.name)
    for each in source.ranks:
        assert each.reports.wait_for("release", prompt.name)[2] is False
    rank.assert_nothing_left()


def test_a_part_of_the_heads_is_not_taken_for_all_from_who_was_one_rank_before(
    open_worker: Any, make_prompt: Any
) -> None:
    target, earlier = open_worker(1), open_worker(1)
    (rank,), prompt = target.ranks, make_prompt(1)
    earlier.assert_hands_over(target, make_prompt(0))
    earlier.ranks[0].service.close()
    later = open_worker(2, endpoints=(*earlier.endpoints, "tcp://127.0.0.1:*"))
    later.offer(prompt, prompt.tables(1))
    target.fetch(prompt, prompt.tables(2), earlier.endpoints)
    assert rank.reports.wait_for("failed", prompt.name)[2] == "rank: ours=rank 0 of 2 theirs=rank 0 of 1"
    rank.reports.wait_for("released", prompt.name)
    rank.assert_nothing_left()


def test_a_request_that_another_worker_cannot_read_is_not_waited_for(open_worker: Any, make_prompt: Any) -> None:
    (rank,) = (target := open_worker(1)).ranks
    prompt = make_prompt()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.bind("tcp://127.0.0.1:*")
        target.fetch(prompt, prompt.tables(2), (stranger.getsockopt_string(zmq.LAST_ENDPOINT),))
        assert stranger.poll(60_000)
        name, _ = stranger.recv_multipart()
        for nonsense in ((b"\xff\xff",), (b"?", b"?")):
            stranger.send_multipart([name, *nonsense])
        stranger.send_multipart([name, encode_message(Refusal(RefusalReason.MALFORMED, None, "a", "b"))])
        assert rank.reports.wait_for("failed", prompt.name)[2] == "malformed: ours=a theirs=b"
    rank.reports.wait_for("released", prompt.name)
    assert rank.service.statistics().num_malformed == 2
    rank.assert_nothing_left()


class Pipe:
    """A link: an event descriptor, and a list of what it brings; None is its end."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.brought: list[Offer | None] = []
        self.is_closed = threading.Event()

    def bring(self, offer: Offer | None) -> None:
        self.brought.append(offer)
        os.eventfd_write(self.fd, 1)

    def fileno(self) -> int:
        return self.fd

    def poll(self, service: Any) -> bool:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self.brought:
            offer = self.brought.pop(0)
            if offer is None:
                return False
            service.command(offer)
        return True

    def close(self) -> None:
        self.is_closed.set()


def test_what_comes_through_the_inlet_is_known_before_anybody_asks_and_its_end_ends_the_service(
    open_worker: Any, make_prompt: Any
) -> None:
    link = Pipe()
    source, target = open_worker(1, link=link), open_worker(1)
    for seed in range(20):
        prompt = make_prompt(seed)
        tables = prompt.tables(1)
        source.ranks[0].fill(prompt.whole, tables)
        link.bring(Offer(prompt.name, prompt.num_tokens))
        link.bring(Computed(prompt.name, tuple(map(tuple, tables)), True, 300))
        target.fetch(prompt, prompt.tables(2), source.endpoints)
        target.ranks[0].reports.wait_for("completed", prompt.name)
        assert target.ranks[0].holds(prompt.whole, prompt.tables(2))
    link.bring(None)
    assert link.is_closed.wait(60)
    source.ranks[0].service._thread.join(60)
    assert not source.ranks[0].service._thread.is_alive()
    os.close(link.fd)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_service_that_was_closed_leaves_no_thread_and_no_descriptor(
    is_started: bool, open_worker: Any, make_prompt: Any, until_true: Any
) -> None:
    (rank,), prompt = open_worker(1, is_started=False).ranks, make_prompt()
    before, reports = (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))), type(rank.reports)()
    hello = rank.service._sender._hello
    service = KvTransferService("tcp://127.0.0.1:*", SharedMemoryAgent("closed"), hello, reports)
    if is_started:
        service.start()
        service.command(Fetch(prompt.name, ("tcp://127.0.0.1:1",), prompt.name, prompt.num_tokens, ((0,) * 8,) * 2))
        reports.wait_for("failed", prompt.name, "rank 0 at tcp://127.0.0.1:1 is gone")  # a thread found out
    service.close()
    until_true(lambda: set(threading.enumerate()) == before[0])
    service.command(WithdrawOffer("late"))  # writes to no other descriptor
    del service
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before[1]


def test_pools_that_are_not_what_the_groups_come_to_are_refused(shapes: Any, open_worker: Any) -> None:
    agent = open_worker(1).ranks[0].agent
    pools = tuple(PoolPlace(0x1000 * i, shape.slot_bytes(4, Part(0, 2)), 2) for i, shape in enumerate(shapes, 1))
    assert make_hello("tiny", 4, shapes, pools, agent, Part(1, 2)).part == Part(1, 2)
    for part in (Part(0, 1), Part(0, 3)):
        with pytest.raises(InvalidValueError, match="pools"):
            make_hello("tiny", 4, shapes, pools, agent, part)
