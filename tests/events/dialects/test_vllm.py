"""vLLM's batches: bytes that vLLM's own encoder wrote, the older positional form, and everything that can be wrong."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import MalformedMessageError
from kvist.events.dialects import decode_block_events
from kvist.events.engine_events import FULL, STATE, UNKNOWN, EngineCleared, EngineRemoved, EngineStored
from kvist.events.hashing import block_hashes
from kvist.events.types import Stored, Tier
from kvist.publisher.filter import WindowFilter
from kvist.publisher.normaliser import Normaliser

# Written by msgspec 0.22.0 from the classes of vLLM 0.33.0, vllm/distributed/kv_events.py.
# A full and a sliding group, a removal and a clearing, of data-parallel rank 3.
HYBRID = bytes.fromhex(
    "93cb3ff800000000000094de000aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cff2345678"
    "9abcdef002b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f"
    "73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b76"
    "5f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ede000ba474797065ab426c6f636b53746f7265"
    "64ac626c6f636b5f6861736865739103b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739801020304"
    "05060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a96772"
    "6f75705f69647801b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368"
    "655f737065635f736c6964696e675f77696e646f77cd020084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f"
    "68617368657391cff23456789abcdef0a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c"
    "6f636b73436c656172656403"
)
# VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0: a store and a removal under a digest of 32 bytes; no rank.
BYTE_HASHES = bytes.fromhex(
    "93cb3ff800000000000092de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420000000"
    "000000000000000000000000000000000000000000f23456789abcdef0b1706172656e745f626c6f636b5f68617368c0a974"
    "6f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f7261"
    "5f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420000000000000000000"
    "000000000000000000000000000000f23456789abcdef0a66d656469756da3475055c0"
)
# An adapter, a salt, an image in the second of three blocks, a session, locality and lookahead tokens.
EXTRA_KEYS = bytes.fromhex(
    "93cb3ff800000000000091de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393010203b170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739c000102030405060708090a0baa626c6f636b5f73697a"
    "6504a76c6f72615f696407a66d656469756da3475055a96c6f72615f6e616d65a373716caa65787472615f6b6579739392a3"
    "73716ca473616c7492a373716c92d94030313233343536373839616263646566666666666666666666666666666666666666"
    "6666666666666666666666666666666666666666666666666666666666660291a373716ca86c6f63616c697479a54c4f4341"
    "4caa73657373696f6e5f6964a173b36c6f6f6b61686561645f746f6b656e5f6964739391049108910cc0"
)
# Prompt embeddings in the second of two blocks.
PROMPT_EMBEDS = bytes.fromhex(
    "93cb3ff800000000000091de0009a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b17061"
    "72656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980001020304050607aa626c6f636b5f73697a6504a76c6f"
    "72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c091c420010101010101"
    "0101010101010101010101010101010101010101010101010101c0"
)
# An offloaded block, which comes without tokens and with block size 0.
OFFLOADED = bytes.fromhex(
    "93cb3ff800000000000091de000aa474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b1706172"
    "656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0a66d65"
    "6469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647800a86c6f63616c697479a54c4f43414cc0"
)
HASH = 0xF23456789ABCDEF0
IMAGE = "0123456789abcdef" + "f" * 48

MAP = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4}


def encode(*events: object, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored_map(**fields: object) -> dict[str, object]:
    return {"type": "BlockStored", **MAP, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def decode_one(**fields: object) -> EngineStored:
    (event,) = decode_block_events(encode(stored_map(**fields)), "w", "vllm").events
    assert isinstance(event, EngineStored)
    return event


def test_a_hybrid_models_batch_decodes_to_one_event_per_group():
    decoded = decode_block_events(HYBRID, "w", "vllm")
    assert decoded.events == (
        EngineStored([HASH, 2], [1, 2, 3, 4, 5, 6, 7, 8], 4, window=FULL, group=0, rank=3),
        EngineStored([3], [1, 2, 3, 4, 5, 6, 7, 8], 4, window=512, group=1, rank=3),
        EngineRemoved([HASH], UNKNOWN, 0, 3),
        EngineCleared(3, Tier.GPU),
    )
    assert (decoded.timestamp_s, decoded.rank) == (1.5, 3)
    assert (decoded.num_ignored_events, decoded.num_malformed_events) == (0, 0)


def test_byte_hashes_fold_to_the_integers_that_vllm_itself_would_send():
    decoded = decode_block_events(BYTE_HASHES, "w", "vllm")
    assert decoded.events == (EngineStored([HASH], [1, 2, 3, 4], 4), EngineRemoved([HASH]))
    assert decoded.rank is None


def test_extra_keys_give_the_salt_and_the_images():
    (event,) = decode_block_events(EXTRA_KEYS, "w", "vllm").events
    assert event.lora_name == "sql"
    assert event.cache_salt == "salt"
    assert event.mm_hashes == [[], [0x0123456789ABCDEF], []]


def test_with_lookahead_tokens_a_block_is_named_by_the_first_token_behind_it_too():
    (event,) = decode_block_events(EXTRA_KEYS, "w", "vllm").events
    assert event.is_eagle
    assert event.token_ids == [*range(12), 12]
    told = MAP | {"type": "BlockStored", "lookahead_token_ids": [[5, 6]], "lora_id": None, "medium": "GPU"}
    (event,) = decode_block_events(msgspec.msgpack.encode([1.5, [told], 0]), "w", "vllm").events
    (stored,) = Normaliser(4).normalise(event)
    assert stored.hashes == block_hashes([1, 2, 3, 4, 5], 4, is_eagle=True).tobytes()


@pytest.mark.parametrize("lookahead", [[], [[5], [6]], [[]], [5], [["x"]], "x"])
def test_lookahead_tokens_that_are_not_some_for_each_block_are_malformed(lookahead):
    told = MAP | {"type": "BlockStored", "lookahead_token_ids": lookahead, "lora_id": None, "medium": "GPU"}
    decoded = decode_block_events(msgspec.msgpack.encode([1.5, [told], 0]), "w", "vllm")
    assert decoded.num_malformed_events == (lookahead != [])


def test_a_chain_ends_before_prompt_embeddings():
    decoded = decode_block_events(PROMPT_EMBEDS, "w", "vllm")
    assert decoded.events[0].block_hashes == [1, None]


def test_an_offloaded_block_is_placed_by_its_hash_alone():
    normaliser = Normaliser(4)
    normaliser.normalise(EngineStored([1], [1, 2, 3, 4], 4))
    (event,) = decode_block_events(OFFLOADED, "w", "vllm").events
    block_hash = int(block_hashes([1, 2, 3, 4], 4)[0]).to_bytes(8, "little")
    assert normaliser.normalise(event) == (Stored(block_hash, tier=Tier.HOST),)


def test_the_groups_of_a_hybrid_model_come_down_to_the_full_one():
    window_filter = WindowFilter(3)
    events = decode_block_events(HYBRID, "w", "vllm").events
    assert [passed for event in events for passed in window_filter.admit(event)] == [events[0], events[2], events[3]]


@pytest.mark.parametrize(
    ("kind", "sliding_window", "window"),
    [
        ("full_attention", None, FULL),
        ("full_attention", 1024, FULL),
        ("mla_attention", None, FULL),
        ("sink_full_attention", None, FULL),
        ("sliding_window", 1024, 1024),
        ("sliding_window_mla", 128, 128),
        ("chunked_local_attention", None, UNKNOWN),
        ("mamba", None, STATE),
        ("unknown", None, UNKNOWN),
        (None, None, UNKNOWN),
        (None, 512, 512),
    ],
)
def test_the_kind_of_a_group_gives_its_window(kind, sliding_window, window):
    assert decode_one(kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=sliding_window).window == window


@pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention"])
def test_groups_that_hold_no_prefix_are_ignored_and_counted(kind):
    decoded = decode_block_events(encode(stored_map(kv_cache_spec_kind=kind)), "w", "vllm")
    assert (decoded.events, decoded.num_ignored_events) == ((), 1)


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        ("GPU", None, Tier.GPU),
        (None, None, Tier.GPU),
        ("CPU", "LOCAL", Tier.HOST),
        ("cpu", None, Tier.HOST),
        ("STORAGE", None, Tier.DISK),
        ("STORAGE", "REMOTE", Tier.EXTERNAL),
    ],
)
def test_the_medium_gives_the_tier(medium, locality, tier):
    assert decode_one(medium=medium, locality=locality).tier is tier


def test_an_unknown_medium_or_type_is_ignored_and_counted():
    tape = stored_map(medium="TAPE")
    decoded = decode_block_events(encode(tape, {"type": "BlockMoved"}, ["BlockMoved", 1], stored_map()), "w", "vllm")
    assert len(decoded.events) == 1
    assert (decoded.num_ignored_events, decoded.num_malformed_events) == (3, 0)


# The positional form of 2025.


def test_positional_events_decode_like_maps():
    decoded = decode_block_events(
        encode(
            ["BlockStored", [1, 2], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None],
            ["BlockStored", [3], 2, [9, 9, 9, 9], 4, 7, "CPU", "sql", [["sql", "salt"]], 1, "sliding_window", 512],
            ["BlockRemoved", [1]],
            ["BlockRemoved", [3], "CPU", 1, "LOCAL", "a later field"],
            ["AllBlocksCleared"],
            rank=None,
        ),
        "w",
        "vllm",
    )
    assert decoded.events[0] == EngineStored([1, 2], [1, 2, 3, 4, 5, 6, 7, 8], 4)
    second = decoded.events[1]
    assert (second.window, second.group, second.tier, second.parent_block_hash) == (512, 1, Tier.HOST, 2)
    assert (second.lora_id, second.lora_name, second.cache_salt) == (7, "sql", "salt")
    assert decoded.events[2:] == (
        EngineRemoved([1]),
        EngineRemoved([3], group=1, tier=Tier.HOST),
        EngineCleared(tier=Tier.GPU),
    )
    assert decoded.num_malformed_events == 0


def test_maps_and_positional_events_may_be_mixed():
    decoded = decode_block_events(encode(stored_map(), ["BlockRemoved", [1], "GPU"]), "w", "vllm")
    assert decoded.events == (EngineStored([1], [1, 2, 3, 4], 4), EngineRemoved([1]))


# Hashes.


def test_signed_unsigned_and_byte_forms_of_a_hash_meet():
    forms = (HASH, HASH - 2**64, HASH.to_bytes(8, "big"), bytes(24) + HASH.to_bytes(8, "big"))
    assert {decode_one(block_hashes=[form], parent_block_hash=form).block_hashes[0] for form in forms} == {HASH}
    assert {decode_one(parent_block_hash=form).parent_block_hash for form in forms} == {HASH}


# Extra keys.


@pytest.mark.parametrize(
    ("extra_keys", "salt", "mm_hashes"),
    [
        ([["salt"], None], "salt", None),
        ([[IMAGE], None], IMAGE, None),
        ([None, [IMAGE]], None, [[], [0x0123456789ABCDEF]]),
        ([["sql", "sql"], ["sql"]], "sql", None),
        ([["sql", [IMAGE, -2], [IMAGE, 1]], None], None, [[0x0123456789ABCDEF] * 2, []]),
        ([["tenant"], ["tenant"]], "tenant", None),
        ([[], []], None, None),
    ],
    ids=[
        "salt",
        "salt like a digest",
        "item without offset",
        "salt named like the adapter",
        "items",
        "repeated",
        "empty",
    ],
)
def test_extra_keys_are_told_apart(extra_keys, salt, mm_hashes):
    event = decode_one(block_hashes=[1, 2], token_ids=[*range(8)], lora_name="sql", extra_keys=extra_keys)
    assert event.block_hashes == [1, 2]
    assert event.cache_salt == salt
    assert event.mm_hashes == mm_hashes


@pytest.mark.parametrize(
    "key",
    [["a name the client chose", 0], ["sql:" + IMAGE, 0], [IMAGE], [7, 0], b"digest", 7, None, {"a": 1}],
    ids=str,
)
def test_a_chain_ends_before_a_block_with_a_key_that_has_no_hash(key):
    decoded = decode_block_events(
        encode(stored_map(block_hashes=[1, 2, 3], extra_keys=[None, [key], None])), "w", "vllm"
    )
    assert decoded.events[0].block_hashes == [1, None, None]


def test_two_different_salts_in_one_chain_are_not_guessed_at():
    event = decode_one(block_hashes=[1, 2], extra_keys=[["a"], ["b"]])
    assert (event.block_hashes, event.cache_salt) == ([1, None], "a")


def test_a_salt_field_counts_for_more_than_extra_keys():
    event = decode_one(cache_salt="tenant", extra_keys=[["other"]])
    assert (event.block_hashes, event.cache_salt) == ([None], "tenant")


# One broken event never costs the others.


@pytest.mark.parametrize(
    "broken",
    [
        7,
        [],
        {},
        [7],
        {"type": 7},
        {"type": "BlockStored"},
        ["BlockStored"],
        ["BlockRemoved", "GPU"],
        stored_map(block_hashes="text"),
        stored_map(block_hashes=[1.5]),
        stored_map(token_ids=[1, "2"]),
        stored_map(token_ids=[[1, 2], 3]),
        stored_map(token_ids=[[1, 2], [3, 4]]),
        stored_map(block_size=-1),
        stored_map(group_idx=-1),
        stored_map(medium=5),
        stored_map(extra_keys=[["salt"], None]),
        stored_map(extra_keys=["salt"]),
    ],
    ids=repr,
)
def test_a_malformed_event_is_counted_and_the_others_are_kept(broken):
    decoded = decode_block_events(encode(stored_map(), broken, ["AllBlocksCleared"]), "w", "vllm")
    assert decoded.events == (EngineStored([1], [1, 2, 3, 4], 4), EngineCleared(0, Tier.GPU))
    assert (decoded.num_malformed_events, decoded.num_ignored_events) == (1, 0)


def test_fields_that_a_later_version_adds_are_ignored():
    decoded = decode_block_events(msgspec.msgpack.encode([1.5, [stored_map(colour="red")], 0, "later"]), "w", "vllm")
    assert decoded.events == (EngineStored([1], [1, 2, 3, 4], 4),)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode(["now", [], 0]),
        msgspec.msgpack.encode([math.nan, [], 0]),
        msgspec.msgpack.encode([1.5, None, 0]),
        msgspec.msgpack.encode([1.5, [], -1]),
        msgspec.msgpack.encode([1.5, [], 4096]),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00" + b"\x91" * 100_000,
        HYBRID[:-1],
        HYBRID + b"\x00",
    ],
    ids=range(13),
)
def test_what_is_no_batch_is_malformed(payload):
    with pytest.raises(MalformedMessageError) as caught:
        decode_block_events(payload, "tcp://engine:5557", "vllm")
    assert caught.value.source == "tcp://engine:5557"


@given(st.binary())
def test_random_bytes_raise_nothing_but_malformed(payload):
    _decode_or_malformed(payload)


@given(st.sampled_from([HYBRID, BYTE_HASHES, EXTRA_KEYS, PROMPT_EMBEDS]), st.data())
def test_a_damaged_batch_raises_nothing_but_malformed(payload, data):
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_malformed(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from([*MAP, "medium", "extra_keys", "group_idx", "cache_salt"]), values)))
def test_events_with_any_values_never_raise_on_the_whole_way(changes):
    window_filter, normaliser = WindowFilter(), Normaliser(4)
    decoded = decode_block_events(encode(*(stored_map(**change) for change in changes)), "w", "vllm")
    assert len(decoded.events) + decoded.num_malformed_events + decoded.num_ignored_events == len(changes)
    for event in decoded.events:
        for passed in window_filter.admit(event):
            normaliser.normalise(passed)


def _decode_or_malformed(payload: bytes) -> None:
    window_filter, normaliser = WindowFilter(), Normaliser(4)
    try:
        decoded = decode_block_events(payload, "w", "vllm")
    except MalformedMessageError:
        return
    for event in decoded.events:
        for passed in window_filter.admit(event):
            normaliser.normalise(passed)
