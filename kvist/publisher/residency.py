"""What one rank holds: which canonical blocks, in which tiers, under which of the engine's own hashes.

Residency is a set per (canonical block, tier). Engines report physical blocks: a hash may be stored twice, and one
removal may leave a copy behind. Copies are not counted: a removal removes, and the next store brings the block back.
Different engine hashes of one canonical block (an engine that hashes more than we do) are told apart: the block is
held until the last of them is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvist.events.digest import blocks_digest
from kvist.events.engine import EngineHash
from kvist.events.types import Tier

_U64_MASK = 0xFFFF_FFFF_FFFF_FFFF


class Scope(NamedTuple):
    """What besides its tokens names a block, and is the same all along its chain."""

    lora_name: str | None
    cache_salt: str | None


NO_SCOPE = Scope(None, None)


class Held(NamedTuple):
    """What `Residency.hold` changed: positions in the chain that are new to the tier, and blocks that left it."""

    new_idxs: list[int]
    displaced: list[int]


class Released(NamedTuple):
    """What `Residency.release` changed: blocks that left the tier, and engine hashes that were not in it."""

    block_hashes: list[int]
    not_found: list[EngineHash]


class Holdings(Protocol):
    """What a normaliser needs of what it keeps: `Residency`, or something that keeps the same in another way."""

    @property
    def num_blocks(self) -> int:
        """Return how many (block, tier) pairs are held."""

    @property
    def digest(self) -> int:
        """Return the digest (`kvist.events.digest`) of everything held."""

    def find(self, engine_hash: EngineHash) -> int | None:
        """Return the canonical block that the engine calls this, in the fastest tier that holds it."""

    def holds(self, block_hash: int) -> bool:
        """Return whether any tier holds the block."""

    def parent(self, block_hash: int) -> int | None:
        """Return the block before a held one, None at the root, or where that does not matter."""

    def scope(self, block_hash: int) -> Scope:
        """Return the scope that a held block was stored with."""

    def hold(
        self,
        engine_hashes: Sequence[EngineHash],
        block_hashes: Sequence[int],
        parent: int | None,
        tier: Tier,
        scope: Scope = NO_SCOPE,
    ) -> Held:
        """Hold a chain of blocks behind `parent` in a tier."""

    def release(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> Released:
        """Take the engine's hashes out of a tier, in any order."""

    def clear(self) -> None:
        """Hold nothing."""


class Residency:
    """The blocks of one rank. An entry lives exactly as long as its block: memory is bounded by the engine's cache."""

    def __init__(self) -> None:
        # One dict a tier: a hash that no tier holds is gone from all of them, without a count of references.
        self._block_of: dict[Tier, dict[EngineHash, int]] = {tier: {} for tier in Tier}
        self._parent_of: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}
        # How many engine hashes beyond the first hold a block in a tier: nearly always none.
        self._num_aliases: dict[tuple[int, Tier], int] = {}
        self._scopes: dict[int, Scope] = {}
        self._digest = 0

    @property
    def num_blocks(self) -> int:
        """Return how many (block, tier) pairs are held."""
        return sum(map(len, self._parent_of.values()))

    @property
    def digest(self) -> int:
        """Return the digest (`kvist.events.digest`) of everything held, kept up with each change."""
        return self._digest

    def find(self, engine_hash: EngineHash) -> int | None:
        """Return the canonical block that the engine calls this, in the fastest tier that holds it."""
        for block_of in self._block_of.values():
            block_hash = block_of.get(engine_hash)
            if block_hash is not None:
                return block_hash
        return None

    def holds(self, block_hash: int) -> bool:
        """Return whether any tier holds the block."""
        return any(block_hash in parent_of for parent_of in self._parent_of.values())

    def parent(self, block_hash: int) -> int | None:
        """Return the block before a held one, None at the root; the parent need not be held any more."""
        for parent_of in self._parent_of.values():
            if block_hash in parent_of:
                return parent_of[block_hash]
        raise KeyError(block_hash)

    def scope(self, block_hash: int) -> Scope:
        """Return the scope that a held block was stored with."""
        return self._scopes.get(block_hash, NO_SCOPE)

    def hold(
        self,
        engine_hashes: Sequence[EngineHash],
        block_hashes: Sequence[int],
        parent: int | None,
        tier: Tier,
        scope: Scope = NO_SCOPE,
    ) -> Held:
        """Hold a chain of blocks behind `parent` in a tier.

        An engine hash that named another block in this tier names the new one from here on: the last store wins.
        """
        block_of, parent_of = self._block_of[tier], self._parent_of[tier]
        held = Held([], [])
        for idx, (engine_hash, block_hash) in enumerate(zip(engine_hashes, block_hashes, strict=True)):
            old_block_hash = block_of.get(engine_hash)
            if old_block_hash != block_hash:
                if old_block_hash is not None and self._drop(old_block_hash, tier):
                    held.displaced.append(old_block_hash)
                block_of[engine_hash] = block_hash
                if block_hash in parent_of:
                    self._num_aliases[block_hash, tier] = self._num_aliases.get((block_hash, tier), 0) + 1
                else:
                    parent_of[block_hash] = parent
                    held.new_idxs.append(idx)
                    if scope != NO_SCOPE:
                        self._scopes[block_hash] = scope
            parent = block_hash
        self._add_to_digest([block_hashes[idx] for idx in held.new_idxs], tier, sign=1)
        self._add_to_digest(held.displaced, tier, sign=-1)
        return held

    def release(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> Released:
        """Take the engine's hashes out of a tier, in any order."""
        block_of = self._block_of[tier]
        released = Released([], [])
        for engine_hash in engine_hashes:
            block_hash = block_of.pop(engine_hash, None)
            if block_hash is None:
                released.not_found.append(engine_hash)
            elif self._drop(block_hash, tier):
                released.block_hashes.append(block_hash)
        self._add_to_digest(released.block_hashes, tier, sign=-1)
        return released

    def clear(self) -> None:
        """Hold nothing."""
        for tier in Tier:
            self._block_of[tier].clear()
            self._parent_of[tier].clear()
        self._num_aliases.clear()
        self._scopes.clear()
        self._digest = 0

    def _drop(self, block_hash: int, tier: Tier) -> bool:
        """Give up one engine hash's hold on a block; return whether the block left the tier."""
        num_aliases = self._num_aliases.pop((block_hash, tier), 0) if self._num_aliases else 0
        if num_aliases:
            if num_aliases > 1:
                self._num_aliases[block_hash, tier] = num_aliases - 1
            return False
        del self._parent_of[tier][block_hash]
        if self._scopes and not self.holds(block_hash):
            self._scopes.pop(block_hash, None)
        return True

    def _add_to_digest(self, block_hashes: Sequence[int], tier: Tier, *, sign: int) -> None:
        if block_hashes:
            self._digest = (self._digest + sign * blocks_digest(block_hashes, tier)) & _U64_MASK
