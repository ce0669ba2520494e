"""An engine that stores, offloads, removes and clears at random, and a brute-force account of what it holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvist.events.engine_events import (
    FULL,
    UNKNOWN,
    EngineCleared,
    EngineCreated,
    EngineEvent,
    EngineRemoved,
    EngineStored,
)
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import block_digest
from kvist.events.types import Tier

BLOCK_SIZE = 4
SLIDING_WINDOW = 8
MAX_DEPTH = 6
NUM_BRANCHES = 3
"""Prompts are few and short enough for workers to share prefixes all the time."""

Pair = tuple[int, Tier]
"""A canonical block in a tier."""
Held = frozenset[Pair]


class Path(NamedTuple):
    """A block, named by all tokens up to its end: one number stands for the tokens of a block."""

    lora_name: str | None
    steps: tuple[int, ...]

    @property
    def parent(self) -> Path | None:
        return Path(self.lora_name, self.steps[:-1]) if len(self.steps) > 1 else None

    def tokens(self, num_blocks: int) -> list[int]:
        """Return the tokens of the last blocks."""
        return [step * BLOCK_SIZE + idx for step in self.steps[-num_blocks:] for idx in range(BLOCK_SIZE)]


class Name(NamedTuple):
    """What the engine calls a physical block: there may be two of one content."""

    engine_hash: int
    path: Path


@cache
def canonical(path: Path) -> int:
    """Return the name of a block in the index."""
    hashes = block_hashes(path.tokens(len(path.steps)), BLOCK_SIZE, lora_name=path.lora_name)
    return int(hashes[-1])


@cache
def name_of(path: Path, copy: int) -> Name:
    """Return a block's name, the same in every process, as engines' hashes of contents are."""
    return Name(xxh3_64_intdigest(repr((path, copy)).encode()), path)


def digest_of(held: Held) -> tuple[int, int]:
    """Return what a heartbeat says of these blocks."""
    return len(held), sum(block_digest(*pair) for pair in held) % (1 << 64)


class Engine:
    """One rank of one process: reports what it does to `report`, and knows what it holds."""

    def __init__(
        self,
        rng: random.Random,
        rank: int,
        report: Callable[[EngineEvent], None],
        *,
        has_groups: bool = False,
        has_created: bool = True,
        max_blocks: int = 150,
        has_copies: bool = False,
        num_branches: int = NUM_BRANCHES,
        max_depth: int = MAX_DEPTH,
    ) -> None:
        """With groups there is one of full attention and one that slides, which the index must not hear of.

        With copies, what is stored again is held until it is removed as often, as by vLLM. As its clearing does not say
        what becomes of blocks beside the GPU, such an engine either has some or is cleared.
        """
        self.rank = rank
        self.num_stored = 0
        self.held_in_part: set[Pair] = set()
        """Blocks that the group which slides holds or held, whether or not the other does."""
        self._rng = rng
        self._report = report
        self._has_groups = has_groups
        self._max_blocks = max_blocks
        self._has_offloads = not has_copies or rng.random() < 0.5
        self._has_clears = not (has_copies and self._has_offloads)
        self._has_copies = has_copies
        self._num_branches = num_branches
        self._max_depth = max_depth
        # A list beside their places in it: one is picked, stored or dropped in constant time, the same in every run.
        self._names: list[tuple[Name, Tier]] = []
        self._held: dict[tuple[Name, Tier], int] = {}
        self._num_copies: Counter[tuple[Name, Tier]] = Counter()
        self._pairs: dict[Pair, int] = {}
        self._num_by_block: dict[int, int] = {}
        if has_groups and has_created:
            report(EngineCreated(FULL, 0, rank))
            report(EngineCreated(SLIDING_WINDOW, 1, rank))

    @property
    def held(self) -> Held:
        """Return what is held now."""
        return frozenset(self._pairs)

    @property
    def num_blocks(self) -> int:
        return len(self._pairs)

    def live(self) -> None:
        """Do one thing."""
        choice = self._rng.random()
        if len(self._held) > self._max_blocks:
            self.remove(len(self._held) // 3)
        elif choice < 0.004 and self._has_clears:
            self.clear()
        elif choice < 0.12 and self._held and self._has_offloads:
            self._offload()
        elif choice < 0.62 or not self._held:
            self.store(self._rng.randint(1, 4))
        else:
            self.remove(self._rng.randint(1, 4))
        if self._has_groups and self.num_stored and self._rng.random() < 0.3:
            self._slide()

    def store(self, num_blocks: int) -> None:
        """Store a chain at the root or behind a held block, some of which may be held already."""
        parent = self._pick() if self._held and self._rng.random() < 0.7 else None
        if parent is not None and len(parent.path.steps) >= self._max_depth:
            parent = None
        lora_name = self._rng.choice((None, None, "sql")) if parent is None else parent.path.lora_name
        path = Path(lora_name, ()) if parent is None else parent.path
        tier = self._rng.choice((Tier.GPU, Tier.GPU, Tier.GPU, Tier.HOST)) if self._has_offloads else Tier.GPU
        names = []
        for _ in range(min(num_blocks, self._max_depth - len(path.steps))):
            path = Path(lora_name, (*path.steps, self._rng.randrange(self._num_branches)))
            names.append(name_of(path, int(self._rng.random() < 0.1)))
        self._report(
            EngineStored(
                [name.engine_hash for name in names],
                path.tokens(len(names)),
                BLOCK_SIZE,
                None if parent is None else parent.engine_hash,
                rank=self.rank,
                tier=tier,
                lora_name=lora_name,
                **self._group(0),
            )
        )
        for name in names:
            self._hold(name, tier)

    def remove(self, num_blocks: int) -> None:
        """Remove some blocks in any order, parents before children too."""
        victims = self._rng.sample(self._names, min(num_blocks, len(self._names)))
        for tier in Tier:
            hashes = [name.engine_hash for name, held_in in victims if held_in is tier]
            if hashes:
                self._report(EngineRemoved(hashes, rank=self.rank, tier=tier, **self._group(0)))
        for name, tier in victims:
            self._drop(name, tier)

    def clear(self) -> None:
        """Drop everything."""
        self._report(EngineCleared(self.rank))
        self._held.clear()
        self._num_copies.clear()
        self._names.clear()
        self._pairs.clear()
        self._num_by_block.clear()

    def _offload(self) -> None:
        """Copy a block to the host, by its hash alone; engines do so parents first."""
        name = self._pick()
        parent = name.path.parent
        if parent is not None and not self._num_by_block.get(canonical(parent)):
            return
        self._report(EngineStored([name.engine_hash], [], BLOCK_SIZE, rank=self.rank, tier=Tier.HOST, **self._group(0)))
        self._hold(name, Tier.HOST)

    def _slide(self) -> None:
        """Store and remove in the group that slides, under hashes that the other group uses, too."""
        path = Path(None, tuple(self._rng.randrange(self._num_branches) for _ in range(3)))
        names = [name_of(Path(None, path.steps[: idx + 1]), 0).engine_hash for idx in range(3)]
        self.held_in_part |= {(canonical(Path(None, path.steps[: idx + 1])), Tier.GPU) for idx in range(3)}
        stored = EngineStored(names, path.tokens(3), BLOCK_SIZE, rank=self.rank, **self._group(1))
        self._report(self._rng.choice((stored, EngineRemoved(names[:1], rank=self.rank, **self._group(1)))))

    def _group(self, group: int) -> dict[str, object]:
        if not self._has_groups:
            return {"window": UNKNOWN, "group": None}
        return {"window": SLIDING_WINDOW if group else FULL, "group": group}

    def _pick(self) -> Name:
        return self._rng.choice(self._names)[0]

    def _hold(self, name: Name, tier: Tier) -> None:
        self.num_stored += 1
        self._num_copies[name, tier] += 1
        if (name, tier) not in self._held:
            self._held[name, tier] = len(self._names)
            self._names.append((name, tier))
            block = canonical(name.path)
            self._pairs[block, tier] = self._pairs.get((block, tier), 0) + 1
            self._num_by_block[block] = self._num_by_block.get(block, 0) + 1

    def _drop(self, name: Name, tier: Tier) -> None:
        num_copies = self._num_copies.pop((name, tier)) - 1
        if num_copies and self._has_copies:
            self._num_copies[name, tier] = num_copies
            return
        place, last = self._held.pop((name, tier)), self._names.pop()
        if last != (name, tier):
            self._names[place] = last
            self._held[last] = place
        block = canonical(name.path)
        self._num_by_block[block] -= 1
        self._pairs[block, tier] -= 1
        if not self._pairs[block, tier]:
            del self._pairs[block, tier]
