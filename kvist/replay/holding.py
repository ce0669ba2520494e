"""What a rank holds by its canonical events: exact sets, which cost about 100 bytes a block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvist.events import Cleared, Event, Removed, Stored, Tier, snapshot
from kvist.events.digest import blocks_digest

_MASK = 0xFFFF_FFFF_FFFF_FFFF


class Change(NamedTuple):
    """What one event changed: blocks that are new to their tier or left it, and how many it named in vain.

    `notes` has, for each block that is gone, what was remembered with it.
    """

    new: list[int]
    gone: list[int]
    notes: list[int]
    num_in_vain: int


class HeldBlocks:
    """The blocks of one rank by tier, each with a number that the caller gave with it, such as when it was stored."""

    def __init__(self) -> None:
        self.tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self.digest = 0

    @property
    def num_blocks(self) -> int:
        """Return how many (block, tier) pairs are held."""
        return sum(map(len, self.tiers))

    def apply(self, event: Event, note: int = 0) -> Change:
        """Take an event, and remember `note` for the blocks that are new."""
        if isinstance(event, Stored):
            return self._store(event, note)
        if isinstance(event, Removed):
            return self._remove(event)
        return self.clear() if isinstance(event, Cleared) else Change([], [], [], 0)

    def clear(self) -> Change:
        """Forget everything."""
        gone = [block for held in self.tiers for block in held]
        notes = [note for held in self.tiers for note in held.values()]
        for held in self.tiers:
            held.clear()
        self.digest = 0
        return Change([], gone, notes, 0)

    def restore(self, slices: Iterable[snapshot.HeldBlocks], note: int = 0) -> Change:
        """Hold what a snapshot says, and nothing else; `note` is for the blocks that are new."""
        before, self.tiers = self.tiers, tuple({} for _ in Tier)
        self.digest = 0
        for held in slices:
            self.digest = self.digest + held.holding().digest & _MASK
            for tier in Tier:
                hashes = held.hashes[held.tiers >> tier & 1 == 1].tolist()
                self.tiers[tier].update((block, before[tier].get(block, note)) for block in hashes)
        new = [block for was, now in zip(before, self.tiers, strict=True) for block in now if block not in was]
        gone = [block for was, now in zip(before, self.tiers, strict=True) for block in was if block not in now]
        return Change(new, gone, [], 0)

    def _store(self, event: Stored, note: int) -> Change:
        held, blocks = self.tiers[event.tier], hashes_of(event)
        new = list(dict.fromkeys(block for block in blocks if block not in held))
        held.update(dict.fromkeys(new, note))
        self.digest = self.digest + blocks_digest(new, event.tier) & _MASK
        return Change(new, [], [], len(blocks) - len(new))

    def _remove(self, event: Removed) -> Change:
        held, blocks = self.tiers[event.tier], hashes_of(event)
        gone = list(dict.fromkeys(block for block in blocks if block in held))
        notes = [held.pop(block) for block in gone]
        self.digest = self.digest - blocks_digest(gone, event.tier) & _MASK
        return Change([], gone, notes, len(blocks) - len(gone))


def hashes_of(event: Stored | Removed) -> list[int]:
    """Return an event's blocks as numbers."""
    blocks: list[int] = np.frombuffer(event.hashes, "<u8").tolist()
    return blocks
