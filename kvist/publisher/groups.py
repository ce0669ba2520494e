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
from kvist.events.engine_events import STATE, UnsizedWindow
from kvist.events.types import MAX_KINDS, MAX_NEEDED, MAX_STRIDE, GroupRule, Tier
from kvist.publisher.filter import FilterState, PassedEvent, WindowFilter

MAX_GROUPS, MAX_COUNTED = 32, 1 << 22
STATE_RULE = GroupRule(1)
"""A group of states must hold the last one."""


class GroupHolder(Protocol):
    """Records which blocks a rank's published group and its other groups hold.

    A group may hold a block before the published one does, and after it: the block counts while both hold it.
    """

    @property
    def counts_copies(self) -> bool:
        """Return whether a block that is stored again has one more copy."""

    @property
    def trusts_stores(self) -> bool:
        """Return whether the blocks of a store are certainly held, rather than perhaps only reported once more."""

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


class SmallBlocks:
    """The blocks of a group that are smaller than the published ones: it holds one of those if it holds all within it.

    A published block has the name of the last block within it, and the others are found by what stores say comes before
    each. So *whole* is every name that is held together with those before it, as many as a published block has.
    """

    def __init__(self, window: int | UnsizedWindow, block_size: int, published_size: int) -> None:
        self.block_size, self.num_within = block_size, published_size // block_size
        self._num_needed = -(-(window - 1) // block_size) if isinstance(window, int) else MAX_NEEDED * self.num_within
        self.is_exact = self._num_needed % self.num_within == 0
        """Whether the group needs whole published blocks, and all of its own could be recorded in their places."""
        self._copies: dict[EngineHash, int] = {}
        self._before: dict[EngineHash, EngineHash] = {}
        self._behind: dict[EngineHash, set[EngineHash]] = {}

    def store(self, event: EngineStored, holder: GroupHolder) -> list[EngineHash]:
        """Record the blocks of a store, or one more copy of each; return the names that are whole now."""
        # A store that skips blocks has the tokens of the whole span: which block is where cannot be told.
        has_gaps = len(event.token_ids) != len(event.block_hashes) * self.block_size + event.is_eagle
        self.is_exact &= not has_gaps
        before, whole = None if has_gaps else event.parent_block_hash, list[EngineHash]()
        num_left_out = 0 if holder.trusts_stores else max(0, len(event.block_hashes) - self._num_needed)
        for idx, name in enumerate(event.block_hashes):
            if name is not None and idx >= num_left_out:
                whole += self._store(name, before, holder.counts_copies)
            before = None if has_gaps else name
        return whole

    def remove(self, names: Iterable[EngineHash], holder: GroupHolder) -> list[EngineHash]:
        """Record that blocks are held no more, or one copy less of each; return the names that are whole no more."""
        broken = list[EngineHash]()
        for name in names:
            num_copies = self._copies.get(name, 0)
            if num_copies > 1 and holder.counts_copies:
                self._copies[name] = num_copies - 1
            elif num_copies:
                broken += self._whole_from(name)
                del self._copies[name]
                self._unlink(name)
        return broken

    def whole(self) -> list[EngineHash]:
        return [*filter(self._is_whole, self._copies)]

    def clear(self) -> None:
        self._copies.clear()
        self._before.clear()
        self._behind.clear()

    def _store(self, name: EngineHash, before: EngineHash | None, counts_copies: bool) -> list[EngineHash]:
        num_copies, was_whole = self._copies.get(name, 0), self._whole_from(name)
        if not num_copies and len(self._copies) >= MAX_COUNTED:
            self.is_exact = False
            return []
        self._copies[name] = num_copies + 1 if counts_copies else 1
        if before is not None and self._before.get(name) != before:
            self._unlink(name)
            self._before[name] = before
            self._behind.setdefault(before, set()).add(name)
        return [each for each in self._whole_from(name) if each not in was_whole]

    def _unlink(self, name: EngineHash) -> None:
        before = self._before.pop(name, None)
        if before is not None:
            self._behind[before].discard(name)
            if not self._behind[before]:
                del self._behind[before]

    def _whole_from(self, name: EngineHash) -> list[EngineHash]:
        """Return which names are whole of those that need this one."""
        names = last = [name]
        for _ in range(self.num_within - 1):
            last = [behind for each in last for behind in self._behind.get(each, ())]
            names = names + last
        return [*filter(self._is_whole, names)]

    def _is_whole(self, name: EngineHash | None) -> bool:
        for _ in range(self.num_within):
            if name is None or name not in self._copies:
                return False
            name = self._before.get(name)
        return True


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
        self.small: dict[int, SmallBlocks] = {}
        """Those of the groups, by `group_key`, whose blocks are smaller than the published ones. Not to be resumed."""
        self._is_expressible = True
        # Whether the published group has blocks of the published size, and others within those; and another has states.
        self._has_whole = self._has_parts = self._has_states = False
        self.rules: list[GroupRule] = []
        """What the published group must hold, then each of the others."""
        self._update_rules()

    @property
    def is_expressible(self) -> bool:
        """Return whether the rules say exactly what all groups must hold."""
        # vLLM keeps parts of a full-attention group's blocks in any hybrid model, but only states let a hit end there.
        has_odd_hits = self._has_parts and (self._has_states or not self._has_whole)
        return self._is_expressible and not has_odd_hits and all(small.is_exact for small in self.small.values())

    def has_small_blocks(self, event: EngineStored | EngineRemoved) -> bool:
        """Return whether an event's blocks are, or a removal's may be, smaller than the published ones."""
        if isinstance(event, EngineStored) and event.block_size < self._block_size:
            return True
        return group_key(event.group, event.window) in self.small

    def admit(self, event: EngineEvent, publish: Callable[[PassedEvent], object]) -> tuple[bool, int | None]:
        """Process one event; return whether it was published, or else which of the other groups it is of, if any."""
        before = self._filter.state
        if isinstance(event, EngineRemoved) and event.group in self.other_rules and event.group != before.group:
            self._filter.num_filtered += 1
            return False, self._count(event, is_published=False)  # the filter passes it while nothing is published
        passed = self._filter.admit(event)
        if any(isinstance(each, EngineCleared) and each is not event for each in passed):
            self._switch_group(before, passed, publish)
        else:
            for each in passed:
                publish(each)
        if self._filter.state != before:
            self._update_rules()
        if isinstance(event, EngineStored | EngineRemoved):
            return bool(passed), self._count(event, is_published=bool(passed))
        for small in self.small.values() if isinstance(event, EngineCleared) else ():
            small.clear()
        return bool(passed), None

    def is_report(self, event: EngineEvent) -> bool:
        """Return whether a store only reports blocks once more: all groups hold what a hit of them needs."""
        if not isinstance(event, EngineStored) or event.parent_block_hash is not None:
            return False
        if event.tier is not Tier.GPU or not (event.is_report or self._has_full_reports):
            return False
        small = self.small.get(group_key(event.group, event.window) or 0)
        published = (
            event.block_hashes if small is None else event.block_hashes[small.num_within - 1 :: small.num_within]
        )
        for group, rule in enumerate(self.rules, -1):
            names = published[rule.stride - 1 :: rule.stride]
            num_needed = len(names) if rule.num_needed == 0 and group < 0 else rule.num_needed - rule.num_ahead
            needed = names[max(0, len(names) - num_needed) :]
            if not self._holder.are_held(group, [name for name in needed if name is not None]):
                return False
        return True

    def resume(self, state: FilterState, others: Mapping[int, GroupRule], *, is_expressible: bool = True) -> None:
        self._filter.state = state
        self._is_expressible = is_expressible
        self._has_states = STATE_RULE in others.values()  # as far as rules tell
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

    def _count(self, event: EngineStored | EngineRemoved, *, is_published: bool) -> int | None:
        """Record an event unless it is of the published group; return which of the others it is of, None for none."""
        self._has_states |= event.window is STATE
        key = group_key(event.group, event.window)
        names: Sequence[EngineHash | None] = event.block_hashes
        is_on_gpu = event.tier in (Tier.GPU, None)
        small = self._small_of(key, event, is_published=is_published) if is_on_gpu else None
        if small is not None and isinstance(event, EngineStored):
            names = small.store(event, self._holder)
        elif small is not None and isinstance(event, EngineRemoved):
            names = small.remove(event.block_hashes, self._holder)
        if is_published:
            if isinstance(event, EngineStored):
                self._has_whole |= event.block_size == self._block_size
                self._has_parts |= event.block_size < self._block_size and is_on_gpu
            return None
        if isinstance(event, EngineStored) and key is not None and event.window is not UNKNOWN:
            state, known = self._filter.state, self.other_rules.get(key)
            # The group turns out to have larger blocks than its rule says.
            is_larger = known and event.window is not STATE and event.block_size > known.stride * self._block_size
            if (known is None or is_larger) and group_key(state.group, state.window) != key:
                self._add(key, event.window, event.block_size)
                self._update_rules()
        group = self._number_of(key)
        if group is None or not is_on_gpu:
            return group
        change: Callable[[int, Sequence[Any]], None] = self._holder.remove_from_group
        if isinstance(event, EngineStored):
            change = self._holder.store_in_group
        for some in [names] if small is None else [[name] for name in names]:  # each is certain by itself
            change(group, some)
        return group

    def _small_of(
        self, key: int | None, event: EngineStored | EngineRemoved, *, is_published: bool
    ) -> SmallBlocks | None:
        """Return the blocks of a group that has smaller ones than the published group, None for any other.

        The only group so far may be such a one, too: it is published until one with a larger window shows.
        """
        small = None if key is None else self.small.get(key)
        if isinstance(event, EngineRemoved) or event.window is STATE:
            return small
        size, published_size = event.block_size, self._block_size
        if is_published and event.window is FULL:
            return None
        if small is not None or size >= published_size:
            self._is_expressible &= small is None or small.block_size == size
            return small
        is_unfit = size < 1 or published_size % size or published_size > size * MAX_STRIDE
        is_unfit = is_unfit or event.window is UNKNOWN or bool(self._num_ahead)
        if key is None or key in self.other_rules or is_unfit or len(self.small) == MAX_GROUPS:
            self._is_expressible = False
            return None
        return self.small.setdefault(key, SmallBlocks(event.window, size, published_size))

    def _switch_group(
        self, before: FilterState, passed: Iterable[PassedEvent], publish: Callable[[PassedEvent], object]
    ) -> None:
        """Publish a group with a larger window; record the blocks that were published before as another group's."""
        key = group_key(before.group, before.window)
        small = None if key is None else self.small.get(key)
        names = self._holder.engine_hashes() if small is None else small.whole()
        counts = self._holder.group_counts()
        for each in passed:
            publish(each)
        if key is not None and before.window is not None:
            self._add(key, before.window, self._block_size if small is None else small.block_size)
            group = self._number_of(key)
            counts += [] if group is None else [(name, group, 1) for name in names]
        self._holder.restore_group_counts(counts)

    def _add(self, key: int, window: Window, block_size: int) -> None:
        rule = rule_of(window, block_size, self._block_size, self._num_ahead)
        if rule is None or len(self.other_rules) == MAX_GROUPS or len({*self.other_rules.values(), rule}) > MAX_KINDS:
            self._is_expressible = False
        else:
            self.other_rules[key] = rule

    def _number_of(self, key: int | None) -> int | None:
        return [*self.other_rules].index(key) if key in self.other_rules else None


def group_key(group: int | None, window: Window | None) -> int | None:
    """Return a key for a group: its number, or its negative window for TensorRT-LLM's groups, which have no number."""
    return group if group is not None else -window if isinstance(window, int) else None


def rule_of(window: Window, block_size: int, published_size: int, num_ahead: int = 0) -> GroupRule | None:
    """Return what a group must hold for a hit, None if its blocks do not line up with the published ones.

    Of several blocks within a published one it must hold all, see `SmallBlocks`. A state belongs to the published block
    that ends where it was taken: vLLM may keep some within the group's own, larger blocks.
    """
    size, smaller = max(block_size, published_size), min(block_size, published_size)
    if smaller <= 0 or size % smaller or block_size > published_size * MAX_STRIDE:
        return None
    if window is STATE:
        return STATE_RULE
    num_needed = MAX_NEEDED
    if isinstance(window, int):  # its next token looks back on them
        num_needed = -(-(-(-(window - 1) // block_size) * block_size) // size)
    return GroupRule(min(num_needed + num_ahead, MAX_NEEDED), size // published_size, num_ahead)
