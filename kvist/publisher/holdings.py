"""What a normaliser keeps account with: which canonical blocks a rank holds, under which of the engine's own hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvist.events.engine_events import EngineHash
from kvist.events.types import Tier


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
