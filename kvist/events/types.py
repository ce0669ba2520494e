"""Canonical events: what publishers stream and routers index.

A batch is one message: everything one rank did within a few milliseconds, in order. Blocks are named by their canonical
sequence hash (`kvist.events.hashing`), packed as little-endian u64, so that applying an event is close to a memcpy.
The bytes are specified in docs/wire-format.md.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

# Decoding checks these; msgpack itself carries no integer above 2**64 - 1.
NonNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(gt=0)]
NonEmpty: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
# Bounded well above what is deployed: without a bound, garbage could make everything kept by rank grow.
MAX_RANKS = 4096
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
# A rank or its companion, which has a stream of its own.
RankOrCompanion: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2 * MAX_RANKS)]


class Tier(IntEnum):
    """Where a block lives, fastest first; the numbers are part of the wire format."""

    GPU = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: the unit that holds blocks, numbers its events and restarts."""

    worker: str
    rank: int

    @property
    def companion(self) -> WorkerRank:
        """Return the rank that stands for this one's other layer groups in an index."""
        return WorkerRank(self.worker, self.rank + MAX_RANKS)


MAX_NEEDED, MAX_STRIDE, MAX_KINDS = 1 << 20, 256, 4


class GroupRule(NamedTuple):
    """What a group of layers must hold for a hit: the last `num_needed` of its blocks; 0 of the published group is all.

    A block of the group is as long as `stride` published ones, and has the name of the last of them. `num_ahead` more
    blocks are needed behind the hit, which the engine has but computes again.
    """

    num_needed: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEEDED)]
    stride: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIDE)] = 1
    num_ahead: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0


class Stored(msgspec.Struct, tag="stored", array_like=True, frozen=True, gc=False):
    """A chain of blocks, parent first, is now held. `parent` is the block before the first one, None at the root."""

    hashes: bytes
    parent: NonNegative | None = None
    tier: Tier = Tier.GPU


class Removed(msgspec.Struct, tag="removed", array_like=True, frozen=True, gc=False):
    """These blocks are no longer held in this tier, in whatever order they left."""

    hashes: bytes
    tier: Tier = Tier.GPU


class Cleared(msgspec.Struct, tag="cleared", array_like=True, frozen=True, gc=False):
    """The rank holds nothing any more, in any tier."""


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True, frozen=True, gc=False):
    """What the rank holds after all batches so far: how many (block, tier) pairs, and their digest.

    Its batch uses up no sequence number: it names the next one to be used, so a subscriber that expects a lower one has
    lost something, even if nothing follows.
    """

    num_blocks: NonNegative
    digest: NonNegative
    is_complete: bool = True
    """Whether the publisher knows all that the engine holds: one beside an engine may have lost events."""
    rules: Annotated[tuple[GroupRule, ...], msgspec.Meta(max_length=1 + MAX_KINDS)] = ()
    """For a companion: what a hit of its rank needs of the published group, and of each kind of others."""
    is_upper_bound: bool = False
    """Whether hits also need blocks that are not in the stream: of other layer groups, or the last of a window."""


Event: TypeAlias = Stored | Removed | Cleared | Heartbeat


class Holding(NamedTuple):
    """What a publisher or a copy holds: the number of (block, tier) pairs, and their digest."""

    num_blocks: int
    digest: int


class RankEnvelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How each message of a rank begins. Order and gaps are judged by `(epoch, sequence)`, never by the transport.

    `epoch` changes with each start of the publisher; `sequence` counts that epoch's batches from 0; `block_size` is in
    tokens.
    """

    worker: NonEmpty
    rank: RankOrCompanion
    epoch: NonNegative
    sequence: NonNegative
    block_size: Positive

    @property
    def source(self) -> WorkerRank:
        return WorkerRank(self.worker, self.rank)


class Batch(RankEnvelope, tag="kvist1", array_like=True, frozen=True, gc=False):
    """One message of one rank; `timestamp_s` is Unix time when the batch was closed."""

    timestamp_s: float
    events: tuple[Event, ...]
    rules_version: NonNegative = 0
    """Which rules of the rank's companion held when the batch was closed, counted from 1; 0 if it has none."""


class SnapshotPart(RankEnvelope, tag="kvist-snapshot", array_like=True, frozen=True, gc=False):
    """Some of the blocks a rank held before its batch `sequence`, by ascending depth: parents come first.

    All parts together are `num_blocks` (block, tier) pairs with this digest, as in a heartbeat. Block i has the u64
    `hashes[8*i:]`, the u32 `depths[4*i:]` counts the blocks before it in its chain, and bit t of `tiers[i]` says that
    it is held in Tier t; all little-endian.
    """

    part_idx: NonNegative
    num_parts: Positive
    num_blocks: NonNegative
    digest: NonNegative
    hashes: bytes
    depths: bytes
    tiers: bytes
