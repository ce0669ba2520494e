"""The short way of plain events against the long way of all: equal bytes and equal state, whatever an engine says."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvist.errors import MalformedMessageError
from kvist.events.codec import encode_batch
from kvist.events.dialects import vllm
from kvist.events.types import WorkerRank
from kvist.events.windows import FULL
from kvist.publisher.plain import engine_event, read_plain
from kvist.publisher.stream import RankStream
from kvist.publisher.unread import Unread, rank_to_be_read

BLOCK_SIZE = 2
NUM_HISTORIES = 40
SOURCE = WorkerRank("w", 3)

STRANGE_FIELDS = {
    "medium": ["CPU", "gpu", "TAPE", None],
    "lora_name": ["sql"],
    "lora_id": [0, 1],
    "cache_salt": ["tenant"],
    "extra_keys": [[], [None], [None, None], [["tenant"]], [[["0" * 64, 1]]]],
    "block_size": [0, 1, 4],
    "kv_cache_spec_kind": ["mla_attention", "sliding_window", "mamba", "unknown", None],
    "kv_cache_spec_sliding_window": [0, 128, 512],
    "token_ids": [[], [1], [1, 2, 3], [1, -1], [1, 2**32], [(1, 2), (2, 3)], [1.5, 2]],
    "block_hashes": [[], [1, 2], [2, 2], [-1], [b"digest"], [None], [1, None], [2**64 - 1]],
    "parent_block_hash": [-1, b"digest", 99],
    "locality": ["LOCAL", "REMOTE"],
    "group_idx": [-1, 2**40],
    "session_id": ["of no interest"],
}
STRANGE_EVENTS = [{"type": "AllBlocksCleared"}, {"type": "BlockMoved"}, {"type": 5}, ["BlockRemoved", [1], "GPU"]]


def stored(name: int, as_of: int | None = None, behind: int | None = None, group: int | None = 0, **fields) -> dict:
    number = name if as_of is None else as_of
    event = {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": behind,
        "token_ids": [number * BLOCK_SIZE + idx for idx in range(BLOCK_SIZE)],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "kv_cache_spec_kind": "full_attention",
    }
    return {**event, **({} if group is None else {"group_idx": group}), **fields}


def removed(block_hashes: list[int], group: int | None = 0, **fields) -> dict:
    event = {"type": "BlockRemoved", "block_hashes": block_hashes, "medium": "GPU"}
    return {**event, **({} if group is None else {"group_idx": group}), **fields}


class Engine:
    """Says plain things, and strange ones as often as it is strange."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_names = self.rng.choice([4, 8, 16])
        self.groups = self.rng.choice([[0], [0, 0, 0, None], [0, 0, 1], [None]])
        self.kinds = self.rng.choice([["full_attention"], ["full_attention", "full_attention", None], [None]])
        self.strangeness = self.rng.choice([0.0, 0.02, 0.1, 0.4])

    def message(self) -> bytes:
        """Return a message of up to eight events."""
        timestamp_s = float("inf") if self._is(self.strangeness / 4) else 1.0
        events = [self.event() for _ in range(self.rng.randrange(9))]
        return msgspec.msgpack.encode([timestamp_s, events, SOURCE.rank])

    def event(self):
        rng, group = self.rng, self.rng.choice(self.groups)
        if self._is(self.strangeness / 8):
            return rng.choice(STRANGE_EVENTS)
        if self._is(0.4):
            hashes = (
                [self._name()] if not self._is(self.strangeness) else [self._name() for _ in range(rng.randrange(4))]
            )
            fields = {"medium": rng.choice(["CPU", None])} if self._is(self.strangeness) else {}
            return removed(hashes, group, **fields)
        fields = {"kv_cache_spec_kind": rng.choice(self.kinds)}
        if group == 1:
            fields = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
        if self._is(self.strangeness):
            field = rng.choice([*STRANGE_FIELDS, "lora_name", "cache_salt", "medium"])
            fields[field] = rng.choice(STRANGE_FIELDS[field])
        as_of = self._name() if self._is(self.strangeness) else None
        return stored(self._name(), as_of, self._name() if self._is(0.6) else None, group, **fields)

    def _name(self) -> int:
        return self.rng.randrange(self.num_names)

    def _is(self, probability: float) -> bool:
        return self.rng.random() < probability


class LongWay:
    """A stream that takes a message's events one after another, as the dialect reads them."""

    def __init__(self, window) -> None:
        self.stream = RankStream(SOURCE, BLOCK_SIZE, epoch=1, window=window)
        self.sent: list[bytes] = []

    def take(self, payload: bytes) -> None:
        for event in read_all(payload):
            self.stream.admit(event)

    def close(self) -> None:
        self.sent += map(encode_batch, self.stream.close_batches(1.0))

    def state(self) -> tuple[object, ...]:
        residency = self.stream.residency
        return (
            self.sent,
            self.stream.heartbeat(1.0),
            self.stream.statistics(),
            self.stream.state().filter,
            [residency.names(tier) for tier in range(4)],
            residency.places,
            residency.scopes,
        )


class ShortWay(LongWay):
    """A stream that takes messages as they are."""

    def take(self, payload: bytes) -> None:
        self.stream.admit_unread(Unread(SOURCE.rank, payload, read_all))


