"""What one rank holds: which canonical blocks, in which tiers, under which of the engine's own hashes.

Residency is a set per (canonical block, tier). Some engines report physical blocks: a hash stored twice is two copies,
and a removal takes one of them. With `counts_copies` they are counted, and the block is held until the last is removed;
otherwise one removal is enough. A canonical block that has several engine hashes (the engine hashes more than we do) is
held until the last of them is removed.

Each block's depth is kept beside its parent: snapshots contain it, and it does not change when the parent is gone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from kvist.events.engine_events import EngineHash
from kvist.events.snapshot import HeldBlocks, blocks_digest
from kvist.events.types import Tier

_U64_MASK = 0xFFFF_FFFF_FFFF_FFFF
# A block's place is one integer, half the memory of a parent and a depth in dicts of their own: its parent's hash, its
# depth in 32 bits, and a bit for each tier that holds it. Only the root has depth 0, and its parent counts for nothing.
_PARENT_SHIFT, _DEPTH_SHIFT = 36, 4
_DEPTH_MASK, _TIERS_MASK = 0xFFFF_FFFF, 0xF
_DEPTH_AND_TIERS_MASK = (1 << _PARENT_SHIFT) - 1

_NUM_BLOCKS_A_SLICE = 16_384


class Scope(NamedTuple):
    """What a block's hash depends on besides tokens; the same for all blocks of a chain."""

    lora_name: str | None
    cache_salt: str | None


NO_SCOPE = Scope(None, None)


class Chain(NamedTuple):
    """Blocks of a prompt, each behind the one before it and the first behind `parent`, and where they are stored."""

    engine_hashes: Sequence[EngineHash]
    block_hashes: Sequence[int]
    parent: int | None
    tier: Tier
    scope: Scope = NO_SCOPE


class Held(NamedTuple):
    """What `Residency.hold` changed: positions in the chain that are new to the tier, and blocks that left it."""

    new_idxs: list[int]
    displaced: list[int]


