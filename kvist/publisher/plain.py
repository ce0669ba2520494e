"""Plain messages: what nearly all are, read by types so narrow that whatever decodes needs no second look.

A message is plain if all that its events say is which blocks of the base model, with their tokens, came to the GPU or
left it, and hashes are unsigned, as vLLM's. Anything else is for the dialects (`kvist.events.dialects.block_events`).
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, final

import msgspec

from kvist.events.codec import DECODE_ERRORS
from kvist.events.dialects.block_events import window_of
from kvist.events.engine import EngineRemoved, EngineStored
from kvist.events.types import NonNegative, Rank
from kvist.events.windows import UNKNOWN

_Medium: TypeAlias = Literal["GPU"] | None
_FullKind: TypeAlias = Literal["full_attention", "mla_attention", "sink_full_attention"]
_SlidingKind: TypeAlias = Literal["sliding_window", "sliding_window_mla", "chunked_local_attention"]


class PlainStored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False):
    """Blocks of the base model, in GPU memory, named by their tokens alone."""

    block_hashes: list[NonNegative]
    token_ids: list[int]
    block_size: NonNegative
    parent_block_hash: NonNegative | None = None
    lora_id: None = None
    medium: _Medium = None
    lora_name: None = None
    cache_salt: None = None
    extra_keys: list[None] | None = None
    group_idx: NonNegative | None = None
    kv_cache_spec_kind: _FullKind | _SlidingKind | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: None = None


@final
class PlainRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    """Blocks that left GPU memory."""

    block_hashes: list[NonNegative]
    medium: _Medium = None
    group_idx: NonNegative | None = None
    locality: None = None


PlainEvent: TypeAlias = PlainStored | PlainRemoved


class _PlainBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    timestamp_s: float
    events: list[PlainEvent]
    rank: Rank | None = None


_decode_batch = msgspec.msgpack.Decoder(_PlainBatch).decode


def read_plain(payload: bytes) -> list[PlainEvent] | None:
    """Return the events of a plain message, which are those that the dialects find in it; None for another one."""
    try:
        batch = _decode_batch(payload)
    except DECODE_ERRORS:
        return None
    return batch.events if math.isfinite(batch.timestamp_s) else None


def engine_event(event: PlainEvent, rank: int) -> EngineStored | EngineRemoved:
    """Return the event as the dialects do."""
    if isinstance(event, PlainRemoved):
        return EngineRemoved(event.block_hashes, UNKNOWN, event.group_idx, rank)
    return EngineStored(
        block_hashes=event.block_hashes,
        token_ids=event.token_ids,
        block_size=event.block_size,
        parent_block_hash=event.parent_block_hash,
        window=window_of(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
        group=event.group_idx,
        rank=rank,
    )
