"""Recordings begun amid streams, over real transports: replayed, they are exactly what the publishers held."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from kvist.events import FULL, WorkerRank
from kvist.events.codec import is_snapshot_part
from kvist.events.transports import Message, open_publication
from kvist.events.transports import base as transports_base
from kvist.indexer import Indexer
from kvist.publisher import KvEventPublisher
from kvist.publisher.buffers import PublisherLimits
from kvist.radix import RadixIndex
from kvist.replay import RecordingReader, RecordingWriter
from kvist.replay.indexing import IndexPlayer
from kvist.replay.player import Player, close_publications, open_publications
from kvist.replay.recorder import Recorder, SourceSpec
from kvist.replay.script import Pace, Script
from kvist.replay.statistics import StatisticsCollector

RANK = WorkerRank("gpu-0", 0)


@contextlib.asynccontextmanager
async def recording(path, *urls, **options):
    """Record these streams while entered; yields the recorder and its writer."""
    with RecordingWriter(path, **options) as writer:
        recorder = Recorder([SourceSpec.parse(url) for url in urls], writer)
        task = asyncio.create_task(recorder.run())
        try:
            yield recorder, writer
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def following(url):
    """Follow a stream while entered; yields the index and its indexer."""
    index = RadixIndex()
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source(RANK.worker, url)
        yield index, indexer


class LossyPublication:
    """A publication over ZeroMQ that loses what it is told to lose."""

    def __init__(self):
        self._real = open_publication("tcp://127.0.0.1:0")
        self.endpoint = self._real.endpoint
        self.serve_replay = self._real.serve_replay
        self.close = self._real.close
        self.is_losing = False

    def send(self, message):
        if not self.is_losing:
            self._real.send(message)


class Engine:
    """Stores chains of four blocks with a common beginning, and removes some."""

    def __init__(self, publisher):
        self._publisher = publisher
        self._rng = random.Random(5)
        self._names = []
        self._number = 0

    def serve(self, num_requests):
        for _ in range(num_requests):
            self._number += 1
            tokens = [self._rng.randrange(3)] * 8 + [self._number] * 8
            names = [self._number * 4 + n for n in range(4)]
            self._publisher.stored(names, tokens, window=FULL, group=0)
            self._names += names
            if self._rng.random() < 0.6:
                gone = [self._names.pop(self._rng.randrange(len(self._names))) for _ in range(3)]
                self._publisher.removed(gone, window=FULL, group=0)


def read(path):
    with RecordingReader(path) as reader:
        return list(reader)


def played(path, **options):
    player = IndexPlayer(RadixIndex())
    for lines in Script(path, **options).lines():
        player.apply(lines)
    return player.report()


async def held_by(publisher):
    """Return what the rank holds now, and the number of its next batch."""
    beats = []
    await asyncio.wrap_future(publisher.call_between_batches(lambda streams: beats.append(streams[0].heartbeat(0.0))))
    ((heartbeat,), sequence) = beats[0].events, beats[0].sequence
    return sequence, (heartbeat.num_blocks, heartbeat.digest)


async def recorded_up_to(publisher, writer, path, until):
    """Wait until a heartbeat that tells of all that was reported is in the file; return what is held."""
    sequence, held = await held_by(publisher)

    def is_there():
        writer.flush()
        messages = [record.message for record in read(path)]
        return messages[-1:] and messages[-1].sequence == sequence and b"heartbeat" in messages[-1].payload

    await until(is_there)
    return held


def small(num_batches=4):
    return PublisherLimits(replay_max_batches=num_batches)


@pytest.fixture
def make_url(start_nats_server, start_mqtt_broker):
    """Return a function that starts what a transport needs, and returns a URL to publish to."""

    def make(transport):
        if transport == "zmq":
            return "tcp://127.0.0.1:0"
        if transport == "mqtt":
            return f"mqtt://127.0.0.1:{start_mqtt_broker().port}/model/gpu-0"
        server = start_nats_server(has_jetstream=transport == "jetstream")
        return f"nats://127.0.0.1:{server.port}/model/gpu-0" + ("?jetstream=KV" if transport == "jetstream" else "")

    return make


async def late_recording(path, url, until, **options):
    """Record a publisher that has stored and removed thousands of blocks; return what it holds in the end."""
    with await asyncio.to_thread(KvEventPublisher, url, worker="gpu-0", block_size=4, **options) as publisher:
        engine = Engine(publisher)
        for _ in range(10):  # more batches than it keeps
            await asyncio.to_thread(engine.serve, 300)
            await held_by(publisher)
        async with recording(path, f"late={publisher.endpoint}") as (recorder, writer):
            await until(lambda: recorder.reports()[0].num_messages)
            for _ in range(5):
                await asyncio.to_thread(engine.serve, 50)
                await held_by(publisher)
            held = await recorded_up_to(publisher, writer, path, until)
            (report,) = recorder.reports()
        await asyncio.to_thread(publisher.close)
    assert report.partial == ()
    return held


@pytest.mark.parametrize("transport", ["zmq", "nats", "jetstream", "mqtt"])
async def test_a_recording_begun_late_is_exact(tmp_path, until, make_url, transport):
    path = tmp_path / "r"
    held = await late_recording(path, make_url(transport), until, limits=small())
    report = played(path)
    (rank,) = report.ranks
    assert ((rank.num_blocks, rank.digest), rank.state) == (held, "live")
    assert (report.num_snapshots, report.num_cleared) == (1, 0)
    statistics = StatisticsCollector()
    for record in read(path):
        statistics.add(record)
    told = statistics.result()
    assert told.ranks[RANK].num_restored > 3000
    assert told.ranks[RANK].num_live == held[0]
    (source,) = told.sources
    assert (source.num_gaps, source.is_from_start, source.num_snapshots) == (0, True, 1)


async def test_a_gap_that_a_publisher_no_longer_keeps_is_bridged_by_a_snapshot(tmp_path, until):
    path, publication = tmp_path / "r", LossyPublication()
    with KvEventPublisher(publication, worker="gpu-0", block_size=4, limits=small()) as publisher:
        engine = Engine(publisher)
        async with recording(path, publication.endpoint) as (recorder, writer):
            await until(lambda: recorder.reports()[0].num_messages)
            for is_losing in (False, True, False):
                publication.is_losing = is_losing
                for _ in range(20):
                    await asyncio.to_thread(engine.serve, 20)
                    await held_by(publisher)
            held = await recorded_up_to(publisher, writer, path, until)
            (heard,) = recorder.reports()
    assert (heard.num_gaps, heard.num_snapshots, heard.partial) == (1, 1, ())
    report = played(path)
    (rank,) = report.ranks
    assert ((rank.num_blocks, rank.digest), rank.state, report.num_cleared) == (held, "live", 0)


async def test_a_replay_answers_subscribers_as_the_publisher_did(tmp_path, until):
    """One is there from the beginning, one comes when all is over: both end with exactly what was held."""
    path = tmp_path / "r"
    held = await late_recording(path, "tcp://127.0.0.1:0", until, limits=small())
    (source,) = {record.source for record in read(path)}
    publications = open_publications(["tcp://127.0.0.1:0"], [source])
    url = publications[source].endpoint
    player = Player(Script(path), publications, pace=Pace(None))
    async with following(url) as (early, early_indexer):
        await player.play()
        task = asyncio.create_task(player.repeat())
        await until(lambda: early_indexer.is_exact("gpu-0", 0))
        async with following(url) as (late, late_indexer):
            await until(lambda: late_indexer.is_exact("gpu-0", 0))
            for index in (early, late):
                assert (index.digest(RANK).num_blocks, index.digest(RANK).digest) == held
        task.cancel()
    await asyncio.to_thread(close_publications, publications)
    assert player.num_replays >= 2
    assert player.num_sent == sum(not is_snapshot_part(record.message.payload) for record in read(path))


async def test_a_late_recording_played_twice_over_is_the_same(tmp_path, until):
    path = tmp_path / "r"
    held = await late_recording(path, "tcp://127.0.0.1:0", until, limits=small())
    (rank,) = played(path, num_rounds=2).ranks
    assert ((rank.num_blocks, rank.digest), rank.state) == (held, "live")


async def test_an_engines_own_stream_is_asked_from_its_beginning(tmp_path, until, start_vllm, free_port):
    path, port = tmp_path / "r", free_port()
    engine = start_vllm(port)
    for number in range(500):
        engine.store(number, [number] * 4)
    engine.remove(*range(0, 500, 3))
    async with recording(path, f"gpu-0=tcp://127.0.0.1:{port}") as (recorder, writer):

        def is_heard():
            engine.store(engine.next_sequence + 1000, [engine.next_sequence] * 4)
            return recorder.reports()[0].num_recovered and not recorder.reports()[0].partial

        await until(is_heard)
        engine.publish(is_lost=True)
        engine.store(9999, [9999] * 4)
        await until(lambda: writer.flush() or read(path)[-1].message.sequence == engine.next_sequence - 1)
    assert [record.message.payload for record in read(path)] == [payload for _, payload in engine.kept]
    report = played(path)
    assert (report.ranks[0].state, report.num_cleared) == ("live", 0)


async def test_an_engine_that_keeps_nothing_is_recorded_and_told_to_be_partial(tmp_path, until, start_vllm, free_port):
    path, port = tmp_path / "r", free_port()
    engine = start_vllm(port, num_kept=None)
    engine.store(1, [1] * 4)
    async with recording(path, f"gpu-0=tcp://127.0.0.1:{port}") as (recorder, writer):

        def is_heard():
            engine.store(engine.next_sequence + 1000, [engine.next_sequence] * 4)
            return writer.num_messages > 3

        await until(is_heard)
        assert recorder.reports()[0].partial == ("gpu-0",)
    assert played(path).ranks[0].state == "partial"


class EndlessAnswers:
    """Answers every question with signs of life, for ever."""

    def __init__(self, sign):
        self._sign = sign
        self.is_ended = False

    def replay(self, _):
        while not self.is_ended:
            yield self._sign


async def test_an_answer_without_an_end_holds_live_messages_up_for_a_while_only(make, tmp_path, until, monkeypatch):
    monkeypatch.setattr(transports_base, "MAX_ANSWER_S", 0.1)
    path, publication = tmp_path / "r", open_publication("tcp://127.0.0.1:0")
    answers = EndlessAnswers(make.heartbeat(7, 3, 5))
    publication.serve_replay(answers)
    sent = [make.batch(number, make.stored(number)) for number in range(7, 40)]
    async with recording(path, publication.endpoint) as (recorder, writer):

        def is_heard():
            publication.send(make.heartbeat(7, 3, 5))
            return recorder.reports()[0].num_messages

        await until(is_heard)
        for message in sent:
            publication.send(message)
        await until(lambda: writer.num_messages >= len(sent))
        assert recorder.reports()[0].partial == ("w/0",)
    answers.is_ended = True
    await asyncio.to_thread(publication.close)
    recorded = [record.message for record in read(path) if b"heartbeat" not in record.message.payload]
    assert recorded == sent
    assert played(path).ranks[0].state == "partial"


async def test_what_waits_for_an_answer_is_written_when_the_recorder_ends(make, tmp_path, until):
    path, publication = tmp_path / "r", open_publication("memory://late-and-silent")
    answers = EndlessAnswers(make.heartbeat(7, 3, 5))
    publication.serve_replay(answers)
    async with recording(path, "memory://late-and-silent") as (recorder, _):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        publication.send(make.batch(7))
        await until(lambda: recorder.reports()[0].num_messages)
        assert read(path) == []
        answers.is_ended = True
    publication.close()
    assert [record.message for record in read(path)] == [make.batch(7)]


async def test_who_goes_on_recording_writes_what_was_missed_and_nothing_twice(tmp_path, until, start_vllm, free_port):
    """An engine and a publisher are recorded, go on alone for a while, and are recorded again: nothing lacks."""
    path, port = tmp_path / "r.mcap", free_port()
    engine = start_vllm(port)
    for number in range(100):
        engine.store(number, [number] * 4)
    with KvEventPublisher("tcp://127.0.0.1:0", worker="gpu-1", block_size=4) as publisher:
        served = Engine(publisher)
        await asyncio.to_thread(served.serve, 50)
        for session in range(3):
            with RecordingWriter(path, appends=session > 0) as writer:
                urls = (f"gpu-0=tcp://127.0.0.1:{port}", f"gpu-1={publisher.endpoint}")
                recorder = Recorder([SourceSpec.parse(url) for url in urls], writer)
                if writer.earlier is not None:
                    with RecordingReader(writer.earlier) as earlier:
                        recorder.skip(earlier)
                task = asyncio.create_task(recorder.run())

                def is_heard(session=session, writer=writer, recorder=recorder):
                    engine.store(engine.next_sequence + 1000, [engine.next_sequence] * 4)
                    writer.flush()
                    sources = {record.source.name for record in read(path) if record.session == session}
                    return len(sources) == 2 and not any(report.partial for report in recorder.reports())

                await until(is_heard)
                await asyncio.to_thread(served.serve, 10)
                held = await recorded_up_to(publisher, writer, path, until)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await asyncio.to_thread(served.serve, 30)
            for number in range(10):
                engine.store(5000 + 100 * session + number, [number + session] * 4)
    records = read(path)
    engines = [record.message.payload for record in records if record.source.name == "gpu-0"]
    assert engines == [payload for _, payload in engine.kept][: len(engines)]
    ours = [record.message for record in records if record.source.name == "gpu-1"]
    numbers = [message.sequence for message in ours if b"heartbeat" not in message.payload]
    assert numbers == list(range(len(numbers)))
    assert [part.name for part in sorted(tmp_path.iterdir())] == ["r.1.mcap", "r.2.mcap", "r.mcap"]
    ranks = {rank.source.worker: rank for rank in played(path).ranks}
    assert {rank.state for rank in ranks.values()} == {"live"}
    assert (ranks["gpu-1"].num_blocks, ranks["gpu-1"].digest) == held


def test_a_publishers_own_bytes_of_a_snapshot_are_recorded_and_held(make, tmp_path):
    payload = bytes.fromhex(
        "9dae6b766973742d736e617073686f74a8776f726b65722d3000cf000691f29d0000000104000103"
        "cfd0e795dd95cd4558c4105cca2dfbd7e438cb3d3c6d9d37b2a244c4080000000001000000c4020103"
    )
    message = Message(b"kv/worker-0/0", 1, payload)
    path = make.write(tmp_path / "r", make.records(message))
    assert [record.message for record in read(path)] == [message]
    (rank,) = played(path).ranks
    assert (rank.source, rank.num_blocks, rank.digest) == (("worker-0", 0), 3, 0xD0E795DD95CD4558)
