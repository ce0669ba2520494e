"""A rank's other layer groups, beside the published one: what each must hold for the engine to have a hit.

A hit ends at a multiple of all groups' block sizes. Up to there full-attention groups must hold all blocks, a sliding
group those of its window, which the next token looks back on, and a group of states the last one (vLLM 0.33.0
`v1/core/kv_cache_coordinator.py`, `HybridKVCacheCoordinator`). Groups with the same rule form one *kind*, which holds
a block if all of them do.
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
    """Records which blocks a rank's published group and its other groups hold.

    A group may hold a block before the published one does, and after it: the block counts while both hold it.
    """

    def set_groups(self, published: GroupRule, others: Sequence[GroupRule]) -> None:
        """Set the rules of the published group and of the others; the blocks that these hold stay recorded."""

    def store_in_group(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> None:
        """Record that a group holds blocks, or one more copy of each.

        Where the engine may only report what it holds once more, only the last blocks are recorded.
        """

    def remove_from_group(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        """Record that a group holds blocks no more, or one copy less of each."""

    def are_held(self, group: int, engine_hashes: Sequence[EngineHash]) -> bool:
        """Return whether a group, -1 for the published one, holds all these blocks."""

    def group_counts(self) -> list[tuple[Any, int, int]]:
        """Return what the other groups hold: engine hashes, groups, numbers of copies."""

    def restore_group_counts(self, counts: Iterable[tuple[Any, int, int]]) -> None:
        """Record what `group_counts` returned, of blocks that are not published now."""

    def engine_hashes(self) -> list[Any]:
        """Return the engine hashes of the blocks that are published on the GPU."""


class GroupSplitter:
    """Passes on the published group's events, as the window filter does, and gives those of the others to the holder.

    The others are numbered in the order they first appear. When a group with a larger window takes over, the blocks
    that were published before become another group's. `num_ahead` blocks behind a hit the engine must hold as well.
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
        self.other_rules: dict[int, GroupRule] = {}
        """What each of the other groups must hold, by `group_key`."""
        self.is_expressible = True
        """Whether the rules say exactly what all groups must hold."""
        self.rules: list[GroupRule] = []
        """What the published group must hold, then each of the others."""
        self._update_rules()

    def admit(self, event: EngineEvent, publish: Callable[[PassedEvent], object]) -> tuple[bool, int | None]:
        """Process one event; return whether it was published, or else which of the other groups it is of, if any."""
        before = self._filter.state
        if isinstance(event, EngineRemoved) and event.group in self.other_rules and event.group != before.group:
            self._filter.num_filtered += 1
            return False, self._count(event)  # the filter would pass it while nothing is published
        passed = self._filter.admit(event)
        if any(isinstance(each, EngineCleared) and each is not event for each in passed):
            self._switch_group(before, passed, publish)
        else:
            for each in passed:
                publish(each)
        if self._filter.state != before:
            self._update_rules()
        if isinstance(event, EngineStored) and event.tier is Tier.GPU and event.block_size < self._block_size:
            self.is_expressible &= event.window is STATE  # no rule can name what lies inside a published block
        is_of_blocks = isinstance(event, EngineStored | EngineRemoved)
        return bool(passed), self._count(event) if is_of_blocks and not passed else None  # type: ignore[arg-type]

    def is_report(self, event: EngineEvent) -> bool:
        """Return whether a store only reports blocks once more: all groups hold what a hit of them needs."""
        if not isinstance(event, EngineStored) or event.parent_block_hash is not None:
            return False
        if event.tier is not Tier.GPU or not (event.is_report or self._has_full_reports):
            return False
        for group, rule in enumerate(self.rules, -1):
            names = event.block_hashes[rule.stride - 1 :: rule.stride]
            num_needed = len(names) if rule.num_needed == 0 and group < 0 else rule.num_needed - rule.num_ahead
            needed = names[max(0, len(names) - num_needed) :]
            if not self._holder.are_held(group, [name for name in needed if name is not None]):
                return False
        return True

    def resume(self, state: FilterState, others: Mapping[int, GroupRule]) -> None:
        self._filter.resume(state)
        self.other_rules.update(others)
        self._update_rules()

    def _update_rules(self) -> None:
        """Give the holder the rules of all groups, if they have changed."""
        window = self._filter.state.window
        published = GroupRule(0, 1, self._num_ahead)
        if window is not None and window is not FULL:
            published = rule_of(window, self._block_size, self._block_size, self._num_ahead) or GroupRule(0)
        rules = [published, *self.other_rules.values()]
        if rules != self.rules:
            self.rules = rules
            self._holder.set_groups(rules[0], rules[1:])

    def _count(self, event: EngineStored | EngineRemoved) -> int | None:
        """Record an event of one of the other groups; return which group that is, None if it is none of them."""
        key = group_key(event.group, event.window)
        if isinstance(event, EngineStored) and key is not None and event.window is not UNKNOWN:
            state, known = self._filter.state, self.other_rules.get(key)
            # The group turns out to have larger blocks than its rule says.
            is_larger = known and event.window is not STATE and event.block_size > known.stride * self._block_size
            if (known is None or is_larger) and group_key(state.group, state.window) != key:
                self._add(key, event.window, event.block_size)
                self._update_rules()
        group = self._number_of(key)
        if group is None or event.tier not in (Tier.GPU, None):
            return group
        if isinstance(event, EngineStored):
            self._holder.store_in_group(group, event.block_hashes)
        else:
            self._holder.remove_from_group(group, event.block_hashes)
        return group

    def _switch_group(
        self, before: FilterState, passed: Iterable[PassedEvent], publish: Callable[[PassedEvent], object]
    ) -> None:
        """Publish a group with a larger window; record the blocks that were published before as another group's."""
        counts, names = self._holder.group_counts(), self._holder.engine_hashes()
        for each in passed:
            publish(each)
        key = group_key(before.group, before.window)
        if key is not None and before.window is not None:
            self._add(key, before.window, self._block_size)
            group = self._number_of(key)
            counts += [] if group is None else [(name, group, 1) for name in names]
        self._holder.restore_group_counts(counts)

    def _add(self, key: int, window: Window, block_size: int) -> None:
        """Add a group by its key, if a rule can say what it must hold."""
        rule = rule_of(window, block_size, self._block_size, self._num_ahead)
        if rule is None or len(self.other_rules) == MAX_GROUPS or len({*self.other_rules.values(), rule}) > MAX_KINDS:
            self.is_expressible = False
        else:
            self.other_rules[key] = rule

    def _number_of(self, key: int | None) -> int | None:
        return [*self.other_rules].index(key) if key in self.other_rules else None


def group_key(group: int | None, window: Window | None) -> int | None:
    """Return a key for a group: its number, or its negative window for TensorRT-LLM's groups, which have no number."""
    return group if group is not None else -window if isinstance(window, int) else None


def rule_of(window: Window, block_size: int, published_size: int, num_ahead: int = 0) -> GroupRule | None:
    """Return what a group must hold for a hit, None if its blocks do not line up with the published ones.

    Of several blocks within a published one only the last counts. A state belongs to the published block that ends
    where it was taken: vLLM may keep some within the group's own, larger blocks.
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