class Holdings(Protocol):
    """Where a normaliser records which blocks a rank holds: `Residency`, or another implementation."""

    def find(self, engine_hash: EngineHash) -> int | None:
        """Return the canonical block that has an engine hash, in the fastest tier where it has one."""

    def holds(self, block_hash: int) -> bool:
        """Return whether any tier holds the block."""

    def parent(self, block_hash: int) -> int | None:
        """Return the block before a held one, None at the root, or where that does not matter."""

    def scope(self, block_hash: int) -> Scope:
        """Return the scope that a held block was stored with."""

    def hold(self, chain: Chain) -> Held:
        """Hold a chain of blocks in its tier."""

    def release(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> Sequence[int]:
        """Remove engine hashes, or one copy of each, from a tier; return the blocks to publish as removed."""

    def clear(self) -> None:
        """Remove everything from all tiers."""


class Residency:
    """The usual `Holdings`. An entry lives exactly as long as its block: memory is bounded by the engine's cache."""

    def __init__(self) -> None:
        self.counts_copies = False
        """Whether an engine hash that is stored again has one more copy, rather than being reported once more."""
        # One dict a tier: so a hash that no tier holds needs no count of references to be forgotten.
        self._block_of: list[dict[EngineHash, int]] = [{} for _ in Tier]
        self.places: dict[int, int] = {}
        # How many engine hashes beyond the first hold a block in a tier: nearly always none.
        self._num_aliases: dict[tuple[int, Tier], int] = {}
        # How many copies an engine hash has in a tier beyond the first.
        self.copies: dict[tuple[EngineHash, Tier], int] = {}
        self.scopes: dict[int, Scope] = {}
        self.digest = 0
        """The digest (`kvist.events.snapshot`) of everything held."""

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._block_of)) - sum(self._num_aliases.values())

    def copy(self) -> Residency:
        """Return one that holds the same; O(blocks), at the speed of copying dicts."""
        copy = Residency()
        copy._block_of = [block_of.copy() for block_of in self._block_of]
        copy.places = self.places.copy()
        copy._num_aliases, copy.copies = self._num_aliases.copy(), self.copies.copy()
        copy.scopes = self.scopes.copy()
        copy.digest = self.digest
        return copy

    @classmethod
    def of(
        cls,
        names: Mapping[Tier, dict[EngineHash, int]],
        copies: dict[tuple[EngineHash, Tier], int],
        places: dict[int, int],
        scopes: dict[int, Scope],
        digest: int,
    ) -> Residency:
        """Return a residency with another one's engine hashes (`names`) of each tier, copies, places, and so on."""
        residency = cls()
        residency.copies, residency.places, residency.scopes = copies, places, scopes
        for tier, block_of in names.items():
            residency._block_of[tier] = block_of
            num_names = Counter(block_of.values())
            residency._num_aliases |= {(block, tier): num - 1 for block, num in num_names.items() if num > 1}
        residency.digest = digest
        return residency

    def names(self, tier: Tier) -> dict[EngineHash, int]:
        """Return the blocks of a tier by their engine hashes."""
        return self._block_of[tier]

    def slices(self) -> Iterator[HeldBlocks]:
        """Yield all blocks, some at a time; nothing may change meanwhile."""
        blocks, places = iter(self.places), iter(self.places.values())
        while hashes := array("Q", islice(blocks, _NUM_BLOCKS_A_SLICE)):
            parts = array("Q", (place & _DEPTH_AND_TIERS_MASK for place in islice(places, len(hashes))))
            packed = np.frombuffer(parts, np.uint64)
            depths, tiers = packed >> np.uint64(_DEPTH_SHIFT), packed & np.uint64(_TIERS_MASK)
            yield HeldBlocks(np.frombuffer(hashes, np.uint64), depths.astype(np.uint32), tiers.astype(np.uint8))

    def find(self, engine_hash: EngineHash) -> int | None:
        for block_of in self._block_of:
            block_hash = block_of.get(engine_hash)
            if block_hash is not None:
                return block_hash
        return None

    def holds(self, block_hash: int) -> bool:
        return block_hash in self.places

    def parent(self, block_hash: int) -> int | None:
        """Return the block before a held one, None at the root; the parent need not be held any more."""
        place = self.places[block_hash]
        return place >> _PARENT_SHIFT if _depth(place) else None

    def scope(self, block_hash: int) -> Scope:
        return self.scopes.get(block_hash, NO_SCOPE)

    def hold(self, chain: Chain) -> Held:
        """Hold a chain in its tier; an engine hash names the block that was stored with it last."""
        engine_hashes, block_hashes, parent, tier, scope = chain
        block_of, place_of, tier_bit = self._block_of[tier], self.places, 1 << tier
        depth = 0 if parent is None else _depth(place_of.get(parent, 0)) + 1
        depth_bits, before = depth << _DEPTH_SHIFT, parent or 0
        is_scoped = scope != NO_SCOPE
        new_idxs: list[int] = []
        displaced: list[int] = []
        for idx, (engine_hash, block_hash) in enumerate(zip(engine_hashes, block_hashes, strict=True)):
            old_block_hash = block_of.get(engine_hash)
            if old_block_hash == block_hash:
                if self.counts_copies:
                    self.copies[engine_hash, tier] = self.copies.get((engine_hash, tier), 0) + 1
            else:
                if old_block_hash is not None:
                    self.copies.pop((engine_hash, tier), None)
                    if self._drop(old_block_hash, tier):
                        displaced.append(old_block_hash)
                block_of[engine_hash] = block_hash
                old_place = place_of.get(block_hash, 0)
                if old_place & tier_bit:
                    self._num_aliases[block_hash, tier] = self._num_aliases.get((block_hash, tier), 0) + 1
                else:
                    place_of[block_hash] = (old_place or before << _PARENT_SHIFT | depth_bits) | tier_bit
                    new_idxs.append(idx)
                    if is_scoped:
                        self.scopes[block_hash] = scope
            before = block_hash
            depth_bits += 1 << _DEPTH_SHIFT
        self._update_digest([block_hashes[idx] for idx in new_idxs], displaced, tier)
        return Held(new_idxs, displaced)

    def release(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> list[int]:
        block_of = self._block_of[tier]
        released: list[int] = []
        for engine_hash in engine_hashes:
            if self.copies and self._drop_copy(engine_hash, tier):
                continue
            block_hash = block_of.pop(engine_hash, None)
            if block_hash is not None and self._drop(block_hash, tier):
                released.append(block_hash)
        self._update_digest([], released, tier)
        return released

    def clear(self) -> None:
        for tier in Tier:
            self._block_of[tier].clear()
        self.places.clear()
        self._num_aliases.clear()
        self.copies.clear()
        self.scopes.clear()
        self.digest = 0

    def _drop_copy(self, engine_hash: EngineHash, tier: Tier) -> bool:
        """Remove one copy of a hash; return whether another is left. Where they are not counted, none is."""
        num_copies = self.copies.pop((engine_hash, tier), 0)
        if num_copies > 1 and self.counts_copies:
            self.copies[engine_hash, tier] = num_copies - 1
        return num_copies > 0 and self.counts_copies

    def _drop(self, block_hash: int, tier: Tier) -> bool:
        """Remove one engine hash of a block; return whether that was the last in the tier."""
        num_aliases = self._num_aliases.pop((block_hash, tier), 0) if self._num_aliases else 0
        if num_aliases:
            if num_aliases > 1:
                self._num_aliases[block_hash, tier] = num_aliases - 1
            return False
        place = self.places[block_hash] & ~(1 << tier)
        if place & _TIERS_MASK:
            self.places[block_hash] = place
        else:
            del self.places[block_hash]
            self.scopes.pop(block_hash, None)
        return True

    def _update_digest(self, added: list[int], removed: list[int], tier: Tier) -> None:
        self.digest = (self.digest + blocks_digest(added, tier) - blocks_digest(removed, tier)) & _U64_MASK


def _depth(place: int) -> int:
    return place >> _DEPTH_SHIFT & _DEPTH_MASK
