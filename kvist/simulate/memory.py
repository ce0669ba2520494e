"""What a simulated worker caches: a pool of blocks for each group of layers, by the rules of `kvist.kvcache`.

What running requests need is pinned. The rest is evicted least recently used first, to the host's tier where there is
one, which evicts by the same rule. A block that is needed again comes back: it is in one tier at a time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvist.errors import InvalidValueError
from kvist.events import FULL, Tier
from kvist.events.engine_events import KnownWindow
from kvist.kvcache import KvDtype, KvGroup, LayerKv, peak_num_blocks, plan_windows, split_memory
from kvist.kvcache.stale import num_stale_blocks, reusable_prefix

MAX_STEP_TOKENS = 2048
MAX_RUNNING = 256
NUM_LAYERS = 100
"""Of a simulated model, so that shares of them are exact to a hundredth."""

EventCallback = Callable[[float, int, Tier, Sequence[Hashable], bool], None]
"""Called with the time, the group, the tier, some blocks, and whether the group now holds them there, or no longer."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How workers keep what they cache, beside how many tokens that is of a model whose layers all see everything."""

    window: KnownWindow = FULL
    """How far back some layers see, which are this `share` of all."""
    share: float = 0.0
    host_tokens: int = 0

    def groups(self, longest: int) -> tuple[KvGroup, ...]:
        """Return the layers that share a pool, the widest window first, where prompts and answers are so long."""
        full, sliding = (LayerKv(window, 1, 1, KvDtype.FLOAT16) for window in (FULL, self.window))
        num_sliding = round(NUM_LAYERS * self.share)
        return plan_windows([full] * (NUM_LAYERS - num_sliding) + [sliding] * num_sliding, longest).groups

    def pools(
        self, cache_tokens: int, block_size: int, longest: int, on_event: EventCallback = lambda *_: None
    ) -> list[Pool]:
        """Return empty pools for so many tokens; raises InvalidValueError where the longest request does not fit."""
        groups, room = self.groups(longest), cache_tokens // block_size * block_size
        if room == 0:
            raise InvalidValueError("cache_tokens", cache_tokens, f"room for a block of {block_size} tokens")
        memory_bytes = cache_tokens * sum(group.token_bytes for group in groups)
        limits = {
            "max_model_len": min(max(longest, block_size), room),
            "max_num_seqs": MAX_RUNNING,
            "max_step_tokens": MAX_STEP_TOKENS,
        }
        on_gpu = split_memory(groups, block_size, memory_bytes, **limits, policy="bounded")
        scale = self.host_tokens / cache_tokens
        return [
            Pool(group, block_size, num_blocks, int(num_blocks * scale), on_event)
            for group, num_blocks in zip(groups, on_gpu, strict=True)
        ]


PLAIN_MEMORY = Memory()


class Hold(NamedTuple):
    """What a running request has of a pool: blocks that others can find, and how many that they cannot."""

    blocks: Sequence[Hashable] = ()
    num_own: int = 0


