"""End to end: a publisher, a transport, an indexer and the real index, against a dict of sets."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from kvist.errors import InvalidValueError
from kvist.events import Batch, Heartbeat, WorkerRank
from kvist.events.codec import encode_batch
from kvist.events.session import SourceState
from kvist.events.transports import Endpoint, Message, open_publication, open_subscription
from kvist.events.transports.memory import MemoryPublication
from kvist.events.transports.zmtp import Reads
from kvist.indexer import Indexer
from kvist.publisher import KvEventPublisher, PublisherLimits

BLOCK_SIZE = 4
QUICK = PublisherLimits(coalesce_s=0.001, heartbeat_s=0.05)
_names = count()


@pytest.fixture
def memory_url():
    return f"memory://indexer-{next(_names)}"


def publisher_at(transport, *, limits=QUICK, worker="its-own-name", block_size=BLOCK_SIZE, **options):
    return KvEventPublisher(transport, worker=worker, block_size=block_size, limits=limits, **options)


def sole(indexer):
    (statistics,) = indexer.statistics()
    return statistics


async def test_the_index_equals_the_truth_over_zmq_under_the_routers_name(indexer, make_truth, digest_of, until):
    with publisher_at("tcp://127.0.0.1:0", num_ranks=2) as publisher:
        indexer.add_source("w1", publisher.endpoint)
        truths = [make_truth(publisher, rank, seed=rank) for rank in range(2)]
        for truth in truths:
            truth.churn(300)
        for rank, truth in enumerate(truths):
            await until(lambda: digest_of("w1", rank) == truth.digest())  # noqa: B023 - awaited at once
            await until(lambda: indexer.is_exact("w1", rank))  # noqa: B023
        assert digest_of("its-own-name") == (0, 0)
        assert indexer.states("w1") == {0: SourceState.LIVE, 1: SourceState.LIVE}
        statistics = sole(indexer)
        assert statistics.num_malformed == statistics.num_refused_events == statistics.num_cleared == 0
        assert statistics.last_event_age_s < 20
        assert statistics.lag_s < 20


class FaultyPublication(MemoryPublication):
    """Sends what `wire` makes of each message: nothing for a loss, two for a duplicate, an earlier one for a delay."""

    def __init__(self, url: str, wire: Callable[[Message], list[Message]]) -> None:
        super().__init__(Endpoint.parse(url))
        self._wire = wire

    def send(self, message: Message) -> None:
        for delivered in self._wire(message):
            super().send(delivered)


class Chaos:
    """A wire that loses, repeats and holds back, and still keeps the order of what arrives."""

    def __init__(self, seed: int) -> None:
        self.is_on = True
        self._rng = random.Random(seed)
        self._late: list[Message] = []

    def __call__(self, message: Message) -> list[Message]:
        if not self.is_on:
            due, self._late = [*self._late, message], []
            return due
        choice = self._rng.random()
        if choice < 0.2:
            return []
        self._late += [message] * (2 if choice < 0.4 else 1)
        if choice < 0.7:
            return []
        due, self._late = self._late, []
        return due


@pytest.mark.parametrize("seed", range(3))
async def test_the_index_equals_the_truth_over_a_wire_that_loses_repeats_and_delays(
    indexer, make_truth, digest_of, until, memory_url, seed
):
    wire = Chaos(seed)
    publication = FaultyPublication(memory_url, wire)
    with publisher_at(publication) as publisher:
        indexer.add_source("w1", memory_url)
        truth = make_truth(publisher, seed=seed)
        num_rounds = count()

        def has_suffered_enough():
            truth.churn(10)
            return next(num_rounds) > 40 and sole(indexer).num_gaps > 1 and sole(indexer).num_recovered > 1

        await until(has_suffered_enough)
        wire.is_on = False
        await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 0))
        assert sole(indexer).num_cleared == 0


async def test_a_heartbeat_heals_the_loss_of_the_last_event_of_all(indexer, make_truth, digest_of, until, memory_url):
    is_lossy = threading.Event()

    def wire(message: Message) -> list[Message]:
        return [] if is_lossy.is_set() and b"heartbeat" not in message.payload else [message]

    with publisher_at(FaultyPublication(memory_url, wire)) as publisher:
        indexer.add_source("w1", memory_url)
        truth = make_truth(publisher)
        truth.store(5)
        await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 0))
        num_recovered = sole(indexer).num_recovered  # what was sent before the indexer listened
        is_lossy.set()
        truth.remove(5)
        await until(lambda: digest_of("w1") == truth.digest())
        assert sole(indexer).num_recovered == num_recovered + 1


async def test_a_worker_that_is_followed_anew_may_connect_to_the_same_address(indexer, until, free_port):
    url = f"tcp://127.0.0.1:{free_port()}?bind=1"
    for _ in range(2):
        indexer.add_source("w", url)
        await until(lambda: indexer.sources[0].subscription is not None or sole(indexer).failure)
        assert sole(indexer).failure is None
        indexer.remove_source("w")


async def test_the_sockets_of_all_streams_are_read_together(indexer, until, free_port, monkeypatch):
    reads_of = []

    def recorded(endpoint, splitter, reads):
        reads_of.append(reads)
        return open_subscription(endpoint, splitter, reads)

    monkeypatch.setattr("kvist.indexer.indexer.open_subscription", recorded)
    for number in range(3):
        indexer.add_source(f"w{number}", f"tcp://127.0.0.1:{free_port()}")
    await until(lambda: len(reads_of) == 3)
    assert isinstance(reads_of[0], Reads)
    assert len(set(reads_of)) == 1


async def test_a_diverged_index_is_noticed_and_relearnt(index, indexer, make_truth, digest_of, until, memory_url):
    with publisher_at(memory_url) as publisher:
        indexer.add_source("w1", memory_url)
        truth = make_truth(publisher)
        truth.churn(50)
        await until(lambda: indexer.is_exact("w1", 0) and digest_of("w1") == truth.digest())
        index.clear("w1", 0)  # a fault that no event tells of
        await until(lambda: sole(indexer).num_diverged == 1 and digest_of("w1") == truth.digest())
        await until(lambda: indexer.is_exact("w1", 0))


async def test_a_slow_subscriber_catches_up_by_replay(
    indexer, make_truth, digest_of, until, until_true, memory_url, monkeypatch
):
    monkeypatch.setattr("kvist.events.transports.received.QUEUE_CAPACITY", 3)
    with publisher_at(memory_url) as publisher:
        indexer.add_source("w1", memory_url)
        truth = make_truth(publisher)
        truth.store()
        await until(lambda: digest_of("w1") == truth.digest())
        for num_batches in range(1, 21):  # the loop stands still meanwhile
            truth.store()
            until_true(lambda: publisher.statistics().ranks[0].num_batches > num_batches)  # noqa: B023 - called at once
        await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 0))
        assert sole(indexer).num_recovered > 0


PUBLISHER_PROCESS = """
    import sys
    from kvist.publisher import KvEventPublisher, PublisherLimits

    url, start = sys.argv[1], int(sys.argv[2])
    publisher = KvEventPublisher(url, worker="w", block_size=4, limits=PublisherLimits(heartbeat_s=0.05))
    for number in range(start, start + 3):
        publisher.stored([number], [number] * 4)
    print("ready", flush=True)
    sys.stdin.read()
