"""Random lives of many sequences against an oracle that remembers what every slot of every block contains."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.events import FULL, Window
from kvist.kvcache import BlockHashChain, KvCacheManager, KvGroup, LayerKv, SequenceBlocks, stale_range

B = 4
WINDOWS: tuple[Window, ...] = (FULL, 9, 3)
NUM_BLOCKS = (14, 11, 9)
PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(0, 6))


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
    tokens: list[int]
    chain: BlockHashChain
    blocks: SequenceBlocks
    computed: int


class KvCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        groups = [KvGroup(i, LayerKv(window, 1, 8), (i,)) for i, window in enumerate(WINDOWS)]
        self.sink = Sink()
        self.manager = KvCacheManager(groups, NUM_BLOCKS, B, self.sink)
        self.content: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in groups]
        self.lives: list[Life] = []

    @rule(data=st.data(), prompts=st.lists(PROMPTS, max_size=3), chunk=st.integers(1, 12), is_failing=st.booleans())
    def step(self, data: st.DataObject, prompts: list[tuple[int, int, int]], chunk: int, is_failing: bool) -> None:
        """Grow some sequences, admit others, then compute all of it, or fail."""
        growing = data.draw(st.lists(st.sampled_from(self.lives), unique=True)) if self.lives else []
        batch = [(life, end) for life in growing if (end := self.grow(life, chunk)) is not None]
        batch += [
            (life, end) for prompt in prompts if (life := self.admit(prompt, chunk)) for end in [life.blocks.num_tokens]
        ]
        if is_failing and batch:
            for life, _ in batch:
                self.lives.remove(life)
                self.manager.close(life.blocks)
            self.manager.revoke()
            return
        for life, end in batch:
            self.write(life, end)
        for life, end in batch:
            self.assert_window_readable(life, end)
            life.computed = end
        self.manager.settle()

    def grow(self, life: Life, count: int) -> int | None:
        if life.computed == len(life.tokens):
            life.tokens.append(len(life.tokens) % 2)
        end = min(len(life.tokens), life.computed + count)
        return end if self.manager.grow(life.blocks, life.tokens, end) else None

    def admit(self, prompt: tuple[int, int, int], chunk: int) -> Life | None:
        stem, length, tail = prompt
        tokens = [1000 * stem + i for i in range(length)] + [50 + i for i in range(tail)]
        chain = BlockHashChain(B)
        hit = self.manager.match(chain, tokens)
        assert hit.num_tokens == self.longest_prefix(chain, len(tokens))
        free = [pool.num_free for pool in self.manager.pools]
        blocks = self.manager.open(hit, chain, tokens, min(len(tokens), hit.num_tokens + chunk))
        if blocks is None:
            assert free == [pool.num_free for pool in self.manager.pools]
            return None
        life = Life(tokens, chain, blocks, hit.num_tokens)
        self.lives.append(life)
        return life

    def write(self, life: Life, end: int) -> None:
        """Store in each slot the whole prefix its key depends on, but never into another's block."""
        for table, content in zip(life.blocks.tables, self.content, strict=True):
            for position in range(life.computed, end):
                slot = (table.block_ids[position // B], position % B)
                assert slot[0] >= 0
                if position // B not in table.adopted:
                    content[slot] = tuple(life.tokens[: position + 1])

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
                all(d in pool for d in chain.digests[stale_range(num_blocks * B, window, B).end : num_blocks])
                for pool, window in zip(self.manager.pools, WINDOWS, strict=True)
            ):
                return num_blocks * B
        raise AssertionError("length 0 needs nothing")

    def assert_window_readable(self, life: Life, end: int) -> None:
        """Assert that every key the step's queries may read is the one of this very prefix."""
        for table, content, window in zip(life.blocks.tables, self.content, WINDOWS, strict=True):
            first = max(0, life.computed + 1 - window) if isinstance(window, int) else 0
            for position in range(first, end):
                slot = (table.block_ids[position // B], position % B)
                assert content[slot] == tuple(life.tokens[: position + 1])

    @invariant()
    def memory_is_consistent(self) -> None:
        self.manager.check_invariants(life.blocks for life in self.lives)
        for pool in self.manager.pools:
            assert self.sink.held[pool.group.group_id] == pool.cached_hashes()

    def teardown(self) -> None:
        for life in self.lives:
            self.manager.close(life.blocks)
        assert all(pool.num_free == pool.num_blocks for pool in self.manager.pools)


TestKvCacheMachine = KvCacheMachine.TestCase
TestKvCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
