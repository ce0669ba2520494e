"""The oracle of the index's tests: the same answers from a dict of sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.events.snapshot import block_digest
from kvist.events.types import Holding
from kvist.radix import ApplyResult, RadixIndex


class Oracle:
    """What every rank holds, as sets of (hash, tier)."""

    def __init__(self) -> None:
        self.held: dict[WorkerRank, set[tuple[int, int]]] = defaultdict(set)

    def store(self, source: WorkerRank, tier: int, parent: int | None, hashes: list[int]) -> ApplyResult:
        chain = hashes if parent is None else [parent, *hashes]
        if any(block == following for block, following in pairwise(chain)):
            return ApplyResult(num_invalid=1)
        held = self.held.get(source, set())
        if parent is not None and not any((parent, other) in held for other in range(4)):
            return ApplyResult(num_parent_not_found=1)
        before = len(held)
        self.held[source].update((block, tier) for block in hashes)
        return ApplyResult(len(self.held[source]) - before)

    def remove(self, source: WorkerRank, tier: int, hashes: list[int]) -> ApplyResult:
        num_not_found = 0
        for block in hashes:
            if (block, tier) in self.held.get(source, set()):
                self.held[source].discard((block, tier))
            else:
                num_not_found += 1
        return ApplyResult(num_not_found=num_not_found)

    def match(self, hashes: list[int]) -> dict[WorkerRank, tuple[int, ...]]:
        scores = {}
        for source, held in self.held.items():
            depths = []
            for widest in Tier:
                depth = 0
                while depth < len(hashes) and any((hashes[depth], tier) in held for tier in range(widest + 1)):
                    depth += 1
                depths.append(depth)
            if depths[-1]:
                scores[source] = tuple(depths)
        return scores

    def digest(self, source: WorkerRank) -> Holding:
        held = self.held.get(source, set())
        return Holding(len(held), sum(block_digest(block, tier) for block, tier in held) % 2**64)

    @property
    def num_blocks(self) -> int:
        return len({block for held in self.held.values() for block, _ in held})


@pytest.fixture
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session")
def make_oracle() -> Callable[[], Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def blocks_of() -> Callable[[RadixIndex], set[int]]:
    """The blocks that have a row in an index, read without touching it."""

    def read(index: RadixIndex) -> set[int]:
        return {
            block
            for segment in index.segments
            for block in segment["rows"][: segment["room"]][segment["rows"]["value"][: segment["room"]] != 0][
                "hash"
            ].tolist()
        }

    return read


@pytest.fixture(scope="session")
def u64() -> Callable[..., NDArray[np.uint64]]:
    """An array of block hashes."""
    return lambda *hashes: np.array(hashes, np.uint64)