"""


async def test_a_publisher_killed_and_restarted_leaves_none_of_its_old_blocks(indexer, digest_of, until, free_port):
    url = f"tcp://127.0.0.1:{free_port()}"
    indexer.add_source("w1", url)

    def start(first_number: int) -> subprocess.Popen:
        command = [sys.executable, "-c", textwrap.dedent(PUBLISHER_PROCESS), url, str(first_number)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        return process

    def kill(process: subprocess.Popen) -> None:
        process.kill()
        process.communicate()

    first = start(1)
    await until(lambda: digest_of("w1")[0] == 3 and indexer.is_exact("w1", 0))
    before = digest_of("w1")
    kill(first)
    second = start(100)
    await until(lambda: digest_of("w1")[0] == 3 and digest_of("w1") != before and indexer.is_exact("w1", 0))
    assert sole(indexer).num_restarts == 1
    kill(second)


async def test_a_publisher_that_lacks_blocks_itself_is_partial_until_it_does_not(indexer, until, memory_url):
    publication = open_publication(memory_url)
    indexer.add_source("w", memory_url)
    await until(lambda: indexer.are_all_connected)
    for is_complete, state in [(False, SourceState.PARTIAL), (True, SourceState.LIVE)]:
        heartbeat = Batch("its-own-name", 0, 1, 0, BLOCK_SIZE, 1.0, (Heartbeat(0, 0, is_complete),))
        publication.send(Message(b"kv/its-own-name/0", 0, encode_batch(heartbeat)))
        await until(lambda state=state: indexer.states("w") == {0: state})
        assert indexer.ranks_counting_copies("w") == ({0} if is_complete else set())
    publication.close()


async def test_while_a_rank_is_resyncing_it_says_so(indexer, make_truth, until, memory_url):
    """The publisher answers no replay: what is missing stays missing until the indexer gives up."""
    is_lossy = threading.Event()
    lost: list[Message] = []

    def wire(message: Message) -> list[Message]:
        if not is_lossy.is_set():
            return [message]
        lost.append(message)
        return []

    class Mute(FaultyPublication):
        def replay(self, request):  # noqa: ARG002 - the Protocol's name
            return None

    publication = Mute(memory_url, wire)
    with publisher_at(publication, limits=PublisherLimits(coalesce_s=0.0, heartbeat_s=0.02)) as publisher:
        indexer.add_source("w1", memory_url)
        await until(lambda: indexer.states("w1"))  # or the first batch would be missed, and never replayed
        truth = make_truth(publisher)
        truth.store()
        await until(lambda: indexer.is_exact("w1", 0))
        is_lossy.set()
        truth.store()
        await until(lambda: [message for message in lost if b"stored" in message.payload])
        is_lossy.clear()
        await until(lambda: WorkerRank("w1", 0) in indexer.resyncing)
        assert indexer.states("w1") == {0: SourceState.RESYNCING}
        await until(lambda: indexer.states("w1") == {0: SourceState.PARTIAL})
        assert WorkerRank("w1", 0) not in indexer.resyncing


async def test_a_stream_of_another_block_size_is_refused_and_the_error_names_both(
    indexer, digest_of, until, memory_url, caplog
):
    with publisher_at(memory_url, block_size=16) as publisher:
        indexer.add_source("w1", memory_url)
        publisher.stored([1], list(range(16)))
        await until(lambda: sole(indexer).num_refused_batches > 2)
    assert sole(indexer).failure == "block_size 16, expected 4"
    assert digest_of("w1") == (0, 0)
    assert indexer.states("w1") == {}
    assert caplog.text.count("stream refused") == 1
    with publisher_at(memory_url) as publisher:
        publisher.stored([1], list(range(4)))
        await until(lambda: indexer.is_exact("w1", 0) and digest_of("w1")[0] == 1)
    assert sole(indexer).failure is None


async def test_malformed_batches_are_counted_logged_once_and_skipped(
    indexer, make_truth, digest_of, until, memory_url, caplog
):
    class Garbling(MemoryPublication):
        def send(self, message):
            for payload in (b"", b"\x97\xa6kvist1", b"\x97\xa6kvist1" + b"\xff" * 40, message.payload[:-1]):
                super().send(Message(message.topic, message.sequence, payload))
            super().send(message)

    with publisher_at(Garbling(Endpoint.parse(memory_url))) as publisher:
        indexer.add_source("w1", memory_url)
        await until(lambda: indexer.states("w1"))
        truth = make_truth(publisher)
        truth.churn(20)
        await until(lambda: digest_of("w1") == truth.digest())
    assert sole(indexer).num_malformed > 4
    assert caplog.text.count("malformed message") == 1


async def test_a_removed_source_is_forgotten_at_once_and_can_come_back(
    indexer, make_truth, digest_of, until, memory_url
):
    with publisher_at(memory_url) as publisher:
        indexer.add_source("w1", memory_url)
        truth = make_truth(publisher)
        truth.churn(20)
        await until(lambda: digest_of("w1") == truth.digest())
        indexer.remove_source("w1")
        assert digest_of("w1") == (0, 0)
        assert indexer.statistics() == []
        truth.churn(20)
        indexer.add_source("w1", memory_url)
        await until(lambda: digest_of("w1") == truth.digest())
        indexer.remove_source("nobody")


async def test_the_memory_of_removed_blocks_is_swept_in_the_background(
    index, indexer, make_truth, digest_of, until, memory_url
):
    with publisher_at(memory_url) as publisher:
        indexer.add_source("w1", memory_url)
        truth = make_truth(publisher)
        truth.churn(50)
        await until(lambda: digest_of("w1") == truth.digest())
    indexer.remove_source("w1")
    await until(lambda: index.statistics().num_retired == index.statistics().num_blocks == 0)


async def test_a_worker_may_have_a_stream_for_each_rank(indexer, make_truth, digest_of, until, memory_url):
    urls = [f"{memory_url}-{rank}" for rank in range(2)]
    with publisher_at(urls[0], num_ranks=0) as one, publisher_at(urls[1], num_ranks=0) as other:
        for url in urls:
            indexer.add_source("w1", url)
        truths = [make_truth(one, 0, seed=1), make_truth(other, 1, seed=2)]
        for rank, truth in enumerate(truths):
            truth.churn(30)
            await until(lambda: digest_of("w1", rank) == truth.digest())  # noqa: B023 - awaited at once
        with pytest.raises(InvalidValueError, match="does not have yet"):
            indexer.add_source("w1", urls[0])


async def test_a_publisher_that_falls_silent_is_not_trusted_any_more(index, make_truth, until, memory_url):
    ahead_s = [0.0]
    async with Indexer(index, block_size=BLOCK_SIZE, clock=lambda: time.monotonic() + ahead_s[0]) as indexer:
        with publisher_at(memory_url) as publisher:
            indexer.add_source("w1", memory_url)
            make_truth(publisher).store()
            await until(lambda: indexer.is_exact("w1", 0))

        def is_distrusted_a_second_later():
            ahead_s[0] += 1.0
            return WorkerRank("w1", 0) in indexer.resyncing

        await until(is_distrusted_a_second_later)


async def test_a_source_that_cannot_be_bound_fails_alone(indexer, make_truth, digest_of, until, memory_url):
    taken = open_publication("tcp://127.0.0.1:0")
    indexer.add_source("broken", f"{Endpoint.parse(taken.endpoint).address}?bind=1")
    with publisher_at(memory_url) as publisher:
        indexer.add_source("w1", memory_url)
        truth = make_truth(publisher)
        truth.churn(10)
        await until(lambda: digest_of("w1") == truth.digest())
    await until(lambda: "endpoint" in (indexer.statistics()[0].failure or ""))
    taken.close()


async def test_a_wrong_url_is_refused_by_add_source(indexer):
    with pytest.raises(InvalidValueError, match="endpoint"):
        indexer.add_source("w1", "tcp://nowhere")


async def test_a_source_whose_peer_never_comes_harms_nobody(indexer, free_port):
    indexer.add_source("w1", f"tcp://127.0.0.1:{free_port()}")
    await asyncio.sleep(0.05)
    assert sole(indexer).last_event_age_s is None
    assert indexer.states("w1") == {}


async def test_leaving_the_indexer_ends_its_tasks_and_keeps_the_index(index, make_truth, digest_of, until, memory_url):
    with publisher_at(memory_url) as publisher:
        async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
            indexer.add_source("w1", memory_url)
            truth = make_truth(publisher)
            truth.churn(10)
            await until(lambda: digest_of("w1") == truth.digest())
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("kvist")] == []
        assert digest_of("w1") == truth.digest()


async def test_an_error_of_the_body_leaves_the_indexer_as_it_is(index):
    with pytest.raises(LookupError, match="mine"):
        async with Indexer(index, block_size=BLOCK_SIZE):
            raise LookupError("mine")


async def test_cancelling_the_body_ends_the_indexer(index, memory_url):
    is_inside = asyncio.Event()

    async def body():
        async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
            indexer.add_source("w1", memory_url)
            is_inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await is_inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("kvist")] == []
