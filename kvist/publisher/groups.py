"""The groups that a rank shows beside the published one: what each must hold for a hit of the engine's.

A hit ends at a multiple of all groups' block sizes. Up to there full groups hold all blocks, a sliding group those of
its window, which its next token looks back on, and a group of states the last one (vLLM 0.33.0
`v1/core/kv_cache_coordinator.py`, `HybridKVCacheCoordinator`). Groups that need the same are of one *kind*, which holds
what all of them hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvist.events import FULL, UNKNOWN, EngineCleared, EngineEvent, EngineHash, EngineRemoved, EngineStored, Window
from kvist.events.engine_events import STATE
from kvist.events.types import MAX_KINDS, MAX_NEEDED, MAX_STRIDE, GroupRule, Tier
from kvist.publisher.filter import FilterState, PassedEvent, WindowFilter

MAX_GROUPS, MAX_COUNTED = 32, 1 << 22


@dataclass(slots=True)
class OtherGroups:
    """What one rank's stores said of its other groups, numbered as they turned up."""

    block_size: int
    num_ahead: int = 0
    """Blocks behind a hit that the engine must have as well."""
    rules: dict[int, GroupRule] = field(default_factory=dict)
    is_expressible: bool = True
    """Whether all groups are known by these rules."""

    def note(self, event: EngineStored, published: FilterState) -> bool:
        """Take note of a store of another group than the published one; return whether it is the group's first."""
        key, published_key = group_key(event.group, event.window), group_key(published.group, published.window)
        if key is None or published_key in (None, key) or event.window is UNKNOWN or key in self.rules:
            return False
        return self.add(key, event.window, event.block_size)

    def add(self, group: int, window: Window, block_size: int) -> bool:
        """Take note of a group, by its key; return whether what it holds can be accounted for."""
        rule = rule_of(window, block_size, self.block_size, self.num_ahead)
        if rule is None or len(self.rules) == MAX_GROUPS or len({*self.rules.values(), rule}) > MAX_KINDS:
            self.is_expressible = False
            return False
        self.rules[group] = rule
        return True

    def number_of(self, key: int | None) -> int | None:
        """Return a group's number, None if it is not one of these."""
        return [*self.rules].index(key) if key in self.rules else None


class GroupHolder(Protocol):
    """Where a rank's blocks are: what is published, and what its other groups hold.

    A group may hold a block before the published one does, and after it: it counts while both do.
    """

    def set_groups(self, published: GroupRule, others: Sequence[GroupRule]) -> None:
        """Have hits need what the published group and each of the others hold; what is counted of these stays so."""

    def store_in_group(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> None:
        """Note that a group holds blocks, or a copy more; of what may be a report, only the last ones."""

    def remove_from_group(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        """Note that a group holds blocks no more, or a copy less of each."""

    def counted(self) -> list[tuple[Any, int, int]]:
        """Return what is counted of the other groups: engine hashes, groups, numbers of copies."""

    def count_again(self, counted: Iterable[tuple[Any, int, int]]) -> None:
        """Count what `counted` returned, of blocks that are not published now."""

    def engine_hashes(self) -> list[Any]:
        """Return the engine hashes of what is published on the GPU."""


class GroupSplitter:
    """Passes the published group's events, as the window filter does, and counts those of the others.

    Whatever a filter clears a rank for, a larger window, leaves what was published before as another group's.
    """

    def __init__(self, window_filter: WindowFilter, block_size: int, holder: GroupHolder, num_ahead: int = 0) -> None:
        self._filter, self._block_size, self._holder = window_filter, block_size, holder
        self.others = OtherGroups(block_size, num_ahead)
        self.rules: list[GroupRule] = []
        """What the published group must hold, then each of the others."""
        self.show()

    def admit(self, event: EngineEvent, publish: Callable[[PassedEvent], object]) -> tuple[bool, int | None]:
        """Take one event: return whether it was for publishing, and else of which of the other groups it is."""
        before = self._filter.state
        passed = self._filter.admit(event)
        if any(isinstance(each, EngineCleared) and each is not event for each in passed):
            self._publish_another(before, passed, publish)
        else:
            for each in passed:
                publish(each)
        if self._filter.state != before:
            self.show()
        is_of_blocks = isinstance(event, EngineStored | EngineRemoved)
        return bool(passed), self._count(event) if is_of_blocks and not passed else None  # type: ignore[arg-type]

    def resume(self, state: FilterState, others: Mapping[int, GroupRule]) -> None:
        self._filter.resume(state)
        self.others.rules.update(others)
        self.show()

    def show(self) -> None:
        """Let the holder know which groups there are, if that has changed."""
        published = published_rule(self._filter.state.window, self._block_size, self.others.num_ahead)
        rules = [published, *self.others.rules.values()]
        if rules != self.rules:
            self.rules = rules
            self._holder.set_groups(rules[0], rules[1:])

    def _count(self, event: EngineStored | EngineRemoved) -> int | None:
        """Count an event of one of the other groups; return which that is, None if it is none of them."""
        if isinstance(event, EngineStored) and self.others.note(event, self._filter.state):
            self.show()
        group = self.others.number_of(group_key(event.group, event.window))
        if group is None or event.tier not in (Tier.GPU, None):
            return group
        if isinstance(event, EngineStored):
            self._holder.store_in_group(group, event.block_hashes)
        else:
            self._holder.remove_from_group(group, event.block_hashes)
        return group

    def _publish_another(
        self, before: FilterState, passed: Iterable[PassedEvent], publish: Callable[[PassedEvent], object]
    ) -> None:
        counted, names = self._holder.counted(), self._holder.engine_hashes()
        for each in passed:
            publish(each)
        key = group_key(before.group, before.window)
        if key is not None and before.window is not None:
            self.others.add(key, before.window, self._block_size)
            group = self.others.number_of(key)
            counted += [] if group is None else [(name, group, 1) for name in names]
        self._holder.count_again(counted)


def group_key(group: int | None, window: Window | None) -> int | None:
    """Return what stands for a group: its number, else, as of TensorRT-LLM's, its window, made negative."""
    return group if group is not None else -window if isinstance(window, int) else None


def num_needed(window: Window, block_size: int) -> int:
    """Return how many blocks of a group, at the end of a hit, its next token looks back on."""
    if window is STATE:
        return 1
    return min(-(-(window - 1) // block_size), MAX_NEEDED) if isinstance(window, int) else MAX_NEEDED


def rule_of(window: Window, block_size: int, published_size: int, num_ahead: int = 0) -> GroupRule | None:
    """Return what a group must hold, None where its blocks have no place; of smaller ones, the last stands for all."""
    if block_size <= 0 or block_size > published_size * MAX_STRIDE:
        return None
    num_ahead = 0 if window is STATE else num_ahead
    num_blocks = num_needed(window, block_size)
    if block_size % published_size == 0:
        return GroupRule(min(num_blocks + num_ahead, MAX_NEEDED), block_size // published_size, num_ahead)
    if published_size % block_size == 0:
        num_blocks = -(-num_blocks * block_size // published_size)
        return GroupRule(min(num_blocks + num_ahead, MAX_NEEDED), 1, num_ahead)
    return None


def published_rule(window: Window | None, block_size: int, num_ahead: int = 0) -> GroupRule:
    if window is None or window is FULL:
        return GroupRule(0, 1, num_ahead)
    return rule_of(window, block_size, block_size, num_ahead) or GroupRule(0)
