from __future__ import annotations

import asyncio
import inspect
import random
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL, Cleared, Stored, Tier
from kvist.events.engine_events import EngineCleared, EngineCreated, EngineRemoved, EngineStored
from kvist.events.hashing import block_hashes
from kvist.events.transports import Endpoint, ReplayRequest, open_publication
from kvist.publisher import KvEventPublisher, PublisherLimits

BLOCK_SIZE = 4
QUICK = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.02)


def publisher_over(publication, limits=QUICK, **options):
    return KvEventPublisher(publication, worker="w", block_size=BLOCK_SIZE, limits=limits, **options)


def tokens_of(number: int) -> list[int]:
    return list(range(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE))


def hash_of(number: int) -> int:
    return int(block_hashes(tokens_of(number), BLOCK_SIZE)[0])


def report_root_blocks(publisher, numbers, rank=0):
    for number in numbers:
        publisher.stored([number], tokens_of(number), rank=rank)


def test_what_was_reported_is_published_in_order_by_the_time_close_returns(publication):
    with publisher_over(publication) as publisher:
        publisher.stored([1, 2], [*tokens_of(1), *tokens_of(2)])
        publisher.stored([3], tokens_of(3), parent_block_hash=2, tier=Tier.HOST)
        publisher.removed([1])
        report_root_blocks(publisher, [9])
    chain = block_hashes([*tokens_of(1), *tokens_of(2), *tokens_of(3)], BLOCK_SIZE).tolist()
    assert publication.held() == {(chain[1], Tier.GPU), (chain[2], Tier.HOST), (hash_of(9), Tier.GPU)}
    assert publication.num_closed == 1


def test_only_the_largest_window_group_is_published(publication):
    with publisher_over(publication) as publisher:
        publisher.created(window=8, group=0)
        publisher.created(window=FULL, group=1)
        publisher.stored([1], tokens_of(1), window=8, group=0)
        publisher.stored([2], tokens_of(2), window=FULL, group=1)
    assert publication.held() == {(hash_of(2), Tier.GPU)}
    assert publisher.statistics().ranks[0].num_filtered == 1


def test_each_rank_has_its_own_topic_numbering_and_blocks(publication):
    with publisher_over(publication) as publisher:
        report_root_blocks(publisher, [1], rank=0)
        report_root_blocks(publisher, [2, 3], rank=5)
        publisher.cleared(rank=0)
    assert publication.held(0) == set()
    assert publication.held(5) == {(hash_of(2), Tier.GPU), (hash_of(3), Tier.GPU)}
    assert {message.topic for message in publication.messages} == {b"kv/w/0", b"kv/w/5"}
    for rank in (0, 5):
        sequences = [batch.sequence for batch in publication.batches() if batch.rank == rank]
        assert sequences == list(range(len(sequences)))


def test_the_caller_may_change_its_lists_and_arrays_afterwards(publication):
    publication.gate.clear()
    hashes, tokens, array = [1], tokens_of(1), np.array(tokens_of(2))
    with publisher_over(publication) as publisher:
        publisher.stored(hashes, tokens)
        publisher.stored([2], array)
        hashes[0], tokens[0] = 99, 99
        array[:] = 99
        publication.gate.set()
    assert publication.held() == {(hash_of(1), Tier.GPU), (hash_of(2), Tier.GPU)}


def test_heartbeats_come_from_the_start_for_every_rank_and_tell_what_is_held(publication, until_true):
    with publisher_over(publication, num_ranks=2) as publisher:
        until_true(lambda: {beat.rank for beat in publication.heartbeats()} == {0, 1})
        report_root_blocks(publisher, [1, 2], rank=1)
    last = next(beat for beat in reversed(publication.heartbeats()) if beat.rank == 1)
    num_batches = sum(batch.rank == 1 for batch in publication.batches())
    assert (last.sequence, last.events[0].num_blocks) == (num_batches, 2)


def test_every_batch_is_in_the_replay_buffer_and_no_heartbeat_is(publication):
    with publisher_over(publication) as publisher:
        report_root_blocks(publisher, range(5))
    batches = [message for message in publication.messages if message.payload in _payloads(publication)]
    assert list(publication.source.replay(ReplayRequest(b"kv/w/0", 0))) == batches


