"""What every dialect decodes to, and the rules that all of them share."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, overload

from kvist.events.engine_events import EngineEvent, EngineHash

_U64_MASK = 0xFFFF_FFFF_FFFF_FFFF
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_MM_IDENTIFIER_LENGTH = 64
_MM_HASH_LENGTH = 16


class DecodedEngineBatch(NamedTuple):
    """An engine's batch. `rank` and `timestamp_s` are None where the engine does not say; events then have rank 0.

    Ignored events are of a type, medium or kind of cache that is never indexed. A block of something whose canonical
    hash cannot be derived, such as prompt embeddings, has the hash None: its chain ends before it.
    """

    timestamp_s: float | None
    rank: int | None
    events: tuple[EngineEvent, ...]
    num_ignored_events: int = 0
    num_malformed_events: int = 0


def fold_hash(engine_hash: EngineHash) -> int:
    """Return the hash as u64, whatever its form; of a digest the last eight bytes count, big-endian, as in vLLM."""
    if isinstance(engine_hash, bytes):
        engine_hash = int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _U64_MASK


@overload
def fold_hashes(engine_hashes: list[EngineHash]) -> list[EngineHash]: ...
@overload
def fold_hashes(engine_hashes: list[EngineHash | None]) -> list[EngineHash | None]: ...
def fold_hashes(engine_hashes: list[Any]) -> list[Any]:
    """Return the folded hashes, None for None; of unsigned integers, which engines send, the list itself."""
    try:
        array("Q", engine_hashes)  # the fastest look at them all
    except (TypeError, OverflowError):
        return [None if engine_hash is None else fold_hash(engine_hash) for engine_hash in engine_hashes]
    return engine_hashes


def mm_hash_of(identifier: str) -> int | None:
    """Return the u64 that stands for a multimodal item, or None when its identifier is not a hash.

    An engine names an item by a digest of 64 hex digits; its first 16 are the number, as Dynamo has it. A name that
    the client chose has no number that a router could compute.
    """
    if len(identifier) != _MM_IDENTIFIER_LENGTH or not _HEX_DIGITS.issuperset(identifier):
        return None
    return int(identifier[:_MM_HASH_LENGTH], 16)