def read_all(payload: bytes):
    try:
        return vllm.decode(payload, "test").events
    except MalformedMessageError:
        return ()


@pytest.mark.parametrize("batch_bytes", [64 << 10, 24])
@pytest.mark.parametrize("window", [None, FULL, 128])
def test_the_short_way_ends_where_the_long_way_does(monkeypatch, batch_bytes, window):
    monkeypatch.setattr("kvist.publisher.coalescer.MAX_BATCH_HASH_BYTES", batch_bytes)
    for seed in range(NUM_HISTORIES):
        engine, short, long = Engine(seed), ShortWay(window), LongWay(window)
        for message_idx in range(60):
            payload = engine.message()
            for way in (short, long):
                way.take(payload)
                if message_idx % 5 == 4:
                    way.close()
            assert short.state() == long.state(), f"{seed=} {message_idx=}"


def test_what_is_read_as_plain_is_what_the_dialect_reads():
    num_plain = 0
    for seed in range(NUM_HISTORIES):
        engine = Engine(seed)
        for _ in range(60):
            payload = engine.message()
            plain = read_plain(payload)
            if plain is not None:
                num_plain += 1
                batch = vllm.decode(payload, "test")
                assert [engine_event(event, SOURCE.rank) for event in plain] == list(batch.events)
                assert (batch.num_ignored_events, batch.num_malformed_events, batch.num_unhashable_blocks) == (0, 0, 0)
    assert num_plain > NUM_HISTORIES * 20


def test_an_ordinary_message_goes_the_short_way_but_for_its_first_events():
    taken: list[object] = []
    stream = RankStream(SOURCE, BLOCK_SIZE, epoch=1)
    admit = stream.admit
    stream.admit = lambda event: (taken.append(event), admit(event))
    first = [stored(1), removed([1])]
    second = [stored(2), stored(3, behind=2), removed([2]), stored(4, behind=3, lora_id=None, extra_keys=[None])]
    for message in (first, second):
        stream.admit_unread(Unread(SOURCE.rank, msgspec.msgpack.encode([1.0, message, SOURCE.rank]), read_all))
    assert len(taken) == len(first)
    assert stream.num_blocks == 2
    assert stream.statistics().num_events == len(first) + len(second)


def test_what_was_learnt_of_a_kind_of_events_is_forgotten_when_the_filter_judges_anew():
    short, long = ShortWay(None), LongWay(None)
    sliding = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
    messages = [[stored(1, **sliding)], [stored(2, **sliding)], [{"type": "AllBlocksCleared"}], [stored(3, **sliding)]]
    for message in (*messages, [stored(4)], [stored(5, **sliding), stored(6)], [stored(7)]):
        payload = msgspec.msgpack.encode([1.0, message, SOURCE.rank])
        for way in (short, long):
            way.take(payload)
            way.close()
        assert short.state() == long.state()
    assert short.stream.num_blocks == 3


@pytest.mark.parametrize("block_size", [(1 << 16) + 1, 2**64 - 1])
def test_no_claim_about_the_size_of_blocks_ends_a_stream(block_size):
    stream = RankStream(SOURCE, block_size, epoch=1)
    for number in (1, 2, 3):
        events = [stored(number, block_size=block_size), removed([number])]
        stream.admit_unread(Unread(SOURCE.rank, msgspec.msgpack.encode([1.0, events, SOURCE.rank]), read_all))
    assert (stream.statistics().num_events, stream.num_blocks) == (6, 0)


def test_a_group_that_is_not_published_is_left_out_the_short_way():
    taken: list[object] = []
    stream = RankStream(SOURCE, BLOCK_SIZE, epoch=1)
    admit = stream.admit
    sliding = {"group": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
    message = [stored(1), stored(1, **sliding), removed([1], group=1)]
    for idx in range(3):
        if idx == 2:
            stream.admit = lambda event: (taken.append(event), admit(event))
        payload = msgspec.msgpack.encode([1.0, [stored(10 + idx), *message[1:]], SOURCE.rank])
        stream.admit_unread(Unread(SOURCE.rank, payload, read_all))
    assert taken == []
    assert (stream.num_blocks, stream.statistics().filter.num_filtered) == (3, 6)


def test_a_batch_may_wait_unread_unless_it_clears_or_is_none():
    def payload(*events: object, rank: object = 3, timestamp_s: float = 1.0) -> bytes:
        return msgspec.msgpack.encode([timestamp_s, list(events), rank])

    assert rank_to_be_read(payload(stored(1))) == 3
    assert rank_to_be_read(payload(rank=None)) == 0
    assert rank_to_be_read(msgspec.msgpack.encode([1.0, [removed([1])]])) == 0
    assert rank_to_be_read(payload(stored(1), {"type": "AllBlocksCleared"})) is None
    assert rank_to_be_read(payload(["AllBlocksCleared"])) is None
    for broken in (
        payload(rank=-1),
        payload(rank="0"),
        payload(timestamp_s=float("inf")),
        b"",
        b"\xc1",
        payload()[:-1],
    ):
        assert rank_to_be_read(broken) is None