def _payloads(publication):
    heartbeat_payloads = {m.payload for m in publication.messages if b"heartbeat" in m.payload}
    return {message.payload for message in publication.messages} - heartbeat_payloads


def test_the_engine_never_waits_for_a_transport_that_hangs(publication):
    publication.gate.clear()
    with publisher_over(publication) as publisher:
        report_root_blocks(publisher, range(1000))  # returns although nothing can be sent
        publication.gate.set()
    assert len(publication.held()) == 1000


def test_events_lost_to_a_full_inbox_are_counted_and_clear_the_rank_there(publication, until_true):
    publication.gate.clear()
    limits = PublisherLimits(inbox_capacity=10, coalesce_s=0.0, heartbeat_s=60)
    with publisher_over(publication, limits, num_ranks=0) as publisher:
        report_root_blocks(publisher, [0])
        until_true(lambda: publisher.statistics().num_waiting_events == 0)  # taken, and stuck in the transport
        report_root_blocks(publisher, range(1, 11))
        report_root_blocks(publisher, range(11, 31))
        publisher.removed([5])
        publisher.stored([77], tokens_of(77), rank=1)
        assert publisher.statistics().num_waiting_events == 12  # two marks, one a rank
        publication.gate.set()
        until_true(lambda: publisher.statistics().num_waiting_events == 0)
        report_root_blocks(publisher, [50])
    assert publisher.statistics().num_lost_events == 22
    assert publication.held(0) == {(hash_of(50), Tier.GPU)}
    assert publication.events(1) == [Cleared()]


def test_a_second_loss_after_a_recovery_clears_again(publication, until_true):
    limits = PublisherLimits(inbox_capacity=1, coalesce_s=0.0, heartbeat_s=60)
    with publisher_over(publication, limits) as publisher:
        for start in (0, 100):
            publication.gate.clear()
            until_true(lambda: publisher.statistics().num_waiting_events == 0)
            report_root_blocks(publisher, range(start, start + 50))
            publication.gate.set()
            until_true(lambda: publisher.statistics().num_waiting_events == 0)
        report_root_blocks(publisher, [200])
    assert publication.held() == {(hash_of(200), Tier.GPU)}
    assert publication.events().count(Cleared()) >= 2


def test_batches_dropped_from_a_full_outbox_can_still_be_replayed(publication, until_true):
    limits = PublisherLimits(outbox_capacity=3, coalesce_s=0.0, heartbeat_s=60)
    with publisher_over(publication, limits) as publisher:
        until_true(publication.heartbeats)
        publication.refusal = BlockingIOError("full")
        for number in range(10):
            report_root_blocks(publisher, [number])
            until_true(lambda: publisher.statistics().num_waiting_events == 0)
        until_true(lambda: publisher.statistics().ranks[0].num_blocks == 10)
        num_batches = publisher.statistics().ranks[0].num_batches
        publication.refusal = None
    assert publisher.statistics().num_dropped_batches == num_batches - 3
    assert len(publication.batches()) == 3
    assert len(list(publication.source.replay(ReplayRequest(b"kv/w/0", 0)))) == num_batches


def test_a_broken_transport_leaves_the_engine_alone_and_is_raised_by_close(publication, until_true, caplog):
    publication.refusal = BrokenPipeError("no route")
    publisher = publisher_over(publication)
    until_true(lambda: publisher.statistics().failure)
    report_root_blocks(publisher, range(3))
    assert publisher.statistics().num_lost_events == 3
    with pytest.raises(BrokenPipeError, match="no route"):
        publisher.close()
    publisher.close()
    assert publication.num_closed == 1
    assert "publishing stopped" in caplog.text


