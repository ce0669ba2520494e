"""Playing recordings to subscribers: order, pace, stalls, what can be asked for again."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvist.errors import InvalidValueError, MissingExtraError
from kvist.events import Tier, WorkerRank
from kvist.events.snapshot import blocks_digest
from kvist.events.transports import Endpoint, ReplayRequest, open_publication, open_subscription
from kvist.events.transports.memory import MemoryPublication
from kvist.indexer import Indexer
from kvist.radix import RadixIndex
from kvist.replay import RecordedSource, RecordingError, player
from kvist.replay.player import Player, open_publications
from kvist.replay.script import Moment, Pace, Script, Selection

_names = itertools.count()


class FakePublication:
    """Takes what is sent; full every other time if told so."""

    endpoint = "memory://fake"

    def __init__(self, *, is_often_full=False):
        self.sent = []
        self.source = None
        self._is_often_full = is_often_full
        self._num_calls = 0

    def serve_replay(self, source):
        self.source = source

    def send(self, message):
        self._num_calls += 1
        if self._is_often_full and self._num_calls % 2:
            raise BlockingIOError
        self.sent.append(message)

    def close(self, timeout_s=5.0):
        pass


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now_s = 100.0
        self.naps = []

    def clock(self):
        return self.now_s

    async def sleep(self, seconds):
        self.naps.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


def script_of(path, **options):
    return Script(path, **options)


async def played(make, path, *, publication=None, pace=None, **options):
    publication, time = publication or FakePublication(), FakeTime()
    player = Player(
        script_of(path, **options), {make.source: publication}, pace=pace, clock=time.clock, sleep=time.sleep
    )
    await player.play()
    return publication, player, time


async def test_messages_go_out_as_they_came_in_order_and_on_time(make, recording):
    messages = [make.batch(i, make.stored(i)) for i in range(20)]
    publication, player, time = await played(make, recording(*messages), pace=Pace(2.0))
    assert publication.sent == messages
    assert time.now_s - 100.0 == pytest.approx(19 * 0.010 / 2, abs=0.001)
    assert (player.num_sent, player.num_sent_bytes) == (20, sum(len(message.payload) for message in messages))


async def test_as_fast_as_possible_never_waits(make, recording):
    _, player, time = await played(make, recording(*(make.batch(i) for i in range(50))), pace=Pace(None))
    assert player.num_sent == 50
    assert sum(time.naps) == 0.0


async def test_a_transport_that_is_full_is_waited_for(make, recording):
    messages = [make.batch(i) for i in range(10)]
    publication, _, _ = await played(make, recording(*messages), publication=FakePublication(is_often_full=True))
    assert publication.sent == messages


async def test_what_is_selected_is_played_and_nothing_else(make, recording):
    messages = [make.batch(i, worker=f"w{i % 3}") for i in range(30)]
    selection = Selection({"w0", "w2"}, Moment(0.1, False), Moment(0.2, False))
    publication, _, _ = await played(make, recording(*messages), selection=selection)
    assert publication.sent == [message for message in messages[10:20] if b"w1" not in message.topic]


async def test_a_loop_plays_it_again_in_later_epochs(make, recording):
    messages = [make.batch(i, make.stored(i)) for i in range(3)]
    publication, _, time = await played(make, recording(*messages), num_rounds=3)
    assert [message.sequence for message in publication.sent] == [0, 1, 2] * 3
    assert len({message.payload for message in publication.sent}) == 9
    assert time.now_s - 100.0 == pytest.approx(3 * 0.020, abs=0.001)


async def test_a_damaged_recording_is_played_up_to_the_damage(make, recording):
    path = recording(*(make.batch(i, make.stored(*range(4000))) for i in range(100)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    publication = FakePublication()
    with pytest.raises(RecordingError, match=str(path)):
        await played(make, path, publication=publication)
    assert [message.sequence for message in publication.sent] == list(range(len(publication.sent)))
    assert publication.sent


async def test_a_ranks_last_message_is_repeated_until_all_is_over(make, recording, until):
    messages = [make.batch(0), make.batch(1), make.batch(0, rank=1)]
    publication, player, _ = await played(make, recording(*messages))
    repeating = asyncio.create_task(player.repeat())
    await until(lambda: len(publication.sent) >= 7)
    repeating.cancel()
    assert publication.sent[3:7] == [messages[1], messages[2]] * 2


def fleet(make, num_ranks, num_batches):
    """Return a stream of several ranks that all store, remove and repeat, with heartbeats that are right."""
    held = [set() for _ in range(num_ranks)]
    messages = []
    for number in range(num_batches):
        for rank in range(num_ranks):
            first = number * 10 + rank * 100_000
            held[rank].update(range(first, first + 8))
            events = [make.stored(*range(first, first + 8))]
            if number:
                held[rank] -= {first - 3, first - 10}
                events.append(make.removed(first - 3, first - 10))
            messages.append(make.batch(number, *events, rank=rank))
            if number % 10 == 9:
                digest = blocks_digest(list(held[rank]), Tier.GPU)
                messages.append(make.heartbeat(number + 1, len(held[rank]), digest, rank=rank))
    return messages, [blocks_digest(list(blocks), Tier.GPU) for blocks in held]


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "memory"])
async def test_an_index_that_hears_a_replay_holds_exactly_what_was_recorded(make, recording, until, url):
    messages, expected = fleet(make, 3, 200)
    path = recording(*messages)
    publication = open_publication(f"memory://replay-{next(_names)}" if url == "memory" else url)
    index = RadixIndex()
    player = Player(script_of(path), {make.source: publication}, pace=Pace(None))
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w", publication.endpoint)
        await player.play()
        repeating = asyncio.create_task(player.repeat())
        await until(lambda: [index.digest(WorkerRank("w", rank)).digest for rank in range(3)] == expected)
        await until(lambda: all(indexer.is_exact("w", rank) for rank in range(3)))  # the heartbeats agree
        repeating.cancel()
    publication.close()


async def test_a_subscriber_that_stalled_asks_for_what_it_missed(make, recording):
    messages = [make.batch(i, make.stored(i)) for i in range(500)]
    publication = open_publication("tcp://127.0.0.1:0")
    player = Player(script_of(recording(*messages)), {make.source: publication}, pace=Pace(None))
    await player.play()
    async with open_subscription(Endpoint.parse(publication.endpoint)) as late:
        assert await late.replay(ReplayRequest(b"kv/w/0", 123, 7), 60.0) == messages[123:]
        assert await late.replay(ReplayRequest(None, 0), 60.0) == [message._replace(topic=b"") for message in messages]
    assert player.num_replays == 2
    publication.close()


async def test_the_same_order_a_rank_at_any_speed(make, recording):
    messages, _ = fleet(make, 4, 50)
    path = recording(*messages)
    for speed in (1.0, 50.0, None):
        publication, _, _ = await played(make, path, pace=Pace(speed))
        assert publication.sent == messages


def test_each_source_gets_a_publication_of_its_own():
    sources = [RecordedSource(name, "") for name in "abc"]
    name = f"memory://replay-{next(_names)}"
    opened = open_publications([name], sources)
    assert [publication.endpoint for publication in opened.values()] == [f"{name}.{idx}" for idx in range(3)]
    opened_tcp = open_publications(["tcp://127.0.0.1:0"], sources)
    assert len({publication.endpoint for publication in opened_tcp.values()}) == 3
    for publication in (*opened.values(), *opened_tcp.values()):
        publication.close()


def test_urls_that_do_not_suffice_are_refused_with_the_sources_names():
    sources = [RecordedSource(name, "") for name in ("pod-1", "pod-2")]
    with pytest.raises(InvalidValueError, match=r"one URL for each of 2 sources \(pod-1, pod-2\), or one with port 0"):
        open_publications(["tcp://127.0.0.1:5557"], sources)


def test_when_one_publication_cannot_be_opened_the_others_are_closed(monkeypatch):
    name = f"memory://replay-{next(_names)}"
    with pytest.raises(InvalidValueError, match="a name that no publication uses"):
        open_publications([name, name], [RecordedSource(name, "") for name in "ab"])
    open_publication(name).close()

    def open_one(url, worker):
        if url == "tcp://127.0.0.1:0":
            raise MissingExtraError("nats", "nats")
        return open_publication(url, worker)

    monkeypatch.setattr(player, "open_publication", open_one)
    with pytest.raises(MissingExtraError):
        open_publications([name, "tcp://127.0.0.1:0"], [RecordedSource(name, "") for name in "ab"])
    open_publication(name).close()


async def test_a_source_that_comes_later_has_nowhere_to_go_and_is_named(make, recording):
    path = recording(make.batch(0))
    make.write(path, make.records(make.batch(0), source=RecordedSource("late", "")), appends=True)
    with pytest.raises(InvalidValueError, match="source: got 'late'"):
        await played(make, path)


async def heard_by_an_indexer(make, path, until, state, **options):
    """Play to an indexer until its rank is in this state; return the digest of what it holds."""
    index, name = RadixIndex(), f"memory://replay-{next(_names)}"
    publication = open_publication(name)
    player = Player(script_of(path, **options), {make.source: publication}, pace=Pace(None))
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w", name)
        await until(lambda: indexer.are_all_connected)
        await player.play()
        await until(lambda: indexer.states("w") == {0: state})
    publication.close()
    return index.digest(WorkerRank("w", 0)).digest


class Unheard(MemoryPublication):
    """Loses what is played until told otherwise, and does not answer the first questions: who asks is too busy."""

    def __init__(self, num_unanswered):
        self.is_heard = False
        self._num_unanswered = num_unanswered
        super().__init__(Endpoint.parse(f"memory://replay-{next(_names)}"))

    def send(self, message):
        if self.is_heard:
            super().send(message)

    def replay(self, request):
        if self.is_heard and self._num_unanswered > 0:
            self._num_unanswered -= 1
            return None
        return super().replay(request)


@pytest.mark.parametrize("num_unanswered", [0, 4])
@pytest.mark.parametrize("kind", ["canonical", "engine"])
async def test_an_index_that_is_just_starting_ends_with_all_of_it(make, recording, until, kind, num_unanswered):
    """It was connected, and asked, before the first message; heard none, and was too busy to read the answers."""
    if kind == "canonical":
        messages = [make.batch(idx, make.stored(idx)) for idx in range(231)]  # and no heartbeat at the end
    else:
        stored = [make.engine_stored(idx, tokens=[idx] * 4) for idx in range(231)]
        messages = [make.engine_batch(idx, each) for idx, each in enumerate(stored)]
    index, publication = RadixIndex(), Unheard(num_unanswered)
    player = Player(script_of(recording(*messages)), {make.source: publication}, pace=Pace(None))
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w", publication.endpoint)
        await until(lambda: player.num_replays == 2)
        await player.play()
        publication.is_heard = True
        repeating = asyncio.create_task(player.repeat())
        await until(lambda: index.digest(WorkerRank("w", 0)).num_blocks == 231)
        await until(lambda: indexer.is_exact("w", 0))
        repeating.cancel()
    publication.close()


async def test_what_was_never_recorded_is_lost_to_a_subscriber_and_the_rank_partial(make, recording, until):
    messages, _ = fleet(make, 1, 50)
    await heard_by_an_indexer(make, recording(*messages[20:]), until, "partial")


async def test_a_subscriber_of_a_part_asks_for_what_was_held_when_it_begins(make, recording, until):
    messages, (expected,) = fleet(make, 1, 50)
    selection = Selection(since=Moment(0.2, False))
    assert await heard_by_an_indexer(make, recording(*messages), until, "live", selection=selection) == expected


async def test_a_recording_heard_to_its_end_is_old_news_the_second_time(make, recording, until):
    messages, (expected,) = fleet(make, 1, 50)
    path, name = recording(*messages), f"memory://replay-{next(_names)}"
    index, source = RadixIndex(), WorkerRank("w", 0)
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w", name)
        for _ in range(2):
            publication = open_publication(name)
            await until(lambda: indexer.are_all_connected)
            await Player(script_of(path), {make.source: publication}, pace=Pace(None)).play()
            await until(lambda: index.digest(source).digest == expected and indexer.is_exact("w", 0))
            publication.close()
        await until(lambda: indexer.statistics()[0].num_duplicates == 50)
        assert index.digest(source).digest == expected
        assert indexer.statistics()[0].num_restarts == 0
