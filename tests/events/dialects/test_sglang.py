"""SGLang's batches: bytes that SGLang's own encoder wrote, EAGLE pairs, and the older positional form."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import MalformedMessageError
from kvist.events.dialects import decode_block_events
from kvist.events.engine_events import EngineCleared, EngineRemoved, EngineStored
from kvist.events.hashing import local_block_hashes
from kvist.events.types import Stored, Tier
from kvist.publisher.normaliser import Normaliser

# Written by msgspec 0.22.0 from the classes of SGLang 0.5.23, sglang/srt/disaggregation/kv_events.py.
# A salted store for an adapter, a removal from host memory and a clearing, of rank 1.
MAPS = bytes.fromhex(
    "93cb4000000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392fb06b170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f7261"
    "5f6964c0a66d656469756da3475055aa63616368655f73616c74a674656e616e74aa73657373696f6e5f6964a178a96c6f72"
    "615f6e616d65a373716c83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391fba66d65646975"
    "6daa4350555f50494e4e454481a474797065b0416c6c426c6f636b73436c656172656401"
)
# Two blocks of four token pairs each.
EAGLE = bytes.fromhex(
    "93cb40000000000000009187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392fb06b170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f69647398920102920203920304920405920506920607920708920809aa"
    "626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da347505500"
)
MINUS_FIVE = 2**64 - 5
EVENTS = (
    EngineStored([MINUS_FIVE, 6], [1, 2, 3, 4, 5, 6, 7, 8], 4, rank=1, lora_name="sql", cache_salt="tenant"),
    EngineRemoved([MINUS_FIVE], rank=1, tier=Tier.HOST),
    EngineCleared(1),
)


def test_a_batch_of_maps_decodes_with_signed_hashes_as_u64():
    decoded = decode_block_events(MAPS, "w", "sglang")
    assert decoded.events == EVENTS
    assert (decoded.timestamp_s, decoded.rank) == (2.0, 1)


def test_vllms_decoder_reads_the_same_maps():
    assert decode_block_events(MAPS, "w", "vllm").events == (*EVENTS[:2], EngineCleared(1, Tier.GPU))
    assert decode_block_events(EAGLE, "w", "vllm") == decode_block_events(EAGLE, "w", "sglang")


def test_eagle_pairs_become_tokens_whose_blocks_overlap_by_one():
    (event,) = decode_block_events(EAGLE, "w", "sglang").events
    assert event == EngineStored([MINUS_FIVE, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], 4, is_eagle=True)
    (stored,) = Normaliser(4).normalise(event)
    assert isinstance(stored, Stored)
    first = local_block_hashes([1, 2, 3, 4, 5], 4, is_eagle=True)[0]
    assert stored.hashes[:8] == first.to_bytes(8, "little")


def test_positional_events_decode_like_maps():
    payload = msgspec.msgpack.encode(
        [
            2.0,
            [
                ["BlockStored", [-5, 6], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", "tenant", "x", "sql"],
                ["BlockRemoved", [-5], "CPU_PINNED"],
                ["AllBlocksCleared"],
            ],
            1,
        ]
    )
    assert decode_block_events(payload, "w", "sglang").events == EVENTS


def test_the_oldest_positional_form_names_no_medium():
    payload = msgspec.msgpack.encode([2.0, [["BlockStored", [1], None, [1], 1, None], ["BlockRemoved", [1]]], 0])
    assert decode_block_events(payload, "w", "sglang").events == (EngineStored([1], [1], 1), EngineRemoved([1]))


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", Tier.GPU), ("CPU_PINNED", Tier.HOST), ("DISK", Tier.DISK), ("EXTERNAL", Tier.EXTERNAL)],
)
def test_the_medium_gives_the_tier(medium, tier):
    payload = msgspec.msgpack.encode([2.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": medium}], 0])
    assert decode_block_events(payload, "w", "sglang").events == (EngineRemoved([1], tier=tier),)


@given(st.sampled_from([MAPS, EAGLE]), st.data())
def test_a_damaged_batch_raises_nothing_but_malformed(payload, data):
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_block_events(bytes(damaged), "w", "sglang")
    except MalformedMessageError:
        return
    normaliser = Normaliser(4)
    for event in decoded.events:
        normaliser.normalise(event)
