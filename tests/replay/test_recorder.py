"""Recording live streams, of publishers, engines and brokers: the recording says what the streams said."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.transports import Endpoint, Message, open_publication
from kvist.indexer import Indexer
from kvist.publisher import KvEventPublisher
from kvist.radix import RadixIndex
from kvist.replay import RecordedSource, RecordingReader, RecordingWriter
from kvist.replay.envelope import read_envelope
from kvist.replay.indexing import IndexPlayer
from kvist.replay.player import Player, close_publications, open_publications
from kvist.replay.recorder import Recorder, SourceSpec, parse_sources
from kvist.replay.script import Pace, Script
from kvist.replay.statistics import StatisticsCollector


@contextlib.asynccontextmanager
async def recording(path, *urls):
    """Record these streams while entered; yields the recorder and its writer."""
    with RecordingWriter(path) as writer:
        recorder = Recorder([SourceSpec.parse(url) for url in urls], writer)
        task = asyncio.create_task(recorder.run())
        try:
            yield recorder, writer
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def read(path):
    with RecordingReader(path) as reader:
        return list(reader)


def num_numbered(writer, path):
    """Return how many batches that are no heartbeats are in a recording by now."""
    writer.flush()
    return sum(not read_envelope(record.message.payload).is_heartbeat for record in read(path))


def serve_requests(publishers, rng, num_requests):
    """Store prompts that share their beginnings, and remove some again, as engines do."""
    prefixes = [[rng.randrange(1000) for _ in range(12)] for _ in range(3)]
    for number in range(num_requests):
        publisher = publishers[rng.randrange(len(publishers))]
        tokens = rng.choice(prefixes) + [rng.randrange(1000) for _ in range(8)]
        names = [hash(tuple(tokens[: 4 * (n + 1)])) & (1 << 62) - 1 for n in range(5)]
        publisher.stored(names, tokens, window=FULL, group=0)
        publisher.stored([number], tokens[:4], window=64, group=1)  # a sliding group: not published
        if number % 3 == 0:
            publisher.removed(names[4:2:-1], window=FULL, group=0)
        if number % 40 == 39:
            publisher.cleared()


async def test_a_recorded_fleet_played_into_an_index_is_the_fleet_as_it_was(tmp_path, until):
    """The live index, the digests of the recorded heartbeats and the replayed index agree, block by block."""
    path, names = tmp_path / "fleet", ["gpu-0", "gpu-1"]
    publishers = [KvEventPublisher("tcp://127.0.0.1:0", worker=name, block_size=4) for name in names]
    live = RadixIndex()
    urls = [f"{name}={publisher.endpoint}" for name, publisher in zip(names, publishers, strict=True)]
    async with recording(path, *urls) as (recorder, writer), Indexer(live, block_size=4) as indexer:
        await until(lambda: all(report.num_connects for report in recorder.reports()))  # heartbeats were heard
        for name, publisher in zip(names, publishers, strict=True):
            indexer.add_source(name, publisher.endpoint)
        await until(lambda: all(indexer.is_exact(name, 0) for name in names))
        await asyncio.to_thread(serve_requests, publishers, random.Random(5), 300)
        await asyncio.to_thread(lambda: [publisher.close() for publisher in publishers])
        num_batches = sum(publisher.statistics().ranks[0].num_batches for publisher in publishers)
        await until(lambda: sum(each.num_batches for each in indexer.statistics()) == num_batches)
        await until(lambda: num_numbered(writer, path) == num_batches)
    replayed = RadixIndex()
    player = IndexPlayer(replayed)
    collector = StatisticsCollector()
    for lines in Script(path).lines():
        player.apply(lines)
        for line in lines:
            collector.add(line.record)
    assert {rank.state for rank in player.report().ranks} == {"live"}
    for name in names:
        assert replayed.digest(WorkerRank(name, 0)) == live.digest(WorkerRank(name, 0))
    held = {rank.source: rank.num_blocks for rank in player.report().ranks}
    assert {rank: each.num_live for rank, each in collector.result().ranks.items()} == held
    prompt = block_hashes(list(range(20)), 4)
    assert dict(replayed.match(prompt).items()) == dict(live.match(prompt).items())


async def test_engines_own_bytes_are_recorded_as_they_are(golden, tmp_path, until):
    path = tmp_path / "r"
    publication = open_publication("tcp://127.0.0.1:0")
    url = publication.endpoint.partition("?")[0]
    sent = [Message(b"kv-events", n, payload) for n, payload in enumerate(golden.values())]
    assert len(sent) >= 7
    async with recording(path, url) as (recorder, writer):
        probe = Message(b"", 0, b"")

        def is_connected():
            publication.send(probe)
            return writer.num_messages > 0

        await until(is_connected)
        for message in sent:
            publication.send(message)
        await until(lambda: writer.num_messages > len(sent) and recorder.reports()[0].num_messages >= len(sent))
        await until(lambda: recorder.reports()[0].num_malformed > 0)
    publication.close()
    records = [record for record in read(path) if record.message != probe]
    assert [record.message for record in records] == sent


@pytest.mark.parametrize("broker", ["nats", "jetstream", "mqtt"])
async def test_streams_are_recorded_from_a_broker_and_played_to_it(
    make, tmp_path, until, broker, start_nats_server, start_mqtt_broker
):
    if broker == "mqtt":
        url = f"mqtt://127.0.0.1:{start_mqtt_broker().port}/model"
    else:
        server = start_nats_server(has_jetstream=broker == "jetstream")
        url = f"nats://127.0.0.1:{server.port}/model"
    option = "?jetstream=KV" if broker == "jetstream" else ""
    messages = [make.batch(n, make.stored(n), worker="gpu-0") for n in range(50)]
    source = RecordedSource("gpu-0", "")
    path = make.write(tmp_path / "made", make.records(*messages, source=source))
    publications = await asyncio.to_thread(open_publications, [url + option], [source])
    player = Player(Script(path), publications, pace=Pace(None))
    probe = make.heartbeat(0, 0, 0, worker="gpu-0")
    async with recording(tmp_path / "heard", f"{url}/gpu-0{option}") as (_, writer):

        def is_heard():
            with contextlib.suppress(BlockingIOError):
                publications[source].send(probe)
            return writer.num_messages > 0

        await until(is_heard)
        await player.play()
        await until(lambda: num_numbered(writer, tmp_path / "heard") >= len(messages))
    await asyncio.to_thread(close_publications, publications)
    assert [record.message for record in read(tmp_path / "heard") if record.message != probe] == messages


async def test_why_a_broker_is_not_heard_is_told(tmp_path, until, start_nats_server):
    server = start_nats_server("authorization: {user: kvist, password: right}")
    url = f"nats://kvist:wrong@127.0.0.1:{server.port}/model/w"
    async with recording(tmp_path / "r", url) as (recorder, _):
        await until(lambda: recorder.reports()[0].problem)
    (report,) = recorder.reports()
    assert "wrong" not in report.problem
    assert "wrong" not in (tmp_path / "r").read_bytes().decode(errors="replace")
    assert (report.num_connects, report.num_messages) == (0, 0)


def test_a_name_is_given_or_taken_from_the_url():
    for text, name, shown in (
        ("pod-1=tcp://h:1?engine=sglang", "pod-1", "tcp://h:1?engine=sglang"),
        ("tcp://h:1?engine=sglang", "h:1", "tcp://h:1?engine=sglang"),
        ("ipc:///tmp/x", "/tmp/x", "ipc:///tmp/x"),
        ("nats://me:secret@h:4222/m/w", "h:4222/m/w", "nats://h:4222/m/w"),
    ):
        spec = SourceSpec.parse(text)
        assert (spec.source.name, spec.source.url) == (name, shown)
    assert SourceSpec.parse("a=tcp://h:1?engine=sglang").endpoint == Endpoint.parse("tcp://h:1?engine=sglang")


def test_two_sources_of_one_name_are_refused():
    assert [spec.source.name for spec in parse_sources(["a=tcp://h:1", "tcp://h:1"])] == ["a", "h:1"]
    with pytest.raises(InvalidValueError, match="source: got 'a', expected each name once"):
        parse_sources(["a=tcp://h:1", "a=tcp://h:2"])


async def test_messages_keep_their_distances_when_the_clock_is_set_meanwhile(make, tmp_path, until):
    publication = open_publication("memory://recorder-clock")
    wall_ns, mono_ns = [10**18], [5]
    with RecordingWriter(tmp_path / "r") as writer:
        recorder = Recorder(
            [SourceSpec.parse("memory://recorder-clock")],
            writer,
            mono_ns=lambda: mono_ns[0],
            wall_ns=lambda: wall_ns[0],
        )
        task = asyncio.create_task(recorder.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        publication.send(make.batch(0))
        await until(lambda: writer.num_messages == 1)
        wall_ns[0] += 10**12
        mono_ns[0] += 10**8
        publication.send(make.batch(1))
        await until(lambda: writer.num_messages == 2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    publication.close()
    assert [record.time_ns for record in read(tmp_path / "r")] == [10**18, 10**18 + 10**8]
