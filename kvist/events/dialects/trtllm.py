"""TensorRT-LLM's polled events: dicts from `llm.get_kv_cache_events()`, numbered by the engine.

Hashes are integers, or hex digests in the second version of its cache manager. A block that moves between cache levels
is reported as `updated`, which is not published: a router counts it where it was stored. The streaming publisher of
TensorRT-LLM speaks vLLM's dialect instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from kvist.events import UNKNOWN, EngineCleared, EngineCreated, EngineEvent, EngineRemoved, EngineStored, Window
from kvist.events.codec import DECODE_ERRORS
from kvist.events.engine_events import DecodedEngineBatch, fold_hash
from kvist.events.types import MAX_RANKS, NonNegative, Rank, Tier

_logger = logging.getLogger(__name__)

_TrtHash: TypeAlias = int | str

_TIER_OF_LEVEL = {0: Tier.GPU, 1: Tier.HOST, 2: Tier.DISK}
_MM_HASH_LENGTH = 16


class _Token(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    token_extra_id: int = 0


class _MmKey(msgspec.Struct, frozen=True, gc=False):
    hash: str


class _Block(msgspec.Struct, frozen=True, gc=False):
    block_hash: _TrtHash | None
    tokens: list[_Token]
    cache_level: int = 0
    mm_keys: list[_MmKey] | None = None
    cache_salt: str | None = None
    lora_id: int | None = None


class _Created(msgspec.Struct, tag="created", tag_field="type", frozen=True, gc=False):
    pass


class _Stored(msgspec.Struct, tag="stored", tag_field="type", frozen=True, gc=False):
    blocks: list[_Block]
    parent_hash: _TrtHash | None = None
    lora_name: str | None = None


class _Removed(msgspec.Struct, tag="removed", tag_field="type", frozen=True, gc=False):
    block_hashes: list[_TrtHash]


class _Updated(msgspec.Struct, tag="updated", tag_field="type", frozen=True, gc=False):
    pass


class _Event(msgspec.Struct, frozen=True, gc=False):
    data: _Created | _Stored | _Removed | _Updated
    window_size: int | None = None
    layer_group_id: NonNegative | None = None
    attention_dp_rank: Rank | None = None

    @property
    def window(self) -> Window:
        return self.window_size if self.window_size is not None and self.window_size > 0 else UNKNOWN


_KNOWN_TYPES = {"created", "stored", "removed", "updated"}


class TrtllmDecoder:
    """Turns one engine's polled events into engine events, and clears a rank whose event ids do not count up by one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last_event_id_by_rank: dict[int, int] = {}
        self.num_gaps = 0
        """How many ids did not follow the one before them: events were lost, repeated or reordered between them."""

    def decode(self, events: Iterable[Mapping[str, Any]]) -> DecodedEngineBatch:
        """Return the next events, never raising."""
        decoded: list[EngineEvent] = []
        num_ignored = num_malformed = 0
        for raw in events:
            decoded += self._clear_after_gap(raw)
            try:
                event = msgspec.convert(raw, _Event)
                engine_events = _engine_events(event, self._block_size)
            except DECODE_ERRORS:
                if _is_unknown_type(raw):
                    num_ignored += 1
                else:
                    num_malformed += 1
                continue
            num_ignored += isinstance(event.data, _Updated)
            decoded += engine_events
        return DecodedEngineBatch(None, None, tuple(decoded), num_ignored, num_malformed)

    def _clear_after_gap(self, raw: object) -> list[EngineEvent]:
        """Return the clearing of a rank, counted and logged, if events of it are missing before this one."""
        if not isinstance(raw, Mapping) or not isinstance(raw.get("event_id"), int):
            return []
        event_id, rank = raw["event_id"], raw.get("attention_dp_rank")
        rank = rank if isinstance(rank, int) and 0 <= rank < MAX_RANKS else 0
        last_event_id = self._last_event_id_by_rank.get(rank, event_id - 1)
        self._last_event_id_by_rank[rank] = event_id
        if event_id == last_event_id + 1:
            return []
        self.num_gaps += 1
        text = "engine events are not consecutive rank=%d last_event_id=%d event_id=%d"
        _logger.warning(text, rank, last_event_id, event_id)
        return [EngineCleared(rank)]


def _is_unknown_type(raw: object) -> bool:
    data = raw.get("data") if isinstance(raw, Mapping) else None
    name = data.get("type") if isinstance(data, Mapping) else None
    return isinstance(name, str) and name not in _KNOWN_TYPES


def _engine_events(event: _Event, block_size: int) -> list[EngineEvent]:
    data, rank = event.data, event.attention_dp_rank or 0
    if isinstance(data, _Created):
        return [EngineCreated(event.window, event.layer_group_id, rank)]
    if isinstance(data, _Stored):
        return list(_stored(event, data, block_size))
    if isinstance(data, _Removed):
        return [EngineRemoved([_fold(h) for h in data.block_hashes], event.window, event.layer_group_id, rank, None)]
    return []


def _stored(event: _Event, data: _Stored, block_size: int) -> Iterator[EngineStored]:
    """Yield one event for each run of blocks in one cache level, chained by the parent hash."""
    parent = None if data.parent_hash is None else _fold(data.parent_hash)
    for level, run in groupby(data.blocks, key=lambda block: block.cache_level):
        blocks = list(run)
        mm_hashes = [_mm_hashes(block) for block in blocks]
        block_hashes = [
            None if block.block_hash is None or items is None else _fold(block.block_hash)
            for block, items in zip(blocks, mm_hashes, strict=True)
        ]
        if level in _TIER_OF_LEVEL:
            yield EngineStored(
                block_hashes=block_hashes,
                token_ids=[token.token_id for block in blocks for token in block.tokens],
                block_size=block_size,
                parent_block_hash=parent,
                block_lengths=[len(block.tokens) for block in blocks],
                window=event.window,
                group=event.layer_group_id,
                rank=event.attention_dp_rank or 0,
                tier=_TIER_OF_LEVEL[level],
                lora_id=blocks[0].lora_id,
                lora_name=data.lora_name,
                cache_salt=blocks[0].cache_salt,
                mm_hashes=[items or [] for items in mm_hashes] if any(mm_hashes) else None,
            )
        parent = block_hashes[-1]
        if parent is None:
            return


def _fold(trt_hash: _TrtHash) -> int:
    return fold_hash(int(trt_hash, 16) if isinstance(trt_hash, str) else trt_hash)


def _mm_hashes(block: _Block) -> list[int] | None:
    """Return the numbers of a block's multimodal items; None when it has extra ids that no item explains."""
    if not block.mm_keys:
        return None if any(token.token_extra_id for token in block.tokens) else []
    digests = [key.hash[:_MM_HASH_LENGTH] for key in block.mm_keys]
    try:
        return [int(digest, 16) for digest in digests]
    except ValueError:
        return None
