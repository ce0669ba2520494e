"""The canonical wire format: golden bytes, forward compatibility, and one kind of error for everything else."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import MalformedMessageError
from kvist.events.codec import decode_batch, encode_batch, is_canonical
from kvist.events.types import MAX_RANKS, Batch, Cleared, Event, Heartbeat, Removed, Stored, Tier

EVENTS: tuple[Event, ...] = (
    Stored(bytes(range(8))),
    Stored(bytes(range(16)), parent=2**64 - 1, tier=Tier.HOST),
    Removed(bytes(8), tier=Tier.DISK),
    Cleared(),
    Heartbeat(num_blocks=3, digest=2**63),
)
BATCH = Batch("worker-0", 1, 2**63, 7, 16, 1700000000.25, EVENTS, rules_version=3)
GOLDEN = bytes.fromhex(
    "99"  # an array of nine
    "a66b7669737431"  # "kvist1"
    "a8776f726b65722d30"  # worker
    "01"  # rank
    "cf8000000000000000"  # epoch
    "07"  # sequence
    "10"  # block size
    "cb41d954fc40100000"  # timestamp
    "95"  # five events
    "94a673746f726564c4080001020304050607c000"
    "94a673746f726564c410000102030405060708090a0b0c0d0e0fcfffffffffffffffff01"
    "93a772656d6f766564c408000000000000000002"
    "91a7636c6561726564"
    "96a968656172746265617403cf8000000000000000c390c2"
    "03"  # rules version
)


def _fields(batch: Batch = BATCH) -> list[object]:
    fields: list[object] = msgspec.msgpack.decode(encode_batch(batch))
    return fields


def _with(index: int, value: object) -> bytes:
    fields = _fields()
    fields[index] = value
    return msgspec.msgpack.encode(fields)


def test_a_batch_has_the_documented_bytes():
    assert encode_batch(BATCH) == GOLDEN


def test_the_documented_bytes_decode_to_the_batch():
    assert decode_batch(GOLDEN, "w") == (BATCH, 0)


def test_a_batch_of_the_version_before_has_no_rules_version():
    before = b"\x98" + GOLDEN[1:-1]
    assert decode_batch(before, "w") == (msgspec.structs.replace(BATCH, rules_version=0), 0)


u64 = st.integers(0, 2**64 - 1)
hashes = st.lists(st.binary(min_size=8, max_size=8), max_size=4).map(b"".join)
tiers = st.sampled_from(Tier)
events = st.one_of(
    st.builds(Stored, hashes, st.none() | u64, tiers),
    st.builds(Removed, hashes, tiers),
    st.builds(Cleared),
    st.builds(Heartbeat, u64, u64),
)
batches = st.builds(
    Batch,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.integers(0, 4095),
    u64,
    u64,
    st.integers(1, 2**32),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(events, max_size=4).map(tuple),
)


@given(batches)
def test_every_batch_comes_back_as_it_was(batch):
    assert decode_batch(encode_batch(batch), "w") == (batch, 0)


def test_canonical_batches_of_any_version_are_told_from_engine_batches():
    assert is_canonical(GOLDEN)
    assert is_canonical(GOLDEN.replace(b"kvist1", b"kvist2"))
    assert not is_canonical(msgspec.msgpack.encode([1.5, [], 0]))
    assert not is_canonical(b"")


def test_an_unknown_version_is_malformed():
    with pytest.raises(MalformedMessageError, match="kvist2"):
        decode_batch(GOLDEN.replace(b"kvist1", b"kvist2"), "w")


def test_fields_that_a_later_version_appends_are_ignored_at_every_level():
    fields = _fields()
    fields[7] = [[*event, "later", {"x": [1]}] for event in fields[7]]
    assert decode_batch(msgspec.msgpack.encode([*fields, "later", 9]), "w") == (BATCH, 0)


@pytest.mark.parametrize(
    "unknown",
    [["evicted", b"", 1], ["evicted"]],
    ids=["type", "bare type"],
)
def test_an_event_of_unknown_type_is_skipped_and_counted(unknown):
    events = _fields()[7]
    payload = _with(7, [*events[:2], unknown, *events[2:]])
    assert decode_batch(payload, "w") == (BATCH, 1)


def test_an_event_of_unknown_type_is_skipped_in_the_stream_of_a_companion_too():
    fields = _fields()
    fields[2], fields[7] = MAX_RANKS, [["evicted"]]
    batch, num_unknown_events = decode_batch(msgspec.msgpack.encode(fields), "w")
    assert (batch.rank, batch.events, num_unknown_events) == (MAX_RANKS, (), 1)


@pytest.mark.parametrize(
    ("index", "value", "named"),
    [
        (1, "", r"\[1\]"),
        (1, 5, r"\[1\]"),
        (2, -1, r"\[2\]"),
        (2, 8192, r"\[2\]"),
        (3, -1, r"\[3\]"),
        (3, None, r"\[3\]"),
        (4, -1, r"\[4\]"),
        (5, 0, r"\[5\]"),
        (6, "now", r"\[6\]"),
        (6, math.nan, "timestamp_s"),
        (6, math.inf, "timestamp_s"),
        (7, None, r"\[7\]"),
        (7, [["stored", bytes(9)]], r"events\[0\].hashes has 9 bytes"),
        (7, [["cleared"], ["removed", bytes(4)]], r"events\[1\].hashes has 4 bytes"),
        (7, [["stored", bytes(8), -1]], r"\[7\]\[0\]"),
        (7, [["stored", "text"]], r"\[7\]\[0\]"),
        (7, [["stored", 5, None, 9]], r"\[7\]\[0\]"),
        (7, [["stored", bytes(8), None, -1]], r"\[7\]\[0\]"),
        (7, [["stored", bytes(8), None, 4]], r"\[7\]\[0\]\[3\]"),
        (7, [["removed", bytes(8), 200, "later"]], r"\[7\]\[0\]\[2\]"),
        (7, [[5]], r"\[7\]\[0\]"),
        (7, [["evicted"], ["stored"]], r"\[7\]"),
        (7, [["stored", bytes(8), None, "gpu"]], r"\[7\]\[0\]"),
        (7, [["stored"]], r"\[7\]\[0\]"),
        (7, [["heartbeat", -1, 0]], r"\[7\]\[0\]"),
        (7, [["heartbeat", 1]], r"\[7\]\[0\]"),
        (7, [[]], r"\[7\]\[0\]"),
        (7, [{"type": "stored"}], r"\[7\]\[0\]"),
        (7, [7], r"\[7\]\[0\]"),
    ],
)
def test_a_broken_field_is_named_in_the_error(index, value, named):
    with pytest.raises(MalformedMessageError, match=named) as caught:
        decode_batch(_with(index, value), "worker-3")
    assert caught.value.source == "worker-3"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x98\xa6kvist1\xa1\xff",
        b"\x81\x01\x02",
        GOLDEN + b"\x00",
        GOLDEN[:-1] + b"\x91" * 100_000,
    ],
    ids=["empty", "huge array", "deep nesting", "broken text", "map", "trailing byte", "deep event"],
)
def test_hostile_bytes_are_malformed(payload):
    with pytest.raises(MalformedMessageError):
        decode_batch(payload, "w")


@given(st.binary())
def test_random_bytes_raise_nothing_but_malformed(payload):
    _decode_or_malformed(payload)


@given(st.data())
def test_a_damaged_batch_raises_nothing_but_malformed(data):
    payload = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_malformed(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


def _decode_or_malformed(payload: bytes) -> None:
    try:
        batch, num_unknown_events = decode_batch(payload, "w")
    except MalformedMessageError:
        return
    assert num_unknown_events >= 0
    assert decode_batch(encode_batch(batch), "w") == (batch, 0)
