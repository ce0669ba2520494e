"""Over each transport, a running index counts malformed messages, logs the first and follows all others exactly.

Each broken message is the next of its stream in all but what breaks it, so that compiled code is the first to read it;
they come by the dozen, since only several that wait together are given to it from a broker.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Stored, Tier, WorkerRank
from kvist.events.codec import decode_batch, encode_batch
from kvist.events.dialects import decode_block_events
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import block_digest
from kvist.events.transports import Message, Publication, open_publication
from kvist.indexer import Indexer
from kvist.radix import RadixIndex

BLOCK_SIZE = 4
TOPIC = b"kv/w/0"
DEEP = b"\x91" * 300_000 + b"\xc0"
# Values that end a reader which goes on after it was told that there is none.
NO_VALUES = [b"\xc1", b"\xc1" * 3, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb", b"\x91", DEEP]
encode = msgspec.msgpack.encode


@pytest.fixture(params=["zmq", "nats", "jetstream", "mqtt"])
def publication(request, start_nats_server, start_mqtt_broker) -> Iterator[Publication]:
    if request.param == "zmq":
        url = "tcp://127.0.0.1:0"
    elif request.param == "mqtt":
        url = f"mqtt://127.0.0.1:{start_mqtt_broker().port}/model/w"
    else:
        server = start_nats_server(has_jetstream=request.param == "jetstream")
        url = f"nats://127.0.0.1:{server.port}/model/w{'?jetstream=KV' if request.param == 'jetstream' else ''}"
    publication = open_publication(url)
    yield publication
    publication.close(timeout_s=1)


def canonical(sequence: int) -> bytes:
    """Return a batch that stores one block below the one before."""
    stored = Stored(struct.pack("<Q", 1000 + sequence), 999 + sequence if sequence else None, Tier.GPU)
    return encode_batch(Batch("w", 0, 1, sequence, BLOCK_SIZE, 7.0, (stored,)))


def broken_canonical(sequence: int) -> list[bytes]:
    """Return batches of that number which are none."""
    good = canonical(sequence)
    assert good[0] == 0x99
    fields = [bytes([0x9A]) + good[1:] + value for value in NO_VALUES]
    fields += [bytes([0x9B]) + good[1:] + values for values in (b"\xc1\xc0", b"\xc0\xc1", b"\xc1" * 9)]
    at = good.index(b"\xa6stored") - 1
    fields += [good[:at] + bytes([good[at] + 1]) + good[at + 1 :] + value for value in NO_VALUES]
    return [*fields, good[:-1], good + b"\xc0", b"", b"\xc1", good[:9], good.replace(b"\xa1w", b"\xa1\xff")]


def tokens(sequence: int) -> list[int]:
    return [sequence * BLOCK_SIZE + number for number in range(BLOCK_SIZE)]


def engines(sequence: int) -> bytes:
    """Return an engine's batch that stores one block below the one before."""
    event = {
        "type": "BlockStored",
        "block_hashes": [sequence + 1],
        "parent_block_hash": sequence or None,
        "token_ids": tokens(sequence),
        "block_size": BLOCK_SIZE,
    }
    return encode([7.0, [event], 0])


def broken_engines() -> list[bytes]:
    """Return batches which are none."""
    event = b"\x93\xcb" + struct.pack(">d", 7.0) + b"\x91"
    key = event + b"\x82" + encode("type") + encode("BlockStored")
    values = [
        start + value for start in (event, key + encode("block_hashes"), key + encode("new")) for value in NO_VALUES
    ]
    return [*values, b"", b"\xc1", event, engines(5)[:-1] + b"\xc1", engines(5) + b"\xc0"]


async def follow(
    publication: Publication, message_of: Callable[[int], bytes], until: Callable, is_there: Callable[[], bool]
) -> None:
    """Send the stream's first message until it arrives: before a subscriber is there, all is lost."""

    def is_heard() -> bool:
        publication.send(Message(TOPIC, 0, message_of(0)))
        return is_there()

    await until(is_heard)


def assert_counted(indexer: Indexer, caplog: pytest.LogCaptureFixture, num_broken: int) -> None:
    """Check that so many messages, and no others, were left out of the one stream there is."""
    (statistics,) = indexer.statistics()
    assert statistics.num_malformed == num_broken
    assert (
        statistics.num_gaps == statistics.num_cleared == statistics.num_diverged == statistics.num_refused_events == 0
    )
    assert sum("skipped" in record.message for record in caplog.records) == 1


async def test_what_is_no_canonical_batch_costs_the_stream_nothing(
    publication: Publication, indexer: Indexer, index: RadixIndex, until: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    indexer.add_source("w", publication.endpoint)
    await follow(publication, canonical, until, lambda: index.digest(WorkerRank("w", 0)).num_blocks == 1)
    num_broken, num_blocks = len(broken_canonical(1)), 1
    for kind in range(num_broken):
        broken = broken_canonical(num_blocks)[kind]
        with pytest.raises(MalformedMessageError):
            decode_batch(broken, "w")
        publication.send(Message(TOPIC, num_blocks, broken))
        publication.send(Message(TOPIC, num_blocks, canonical(num_blocks)))
        num_blocks += 1
    await until(lambda: index.digest(WorkerRank("w", 0)).num_blocks == num_blocks)
    hashes = range(1000, 1000 + num_blocks)
    assert index.digest(WorkerRank("w", 0)).digest == sum(block_digest(each, Tier.GPU) for each in hashes) % (1 << 64)
    assert_counted(indexer, caplog, num_broken)


async def test_what_is_no_batch_of_an_engines_costs_the_stream_only_itself(
    publication: Publication, indexer: Indexer, index: RadixIndex, until: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    indexer.add_source("w", publication.endpoint)
    await follow(publication, engines, until, lambda: index.digest(WorkerRank("w", 0)).num_blocks == 1)
    num_blocks, sequence, prompt = 1, 1, tokens(0)
    for broken in broken_engines():
        with pytest.raises(MalformedMessageError):
            decode_block_events(broken, "w", "vllm")
        publication.send(Message(TOPIC, sequence, broken))
        publication.send(Message(TOPIC, sequence + 1, engines(num_blocks)))
        num_blocks, sequence, prompt = num_blocks + 1, sequence + 2, prompt + tokens(num_blocks)
    await until(lambda: index.digest(WorkerRank("w", 0)).num_blocks == num_blocks)
    digest = sum(block_digest(each, Tier.GPU) for each in block_hashes(prompt, BLOCK_SIZE).tolist()) % (1 << 64)
    assert index.digest(WorkerRank("w", 0)).digest == digest
    assert_counted(indexer, caplog, len(broken_engines()))
