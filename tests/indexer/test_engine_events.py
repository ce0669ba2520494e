"""The checking pass against the decoder: what it accepts means the same to both."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvist.events import EngineRemoved, EngineStored
from kvist.events.dialects import decode_block_events
from kvist.events.engine_events import FULL, STATE, UNKNOWN
from kvist.events.transports import Message
from kvist.events.transports.block import MessageBlock
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.engine import apply_messages
from kvist.indexer.engine import EngineLane
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import HEAD, SEGMENT

encode = msgspec.msgpack.encode


class Checker:
    """Checks payloads by a lane's own call, which stops behind that: no rank has the number it is given."""

    def __init__(self, dialect: str) -> None:
        index = RadixIndex(seed=1, segment_bits=1)
        self._lane = EngineLane(2, dialect, index)
        nobody = np.zeros(1, layout.RANK)
        nobody["number"] = -1
        self._held = index.core, index.segments, *((np.zeros(1, HEAD), np.zeros(0, SEGMENT)) * 2), nobody

    def check(self, payload: bytes) -> list[dict[str, Any]] | None:
        """Return the events of an accepted message, None for one that is not."""
        lane, block = self._lane, MessageBlock.of([Message(b"", 0, payload)])
        lane.stream["message_idx"] = lane.stream["is_checked"] = 0
        data = np.frombuffer(block.buffer, np.uint8)
        state = self._held, lane._streams, data, block.table, 0, 1 << 30
        reason = apply_messages(*state, *lane._scratch, *lane._fingerprints)
        assert reason in (layout.OTHER_RANK, layout.UNUSUAL_MESSAGE)
        if reason == layout.UNUSUAL_MESSAGE:
            return None
        events, self.hashes, _, self.tokens, _ = lane._scratch
        names = events.dtype.names
        return [dict(zip(names, row, strict=True)) for row in events[: lane.stream["num_checked"]].tolist()]

    @property
    def rank(self) -> int:
        return int(self._lane.stream["checked_rank"])

    @property
    def end(self) -> int:
        return int(self._lane.stream["checked_end"])


def words(array: NDArray[Any], start: int, count: int) -> list[int]:
    return array[start : start + count].tolist()


def expected_verdict(event: EngineStored | EngineRemoved) -> int:
    windows = {FULL: layout.FULL_WINDOW, STATE: layout.STATE_WINDOW, UNKNOWN: 0}
    window = windows.get(event.window, event.window)
    group = 0 if event.group is None else event.group + 1
    return isinstance(event, EngineRemoved) | group << 1 | window << 32


def assert_agrees(checker: Checker, payload: bytes, dialect: str) -> int:
    """Compare each event with what the decoder makes of it alone; return how many were not left to it."""
    events = checker.check(payload)
    if events is None:
        return 0
    decoded = decode_block_events(payload, "test", dialect)
    assert (decoded.rank or 0) == checker.rank
    num_taken = 0
    for idx, event in enumerate(events):
        end = events[idx + 1]["start"] if idx + 1 < len(events) else checker.end
        alone = b"\x93" + payload[1:10] + b"\x91" + payload[event["start"] : end] + b"\x00"
        one = decode_block_events(alone, "test", dialect)
        assert len(one.events) + one.num_ignored_events + one.num_malformed_events == 1
        if event["kind"] == layout.UNUSUAL:
            continue
        num_taken += 1
        assert one.num_malformed_events == 0
        assert one.num_ignored_events == (event["kind"] == layout.IGNORED)
        for read in one.events:
            assert (event["kind"] == layout.STORED) == isinstance(read, EngineStored)
            assert event["tier"] == read.tier
            assert event["key"] == expected_verdict(read)
            assert words(checker.hashes, event["first_hash"], event["num_hashes"]) == list(read.block_hashes)
            if isinstance(read, EngineStored):
                num_tokens = event["num_tokens"] + event["has_lookahead"]
                assert words(checker.tokens, event["first_token"], num_tokens) == list(read.token_ids)
                assert event["has_lookahead"] == read.is_eagle
                assert event["block_size"] == read.block_size
                parent = event["parent"] if event["has_parent"] else None
                assert parent == read.parent_block_hash
                assert not any((read.lora_id, read.lora_name, read.cache_salt, read.mm_hashes))
    return num_taken