def test_closing_amid_a_flood_ends_in_time_and_counts_what_is_left(publication):
    limits = PublisherLimits(close_timeout_s=0.5)
    publisher = publisher_over(publication, limits)
    is_stopping = threading.Event()

    def flood():
        number = 0
        while not is_stopping.is_set():
            report_root_blocks(publisher, [number])
            number += 1

    engine = threading.Thread(target=flood)
    engine.start()
    publisher.close()
    is_stopping.set()
    engine.join()
    statistics = publisher.statistics()
    assert statistics.num_waiting_events <= 1  # at most the mark of what came after closing
    assert len(publication.held()) == statistics.ranks[0].num_blocks


def test_closing_with_a_transport_that_stays_full_ends_in_time(publication):
    publication.refusal = BlockingIOError("full")
    publisher = publisher_over(publication, PublisherLimits(close_timeout_s=0.2))
    report_root_blocks(publisher, [1])
    publisher.close()
    assert publisher.statistics().num_waiting_batches > 0


def test_no_thread_outlives_a_closed_publisher():
    before = set(threading.enumerate())
    with KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=4):
        started = set(threading.enumerate()) - before
        assert {thread.name for thread in started} == {"kvist-publisher", "kvist-replay"}
    assert started.isdisjoint(threading.enumerate())


@pytest.mark.parametrize(
    "garbage",
    [
        {"block_hashes": [1], "token_ids": [1, 2]},
        {"block_hashes": [1], "token_ids": [-1, 2, 3, 4]},
        {"block_hashes": [1], "token_ids": ["a", "b", "c", "d"]},
        {"block_hashes": [None], "token_ids": tokens_of(1)},
        {"block_hashes": [1], "token_ids": tokens_of(1), "parent_block_hash": 404},
        {"block_hashes": [], "token_ids": []},
        {"block_hashes": [[1]], "token_ids": tokens_of(1)},
        {"block_hashes": [1], "token_ids": tokens_of(1), "lora_name": 5},
        {"block_hashes": [1], "token_ids": tokens_of(1), "tier": 9},
        {"block_hashes": [1], "token_ids": tokens_of(1), "group": []},
        {"block_hashes": [1], "token_ids": tokens_of(1), "block_lengths": ["four"]},
    ],
)
def test_a_malformed_report_publishes_nothing_and_stops_nothing(publication, garbage):
    with publisher_over(publication) as publisher:
        publisher.stored(**garbage)
        report_root_blocks(publisher, [7])
    assert publication.held() == {(hash_of(7), Tier.GPU)}


class Awkward:
    """An engine's own object: whatever is asked of it, it raises something of its own."""

    def _refuse(self, *_):
        raise RuntimeError("not on this device")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = __repr__ = __lt__ = _refuse


def a_generator_that_raises():
    yield 1
    raise RuntimeError("the engine's own")


HOSTILE = [
    lambda: None,
    lambda: 1.5,
    lambda: float("nan"),
    lambda: -1,
    lambda: 10**30,
    lambda: True,
    lambda: "text",
    lambda: b"bytes",
    list,
    lambda: [None],
    lambda: [[1]],
    lambda: [1.5],
    lambda: [10**30],
    lambda: [np.uint64(2**63), np.int8(-1)],
    lambda: {1: 2},
    lambda: np.int64(0),
    lambda: np.float32(2),
    lambda: np.array(5),
    lambda: np.array([[1, 2], [3, 4]]),
    lambda: np.array([1, None, "a"], object),
    lambda: np.array([1.5, np.nan]),
    lambda: object(),
    Awkward,
    lambda: [Awkward()],
    lambda: {Awkward.__name__: Awkward()},
    a_generator_that_raises,
    lambda: (number for number in [1]),
]

SURFACE = [
    ("created", ["window", "group", "rank"]),
    ("stored", [name for name in inspect.signature(KvEventPublisher.stored).parameters if name != "self"]),
    ("removed", ["block_hashes", "window", "group", "rank", "tier"]),
    ("cleared", ["rank"]),
]


