"""The oracle of the index's tests: the same answers from a dict of sets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.events.snapshot import block_digest
from kvist.events.types import GroupRule, Holding
from kvist.radix import ApplyResult, RadixIndex


def longest_hit(
    rules: Sequence[GroupRule], held: Sequence[Container[int]], hashes: Sequence[int], num_usable: int
) -> int:
    """Return the longest hit at whose end each group holds what it needs, by trying all lengths."""
    step = math.lcm(*[rule.stride for rule in rules])
    hashes = hashes if len(rules) > 1 else hashes[:num_usable]
    longest = min(num_usable, len(hashes) - max(rule.num_ahead * rule.stride for rule in rules))
    for end in range(longest // step * step, 0, -step):
        ends = [end + rule.num_ahead * rule.stride for rule in rules]
        needed = [
            range(last - 1, -1, -rule.stride)[: rule.num_needed or None] for rule, last in zip(rules, ends, strict=True)
        ]
        if all(hashes[place] in blocks for places, blocks in zip(needed, held, strict=True) for place in places):
            return end
    return 0


class Oracle:
    """What every rank holds, as sets of (hash, tier), and what hits of those need that have several groups."""

    def __init__(self) -> None:
        self.held: dict[WorkerRank, set[tuple[int, int]]] = defaultdict(set)
        self._rules: dict[WorkerRank, Sequence[GroupRule]] = {}
        self._companions: set[WorkerRank] = set()

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

    def set_groups(self, source: WorkerRank, rules: Sequence[GroupRule]) -> None:
        self._rules[source] = rules
        self._companions.add(source.companion)

    def clear(self, source: WorkerRank) -> None:
        """Hold nothing, and be of one group; with a companion go the rules that are about it."""
        self.held.pop(source, None)
        self._companions.discard(source)
        self._rules = {each: rules for each, rules in self._rules.items() if source not in (each, each.companion)}

    def match(self, hashes: list[int], num_usable: int | None = None) -> dict[WorkerRank, tuple[int, ...]]:
        num_usable, sources = len(hashes) if num_usable is None else num_usable, self.held.keys() - self._companions
        answers = {source: self._depths(source, hashes, num_usable) for source in sources}
        return {source: depths for source, depths in answers.items() if depths[-1]}

    def _depths(self, source: WorkerRank, hashes: list[int], num_usable: int) -> tuple[int, ...]:
        held = self.held[source]
        if source in self._rules:
            kinds = [{block for block, tier in self.held.get(source.companion, ()) if tier == kind} for kind in Tier]
            groups = [{block for block, tier in held if tier == Tier.GPU}, *kinds]
            rules = self._rules[source]
            return (longest_hit(rules, groups[: len(rules)], hashes, num_usable),) * len(Tier)
        depths = []
        for widest in Tier:
            depth = 0
            while depth < num_usable and any((hashes[depth], tier) in held for tier in range(widest + 1)):
                depth += 1
            depths.append(depth)
        return tuple(depths)

    def digest(self, source: WorkerRank) -> Holding:
        held = self.held.get(source, set())
        return Holding(len(held), sum(block_digest(block, tier) for block, tier in held) % 2**64)

    @property
    def num_blocks(self) -> int:
        return len({block for held in self.held.values() for block, _ in held})


@pytest.fixture
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(name="longest_hit", scope="session")
def get_longest_hit() -> Callable[..., int]:
    return longest_hit


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
