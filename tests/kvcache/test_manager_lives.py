"""Random lives of a rank's KV memory, as seeds have them: what lies in every place of every page, what is found again,
what events say of it and what is forgotten first are as an oracle in plain Python has them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lives import seeds
from memory_invariants import check_memory

from kvist.events import FULL, Window
from kvist.kvcache import (
    ABSENT,
    BlockHashChain,
    BlockTable,
    KvCacheManager,
    KvDtype,
    KvGroup,
    LayerKv,
    PrefixHit,
    ScratchPolicy,
    SequenceBlocks,
)
from kvist.kvcache.sequences import event_hash

LIVES = seeds(30)
NUM_ACTS = 100

Scope: TypeAlias = tuple[str | None, str | None]  # adapter and salt
B = 4
GROUPS: list[tuple[tuple[Window, int, int], ...]] = [  # window, layers and blocks of each
    ((FULL, 1, 14), (9, 3, 11), (3, 2, 9)),
    ((9, 3, 12), (FULL, 2, 16)),
    ((FULL, 2, 12),),
    ((1, 2, 13), (6, 4, 12)),
]
POLICIES = (None, ScratchPolicy(), ScratchPolicy(max_rewind_tokens=3))
SCOPES: list[Scope] = [(None, None), (None, "salt"), ("adapter", None)]
REACHED = (
    *("open", "no room to open", "hit", "grow", "no room to grow", "adopted", "evicted", "window slid", "scratch"),
    *("rewind", "failed step", "reserve", "accept", "give up", "keep", "keep whole", "keep cached", "flush"),
)

Name: TypeAlias = tuple[int | None, tuple[int, ...], str | None, str | None]
"""A block as events tell it: its parent, its tokens, and what it is salted with."""


@dataclass
class Replayed:
    """What whoever hears the events knows: the hash of each block that was ever told of, and those held, a group."""

    hashes: dict[Name, int] = field(default_factory=dict)
    held: dict[int, dict[int, int | None]] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    removed_of: dict[int, list[int]] = field(default_factory=dict)

    def created(self, *, window: Window, group: int) -> None:
        self.held[group], self.windows[group], self.removed_of[group] = {}, window, []

    def stored(self, block_hashes: list[int], token_ids: list[int], *, group: int, **facts: Any) -> None:
        parent, held = facts["parent_block_hash"], self.held[group]
        assert len(token_ids) == B * len(block_hashes) > 0
        assert facts["window"] == self.windows[group]
        for idx, block_hash in enumerate(block_hashes):
            name = (parent, tuple(token_ids[idx * B : (idx + 1) * B]), facts["lora_name"], facts["cache_salt"])
            assert self.hashes.setdefault(name, block_hash) == block_hash
            assert block_hash not in held, "stored twice"
            held[block_hash] = parent
            parent = block_hash
        self.check_parents(group)

    def removed(self, block_hashes: list[int], *, group: int, window: Window) -> None:
        assert block_hashes
        assert window == self.windows[group]
        for block_hash in block_hashes:
            del self.held[group][block_hash]
        self.removed_of[group] += block_hashes
        self.check_parents(group)

    def cleared(self) -> None:
        for group, held in self.held.items():
            self.removed_of[group] += held
            held.clear()

    def check_parents(self, group: int) -> None:
        """Assert that of what sees everything, a block is held no longer than what is before it."""
        if self.windows[group] is FULL:
            parents = set(self.held[group].values()) - {None}
            assert parents <= self.held[group].keys(), "a block is held without its parent"

    def reusable(self, token_ids: list[int], chain: BlockHashChain, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens all groups can serve together: the longest that can be."""
        hashes = [event_hash(digest) for digest in chain.digests[: num_tokens // B]]
        for ordinal, block_hash in enumerate(hashes):
            block = tuple(token_ids[ordinal * B : (ordinal + 1) * B])
            name = (hashes[ordinal - 1] if ordinal else None, block, chain.lora_name, chain.cache_salt)
            is_held = any(block_hash in held for held in self.held.values())
            assert self.hashes.get(name, None if is_held else block_hash) == block_hash, "told of as another block"
        for count in range(len(hashes), 0, -1):
            if all(
                held.keys() >= set(hashes[num_unseen(count * B, self.windows[group]) : count])
                for group, held in self.held.items()
            ):
                return count * B
        return 0


def num_unseen(history: int, window: Window) -> int:
    """Return how many first blocks a query at position `history` does not see, nor any later one."""
    oldest_seen = history - window + 1 if isinstance(window, int) else 0
    return max(0, oldest_seen) // B


@dataclass(eq=False)
class Sequence:
    """A sequence: its tokens, a number for each that stands for all of them up to it, and what it holds."""

    token_ids: list[int]
    num_prompt: int
    scope: Scope
    chain: BlockHashChain
    prefix_ids: list[int] = field(default_factory=list)
    blocks: SequenceBlocks = field(init=False)
    num_computed: int = 0


@dataclass(eq=False)
class Kept:
    """Blocks of a prompt that are held beside those of the sequence that computes it."""

    blocks: SequenceBlocks
    source: Sequence | None
    prefix_ids: list[int]


class Life:
    """Drives a manager and the oracle side by side, as a seed has it."""

    def __init__(self, seed: int, reached: Counter[str]) -> None:
        self.random = rng = random.Random(seed)
        self.reached = reached
        size = rng.choice((1, 1, 2))
        self.shape = [(window, num_layers, size * count) for window, num_layers, count in rng.choice(GROUPS)]
        self.policy = rng.choice(POLICIES)
        self.has_prefix_cache = rng.random() < 0.9
        groups = [
            KvGroup(idx, LayerKv(window, 1, 8, KvDtype.FLOAT32), tuple(range(10 * idx, 10 * idx + num_layers)))
            for idx, (window, num_layers, _) in enumerate(self.shape)
        ]
        self.events = Replayed()
        sink: Any = self.events
        counts = [count for _, _, count in self.shape]
        self.manager = KvCacheManager(groups, counts, B, sink, self.has_prefix_cache, self.policy)
        self.content: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in groups]
        self.numbers: dict[tuple[Any, int], int] = {}
        self.promised: dict[bytes, list[int]] = {}
        self.freed_at: list[dict[bytes, int]] = [{} for _ in groups]
        self.texts: list[tuple[list[int], Scope]] = [([], SCOPES[0])]
        self.running: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.kept: list[Kept] = []
        self.num_acts = self.num_queried = self.num_hits = 0
        self.touched: list[set[bytes]] = []
        self.is_revoked = False

    def live(self) -> None:
        acts = {
            self.step: 30,
            self.reserve: 8,
            self.accept: 8,
            self.give_up: 1,
            self.keep: 8,
            self.keep_more: 14,
            self.keep_what_is_cached: 2,
            self.keep_no_more: 6,
            self.close: 18,
            self.flush: 1,
        }
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_ACTS):
            self.act(act)
        for sequence in [*self.running, *self.reserved]:
            self.manager.close(sequence.blocks)
        for kept in self.kept:
            self.manager.close(kept.blocks)
        assert all(pool.num_free == pool.num_blocks for pool in self.manager.pools)
        for token_ids, scope in self.texts:
            self.find([*token_ids, 0], scope)
        self.manager.flush()
        assert not any(self.events.held.values())

    def act(self, act: Callable[[], None]) -> None:
        self.num_acts += 1
        is_forgetting = act == self.flush
        was_free = [self.free_digests(group_id) for group_id in range(len(self.shape))]
        self.touched = [set() for _ in self.shape]
        num_removed = [len(removed) for removed in self.events.removed_of.values()]
        self.is_revoked = False
        act()
        self.check_memory()
        for group_id, before in enumerate(was_free):
            removed = set(self.events.removed_of[group_id][num_removed[group_id] :])
            self.check_order(group_id, before, removed, is_forgetting or self.is_revoked)
            self.reached["evicted"] += bool(removed)

    # --- What is done -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Grow some sequences, admit others, then compute all of it, or fail; then take some guesses back."""
        rng, manager = self.random, self.manager
        growing = rng.sample(self.running, rng.randint(0, len(self.running)))
        batch = [sequence for sequence in growing if self.grow(sequence)]
        for _ in range(rng.choice((0, 1, 1, 2))):
            sequence = self.make_prompt()
            for _ in range(rng.choice((1, 1, 1, 3))):  # choices of one prompt
                twin = self.make_sequence(sequence.token_ids.copy(), sequence.scope)
                if self.admit(twin):
                    batch.append(twin)
        if batch and rng.random() < 0.05:
            self.reached["failed step"] += 1
            self.is_revoked = True
            for sequence in batch:
                self.running.remove(sequence)
                manager.close(sequence.blocks)
            manager.revoke()
            return
        self.compute(batch)
        num_scratch = sum(pool.num_scratch for pool in manager.statistics().pools)
        assert num_scratch == sum(
            len(table.scratch.slot_ids)
            for sequence in batch
            for table in sequence.blocks.tables
            if table.scratch is not None
        )
        self.reached["scratch"] += bool(num_scratch)
        manager.settle()
        for sequence in batch:
            sequence.num_computed = sequence.blocks.num_tokens
            for table, (window, _, _) in zip(sequence.blocks.tables, self.shape, strict=True):
                assert table.first_held == num_unseen(sequence.blocks.num_final_tokens, window)
                self.reached["window slid"] += table.first_held > 0
            if rng.random() < 0.4:
                self.rewind(sequence)

    def grow(self, sequence: Sequence) -> bool:
        rng = self.random
        if sequence.num_computed == len(sequence.token_ids):
            self.extend(sequence, [rng.randrange(2) for _ in range(rng.choice((1, 1, 1, 2, 5)))])
        end = min(len(sequence.token_ids), sequence.num_computed + rng.randint(1, 18))
        needed = self.needed(sequence.num_computed, end, sequence.blocks.is_scratch_allowed)
        before = self.state()
        self.reached["grow"] += 1
        if self.manager.grow(sequence.blocks, sequence.token_ids, end):
            assert self.has_room(needed, before)
            self.check_evicted(needed, before)
            self.note(sequence)
            return True
        assert self.state() == before
        assert not self.has_room(needed, before)
        self.reached["no room to grow"] += 1
        return False

    def admit(self, sequence: Sequence) -> bool:
        rng, token_ids = self.random, sequence.token_ids
        hit = self.find(token_ids, sequence.scope, sequence.chain)
        end = min(len(token_ids), hit.num_tokens + rng.randint(1, 24))
        is_scratch_allowed = self.policy is not None and rng.random() < 0.8
        needed = self.needed(hit.num_tokens, end, is_scratch_allowed)
        before = self.state()
        blocks = self.manager.open(hit, sequence.chain, token_ids, end, is_scratch_allowed=is_scratch_allowed)
        assert (blocks is not None) == self.has_room(needed, before, hit.block_ids)
        if blocks is None:
            assert self.state() == before
            self.reached["no room to open"] += 1
            return False
        self.check_evicted(needed, before)
        self.reached["open"] += 1
        self.reached["hit"] += hit.num_tokens > 0
        self.num_queried += len(token_ids)
        self.num_hits += hit.num_tokens
        sequence.blocks, sequence.num_computed = blocks, hit.num_tokens
        self.running.append(sequence)
        self.note(sequence)
        return True

    def rewind(self, sequence: Sequence) -> None:
        """Take back what was computed beyond some token; of a prompt it is computed again, guesses are others then."""
        blocks = sequence.blocks
        num_tokens = self.random.randint(blocks.num_final_tokens, blocks.num_tokens)
        self.reached["rewind"] += num_tokens < blocks.num_tokens
        self.manager.rewind(blocks, num_tokens)
        sequence.num_computed = num_tokens
        num_left = max(num_tokens, sequence.num_prompt)
        del sequence.token_ids[num_left:], sequence.prefix_ids[num_left:]

    def reserve(self) -> None:
        """Make room for a prompt that is computed elsewhere; nothing of it can be found yet."""
        sequence = self.make_prompt()
        token_ids, manager = sequence.token_ids, self.manager
        num_tokens = self.random.choice((len(token_ids), self.random.randint(1, len(token_ids))))
        del token_ids[num_tokens:], sequence.prefix_ids[num_tokens:]
        hit = self.find(token_ids, sequence.scope, sequence.chain, is_next_known=True)
        before = self.state()
        blocks = manager.reserve(hit, sequence.chain, token_ids, num_tokens)
        found = self.found_by_each(sequence, num_tokens)
        num_blocks = -(-num_tokens // B)
        unseen = [num_unseen(num_tokens, window) for window, _, _ in self.shape]
        needed = [num_blocks - first - len(ids) for first, ids in zip(unseen, found, strict=True)]
        assert (blocks is not None) == self.has_room(needed, before, found)
        if blocks is None:
            assert self.state() == before
            return
        for table, first, ids in zip(blocks.tables, unseen, found, strict=True):
            assert table.first_held == first
            assert list(table.block_ids[:first]) == [ABSENT] * first
            assert list(table.block_ids[first : first + len(ids)]) == ids
            assert table.adopted == list(range(first, first + len(ids)))
            assert len(table.block_ids) == num_blocks
        self.check_evicted(needed, before)
        self.reached["reserve"] += 1
        sequence.blocks = blocks
        self.reserved.append(sequence)
        self.note(sequence)

    def accept(self) -> None:
        """Write what is missing, as another worker would, and let it be read like any other sequence."""
        if not self.reserved:
            return
        self.reached["accept"] += 1
        sequence = self.reserved.pop(self.random.randrange(len(self.reserved)))
        self.promise(sequence)
        for group_id, (_, num_layers, _) in enumerate(self.shape):
            table = sequence.blocks.tables[group_id]
            for layer in range(num_layers):
                for position in range((table.first_held + len(table.adopted)) * B, len(sequence.token_ids)):
                    place = self.place(table, group_id, layer, position)
                    self.content[group_id][place] = (layer, sequence.prefix_ids[position])
        self.num_queried += sequence.blocks.num_tokens
        self.num_hits += sequence.blocks.num_final_tokens
        self.manager.accept(sequence.blocks, sequence.token_ids)
        sequence.num_computed = sequence.num_prompt = len(sequence.token_ids)
        self.running.append(sequence)
        self.note(sequence)

    def give_up(self) -> None:
        """Close what was never filled: nothing of it becomes known, whatever was written to it."""
        if self.reserved:
            self.reached["give up"] += 1
            sequence = self.reserved.pop(self.random.randrange(len(self.reserved)))
            before = [dict(pool._cached) for pool in self.manager.pools]
            self.manager.close(sequence.blocks)
            assert [pool._cached for pool in self.manager.pools] == before

    def keep(self) -> None:
        """Begin to hold what a sequence computes of its prompt, for whoever fetches it."""
        keeping = {kept.source for kept in self.kept}
        free = [each for each in self.running if each.num_computed <= each.num_prompt and each not in keeping]
        if free:
            source = self.random.choice(free)
            blocks = self.manager.open_empty(source.chain, source.num_prompt)
            self.kept.append(Kept(blocks, source, source.prefix_ids[: source.num_prompt]))

    def keep_more(self) -> None:
        running = [(kept, each) for kept in self.kept for each in self.running if kept.source is each]
        computing = [(kept, each) for kept, each in running if each.num_computed <= each.num_prompt]
        if computing:
            kept, sequence = self.random.choice(computing)
            source = sequence.blocks
            is_whole = source.num_final_tokens >= sequence.num_prompt
            num_blocks = -(-sequence.num_prompt // B) if is_whole else source.num_final_tokens // B
            self.manager.share(kept.blocks, source, num_blocks)
            self.reached["keep"] += 1
            self.reached["keep whole"] += is_whole
            for table in kept.blocks.tables:
                assert len(table.block_ids) == max(table.first_held, num_blocks)
                assert ABSENT not in table.block_ids[table.first_held :]
            self.touch(kept.blocks)
            if is_whole:
                kept.source = None

    def keep_what_is_cached(self) -> None:
        """Hold a prompt's first tokens as far as they are cached: that takes no room."""
        sequence = self.make_prompt()
        hit = self.find(sequence.token_ids, sequence.scope, sequence.chain, is_next_known=True)
        if hit.num_tokens:
            blocks = self.manager.reserve(hit, sequence.chain, sequence.token_ids, hit.num_tokens)
            assert blocks is not None
            self.kept.append(Kept(blocks, None, sequence.prefix_ids[: hit.num_tokens]))
            self.touch(blocks)
            self.reached["keep cached"] += 1

    def keep_no_more(self) -> None:
        if self.kept:
            self.manager.close(self.kept.pop(self.random.randrange(len(self.kept))).blocks)

    def close(self) -> None:
        if self.running:
            sequence = self.running.pop(self.random.randrange(len(self.running)))
            self.manager.close(sequence.blocks)

    def flush(self) -> None:
        self.reached["flush"] += 1
        self.manager.flush()
        for pool in self.manager.pools:
            assert not any(pool.is_free(block_id) for block_id in pool._cached.values())

    # --- What is computed -------------------------------------------------------------------------------------------

    def compute(self, batch: list[Sequence]) -> None:
        """Let one layer after the other write all its keys and read those that its queries may see."""
        for sequence in batch:
            self.promise(sequence)
        for group_id, (_, num_layers, _) in enumerate(self.shape):
            for layer in range(num_layers):
                written: set[tuple[int, int]] = set()
                for sequence in batch:
                    self.write(sequence, group_id, layer, written)
                for sequence in batch:
                    self.read(sequence, group_id, layer)

    def write(self, sequence: Sequence, group_id: int, layer: int, written: set[tuple[int, int]]) -> None:
        """Store in each place the layer and the whole prefix its key depends on, but never into another's block."""
        table = sequence.blocks.tables[group_id]
        for position in range(sequence.num_computed, sequence.blocks.num_tokens):
            if position // B in table.adopted:
                self.reached["adopted"] += 1
                continue
            place = self.place(table, group_id, layer, position)
            assert place not in written, "two keys of a layer meet"
            written.add(place)
            self.content[group_id][place] = (layer, sequence.prefix_ids[position])

    def read(self, sequence: Sequence, group_id: int, layer: int) -> None:
        """Assert that every key the step's queries may read is the one of this very layer and prefix."""
        window = self.shape[group_id][0]
        first = max(0, sequence.num_computed + 1 - window) if isinstance(window, int) else 0
        for position in range(first, sequence.blocks.num_tokens):
            place = self.place(sequence.blocks.tables[group_id], group_id, layer, position)
            assert self.content[group_id][place] == (layer, sequence.prefix_ids[position])

    def place(self, table: BlockTable, group_id: int, layer: int, position: int) -> tuple[int, int]:
        _, num_layers, num_blocks = self.shape[group_id]
        ordinal, scratch = position // B, table.scratch
        page = table.block_ids[ordinal] * num_layers + layer
        if scratch is not None and ordinal in scratch.block_range:
            page = int(scratch.pages(num_layers)[layer, ordinal - scratch.block_range.start])
        assert 0 <= page < num_blocks * num_layers
        return page, position % B

    def promise(self, sequence: Sequence) -> None:
        """Remember what a block with each digest of this sequence must hold."""
        chain = BlockHashChain(B, *sequence.scope)
        chain.extend(sequence.token_ids)
        for ordinal, digest in enumerate(chain.digests):
            self.promised[digest] = sequence.prefix_ids[ordinal * B : (ordinal + 1) * B]

    # --- What the oracle knows --------------------------------------------------------------------------------------

    def find(
        self,
        token_ids: list[int],
        scope: Scope,
        chain: BlockHashChain | None = None,
        *,
        is_next_known: bool = False,
    ) -> PrefixHit:
        """Return what the manager finds, which is what is to be found by the events."""
        chain = chain or BlockHashChain(B, *scope)
        hit = self.manager.match(chain, token_ids, is_next_known=is_next_known)
        num_wanted = len(token_ids) - (not is_next_known) if self.has_prefix_cache else 0
        assert hit.num_tokens == self.events.reusable(token_ids, chain, num_wanted)
        return hit

    def found_by_each(self, sequence: Sequence, num_tokens: int) -> list[list[int]]:
        """Return what each group has of what a query behind the prompt sees, up to the first block that it lacks."""
        found: list[list[int]] = []
        for pool, (window, _, _) in zip(self.manager.pools, self.shape, strict=True):
            found.append([])
            for digest in sequence.chain.digests[num_unseen(num_tokens, window) : num_tokens // B]:
                if digest not in pool._cached:
                    break
                found[-1].append(pool._cached[digest])
        return found

    def needed(self, history: int, end: int, is_scratch_allowed: bool) -> list[int]:
        """Return how many slots a step takes in each group, told block by block."""
        needed = []
        new = range(-(-history // B), -(-end // B))
        for window, num_layers, _ in self.shape:
            num_scratch = 0
            if is_scratch_allowed and self.policy is not None:
                num_gone = num_unseen(max(0, end - self.policy.max_rewind_tokens), window)
                num_scratch = sum(ordinal < num_gone for ordinal in new)
            needed.append(len(new) - num_scratch + -(-num_scratch // num_layers))
        return needed

    def has_room(self, needed: list[int], before: Any, taken: Any = None) -> bool:
        """Return whether so many slots were free in each group beside those that are taken again."""
        taken = taken or [[] for _ in needed]
        free = [set(free) for free, *_ in before]
        return all(count <= len(ids - set(again)) for count, ids, again in zip(needed, free, taken, strict=True))

    def state(self) -> list[Any]:
        """Return what a call that fails must leave alone."""
        return [
            (list(pool._free), dict(pool._cached), bytes(pool._num_references), len(removed), self.manager.statistics())
            for pool, removed in zip(self.manager.pools, self.events.removed_of.values(), strict=True)
        ]

    def free_digests(self, group_id: int) -> set[bytes]:
        pool = self.manager.pools[group_id]
        return {digest for digest, block_id in pool._cached.items() if pool.is_free(block_id)}

    def note(self, sequence: Sequence) -> None:
        self.touch(sequence.blocks)
        self.texts.append((sequence.token_ids.copy(), sequence.scope))

    def touch(self, blocks: SequenceBlocks) -> None:
        """Note what is held now: it is freed anew when it is."""
        for touched, pool, table in zip(self.touched, self.manager.pools, blocks.tables, strict=True):
            touched |= {digest for block_id in table.held() if (digest := pool._digests[block_id]) is not None}

    def check_evicted(self, needed: list[int], before: list[Any]) -> None:
        """Assert that no more was evicted than slots were needed beyond those that were free and empty."""
        if self.policy is None or not self.policy.max_rewind_tokens:  # with which a step may give some back first
            for count, (free, cached, _, num_removed, _), after in zip(needed, before, self.state(), strict=True):
                num_empty = len(set(free) - set(cached.values()))
                assert after[3] - num_removed == max(0, count - num_empty), "evicted while slots were empty"

    def check_order(self, group_id: int, was_free: set[bytes], removed: set[int], is_forgetting: bool) -> None:
        """Assert that what was evicted had been free for at least as long as anything that was not."""
        freed_at, is_free = self.freed_at[group_id], self.free_digests(group_id)
        waited = {digest for digest in was_free & is_free if digest not in self.touched[group_id]}
        if not is_forgetting:
            oldest_left = min((freed_at[digest] for digest in waited), default=self.num_acts)
            for digest in was_free:
                if event_hash(digest) in removed and digest not in self.touched[group_id]:
                    assert freed_at[digest] <= oldest_left, "an older block was left"
        self.freed_at[group_id] = {
            digest: freed_at[digest] if digest in waited else self.num_acts for digest in is_free
        }

    def check_memory(self) -> None:
        sequences = [each.blocks for each in (*self.running, *self.reserved)]
        check_memory(self.manager, sequences, [kept.blocks for kept in self.kept])
        statistics = self.manager.statistics()
        assert (statistics.num_queried_tokens, statistics.num_hit_tokens) == (self.num_queried, self.num_hits)
        for group_id, pool in enumerate(self.manager.pools):
            assert self.events.held[group_id].keys() == {event_hash(digest) for digest in pool._cached}
            for digest, block_id in pool._cached.items():
                self.check_block(group_id, block_id, self.promised[digest])
            for kept in self.kept:
                table = kept.blocks.tables[group_id]
                for ordinal, block_id in enumerate(table.block_ids):
                    if block_id != ABSENT:
                        self.check_block(group_id, block_id, kept.prefix_ids[ordinal * B : (ordinal + 1) * B])

    def check_block(self, group_id: int, block_id: int, prefix_ids: list[int]) -> None:
        """Assert that a block holds these tokens' keys in every layer."""
        num_layers = self.shape[group_id][1]
        for layer in range(num_layers):
            page = block_id * num_layers + layer
            found = [self.content[group_id].get((page, offset)) for offset in range(len(prefix_ids))]
            assert found == [(layer, prefix_id) for prefix_id in prefix_ids]

    # --- What is asked ----------------------------------------------------------------------------------------------

    def make_prompt(self) -> Sequence:
        """Make a prompt that shares the beginning of an earlier text, up to any token."""
        rng = self.random
        stem, scope = rng.choice(self.texts[-40:])
        num_shared = max(rng.randint(0, len(stem)), rng.randint(0, len(stem)))
        token_ids = stem[:num_shared] + [rng.randrange(2) for _ in range(rng.choice((0, 1, 5, 12)))]
        return self.make_sequence(token_ids[:40] or [0], rng.choice((scope, scope, scope, *SCOPES[1:])))

    def make_sequence(self, token_ids: list[int], scope: Scope) -> Sequence:
        sequence = Sequence([], len(token_ids), scope, BlockHashChain(B, *scope))
        self.extend(sequence, token_ids)
        return sequence

    def extend(self, sequence: Sequence, token_ids: list[int]) -> None:
        for token_id in token_ids:
            prefix = sequence.prefix_ids[-1] if sequence.prefix_ids else sequence.scope
            sequence.prefix_ids.append(self.numbers.setdefault((prefix, token_id), len(self.numbers) + 1))
        sequence.token_ids += token_ids


def test_whatever_happens_memory_holds_what_was_computed_and_events_say_what_is_reused() -> None:
    reached: Counter[str] = Counter()
    for seed in LIVES:
        try:
            Life(seed, reached).live()
        except BaseException as error:
            error.add_note(f"life {seed}")
            raise
    assert min(reached[each] for each in REACHED) > len(LIVES) // 4, reached
