"""The batch that vLLM introduced and SGLang adopted: `[timestamp, [event, ...], rank?]` in msgpack.

Events are maps tagged "type", or in engines before mid-2026 arrays with the tag first, whose field order is the
engine's own. Read from vLLM 0.33.0 `distributed/kv_events.py` and SGLang 0.5.23 `disaggregation/kv_events.py`.

vLLM: hybrid models send each cache group under its index: the store says the kind and the window, the removal only the
group. Where blocks were skipped the tokens cover the whole span, and the normaliser leaves the event out. The partial
entries of a hybrid cache have a smaller `block_size`, and offloaded blocks may come without tokens: both are the
normaliser's too. With EAGLE a block's hash covers the tokens behind it, too (`lookahead_token_ids`, some for each
block), and its canonical hash the first of them: requests must be hashed the same way. Two blocks that differ only in
those behind the first count as one. A request can have blocks reported anew (`kv_cache_report_mode`), from its prompt's
start: such an event looks like one more copy of each block, but has the request's session, which Kvist's router names.

SGLang: hashes are signed; the LoRA name and the salt stand in the event; with EAGLE, `token_ids` are overlapping pairs:
a block's hash covers one token more than the block there as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import msgspec

from kvist.errors import MalformedMessageError
from kvist.events import FULL, UNKNOWN, EngineCleared, EngineEvent, EngineHash, EngineRemoved, EngineStored, Window
from kvist.events.codec import DECODE_ERRORS
from kvist.events.engine_events import STATE, DecodedEngineBatch, fold_hash, fold_hashes
from kvist.events.types import NonNegative, Rank, Tier

_REMOVED = "block_hashes medium"
_STORED = "block_hashes parent_block_hash token_ids block_size lora_id medium"
_VLLM_STORED = f"{_STORED} lora_name extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality"
_FIELDS = {
    "vllm": {"BlockStored": _VLLM_STORED, "BlockRemoved": f"{_REMOVED} group_idx locality"},
    "sglang": {"BlockStored": f"{_STORED} cache_salt session_id lora_name", "BlockRemoved": _REMOVED},
}
FIELD_ORDERS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    engine: {tag: fields.split() for tag, fields in by_tag.items()} for engine, by_tag in _FIELDS.items()
}
"""The names of the fields in each engine's positional form, by tag."""

REPORT_SESSION: Final = "kvist-full-report"
"""The `session_id` of requests that have blocks reported anew, which vLLM's events repeat."""

TIER_OF_MEDIUM: dict[str | None, Tier] = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
}
FULL_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
# Encoder output rather than keys and values of a prefix.
NEVER_INDEXED_KINDS = {"encoder_only_attention", "cross_attention"}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_MM_IDENTIFIER_LENGTH, _MM_HASH_LENGTH = 64, 16


class _BlockStored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False):
    block_hashes: list[EngineHash | None]
    token_ids: list[int | tuple[int, int]]
    block_size: NonNegative
    parent_block_hash: EngineHash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: NonNegative | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    session_id: Any = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: NonNegative | None = None
    locality: str | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    pass


_RawEvent: TypeAlias = _BlockStored | _BlockRemoved | _AllBlocksCleared
_KNOWN_TYPES = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


class EngineEnvelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An engine's batch around its events."""

    timestamp_s: float
    events: list[msgspec.Raw]
    rank: Rank | None = None


_envelope_decoder = msgspec.msgpack.Decoder(EngineEnvelope)
_event_decoder: msgspec.msgpack.Decoder[_RawEvent] = msgspec.msgpack.Decoder(_RawEvent)
_any_decoder = msgspec.msgpack.Decoder()


