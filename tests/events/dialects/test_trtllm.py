"""TensorRT-LLM's polled dicts, their numbering, and everything that can be wrong with them."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events.dialects.trtllm import TrtllmDecoder
from kvist.events.engine_events import UNKNOWN, EngineCleared, EngineCreated, EngineRemoved, EngineStored
from kvist.events.hashing import block_hashes
from kvist.events.types import Removed, Stored, Tier
from kvist.publisher.filter import WindowFilter
from kvist.publisher.normaliser import Normaliser

B = 4


def decode(events):
    """Decode events that are not numbered."""
    return TrtllmDecoder(B).decode([{**each, "event_id": None} if isinstance(each, dict) else each for each in events])


def event(data: object, event_id: object = 0, **fields: object) -> dict[str, object]:
    return {"event_id": event_id, "data": data, **fields}


def created(window: int | None, **fields: object) -> dict[str, object]:
    return event({"type": "created", "num_blocks_per_cache_level": [8, 2]}, window_size=window, **fields)


def block(block_hash: object, *token_ids: int, **fields: object) -> dict[str, object]:
    tokens = [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in token_ids]
    return {
        "type": "stored_block", "block_hash": block_hash, "tokens": tokens, "cache_level": 0, "priority": 35, **fields
    }  # fmt: skip


def stored(*blocks: object, parent: object = None, window: int | None = 4096, **fields: object) -> dict[str, object]:
    return event({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, window_size=window, **fields)


def removed(*block_hashes: object, window: int | None = 4096) -> dict[str, object]:
    return event({"type": "removed", "block_hashes": list(block_hashes)}, window_size=window)


def decode_one(raw: dict[str, object]):
    (engine_event,) = decode([raw]).events
    return engine_event


def test_the_four_types_decode():
    updated = event({"type": "updated", "block_hash": 1, "cache_level": {"type": "event_diff", "new_value": 1}})
    decoded = decode(
        [
            created(4096, layer_group_id=1, attention_dp_rank=2),
            stored(block(11, 1, 2, 3, 4), block(12, 5, 6), parent=10, layer_group_id=1, attention_dp_rank=2),
            updated,
            removed(11),
        ]
    )
    assert decoded.events == (
        EngineCreated(4096, 1, 2),
        EngineStored([11, 12], [1, 2, 3, 4, 5, 6], B, 10, [4, 2], 4096, 1, 2),
        EngineRemoved([11], 4096, tier=None),
    )
    assert (decoded.num_ignored_events, decoded.num_malformed_events) == (1, 0)


@pytest.mark.parametrize(
    ("engine_hash", "folded"),
    [
        (2**63 - 1, 2**63 - 1),
        (2**63, 2**63),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63) - 1, 2**63 - 1),
        (2**64 + 5, 5),
        (None, None),
        ("ff" * 24 + "00" * 7 + "05", 5),
        ("abcd", 0xABCD),
    ],
)
def test_a_hash_of_any_size_or_form_folds_to_u64(engine_hash, folded):
    assert decode_one(stored(block(engine_hash, 1, 2, 3, 4))).block_hashes == [folded]


@pytest.mark.parametrize("window", [None, 0, -1])
def test_an_event_without_a_window_has_an_unknown_one(window):
    assert decode_one(created(window)).window is UNKNOWN
    assert decode_one(stored(block(1, 1, 2, 3, 4), window=window)).window is UNKNOWN


def test_images_salt_and_adapter_are_read():
    mm_key = {"type": "mm_key", "hash": "0123456789abcdef" + "00" * 24, "start_offset": 2}
    raw = stored(block(1, 1, 2, 3, 4), block(2, 5, 6, 7, 8, mm_keys=[mm_key], cache_salt="tenant", lora_id=7))
    raw["data"]["blocks"][0] |= {"cache_salt": "tenant", "lora_id": 7}
    decoded = decode_one(raw)
    assert decoded.mm_hashes == [[], [0x0123456789ABCDEF]]
    assert (decoded.cache_salt, decoded.lora_id) == ("tenant", 7)


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_keys": [{"type": "mm_key", "hash": "no digest", "start_offset": 0}]},
        {"tokens": [{"token_id": 5, "token_extra_id": 9}] * 4},
    ],
    ids=["image without a digest", "extra ids without an image"],
)
def test_a_chain_ends_before_a_block_that_cannot_be_hashed(fields):
    decoded = decode([stored(block(1, 1, 2, 3, 4), block(2, 5, 6, 7, 8) | fields)])
    assert decoded.events[0].block_hashes == [1, None]


def test_blocks_of_two_cache_levels_become_two_chained_events():
    raw = stored(block(1, 1, 2, 3, 4), block(2, 5, 6, 7, 8, cache_level=1), block(3, 9, 9, 9, 9, cache_level=1))
    first, second = decode([raw]).events
    assert (first.block_hashes, first.tier, first.parent_block_hash) == ([1], Tier.GPU, None)
    assert (second.block_hashes, second.tier, second.parent_block_hash) == ([2, 3], Tier.HOST, 1)


def test_nothing_is_stored_behind_a_hole_in_another_cache_level():
    raw = stored(block(None, 1, 2, 3, 4), block(2, 5, 6, 7, 8, cache_level=1))
    assert [e.block_hashes for e in decode([raw]).events] == [[None]]


def test_a_block_is_removed_from_whatever_level_it_was_stored_in():
    normaliser = Normaliser(B)
    events = decode([stored(block(1, 1, 2, 3, 4, cache_level=1)), removed(1)]).events
    canonical = block_hashes([1, 2, 3, 4], B).tobytes()
    assert [c for e in events for c in normaliser.normalise(e)] == [
        Stored(canonical, tier=Tier.HOST),
        Removed(canonical, tier=Tier.HOST),
    ]


def test_a_start_up_with_two_windows_publishes_the_larger_one_only():
    window_filter, normaliser = WindowFilter(), Normaliser(B)
    polled = [
        created(512),
        created(32768),
        stored(block(1, 1, 2, 3, 4), window=512),
        stored(block(2, 1, 2, 3, 4), window=32768),
        removed(1, window=512),
        removed(2, window=32768),
    ]
    passed = [p for e in decode(polled).events for p in window_filter.admit(e)]
    canonical = block_hashes([1, 2, 3, 4], B).tobytes()
    assert [c for p in passed for c in normaliser.normalise(p)] == [Stored(canonical), Removed(canonical)]


def test_full_blocks_before_a_partial_one_are_published():
    normaliser = Normaliser(B)
    (engine_event,) = decode([stored(block(1, 1, 2, 3, 4), block(2, 5, 6, 7, 8), block(3, 9, 9, 9))]).events
    assert normaliser.normalise(engine_event) == (Stored(block_hashes([*range(1, 9)], B).tobytes()),)


# Numbering.


def test_ids_that_do_not_count_up_by_one_are_gaps(caplog, logged):
    decoder = TrtllmDecoder(B)
    with caplog.at_level(logging.WARNING):
        gaps = [len(decoder.decode([removed(1) | {"event_id": idx}]).events) > 1 for idx in (1, 2, 3, 5, 5, 4)]
    assert gaps == [False, False, False, True, True, True]
    said = logged("kvist.events.dialects.trtllm")
    assert decoder.num_gaps == len(said) == 3
    assert "last_event_id=3 event_id=5" in said[0]


def test_every_event_is_numbered_even_one_that_is_not_decoded():
    decoder = TrtllmDecoder(B)
    raw = [
        created(512) | {"event_id": 1},
        event({"type": "unheard-of"}, 2),
        event("broken", 3),
        removed(1) | {"event_id": 4},
    ]
    decoder.decode(raw)
    assert decoder.num_gaps == 0
    decoder.decode([removed(1) | {"event_id": 6}])
    assert decoder.num_gaps == 1


def test_a_rank_is_cleared_where_its_events_have_a_gap():
    raw = [removed(number) | {"event_id": number, "attention_dp_rank": 1} for number in (1, 2, 4)]
    first, second, cleared, last = TrtllmDecoder(B).decode(raw).events
    assert (first.block_hashes, second.block_hashes, last.block_hashes) == ([1], [2], [4])
    assert cleared == EngineCleared(rank=1)


def test_ranks_are_numbered_apart():
    decoder = TrtllmDecoder(B)
    decoder.decode([removed(1) | {"event_id": 1, "attention_dp_rank": r} for r in (0, 1)])
    assert decoder.num_gaps == 0


# One broken event never costs the others.


@pytest.mark.parametrize(
    "broken",
    [
        None,
        7,
        {},
        event(None),
        event({}),
        event({"type": "stored"}),
        event({"type": "stored", "blocks": [{"block_hash": 1}]}),
        stored(block("not hex", 1, 2, 3, 4)),
        stored(block(1.5, 1, 2, 3, 4)),
        stored(block(1, "a")),
        stored(block(1, 1, 2, 3, 4), parent="no"),
        removed("no"),
        removed(1, window="wide"),
        removed(1) | {"attention_dp_rank": -1},
        removed(1) | {"attention_dp_rank": 4096},
        removed(1) | {"layer_group_id": "first"},
    ],
    ids=repr,
)
def test_a_malformed_event_is_counted_and_the_others_are_kept(broken):
    decoded = decode([removed(1), broken, removed(2)])
    assert [e.block_hashes for e in decoded.events] == [[1], [2]]
    assert (decoded.num_malformed_events, decoded.num_ignored_events) == (1, 0)


def test_an_unknown_type_is_ignored_and_counted():
    decoded = decode([event({"type": "demoted"}), removed(2)])
    assert (len(decoded.events), decoded.num_ignored_events, decoded.num_malformed_events) == (1, 1, 0)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "tokens", "token_id", "block_hash", "hash", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
keys = st.sampled_from(["block_hash", "tokens", "cache_level", "mm_keys", "cache_salt", "lora_id"])


@given(
    st.lists(st.one_of(json, st.dictionaries(keys, json).map(lambda f: stored(block(1, 1, 2, 3, 4) | f))), max_size=5)
)
def test_events_of_any_shape_never_raise_on_the_whole_way(polled):
    window_filter, normaliser = WindowFilter(), Normaliser(B)
    for engine_event in TrtllmDecoder(B).decode(polled).events:
        for passed in window_filter.admit(engine_event):
            normaliser.normalise(passed)
