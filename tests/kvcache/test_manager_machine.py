"""Random lives of many sequences against an oracle that remembers what every place of every page contains."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from memory_invariants import check_memory

from kvist.events import FULL, Window
from kvist.kvcache import (
    BlockHashChain,
    BlockTable,
    KvCacheManager,
    KvDtype,
    KvGroup,
    LayerKv,
    ScratchPolicy,
    SequenceBlocks,
    num_stale_blocks,
)
from kvist.kvcache.sequences import event_hash

B = 4
WINDOWS: tuple[Window, ...] = (FULL, 9, 3)
NUM_LAYERS = (1, 3, 2)
NUM_BLOCKS = (14, 11, 9)
PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(0, 6), st.booleans())


class Sink:
    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {}

    def created(self, *, group: int, **_: object) -> None:
        self.held[group] = set()

    def stored(self, block_hashes: list[int], token_ids: list[int], *, group: int, **facts: object) -> None:
        assert not self.held[group] & set(block_hashes)
        assert len(token_ids) == B * len(block_hashes)
        parent = facts["parent_block_hash"]
        assert group != 0 or parent is None or parent in self.held[group]
        self.held[group] |= set(block_hashes)

    def removed(self, block_hashes: list[int], *, group: int, **_: object) -> None:
        assert self.held[group] >= set(block_hashes)
        self.held[group] -= set(block_hashes)

    def cleared(self, **_: object) -> None:
        self.held = {group: set() for group in self.held}


@dataclass(eq=False)
class Life:
    prompt: list[int]
    tokens: list[int]
    chain: BlockHashChain
    blocks: SequenceBlocks
    computed: int


class KvCacheMachine(RuleBasedStateMachine):
    policy: ScratchPolicy | None = None

    def __init__(self) -> None:
        super().__init__()
        groups = [
            KvGroup(i, LayerKv(window, 1, 8, KvDtype.FLOAT32), tuple(range(10 * i, 10 * i + num_layers)))
            for i, (window, num_layers) in enumerate(zip(WINDOWS, NUM_LAYERS, strict=True))
        ]
        self.sink = Sink()
        self.manager = KvCacheManager(groups, NUM_BLOCKS, B, self.sink, scratch=self.policy)
        self.content: list[dict[tuple[int, int], object]] = [{} for _ in groups]
        self.prefix_ids: dict[tuple[int, int], int] = {}
        self.promised: dict[bytes, list[int]] = {}
        self.lives: list[Life] = []
        self.reserved: list[Life] = []

    @rule(
        data=st.data(),
        prompts=st.lists(PROMPTS, max_size=3),
        chunk=st.integers(1, 18),
        num_guesses=st.integers(0, 4),
        is_failing=st.booleans(),
    )
    def step(
        self,
        data: st.DataObject,
        prompts: list[tuple[int, int, int, bool]],
        chunk: int,
        num_guesses: int,
        is_failing: bool,
    ) -> None:
        """Grow some sequences, admit others, then compute all of it, or fail; then take some guesses back."""
        growing = data.draw(st.lists(st.sampled_from(self.lives), unique=True)) if self.lives else []
        batch = [life for life in growing if self.grow(life, chunk, num_guesses)]
        batch += [life for prompt in prompts if (life := self.admit(prompt, chunk))]
        if is_failing and batch:
            for life in batch:
                self.lives.remove(life)
                self.manager.close(life.blocks)
            self.manager.revoke()
            return
        self.compute(batch)
        self.manager.settle()
        for life in batch:
            life.computed = life.blocks.num_tokens
            if data.draw(st.booleans()):
                self.rewind(life, data.draw(st.integers(life.blocks.num_final_tokens, life.blocks.num_tokens)))

    def grow(self, life: Life, chunk: int, num_guesses: int) -> bool:
        if life.computed == len(life.tokens):
            life.tokens += [len(life.tokens) % 2 + i for i in range(1 + num_guesses)]
        before = self.state_of(life)
        if self.manager.grow(life.blocks, life.tokens, min(len(life.tokens), life.computed + chunk)):
            return True
        assert before == self.state_of(life)
        return False

    def state_of(self, life: Life) -> object:
        """Return what a call that fails must leave alone."""
        tables = [(bytes(table.block_ids), table.first_held, table.scratch) for table in life.blocks.tables]
        return tables, life.blocks.num_tokens, self.manager.statistics()

    def admit(self, prompt: tuple[int, int, int, bool], chunk: int) -> Life | None:
        stem, length, tail, is_scratch_allowed = prompt
        tokens = [1000 * stem + i for i in range(length)] + [50 + i for i in range(tail)]
        chain = BlockHashChain(B)
        hit = self.manager.match(chain, tokens)
        assert hit.num_tokens == self.longest_prefix(chain, len(tokens))
        before = self.manager.statistics()
        end = min(len(tokens), hit.num_tokens + chunk)
        is_scratch_allowed = is_scratch_allowed and self.policy is not None
        blocks = self.manager.open(hit, chain, tokens, end, is_scratch_allowed=is_scratch_allowed)
        if blocks is None:
            assert before == self.manager.statistics()
            return None
        life = Life(tokens.copy(), tokens, chain, blocks, hit.num_tokens)
        self.lives.append(life)
        return life

    def compute(self, batch: list[Life]) -> None:
        """Let one layer after the other write all its keys and read those that its queries may see."""
        for life in batch:
            self.note_promises(life)
        for group_id, num_layers in enumerate(NUM_LAYERS):
            for layer in range(num_layers):
                written: set[tuple[int, int]] = set()
                for life in batch:
                    self.write(life, group_id, layer, written)
                for life in batch:
                    self.read(life, group_id, layer)

    def note_promises(self, life: Life) -> None:
        """Remember what a block with each digest of this sequence must hold."""
        chain = BlockHashChain(B)
        chain.extend(life.tokens)
        for ordinal, digest in enumerate(chain.digests):
            if digest not in self.promised:
                positions = range(ordinal * B, (ordinal + 1) * B)
                self.promised[digest] = [self.prefix_id(life, position) for position in positions]

    def write(self, life: Life, group_id: int, layer: int, written: set[tuple[int, int]]) -> None:
        """Store in each place the layer and the whole prefix its key depends on, but never into another's block."""
        table = life.blocks.tables[group_id]
        for position in range(life.computed, life.blocks.num_tokens):
            if position // B in table.adopted:
                continue
            place = self.place(table, group_id, layer, position)
            assert place not in written, "two keys of a layer meet"
            written.add(place)
            self.content[group_id][place] = (layer, self.prefix_id(life, position))

    def read(self, life: Life, group_id: int, layer: int) -> None:
        """Assert that every key the step's queries may read is the one of this very layer and prefix."""
        window = WINDOWS[group_id]
        first = max(0, life.computed + 1 - window) if isinstance(window, int) else 0
        for position in range(first, life.blocks.num_tokens):
            place = self.place(life.blocks.tables[group_id], group_id, layer, position)
            assert self.content[group_id][place] == (layer, self.prefix_id(life, position))

    def place(self, table: BlockTable, group_id: int, layer: int, position: int) -> tuple[int, int]:
        ordinal = position // B
        slot_id = table.block_ids[ordinal]
        num_layers, scratch = NUM_LAYERS[group_id], table.scratch
        page = slot_id * num_layers + layer
        if scratch is not None and ordinal in scratch.block_range:
            page = int(scratch.pages(num_layers)[layer, ordinal - scratch.block_range.start])
        assert 0 <= page < NUM_BLOCKS[group_id] * num_layers
        return page, position % B

    def prefix_id(self, life: Life, position: int) -> int:
        """Return a number for the tokens up to `position`; equal only for equal tokens."""
        prefix = 0
        for token_id in life.tokens[: position + 1]:
            prefix = self.prefix_ids.setdefault((prefix, token_id), len(self.prefix_ids) + 1)
        return prefix

    def rewind(self, life: Life, num_tokens: int) -> None:
        """Take back what was computed past `num_tokens`; of a prompt it is computed again, guesses are others then."""
        self.manager.rewind(life.blocks, num_tokens)
        life.computed = num_tokens
        del life.tokens[max(num_tokens, len(life.prompt)) :]

    @rule(prompt=PROMPTS)
    def reserve(self, prompt: tuple[int, int, int, bool]) -> None:
        """Make room for a prompt that is computed elsewhere; nothing of it can be found yet."""
        stem, length, tail, _ = prompt
        tokens = [1000 * stem + i for i in range(length)] + [50 + i for i in range(tail)]
        chain = BlockHashChain(B)
        hit = self.manager.match(chain, tokens, is_next_known=True)
        assert len(chain.digests) == len(tokens) // B
        assert hit.num_tokens <= len(tokens)
        before = self.manager.statistics()
        blocks = self.manager.reserve(hit, chain, tokens, len(tokens))
        after = self.manager.statistics()
        if blocks is None:
            assert before == after
            return
        for pool_before, pool_after in zip(before.pools, after.pools, strict=True):
            assert pool_after.num_cached <= pool_before.num_cached, "reserved blocks can be found"
        for table, window in zip(blocks.tables, WINDOWS, strict=True):
            assert table.first_held == num_stale_blocks(len(tokens), window, B)
            assert len(table.held()) == len(table.block_ids) - table.first_held
            assert (table.first_held + len(table.adopted)) * B >= min(hit.num_tokens, table.first_held * B)
        self.reserved.append(Life(tokens.copy(), tokens, chain, blocks, hit.num_tokens))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        """Write what the hit lacks, as another worker would, and let it be read like any other sequence."""
        life = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(life)
        self.note_promises(life)
        for group_id, num_layers in enumerate(NUM_LAYERS):
            table = life.blocks.tables[group_id]
            for layer in range(num_layers):
                for position in range((table.first_held + len(table.adopted)) * B, len(life.tokens)):
                    place = self.place(table, group_id, layer, position)
                    self.content[group_id][place] = (layer, self.prefix_id(life, position))
        self.manager.accept(life.blocks, life.tokens)
        life.computed = len(life.tokens)
        self.lives.append(life)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Close what was never filled: nothing of it becomes known, whatever was written to it."""
        life = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(life)
        before = [dict(pool._cached) for pool in self.manager.pools]
        self.manager.close(life.blocks)
        assert before == [pool._cached for pool in self.manager.pools]

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(self.lives))
        self.lives.remove(life)
        self.manager.close(life.blocks)

    @rule()
    def flush(self) -> None:
        self.manager.flush()

    def longest_prefix(self, chain: BlockHashChain, num_tokens: int) -> int:
        """Try every length, longest first."""
        for num_blocks in range((num_tokens - 1) // B, -1, -1):
            if all(
                all(d in pool for d in chain.digests[num_stale_blocks(num_blocks * B, window, B) : num_blocks])
                for pool, window in zip(self.manager.pools, WINDOWS, strict=True)
            ):
                return num_blocks * B
        raise AssertionError("length 0 needs nothing")

    @invariant()
    def memory_is_consistent(self) -> None:
        check_memory(self.manager, [life.blocks for life in self.lives + self.reserved])
        for pool, statistics in zip(self.manager.pools, self.manager.statistics().pools, strict=True):
            assert self.sink.held[pool.group.group_id] == {event_hash(digest) for digest in pool._cached}
            assert statistics.num_scratch == 0

    @invariant()
    def every_block_that_can_be_found_holds_what_its_digest_says(self) -> None:
        for pool, num_layers, content in zip(self.manager.pools, NUM_LAYERS, self.content, strict=True):
            for digest, promised in self.promised.items():
                for block_id in pool.find_all([digest] if digest in pool else []):
                    for layer in range(num_layers):
                        page = block_id * num_layers + layer
                        assert [content[page, i] for i in range(B)] == [(layer, prefix_id) for prefix_id in promised]

    def teardown(self) -> None:
        for life in self.lives + self.reserved:
            self.manager.close(life.blocks)
        assert all(pool.num_free == pool.num_blocks for pool in self.manager.pools)


class ScratchMachine(KvCacheMachine):
    policy = ScratchPolicy()


class RewindMachine(KvCacheMachine):
    policy = ScratchPolicy(max_rewind_tokens=3)


TestKvCacheMachine = KvCacheMachine.TestCase
TestScratchMachine = ScratchMachine.TestCase
TestRewindMachine = RewindMachine.TestCase
LENGTH = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestKvCacheMachine.settings = TestScratchMachine.settings = TestRewindMachine.settings = LENGTH