class Pool:
    """One group's blocks at one worker."""

    def __init__(
        self, group: KvGroup, block_size: int, num_blocks: int, num_on_host: int, on_event: EventCallback
    ) -> None:
        """Begin empty, with room for so many blocks in each tier."""
        self.num_blocks, self.num_on_host = num_blocks, num_on_host
        self.num_own = 0
        self.pinned = Counter[Hashable]()
        self.idle, self.host = OrderedDict[Hashable, None](), OrderedDict[Hashable, None]()
        self.group, self._block_size, self._on_event = group, block_size, on_event

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block that a query behind so many tokens sees."""
        return num_stale_blocks(num_tokens, self.group.window, self._block_size)

    def plan_hold(self, blocks: Sequence[Hashable], num_tokens: int, longest: int, step_tokens: int) -> Hold:
        """Return what a request needs with its first `num_tokens` computed, until its steps make it `longest`."""
        held = blocks[self.first_needed(num_tokens) : num_tokens // self._block_size]
        peak = peak_num_blocks(self.group, self._block_size, longest, step_tokens)
        return Hold(held, max(0, peak - len(held)))

    def has_room(self, hold: Hold) -> bool:
        num_new = sum(1 for block in hold.blocks if block not in self.pinned)
        return len(self.pinned) + num_new + self.num_own + hold.num_own <= self.num_blocks

    def replace_hold(self, before: Hold, after: Hold, now_s: float) -> None:
        """Pin what a request holds now, and release what else it held; of that the last block is evicted first."""
        kept = len(before.blocks) if after.blocks[: len(before.blocks)] == before.blocks else 0
        acquired, released = after.blocks[kept:], before.blocks[kept:]
        self._store([block for block in acquired if block not in self.pinned and block not in self.idle], now_s)
        self.pinned.update(acquired)
        for block in acquired:
            self.idle.pop(block, None)
        self.pinned.subtract(released)
        for block in reversed(released):
            if not self.pinned[block]:
                del self.pinned[block]
                self.idle[block] = None
        self.num_own += after.num_own - before.num_own

    def cache(self, blocks: Sequence[Hashable], now_s: float) -> None:
        """Cache blocks that no running request needs, as used just now; the last is evicted last."""
        unpinned = [block for block in blocks if block not in self.pinned]
        self._store([block for block in unpinned if block not in self.idle], now_s)
        for block in unpinned:
            self.idle[block] = None
            self.idle.move_to_end(block)

    def cache_answer(self, prompt: Sequence[Hashable], answer: Sequence[Hashable], now_s: float) -> None:
        """Cache the blocks that an answer filled: those the next query cannot see are evicted first, then the last."""
        first = max(0, self.first_needed((len(prompt) + len(answer)) * self._block_size) - len(prompt))
        self.cache([*answer[:first], *reversed(answer[first:])], now_s)

    def evict(self, now_s: float) -> None:
        num_over = len(self.pinned) + len(self.idle) + self.num_own - self.num_blocks
        evicted = [self.idle.popitem(last=False)[0] for _ in range(min(num_over, len(self.idle)))]
        self._report(now_s, Tier.GPU, evicted, False)
        if self.num_on_host:
            self.host.update(dict.fromkeys(evicted))
            self._report(now_s, Tier.HOST, evicted, True)
            forgotten = [self.host.popitem(last=False)[0] for _ in range(len(self.host) - self.num_on_host)]
            self._report(now_s, Tier.HOST, forgotten, False)

    def _store(self, blocks: Sequence[Hashable], now_s: float) -> None:
        """Report blocks as new on the GPU, and remove them from the host's tier."""
        self._report(now_s, Tier.GPU, blocks, True)
        fetched = [block for block in blocks if block in self.host]
        for block in fetched:
            del self.host[block]
        self._report(now_s, Tier.HOST, fetched, False)

    def _report(self, now_s: float, tier: Tier, blocks: Sequence[Hashable], is_stored: bool) -> None:
        if blocks:
            self._on_event(now_s, self.group.group_id, tier, blocks, is_stored)


def find_prefix(pools: Sequence[Pool], blocks: Sequence[Hashable], num_tokens: int, block_size: int) -> tuple[int, int]:
    """Return how many leading tokens of a prompt all pools can serve, on the GPU and with the host's tier.

    The block with the last token is computed in any case.
    """
    usable = min(len(blocks), max(0, num_tokens - 1) // block_size)
    on_gpu, in_any_tier = (
        [(pool.group.window, (pool.pinned, pool.idle, pool.host)[:num]) for pool in pools] for num in (2, 3)
    )
    num_on_gpu = num_leading_blocks(blocks[:usable], block_size, on_gpu)
    num = num_leading_blocks(blocks[:usable], block_size, in_any_tier) if pools[0].num_on_host else num_on_gpu
    return num_on_gpu * block_size, num * block_size


def num_leading_blocks(
    blocks: Sequence[Hashable], block_size: int, groups: Sequence[tuple[KnownWindow, Sequence[Container[Hashable]]]]
) -> int:
    """Return how many leading blocks all groups can serve; a group is its window and the caches with its blocks."""

    def has_block(caches: Sequence[Container[Hashable]], ordinal: int) -> bool:
        block = blocks[ordinal]
        for cache in caches:  # noqa: SIM110 - a generator takes twice as long
            if block in cache:
                return True
        return False

    lookups = [(window, partial(has_block, caches)) for window, caches in groups]
    return reusable_prefix(len(blocks), block_size, lookups)
