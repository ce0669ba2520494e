"""What one rank of an engine holds: nearly all of it is in the index already, and only its names are kept beside it.

A *regular* block is held under one engine hash, which names nothing else: a compiled map leads from the hash to the
block's row, and the row says in which tiers. What is not regular lives in a `Residency`: blocks of an adapter or with a
salt, blocks with several engine hashes, hashes that name several blocks. In the map their hashes are only marked.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvist.events import Event, Removed, Stored, Tier, WorkerRank
from kvist.events.dialects.batch import fold_hash
from kvist.events.engine_events import EngineHash
from kvist.events.types import GroupRule
from kvist.indexer.engine_map import COPY, GROUPS, CopyCounts, EngineMap, Names
from kvist.publisher.groups import GroupAccount
from kvist.publisher.holdings import NO_SCOPE, Held, Released, Scope
from kvist.publisher.residency import Residency
from kvist.radix import RadixIndex

_LOOKED_AT = 2
"""Accounts that are looked through for each irregular block."""
_MAX_COPIES = 1 << 32
"""Believed of a hash that a dump tells of: more than any engine has blocks."""


class EngineResidency:
    """Implements `kvist.publisher.residency.Holdings` on an index, to which it applies each change at once.

    A block that the index has evicted is not held any more.
    """

    def __init__(self, index: RadixIndex, source: WorkerRank, apply: Callable[[Iterable[Event]], None]) -> None:
        """Hold the blocks of `source` in `index`, which `apply` applies events of that source to."""
        self._index = index
        self._source = source
        self._apply = apply
        self.map = EngineMap(index)
        self.copies = CopyCounts()
        """Of regular blocks; those of irregular ones are counted with them."""
        self._irregular = Residency()
        # Blocks in it that a regular hash holds, too: which hash that is shows when it turns up.
        self._shared: set[int] = set()
        # Each name in it with its block, to be looked through for what the index has evicted.
        self._accounts: deque[tuple[EngineHash, int]] = deque()
        self.num_done_before = 0
        """With so many hashes of what is held or released next compiled code is done: it is no copy, nor gone again."""
        self.counts_copies = False
        """Whether an engine hash that is stored again has one more copy; not of what the index has evicted from."""
        self._clearing: int | None = None
        self._rules: list[GroupRule] = []
        self.groups = GroupAccount(self.copies, self._find_on_gpu, self._hold_kind, self._release_kind, GROUPS)
        """What the rank's other groups hold."""

    @property
    def slot(self) -> int:
        """Return the slot that stands for the rank in the index."""
        slot = self._index.slot_of(self._source)
        if slot is None:
            self._apply((Removed(b""),))  # which gives it one
            slot = self._index.slot_of(self._source)
            assert slot is not None
        self.map.slot = slot
        clearing = self._index.clearing_of(self._source)
        if clearing != self._clearing:
            self._clearing = clearing
            if self._rules:
                self._index.set_groups(self._source, self._rules)
        return slot

    @property
    def believes_all(self) -> bool:
        """Whether all that is stored is there, rather than perhaps reported by an engine that was asked."""
        return self.counts_copies

    @property
    def companion_slot(self) -> int:
        """Return the slot that stands for the rank's other groups, -1 without any."""
        slot = self._index.slot_of(self._source.companion) if self.groups.kinds else None
        return -1 if slot is None else slot

    def set_groups(self, published: GroupRule, others: Sequence[GroupRule]) -> None:
        """Have hits need what the published group and each of the others hold; what is counted of these stays so."""
        self.groups.set_rules(others)
        self._rules = [published, *self.groups.kinds] if others or published != GroupRule(0) else []
        self._index.clear(*self._source.companion)
        if self._rules:
            self._index.set_groups(self._source, self._rules)
        for name in {name for name, _, _ in self.counted()}:
            self.groups.on_published(name)

    def counted(self) -> list[tuple[int, int, int]]:
        """Return what is counted of the other groups: engine hashes, groups, numbers of copies."""
        told = self.copies.told().tolist()
        return [(name, place - GROUPS, number) for name, place, number in told if place >= GROUPS]

    def count_again(self, counted: Iterable[tuple[int, int, int]]) -> None:
        """Count what `counted` returned, of blocks that are not published now."""
        for name, group, number in counted:
            self.copies.add(name, GROUPS + group, number)

    def engine_hashes(self) -> list[int]:
        """Return the engine hashes of what is published on the GPU."""
        regular = [name for names in self.map.names(self.slot) for name in names.engine_hashes.tolist()]
        names = [*regular, *(name for name in self._irregular.names(Tier.GPU) if isinstance(name, int))]
        return [name for name in names if self._find_on_gpu(name) is not None]

    def _find_on_gpu(self, name: int) -> int | None:
        if self.map.is_irregular(name):
            return self._irregular.names(Tier.GPU).get(name)
        block_hash = self.map.block_of(name, self.slot)
        return block_hash if block_hash is not None and self._tiers(block_hash) & 1 else None

    def _hold_kind(self, kind: int, block_hash: int) -> None:
        self._index.store(self._source.companion, Tier(kind), None, np.array((block_hash,), np.uint64))

    def _release_kind(self, kind: int, block_hashes: Sequence[int]) -> None:
        self._index.remove(self._source.companion, Tier(kind), np.array(block_hashes, np.uint64))

    @property
    def num_blocks(self) -> int:
        """Return how many (block, tier) pairs are held."""
        return self._index.digest(self._source).num_blocks

    @property
    def digest(self) -> int:
        """Return the digest of everything held."""
        return self._index.digest(self._source).digest

    def find(self, engine_hash: EngineHash) -> int | None:
        """Return the canonical block that the engine calls this, in the fastest tier that holds it."""
        name = fold_hash(engine_hash)
        return self._irregular.find(name) if self.map.is_irregular(name) else self.map.block_of(name, self.slot)

    def holds(self, block_hash: int) -> bool:
        """Return whether any tier holds the block."""
        return self._tiers(block_hash) != 0

    def parent(self, block_hash: int) -> int | None:
        """Return the block before an irregular one; None for a regular one, whose place the index knows itself."""
        return self._irregular.parent(block_hash) if self._irregular.holds(block_hash) else None

    def scope(self, block_hash: int) -> Scope:
        """Return the scope that a held block was stored with."""
        return self._irregular.scope(block_hash)

    def hold(
        self,
        engine_hashes: Sequence[EngineHash],
        block_hashes: Sequence[int],
        parent: int | None,
        tier: Tier,
        scope: Scope = NO_SCOPE,
    ) -> Held:
        """Hold a chain of blocks behind `parent` in a tier; an engine hash names what it was last stored for."""
        held, first_idx = Held([], []), self.num_done_before
        self.num_done_before = 0
        counts_copies = self._is_counting()
        for idx, (engine_hash, block_hash) in enumerate(zip(engine_hashes, block_hashes, strict=True)):
            name = fold_hash(engine_hash)
            if scope == NO_SCOPE and self._is_regular(name, block_hash):
                is_new = self._store(block_hash, parent, tier)
                if is_new:
                    self.copies.drop_all(name, tier)
                elif counts_copies and idx >= first_idx:
                    self.copies.add(name, tier, 1)
                if self.map.can_name(block_hash):
                    self.map.put(name, block_hash)
                else:
                    self.map.mark(name)
                    self._account(name, block_hash, parent, tier)
            else:
                self._forget_evicted()
                displaced = self._hold_irregular(name, block_hash, parent, tier, scope)
                held.displaced.extend(displaced)
                is_new = self._store(block_hash, parent, tier)
            if is_new:
                held.new_idxs.append(idx)
            if tier is Tier.GPU:
                self.groups.on_published(name)
            parent = block_hash
        return held

    def release(self, engine_hashes: Sequence[EngineHash], tier: Tier) -> Released:
        """Take the engine's hashes, or one copy of each that has more, out of a tier, in any order."""
        released, counts_copies = Released([], []), self._is_counting()
        first_idx, self.num_done_before = self.num_done_before, 0
        for engine_hash in engine_hashes[first_idx:]:
            name = fold_hash(engine_hash)
            if not self.map.is_irregular(name) and self.map.block_of(name, self.slot) in self._shared:
                self._make_irregular(name)
            if self.map.is_irregular(name):
                block_hashes, not_found = self._irregular.release((name,), tier)
                if self._irregular.find(name) is None:
                    self.map.drop(name)
            elif self.copies.of(name, tier) and counts_copies:
                self.copies.add(name, tier, -1)
                continue
            else:
                self.copies.drop_all(name, tier)
                block_hashes = self._release_regular(name, tier)
                not_found = [] if block_hashes else [name]
            self._remove(block_hashes, tier)
            released.block_hashes.extend(block_hashes)
            released.not_found.extend(engine_hash for _ in not_found)
        return released

    @property
    def is_told_by_names(self) -> bool:
        """Return whether `names` tells of all blocks; O(irregular ones)."""
        return not self._shared and len(self._plain_names()) == len(self._irregular.places)

    def names(self) -> Iterator[Names]:
        """Yield the engine hashes of all regular blocks, some at a time, and of those that are not so by chance alone.

        In another index, whose keys are others, they may be regular. Blocks that have other names beside are left out.
        """
        shared = np.array([*self._shared], np.uint64)
        for names in self.map.names(self.slot):
            is_sole = ~np.isin(names.blocks, shared)
            yield Names(names.engine_hashes[is_sole], names.blocks[is_sole])
        plain = self._plain_names()
        yield Names(np.array([*plain.values()], np.uint64), np.array([*plain], np.uint64))

    def _plain_names(self) -> dict[int, int]:
        """Return the engine hash of each irregular block without a scope that has one, which names nothing else."""
        pairs = {pair for tier in Tier for pair in self._irregular.names(tier).items()}
        num_blocks, num_names = Counter(name for name, _ in pairs), Counter(block_hash for _, block_hash in pairs)
        return {
            block_hash: name
            for name, block_hash in pairs
            if isinstance(name, int)
            and num_blocks[name] == num_names[block_hash] == 1
            and block_hash not in self._irregular.scopes
            and block_hash not in self._shared
        }

    def told_copies(self) -> bytes:
        """Return what engine hashes have more copies than one: each, its tier, and how many more, as u64."""
        irregular = [(name, tier, num) for (name, tier), num in self._irregular.copies.items() if isinstance(name, int)]
        told = np.concatenate((self.copies.told(), np.array(irregular, np.uint64).reshape(-1, 3)))
        return told.astype("<u8", copy=False).tobytes()

    def resume_copies(self, told: bytes) -> None:
        """Count copies of blocks that `resume` is to account for."""
        for name, tier, num_copies in np.frombuffer(told[: len(told) // 24 * 24], "<u8").reshape(-1, 3).tolist():
            self.copies.add(name, tier % COPY, min(num_copies, _MAX_COPIES))

    def resume(self, names: Names) -> None:
        """Account for blocks that the index has already, put there by another way than `hold`."""
        for position in self.map.put_all(names, self.slot).tolist():
            name, block_hash = int(names.engine_hashes[position]), int(names.blocks[position])
            self.map.mark(name)
            for tier in self._tiers_of(block_hash):
                self._account(name, block_hash, None, tier)
                self._account_copies(name, tier)
        if self.groups.kinds:
            for name in names.engine_hashes.tolist():
                self.groups.on_published(name)

    def clear(self) -> None:
        """Hold nothing."""
        self._index.clear(*self._source)
        self._index.clear(*self._source.companion)
        self.map.clear()
        self._irregular.clear()
        self._shared.clear()
        self._accounts.clear()
        self.copies.clear()

    def _is_counting(self) -> bool:
        self._irregular.counts_copies = self.counts_copies and not self._index.evicted_from(self._source)
        return self._irregular.counts_copies

    def _account_copies(self, name: int, tier: Tier) -> None:
        """Count copies of a hash where it is accounted for from now on."""
        if num_copies := self.copies.of(name, tier):
            self.copies.drop_all(name, tier)
            self._irregular.add_copies(name, tier, num_copies)

    def _is_regular(self, name: int, block_hash: int) -> bool:
        return not self._irregular.holds(block_hash) and self.map.is_regular(name, block_hash, self.slot)

    def _hold_irregular(self, name: int, block_hash: int, parent: int | None, tier: Tier, scope: Scope) -> list[int]:
        """Hold a block under a hash, of which one is not regular or is not from here on; return what the hash left."""
        self._make_irregular(name)
        if not self._irregular.holds(block_hash):
            for held_tier in self._tiers_of(block_hash):
                self._account(_unknown_name(block_hash), block_hash, None, held_tier)
                self._shared.add(block_hash)
        if block_hash in self._shared:
            self.map.mark_row(block_hash)
        displaced = self._account(name, block_hash, parent, tier, scope).displaced
        self._remove(displaced, tier)
        return displaced

    def _account(
        self, name: EngineHash, block_hash: int, parent: int | None, tier: Tier, scope: Scope = NO_SCOPE
    ) -> Held:
        if all(self._irregular.names(each).get(name) != block_hash for each in Tier):
            self._accounts.append((name, block_hash))
        return self._irregular.hold((name,), (block_hash,), parent, tier, scope)

    def _forget_evicted(self) -> None:
        """Look at two accounts, in turn, and forget what the index has evicted: garbage is never most of them."""
        for _ in range(min(_LOOKED_AT, len(self._accounts))):
            name, block_hash = account = self._accounts.popleft()
            if not any(self._irregular.names(tier).get(name) == block_hash for tier in Tier):
                continue  # released, or stored for another block since
            if self._tiers(block_hash):
                self._accounts.append(account)
                continue
            for tier in Tier:
                for each in (name, _unknown_name(block_hash)):
                    if self._irregular.names(tier).get(each) == block_hash:
                        self._irregular.release((each,), tier)
            self._shared.discard(block_hash)
            if isinstance(name, int) and self._irregular.find(name) is None:
                self.map.drop(name)

    def _make_irregular(self, name: int) -> None:
        """Keep account of a hash here from now on, with the block that it names, if any."""
        if self.map.is_irregular(name):
            return
        block_hash = self.map.block_of(name, self.slot)
        self.map.mark(name)
        if block_hash is None:
            return
        for tier in self._tiers_of(block_hash):
            if block_hash in self._shared and self._irregular.release((_unknown_name(block_hash),), tier).not_found:
                continue  # in this tier others hold it
            self._account(name, block_hash, None, tier)
            self._account_copies(name, tier)
        self._shared.discard(block_hash)

    def _release_regular(self, name: int, tier: Tier) -> list[int]:
        block_hash = self.map.block_of(name, self.slot)
        tiers = 0 if block_hash is None else self._tiers(block_hash)
        if tiers in (0, 1 << tier):
            self.map.drop(name)
        return [block_hash] if block_hash is not None and tiers >> tier & 1 else []

    def _tiers(self, block_hash: int) -> int:
        return self.map.tiers(block_hash, self.slot)

    def _tiers_of(self, block_hash: int) -> list[Tier]:
        tiers = self._tiers(block_hash)
        return [tier for tier in Tier if tiers >> tier & 1]

    def _store(self, block_hash: int, parent: int | None, tier: Tier) -> bool:
        """Hold a block in the index; return whether it was not held in this tier before."""
        if self._tiers(block_hash) >> tier & 1:
            return False
        self._apply((Stored(_packed((block_hash,)), parent, tier),))
        return True

    def _remove(self, block_hashes: Sequence[int], tier: Tier) -> None:
        if block_hashes:
            self._apply((Removed(_packed(block_hashes), tier),))
        if block_hashes and tier is Tier.GPU:
            self.groups.on_withdrawn(block_hashes)


def _unknown_name(block_hash: int) -> bytes:
    """Return what stands for the regular hash of a block until that turns up; hashes themselves are integers here."""
    return block_hash.to_bytes(8, "little")


def _packed(block_hashes: Sequence[int]) -> bytes:
    return array("Q", block_hashes).tobytes()
