"""A follower of KV events, and short ways to build managers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from memory_invariants import check_memory

from kvist.events import FULL, Window
from kvist.kvcache import BlockHashChain, KvCacheManager, KvDtype, KvGroup, LayerKv
from kvist.kvcache.sequences import event_hash


class EventFollower:
    """Holds per group what the events say is cached, and checks that each event is possible."""

    def __init__(self) -> None:
        self.windows: dict[int, Window] = {}
        self.held: dict[int, dict[int, tuple[int | None, tuple[int, ...]]]] = defaultdict(dict)
        self.removed_hashes: list[tuple[int, int]] = []
        self.num_clears = 0

    def created(self, *, window: Window, group: int | None = None, rank: int = 0) -> None:
        assert group is not None
        assert group not in self.windows
        assert rank == 0
        self.windows[group] = window

    def stored(self, block_hashes: Sequence[int], token_ids: Sequence[int], **facts: Any) -> None:
        held = self.held[facts["group"]]
        assert facts["window"] == self.windows[facts["group"]]
        size = len(token_ids) // len(block_hashes)
        parent = facts["parent_block_hash"]
        if self.windows[facts["group"]] is FULL:
            assert parent is None or parent in held, "a stored block has no parent"
        for i, block_hash in enumerate(block_hashes):
            assert block_hash not in held, "stored twice"
            held[block_hash] = (parent, tuple(token_ids[i * size : (i + 1) * size]))
            parent = block_hash

    def removed(self, block_hashes: Sequence[int], **facts: Any) -> None:
        assert facts["window"] == self.windows[facts["group"]]
        assert block_hashes
        for block_hash in block_hashes:
            del self.held[facts["group"]][block_hash]
            self.removed_hashes.append((facts["group"], block_hash))

    def cleared(self, *, rank: int = 0) -> None:
        assert rank == 0
        self.num_clears += 1
        self.held.clear()

    def assert_equals(self, manager: KvCacheManager) -> None:
        """Assert that following the events gives what the pools hold."""
        for pool in manager.pools:
            assert set(self.held[pool.group.group_id]) == {event_hash(digest) for digest in pool._cached}


@pytest.fixture
def follower() -> EventFollower:
    return EventFollower()


@pytest.fixture
def new_follower() -> Callable[[], EventFollower]:
    return EventFollower


@pytest.fixture
def make_groups() -> Callable[..., tuple[KvGroup, ...]]:
    """Build one single-layer group a window, in the given order."""

    def make(*windows: Window) -> tuple[KvGroup, ...]:
        return tuple(KvGroup(i, LayerKv(window, 1, 8, KvDtype.FLOAT32), (i,)) for i, window in enumerate(windows))

    return make


@pytest.fixture
def run_sequence() -> Callable[..., int | None]:
    """Admit, compute in chunks and close one sequence; return its cached tokens, or None when it did not fit."""

    def run(manager: KvCacheManager, token_ids: list[int], num_decodes: int = 0, chunk: int = 1 << 30) -> int | None:
        chain = BlockHashChain(manager.block_size)
        num_prompt = len(token_ids) - num_decodes
        hit = manager.match(chain, token_ids[:num_prompt])
        computed = min(num_prompt, hit.num_tokens + chunk)
        sequence = manager.open(hit, chain, token_ids, computed)
        if sequence is None:
            return None
        while computed < len(token_ids):
            manager.settle()
            computed = min(num_prompt, computed + chunk) if computed < num_prompt else computed + 1
            assert manager.grow(sequence, token_ids, computed)
            check_memory(manager, [sequence])
        manager.settle()
        manager.close(sequence)
        return hit.num_tokens

    return run
