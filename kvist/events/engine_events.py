"""Engine events: what an engine says happened in its cache, before filtering and hashing.

Dialects make these from an engine's bytes; the bundled engine calls an `EventSink` directly. Hashes are the engine's
own: opaque, and unique only within a rank and group. A group's attention window is the number of tokens a query may
look back on, itself included.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypedDict, Unpack

import msgspec

from kvist.events.types import Tier

EngineHash: TypeAlias = int | bytes

_U64_MASK = 0xFFFF_FFFF_FFFF_FFFF


class UnsizedWindow(StrEnum):
    """The windows that are not a number of tokens.

    FULL is full attention, and larger than any number. UNKNOWN is that of an engine that never says: such a group
    passes only while its rank has shown one group. STATE is that of a group which keeps a state, as Mamba does: a
    request continues from the state behind a block. Such a group is never published by itself.
    """

    FULL = "full"
    UNKNOWN = "unknown"
    STATE = "state"


FULL: Final = UnsizedWindow.FULL
UNKNOWN: Final = UnsizedWindow.UNKNOWN
STATE: Final = UnsizedWindow.STATE

KnownWindow: TypeAlias = int | Literal[UnsizedWindow.FULL]
Window: TypeAlias = KnownWindow | Literal[UnsizedWindow.UNKNOWN, UnsizedWindow.STATE]


def window_size(window: KnownWindow) -> float:
    """Return a number that orders known windows: tokens, or infinity for FULL."""
    return math.inf if window is FULL else window


class EngineCreated(msgspec.Struct, frozen=True, gc=False):
    """A layer group with this window exists; engines that send this send one a group at start-up."""

    window: Window
    group: int | None = None
    rank: int = 0


class EngineStored(msgspec.Struct, frozen=True, gc=False):
    """A chain of blocks was stored, parent first.

    `token_ids` are the tokens of all blocks, back to back; none at all means that blocks which another tier holds are
    now in this one too. `block_lengths` counts the tokens of each block; None means that each has `block_size`. A None
    hash is a hole: nothing behind it belongs to the chain. `mm_hashes` has, per block, the hashes of the multimodal
    items in it. With `is_eagle`, block i covers tokens [i*B, i*B + B + 1). With `is_report`, the blocks may have been
    stored before.
    """

    block_hashes: Sequence[EngineHash | None]
    token_ids: Sequence[int]
    block_size: int
    parent_block_hash: EngineHash | None = None
    block_lengths: Sequence[int] | None = None
    window: Window = UNKNOWN
    group: int | None = None
    rank: int = 0
    tier: Tier = Tier.GPU
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    mm_hashes: Sequence[Sequence[int]] | None = None
    is_eagle: bool = False
    is_report: bool = False


class EngineRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks left this tier, or with None every tier."""

    block_hashes: Sequence[EngineHash]
    window: Window = UNKNOWN
    group: int | None = None
    rank: int = 0
    tier: Tier | None = Tier.GPU


class EngineCleared(msgspec.Struct, frozen=True, gc=False):
    """The rank dropped its whole cache, or all of one tier and perhaps the others."""

    rank: int = 0
    tier: Tier | None = None


EngineEvent: TypeAlias = EngineCreated | EngineStored | EngineRemoved | EngineCleared


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
    """Return the hash as u64: of an integer its low 64 bits, of a digest its last eight bytes, big-endian, as vLLM."""
    if isinstance(engine_hash, bytes):
        engine_hash = int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _U64_MASK


def fold_hashes(engine_hashes: list[Any]) -> list[Any]:
    """Return the folded hashes, None for None; a list of unsigned integers, as engines send, is returned itself."""
    try:
        array("Q", engine_hashes)  # the fastest check of them all
    except (TypeError, OverflowError):
        return [None if engine_hash is None else fold_hash(engine_hash) for engine_hash in engine_hashes]
    return engine_hashes


class Place(TypedDict, total=False):
    """Which layer group, rank and tier an event is about; as in the events, with the same defaults."""

    window: Window
    group: int | None
    rank: int
    tier: Tier


class StoredFacts(Place, total=False):
    """The optional fields of `EngineStored`."""

    parent_block_hash: EngineHash | None
    block_lengths: Sequence[int] | None
    lora_name: str | None
    cache_salt: str | None
    mm_hashes: Sequence[Sequence[int]] | None


class EventSink(Protocol):
    """Where an engine reports changes of its cache. Never blocks, never raises for what is reported, keeps the order.

    Callable from one engine thread at a time. Arguments are as in the Engine* event of the same name.
    """

    def created(self, *, window: Window, group: int | None = None, rank: int = 0) -> None:
        """Report a layer group, before anything is stored."""

    def stored(
        self, block_hashes: Sequence[EngineHash | None], token_ids: Sequence[int], **facts: Unpack[StoredFacts]
    ) -> None:
        """Report a chain of blocks, parent first."""

    def removed(self, block_hashes: Sequence[EngineHash], **place: Unpack[Place]) -> None:
        """Report blocks whose slots were reused."""

    def cleared(self, *, rank: int = 0) -> None:
        """Report that the rank's whole cache is gone."""
