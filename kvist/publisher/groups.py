"""The groups that a rank shows beside the published one: what each must hold for a hit of the engine's.

A hit ends at a multiple of all groups' block sizes. Up to there full groups hold all blocks, a sliding group those of
its window, which its next token looks back on, and a group of states the last one (vLLM 0.33.0
`v1/core/kv_cache_coordinator.py`, `HybridKVCacheCoordinator`). Groups that need the same are of one *kind*, which holds
what all of them hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvist.events import FULL, UNKNOWN, EngineCleared, EngineEvent, EngineHash, EngineRemoved, EngineStored, Window
from kvist.events.engine_events import STATE
from kvist.events.types import MAX_KINDS, MAX_NEEDED, MAX_STRIDE, GroupRule, Tier
from kvist.publisher.filter import FilterState, PassedEvent, WindowFilter

MAX_GROUPS, MAX_COUNTED = 32, 1 << 22


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

    def are_held(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> bool:
        """Return whether a group, -1 for the published one, holds all these blocks."""

    def counted(self) -> list[tuple[Any, int, int]]:
        """Return what is counted of the other groups: engine hashes, groups, numbers of copies."""

    def count_again(self, counted: Iterable[tuple[Any, int, int]]) -> None:
        """Count what `counted` returned, of blocks that are not published now."""

    def engine_hashes(self) -> list[Any]:
        """Return the engine hashes of what is published on the GPU."""


class GroupSplitter:
    """Passes the published group's events, as the window filter does, and counts those of the others.

    The others are numbered as they turned up. Whatever a filter clears a rank for, a larger window, leaves what was
    published before as another group's. `num_ahead` blocks behind a hit the engine must have as well.
    """

    def __init__(
        self,
        window_filter: WindowFilter,
        block_size: int,
        holder: GroupHolder,
        num_ahead: int = 0,
        has_full_reports: bool = False,
    ) -> None:
        self._has_full_reports = has_full_reports
        self._filter, self._block_size, self._holder, self._num_ahead = window_filter, block_size, holder, num_ahead
        self.others: dict[int, GroupRule] = {}
        """What each of the other groups must hold, by its key."""
        self.is_expressible = True
        """Whether these rules tell exactly what all groups must hold."""
        self.rules: list[GroupRule] = []
        """What the published group must hold, then each of the others."""
        self.show()

    def admit(self, event: EngineEvent, publish: Callable[[PassedEvent], object]) -> tuple[bool, int | None]:
        """Take one event: return whether it was for publishing, and else of which of the other groups it is."""
        before = self._filter.state
        if isinstance(event, EngineRemoved) and event.group in self.others and event.group != before.group:
            self._filter.num_filtered += 1
            return False, self._count(event)  # also before anything is published, when a filter passes what is unknown
        passed = self._filter.admit(event)
        if any(isinstance(each, EngineCleared) and each is not event for each in passed):
            self._publish_another(before, passed, publish)
        else:
            for each in passed:
                publish(each)
        if self._filter.state != before:
            self.show()
        if isinstance(event, EngineStored) and event.tier is Tier.GPU and event.block_size < self._block_size:
            self.is_expressible &= event.window is STATE  # what is inside a published block has no place
        is_of_blocks = isinstance(event, EngineStored | EngineRemoved)
        return bool(passed), self._count(event) if is_of_blocks and not passed else None  # type: ignore[arg-type]

    def is_report(self, event: EngineEvent) -> bool:
        """Return whether blocks are reported anew: not computed again, for all groups hold what a hit of them needs."""
        if not isinstance(event, EngineStored) or event.parent_block_hash is not None:
            return False
        if event.tier is not Tier.GPU or not (event.is_report or self._has_full_reports):
            return False
        for group, rule in enumerate(self.rules, -1):
            names = event.block_hashes[rule.stride - 1 :: rule.stride]
            if not self._holder.are_held(group, names[-max(0, rule.num_needed - rule.num_ahead) :]):
                return False
        return True

    def resume(self, state: FilterState, others: Mapping[int, GroupRule]) -> None:
        self._filter.resume(state)
        self.others.update(others)
        self.show()

    def show(self) -> None:
        """Let the holder know which groups there are, if that has changed."""
        published = published_rule(self._filter.state.window, self._block_size, self._num_ahead)
        rules = [published, *self.others.values()]
        if rules != self.rules:
            self.rules = rules
            self._holder.set_groups(rules[0], rules[1:])

    def _count(self, event: EngineStored | EngineRemoved) -> int | None:
        """Count an event of one of the other groups; return which that is, None if it is none of them."""
        key = group_key(event.group, event.window)
        if isinstance(event, EngineStored) and key is not None and event.window is not UNKNOWN:
            state, known = self._filter.state, self.others.get(key)
            # Larger blocks than it is known by may have been published in its place.
            is_larger = known and event.window is not STATE and event.block_size > known.stride * self._block_size
            if (known is None or is_larger) and group_key(state.group, state.window) != key:
                self._add(key, event.window, event.block_size)
                self.show()
        group = self._number_of(key)
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
            self._add(key, before.window, self._block_size)
            group = self._number_of(key)
            counted += [] if group is None else [(name, group, 1) for name in names]
        self._holder.count_again(counted)

    def _add(self, key: int, window: Window, block_size: int) -> None:
        """Take note of a group, by its key, if what it holds can be accounted for."""
        rule = rule_of(window, block_size, self._block_size, self._num_ahead)
        if rule is None or len(self.others) == MAX_GROUPS or len({*self.others.values(), rule}) > MAX_KINDS:
            self.is_expressible = False
        else:
            self.others[key] = rule

    def _number_of(self, key: int | None) -> int | None:
        return [*self.others].index(key) if key in self.others else None


def group_key(group: int | None, window: Window | None) -> int | None:
    """Return what stands for a group: its number, else, as of TensorRT-LLM's, its window, made negative."""
    return group if group is not None else -window if isinstance(window, int) else None


def rule_of(window: Window, block_size: int, published_size: int, num_ahead: int = 0) -> GroupRule | None:
    """Return what a group must hold, None where its blocks have no place; of smaller ones, the last stands for all.

    A state is one of the published block that ends there: vLLM may keep some within the group's own, larger blocks.
    """
    size, smaller = max(block_size, published_size), min(block_size, published_size)
    if smaller <= 0 or size % smaller or block_size > published_size * MAX_STRIDE:
        return None
    if window is STATE:
        return GroupRule(1)
    num_needed = MAX_NEEDED
    if isinstance(window, int):  # its next token looks back on them
        num_needed = -(-(-(-(window - 1) // block_size) * block_size) // size)
    return GroupRule(min(num_needed + num_ahead, MAX_NEEDED), size // published_size, num_ahead)


def published_rule(window: Window | None, block_size: int, num_ahead: int = 0) -> GroupRule:
    if window is None or window is FULL:
        return GroupRule(0, 1, num_ahead)
    return rule_of(window, block_size, block_size, num_ahead) or GroupRule(0)