def decode_block_events(payload: bytes, source: str, engine: str) -> DecodedEngineBatch:
    """Return a batch's events; `engine` is a key of `FIELD_ORDERS`. Raises MalformedMessageError if it is no batch."""
    try:
        batch = _envelope_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(source, f"not a batch of block events: {error}") from error
    if not math.isfinite(batch.timestamp_s):
        raise MalformedMessageError(source, f"timestamp is {batch.timestamp_s}, expected a finite number")
    events: list[EngineEvent] = []
    num_ignored = num_malformed = 0
    for raw in batch.events:
        try:
            event = _engine_event(_read_event(raw, FIELD_ORDERS[engine]), batch.rank or 0, engine)
        except DECODE_ERRORS:
            num_malformed += 1
        else:
            if event is None:
                num_ignored += 1
            else:
                events.append(event)
    return DecodedEngineBatch(batch.timestamp_s, batch.rank, tuple(events), num_ignored, num_malformed)


def _read_event(raw: msgspec.Raw, field_order: Mapping[str, Sequence[str]]) -> _RawEvent | None:
    """Return an event, None for one of an unknown type; raises one of DECODE_ERRORS for a broken one."""
    try:
        return _event_decoder.decode(raw)
    except DECODE_ERRORS:
        fields: Any = _any_decoder.decode(raw)
    if isinstance(fields, list) and fields and isinstance(fields[0], str):
        names = field_order.get(fields[0], ())
        fields = {"type": fields[0], **dict(zip(names, fields[1:], strict=False))}
    tag = fields.get("type") if isinstance(fields, dict) else None
    if isinstance(tag, str) and tag not in _KNOWN_TYPES:
        return None
    event: _RawEvent = msgspec.convert(fields, _RawEvent)
    return event


def _engine_event(raw: _RawEvent | None, rank: int, engine: str) -> EngineEvent | None:
    """Convert an event, or return None if an index has no use for it; raises ValueError for a broken one."""
    if raw is None:
        return None
    if isinstance(raw, _AllBlocksCleared):
        return EngineCleared(rank, Tier.GPU if engine == "vllm" else None)  # vLLM may keep what it has offloaded
    tier = _tier(raw.medium, raw.locality)
    if tier is None:
        return None
    if isinstance(raw, _BlockRemoved):
        return EngineRemoved(fold_hashes(raw.block_hashes), UNKNOWN, raw.group_idx, rank, tier)
    return _stored(raw, rank, tier)


def _stored(raw: _BlockStored, rank: int, tier: Tier) -> EngineStored | None:
    if raw.kv_cache_spec_kind in NEVER_INDEXED_KINDS:
        return None
    block_hashes = fold_hashes(raw.block_hashes)
    cache_salt, mm_hashes = raw.cache_salt, None
    if raw.extra_keys and any(raw.extra_keys):
        if len(raw.extra_keys) != len(block_hashes):
            raise ValueError("extra keys of other blocks")
        num_hashable, cache_salt, mm_hashes = _read_extra_keys(
            raw.extra_keys, lora_name=raw.lora_name, cache_salt=raw.cache_salt, is_root=raw.parent_block_hash is None
        )
        block_hashes[num_hashable:] = [None] * (len(block_hashes) - num_hashable)
    is_eagle = len(raw.token_ids) > 0 and isinstance(raw.token_ids[0], tuple)
    token_ids: Any = _tokens_of_pairs(raw.token_ids) if is_eagle else raw.token_ids
    if raw.lookahead_token_ids and not is_eagle:
        if len(raw.lookahead_token_ids) != len(block_hashes) or not all(raw.lookahead_token_ids):
            raise ValueError("lookahead tokens of other blocks")
        token_ids, is_eagle = [*token_ids, raw.lookahead_token_ids[-1][0]], True
    return EngineStored(
        block_hashes=block_hashes,
        token_ids=token_ids,
        block_size=raw.block_size,
        parent_block_hash=None if raw.parent_block_hash is None else fold_hash(raw.parent_block_hash),
        window=window_of(raw.kv_cache_spec_kind, raw.kv_cache_spec_sliding_window),
        group=raw.group_idx,
        rank=rank,
        tier=tier,
        lora_id=raw.lora_id,
        lora_name=raw.lora_name,
        cache_salt=cache_salt,
        mm_hashes=mm_hashes,
        is_eagle=is_eagle,
        is_report=raw.session_id == REPORT_SESSION and raw.parent_block_hash is None,
    )