def test_whatever_types_a_report_has_nothing_is_raised_and_what_follows_is_published(publication, until_true):
    rng = random.Random(7)
    right = {"block_hashes": [7], "token_ids": tokens_of(7), "window": FULL}
    with publisher_over(publication) as publisher:
        publisher.created(window=FULL)
        for hostile in HOSTILE:
            publisher.report(hostile())
            for method, names in SURFACE:
                needed = {name: value for name, value in right.items() if name in names}
                for name in names:
                    getattr(publisher, method)(**{**needed, name: hostile()})
                some = rng.sample(names, rng.randint(1, len(names)))
                getattr(publisher, method)(**{**needed, **{name: rng.choice(HOSTILE)() for name in some}})
            for event_type in (EngineCreated, EngineStored, EngineRemoved, EngineCleared):
                publisher.report(event_type(**{name: hostile() for name in event_type.__struct_fields__}))
            for event_field in EngineStored.__struct_fields__:
                publisher.report(EngineStored(**{**right, "block_size": BLOCK_SIZE, event_field: hostile()}))
        until_true(lambda: publisher.statistics().num_waiting_events == 0)
        publisher.cleared()
        publisher.stored([9], tokens_of(9), window=FULL)
    statistics = publisher.statistics()
    assert statistics.failure is None
    assert statistics.num_lost_events == 0
    assert statistics.num_malformed > 0
    assert statistics.ranks[0].num_malformed > 0
    assert set(statistics.ranks) <= {0, 1}  # which True is
    assert publication.held() == {(hash_of(9), Tier.GPU)}


@pytest.mark.parametrize(
    "report",
    [
        lambda publisher: publisher.stored(None, tokens_of(1)),
        lambda publisher: publisher.stored([1], None),
        lambda publisher: publisher.stored(a_generator_that_raises(), tokens_of(1)),
        lambda publisher: publisher.removed(None),
        lambda publisher: publisher.removed(7),
        lambda publisher: publisher.removed([7.5]),
        lambda publisher: publisher.removed([7], tier=Awkward()),
    ],
)
def test_a_report_that_cannot_be_read_is_counted_told_once_and_clears_the_rank(publication, report, caplog):
    with publisher_over(publication) as publisher:
        report_root_blocks(publisher, [7])
        for _ in range(3):
            report(publisher)
    assert publisher.statistics().ranks[0].num_malformed == 3
    assert publication.held() == set()
    assert caplog.text.count("malformed event") == 1


def test_reports_of_no_rank_are_counted_told_once_and_leave_the_ranks_alone(publication, caplog):
    with publisher_over(publication) as publisher:
        report_root_blocks(publisher, [7], rank=np.int64(0))
        for rank in (None, -1, 4096, 10**30, 0.0, "0", [], Awkward()):
            publisher.removed([7], rank=rank)
            publisher.removed(None, rank=rank)
    assert publisher.statistics().num_malformed == 16
    assert publication.held() == {(hash_of(7), Tier.GPU)}
    assert caplog.text.count("malformed event") == 1


def test_reports_that_cannot_be_read_are_bounded_like_others_and_lost_beyond_it(publication, until_true):
    publication.gate.clear()
    limits = PublisherLimits(inbox_capacity=10, coalesce_s=0.0, heartbeat_s=60)
    with publisher_over(publication, limits, num_ranks=0) as publisher:
        report_root_blocks(publisher, [0])
        until_true(lambda: publisher.statistics().num_waiting_events == 0)  # taken, and stuck in the transport
        for _ in range(20):
            publisher.removed(None)
            publisher.removed([1], rank=[])
        assert publisher.statistics().num_waiting_events == 11  # one of them marks the loss
        publication.gate.set()
    assert publisher.statistics().num_lost_events == 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inbox_capacity", 0),
        ("outbox_capacity", -1),
        ("replay_max_batches", 0),
        ("replay_max_bytes", 0),
        ("coalesce_s", -1.0),
        ("heartbeat_s", 0.0),
        ("close_timeout_s", 0.0),
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidValueError, match=field):
        PublisherLimits(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("block_size", 0), ("worker", "http://host:8000")])
def test_a_wrong_value_is_refused_before_anything_is_bound(field, value):
    with pytest.raises(InvalidValueError, match=field):
        KvEventPublisher("tcp://127.0.0.1:0", **{"worker": "w", "block_size": 4, "num_ranks": 0, field: value})