def real_payloads(rng: random.Random) -> list[bytes]:
    """Return batches as engines send them, in all forms."""
    payloads, lookahead = [], [[5], [300, 7], [70_000], [9, 1 << 31]]
    for is_map in (True, False):
        for width in (7, 14, 31, 64):
            hashes = [
                rng.choice([rng.getrandbits(width), -rng.getrandbits(min(width, 63)), rng.randbytes(32)])
                for _ in range(4)
            ]
            tokens = [rng.choice([rng.getrandbits(17), 5, 200, 40_000, (1 << 32) - 1]) for _ in range(8)]
            stored = {
                "block_hashes": hashes,
                "parent_block_hash": rng.choice([None, 3, 1 << 63, b"parent"]),
                "token_ids": tokens,
                "block_size": 2,
                "lora_id": rng.choice([None, 0]),
                "medium": rng.choice(["GPU", "CPU", None]),
            }
            removed = {"block_hashes": hashes[:2], "medium": rng.choice(["DISK", None, "CPU_PINNED"])}
            if is_map:
                stored |= {"lora_name": None, "extra_keys": [None, [], None, None], "cache_salt": "", "group_idx": 0}
                stored |= {"kv_cache_spec_kind": "full_attention", "ownership": {"a": [1, {"b": 2.5}]}}
                stored |= {"locality": rng.choice([None, "LOCAL", "REMOTE"])}
                stored |= rng.choice([{"session_id": "s" * 40}, {"lookahead_token_ids": lookahead}])
                removed |= {"group_idx": 1}
                events = [{"type": "BlockStored", **stored}, {**removed, "type": "BlockRemoved"}]
                events.append({**stored, "type": "BlockStored", "kv_cache_spec_kind": "mamba"})
            else:
                events = [["BlockStored", *stored.values()], ["BlockRemoved", *removed.values()]]
            payloads.append(encode([1.5, events, rng.choice([None, 0, 200, 4095])]))
    return payloads


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """Return a payload with a few bytes changed, cut, doubled or put in."""
    mutant = bytearray(payload)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(mutant) + 1)
        choice = rng.random()
        if choice < 0.6 and at < len(mutant):
            mutant[at] = rng.choice([rng.randrange(256), 0xC0, 0xC1, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF, 0x90, 0x80, 0xA0])
        elif choice < 0.7:
            del mutant[at : at + rng.choice([1, 2, 9])]
        elif choice < 0.8:
            del mutant[at:]
        elif choice < 0.9:
            mutant[at:at] = mutant[at : at + rng.randrange(20)]
        else:
            mutant[at:at] = rng.randbytes(rng.randrange(4))
        if not mutant:
            break
    return bytes(mutant)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_engines_send_is_read_without_the_decoder(dialect):
    checker = Checker(dialect)
    for payload in real_payloads(random.Random(1)):
        num_events = len(decode_block_events(payload, "test", dialect).events)
        assert assert_agrees(checker, payload, dialect) >= num_events


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_damaged_messages_are_refused_or_mean_what_the_decoder_says(dialect):
    checker, rng = Checker(dialect), random.Random(2)
    payloads, num_taken = real_payloads(rng), 0
    for _ in range(8_000):
        num_taken += assert_agrees(checker, mutated(rng.choice(payloads), rng), dialect)
    assert num_taken > 1000


def test_every_cut_of_a_message_is_refused():
    checker = Checker("vllm")
    for payload in real_payloads(random.Random(3)):
        assert checker.check(payload) is not None
        assert all(checker.check(payload[:end]) is None for end in range(len(payload)))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x93\xcb\x7f\xf0" + bytes(6) + b"\x90\x00", id="infinite time"),
        pytest.param(encode([1.5, [], 4096]), id="rank too high"),
        pytest.param(encode([1.5, [], 0, 0]), id="a fourth field"),
        pytest.param(encode([1, [], 0]), id="whole number for a time"),
        pytest.param(b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff", id="more events than bytes"),
        pytest.param(b"\x92\xcb" + bytes(8) + b"\x91" + b"\x91" * 5000 + b"\x90", id="nested without end"),
    ],
)
def test_unusual_messages_are_left_to_the_decoder(payload):
    assert Checker("vllm").check(payload) is None
