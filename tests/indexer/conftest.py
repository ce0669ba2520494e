"""An oracle beside the index: what a publisher was told, as a set, and its digest."""

from __future__ import annotations

import random

import pytest

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import block_digest
from kvist.indexer import Indexer
from kvist.indexer.compilation import compile_all
from kvist.radix import RadixIndex

BLOCK_SIZE = 4


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Services of this process need not wait for their index."""
    compile_all()


class Truth:
    """What one rank holds, told to a sink and kept as a set of (canonical hash, tier)."""

    def __init__(self, sink, rank: int = 0, seed: int = 0) -> None:
        self.sink = sink
        self.rank = rank
        self.held: dict[int, tuple[int, int, int | None]] = {}  # engine hash -> canonical hash, tier, parent
        self._tokens: dict[int, list[int]] = {}
        self._rng = random.Random(seed)
        self._next_engine_hash = 1

    def store(self, num_blocks: int = 1, parent: int | None = None, tier: Tier = Tier.GPU) -> list[int]:
        """Store a chain below a held block; return its engine hashes."""
        engine_hashes = list(range(self._next_engine_hash, self._next_engine_hash + num_blocks))
        self._next_engine_hash += num_blocks
        tokens = [self._rng.randrange(1 << 32) for _ in range(num_blocks * BLOCK_SIZE)]
        prefix = [] if parent is None else self._tokens[parent]
        canonical = block_hashes(prefix + tokens, BLOCK_SIZE).tolist()[-num_blocks:]
        for idx, engine_hash in enumerate(engine_hashes):
            self.held[engine_hash] = (canonical[idx], tier, parent)
            self._tokens[engine_hash] = prefix + tokens[: (idx + 1) * BLOCK_SIZE]
            parent, first_parent = engine_hash, parent if idx == 0 else first_parent  # noqa: F821
        self.sink.stored(engine_hashes, tokens, parent_block_hash=first_parent, rank=self.rank, tier=tier)
        return engine_hashes

    def remove(self, *engine_hashes: int) -> None:
        """Remove held blocks."""
        for engine_hash in engine_hashes:
            tier = self.held.pop(engine_hash)[1]
            self.sink.removed([engine_hash], rank=self.rank, tier=tier)

    def clear(self) -> None:
        """Drop everything."""
        self.held.clear()
        self.sink.cleared(rank=self.rank)

    def churn(self, num_steps: int) -> None:
        """Store and remove at random: chains, branches, tiers, and now and then everything."""
        for _ in range(num_steps):
            choice = self._rng.random()
            held = list(self.held)
            if choice < 0.005:
                self.clear()
            elif choice < 0.6 or not held:
                parent = self._rng.choice(held) if held and choice < 0.4 else None
                self.store(self._rng.randint(1, 5), parent, self._rng.choice([Tier.GPU, Tier.HOST]))
            else:
                self.remove(*self._rng.sample(held, min(len(held), 3)))

    def digest(self) -> tuple[int, int]:
        """Return the number of held (block, tier) pairs, and their digest."""
        pairs = {(canonical, tier) for canonical, tier, _ in self.held.values()}
        return len(pairs), sum(block_digest(*pair) for pair in pairs) % (1 << 64)


@pytest.fixture
def make_truth():
    return Truth


@pytest.fixture
def index() -> RadixIndex:
    return RadixIndex(seed=1)


@pytest.fixture
async def indexer(index):
    async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
        yield indexer


@pytest.fixture
def digest_of(index):
    """Return a function that tells what the index holds of a rank, as `Truth.digest` does."""

    def digest(worker: str, rank: int = 0) -> tuple[int, int]:
        held = index.digest(WorkerRank(worker, rank))
        return held.num_blocks, held.digest

    return digest