def test_a_taken_port_is_an_error_that_names_the_endpoint():
    taken = open_publication("tcp://127.0.0.1:0")
    with pytest.raises(InvalidValueError, match="endpoint"):
        KvEventPublisher(Endpoint.parse(taken.endpoint).address, worker="w", block_size=4)
    taken.close()


def test_continuing_chains_reported_together_travel_as_one_event(publication):
    publication.gate.clear()
    with publisher_over(publication, PublisherLimits(coalesce_s=0.01)) as publisher:
        publisher.stored([0], tokens_of(0))
        for number in range(1, 20):
            publisher.stored([number], tokens_of(number), parent_block_hash=number - 1)
        publication.gate.set()
    assert len(publication.events()) < 20
    assert all(isinstance(event, Stored) for event in publication.events())
    assert len(publication.held()) == 20


def test_the_embedded_hook_runs_with_the_base_install_alone():
    script = """
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                base = {"kvist", "msgspec", "xxhash", "numpy", "zmq"}
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in base and not top.startswith("_"):
                    raise ImportError(f"{name} is not in the base install")

        sys.meta_path.insert(0, Blocker())
        from kvist.publisher import KvEventPublisher

        with KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=4) as publisher:
            publisher.stored([1], [1, 2, 3, 4])
        assert publisher.statistics().ranks[0].num_batches == 1
        assert not {"torch", "numba"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


FORKED_WORKER = """
    import os, sys
    from kvist.publisher import KvEventPublisher

    def publish_from_here(code=0):
        with KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=4) as publisher:
            publisher.stored([1], [1, 2, 3, 4])
        assert publisher.statistics().ranks[0].num_batches == 1

    def use_the_inherited(publisher):
        publisher.stored([1], [1, 2, 3, 4])  # as ever: it neither raises nor waits
        assert publisher.statistics().num_lost_events == 1
        try:
            publisher.close()
        except ValueError as error:
            assert "made in the process that reports" in str(error)
        else:
            raise AssertionError("closing said nothing")

    if sys.argv[1] == "made before the fork":
        publisher = KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=4)
        publisher.stored([9], [1, 2, 3, 4])
        work = lambda: use_the_inherited(publisher)
    else:
        work = publish_from_here
    if (pid := os.fork()) == 0:
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    if sys.argv[1] == "made before the fork":
        publisher.close()
        statistics = publisher.statistics()
        assert (statistics.failure, statistics.ranks[0].num_batches) == (None, 1)
"""


@pytest.mark.parametrize("when", ["made before the fork", "made after the fork"])
def test_a_forked_worker_publishes_with_a_publisher_of_its_own_and_is_told_so_of_another(when):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(FORKED_WORKER), when]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert ("inherited by a fork" in result.stderr) == (when == "made before the fork")


async def test_it_may_be_reported_to_from_an_event_loop(publication):
    with publisher_over(publication) as publisher:
        report_root_blocks(publisher, [7])
        await asyncio.to_thread(publisher.close)
    assert publication.held() == {(hash_of(7), Tier.GPU)}


def test_what_is_to_be_done_between_events_is_done_behind_what_was_reported_or_before_it_if_urgent(publication):
    seen = {}

    def look(name):
        return lambda streams: seen.update({name: (streams[0].residency.num_blocks, streams[0].next_sequence)})

    publication.gate.clear()
    with publisher_over(publication) as publisher:
        report_root_blocks(publisher, [1])
        later = publisher.call_between_batches(look("later"))
        report_root_blocks(publisher, [2])
        urgent = publisher.call_between_batches(look("urgent"), is_urgent=True)
        publication.gate.set()
        for each in (later, urgent, publisher.call_between_batches(look("at the end"))):
            each.result(20)
    assert seen.pop("urgent") in [(0, 0), (1, 1)]
    assert seen == {"later": (1, 1), "at the end": (2, 2)}


def test_what_was_to_be_done_is_cancelled_when_publishing_has_ended(publication):
    publisher = publisher_over(publication)
    publisher.close()
    with pytest.raises(CancelledError):
        publisher.call_between_batches(lambda _: None).result(20)