def _tier(medium: str | None, locality: str | None) -> Tier | None:
    """Return the tier of a medium, GPU where none is named, or None for one that is not known."""
    if locality == "REMOTE":
        return Tier.EXTERNAL
    tier = TIER_OF_MEDIUM.get(medium)
    return TIER_OF_MEDIUM.get(medium.upper()) if tier is None and medium is not None else tier


def window_of(kind: str | None, sliding_window: int | None) -> Window:
    """Return the window of a cache group; UNKNOWN if the engine names neither a kind nor a window."""
    if kind in FULL_KINDS:
        return FULL
    if kind == "mamba":
        return STATE
    return sliding_window if sliding_window is not None and sliding_window > 0 else UNKNOWN


def _tokens_of_pairs(pairs: Sequence[Any]) -> list[int]:
    """Return the tokens of EAGLE's overlapping pairs (t0, t1), (t1, t2), ...; raises ValueError for other tokens."""
    is_pairs = all(isinstance(pair, tuple) for pair in pairs)
    if not is_pairs or any(one[1] != other[0] for one, other in pairwise(pairs)):
        raise ValueError("pairs of tokens that do not overlap")
    return [pairs[0][0], *(second for _, second in pairs)]


def _read_extra_keys(
    extra_keys: Sequence[Sequence[Any] | None], *, lora_name: str | None, cache_salt: str | None, is_root: bool
) -> tuple[int, str | None, list[list[int]] | None]:
    """Return how many blocks of a chain have a canonical hash, its salt, and the multimodal items in each block.

    `is_root` says that the first block starts a prompt.

    vLLM's `extra_keys` are what besides tokens went into a block's hash, untagged and in a list per block. In order:
    the LoRA name, `[mm_identifier, offset]` for each multimodal item, the cache salt (in the first block of a prompt
    only), and the raw digest of prompt embeddings (`v1/core/kv_cache_utils.py`). Where in its block an item starts is
    not part of the canonical hash.
    """
    mm_hashes: list[list[int]] = []
    num_hashable_blocks = len(extra_keys)
    for block_idx, keys in enumerate(extra_keys):
        items: list[int] = []
        rest = list(keys or ())
        if lora_name is not None and lora_name in rest:
            rest.remove(lora_name)
        for key in rest:
            meaning = _meaning_of_key(key, is_prompt_start=is_root and block_idx == 0)
            if isinstance(meaning, int):
                items.append(meaning)
            elif meaning is None or cache_salt not in (None, meaning):
                num_hashable_blocks = min(num_hashable_blocks, block_idx)
            else:
                cache_salt = meaning
        mm_hashes.append(items)
    return num_hashable_blocks, cache_salt, mm_hashes if any(mm_hashes) else None


def _meaning_of_key(key: Any, *, is_prompt_start: bool) -> int | str | None:
    """Return the number of a multimodal item, or a cache salt, or None for what cannot be hashed.

    A bare string at the start of a prompt is the salt, even one that looks like a digest. Further on it is an item if
    it looks like one, because older engines sent items without their offset.
    """
    if isinstance(key, str):
        mm_hash = None if is_prompt_start else _mm_hash_of(key)
        return key if mm_hash is None else mm_hash
    if isinstance(key, list) and len(key) == 2 and isinstance(key[0], str):
        return _mm_hash_of(key[0])
    return None


def _mm_hash_of(identifier: str) -> int | None:
    """Return the u64 that stands for a multimodal item, or None when its identifier is not a hash.

    An engine names an item by a digest of 64 hex digits; its first 16 are the number, as Dynamo has it. A name that
    the client chose has no number that a router could compute.
    """
    if len(identifier) != _MM_IDENTIFIER_LENGTH or not _HEX_DIGITS.issuperset(identifier):
        return None
    return int(identifier[:_MM_HASH_LENGTH], 16)
