"""What an index says of the bundled engine's cache, whose groups evict by themselves and are all published."""

from __future__ import annotations

import random
import time

import pytest

from kvist.events import FULL, EngineCleared, EngineCreated, EngineRemoved, EngineStored, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.kvcache import BlockHashChain, KvCacheManager
from kvist.publisher.stream import RankStream, with_companions
from kvist.radix import RadixIndex

SIZE, SOURCE = 4, WorkerRank("engine", 0)


class Sink:
    """Hands what an engine reports to a rank's stream, as a publisher's thread does."""

    def __init__(self, stream: RankStream) -> None:
        self._admit = stream.admit
        self.created = lambda **fields: self._admit(EngineCreated(**fields))
        self.stored = lambda hashes, tokens, **fields: self._admit(EngineStored(hashes, tokens, SIZE, **fields))
        self.removed = lambda hashes, **fields: self._admit(EngineRemoved(hashes, **fields))
        self.cleared = lambda **fields: self._admit(EngineCleared(**fields))


def publish(stream: RankStream, index: RadixIndex) -> None:
    for each in with_companions({0: stream}).values():
        for batch in each.close_batches(time.time()):
            index.apply(batch.source, batch.events)
    if stream.companion.rules:
        index.set_groups(SOURCE, stream.companion.rules)


@pytest.mark.parametrize("windows", [(FULL, 9), (9, FULL, 13), (FULL, 5, 5, 17), (6, 21), (9,)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_an_index_says_what_the_bundled_engine_will_reuse(make_groups, run_sequence, windows, seed):
    rng, index = random.Random(seed), RadixIndex()
    stream = RankStream(SOURCE, SIZE, 0, has_all_groups=True)
    manager = KvCacheManager(make_groups(*windows), [rng.randint(14, 30) for _ in windows], SIZE, Sink(stream))
    prompts = [[rng.randrange(50)] * (SIZE * rng.randint(1, 3)) for _ in range(4)]
    num_hits = 0
    for _ in range(150):
        prompt = [*rng.choice(prompts)[:24], *(rng.randrange(2) for _ in range(rng.randint(1, 24)))]
        prompts = [*prompts[-30:], prompt]
        run_sequence(manager, prompt, chunk=rng.choice([SIZE, 3 * SIZE, 100]))
        publish(stream, index)
        for asked in rng.sample(prompts, 3):
            usable = asked[: (len(asked) - 1) // SIZE * SIZE]
            match = index.match(block_hashes(usable, SIZE))
            hit = manager.match(BlockHashChain(SIZE), asked).num_tokens
            assert (match[SOURCE].gpu if SOURCE in match else 0) * SIZE == hit
            num_hits += hit > 0
    assert num_hits > 50
