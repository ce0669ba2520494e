"""The bundled model, which slides over 64 tokens, from its block tables to what the router believes of them."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from kvist.engine import bundled_model_path
from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore
from kvist.engine.loading import load_engine
from kvist.engine.request import SequenceInput
from kvist.events import FULL, EventSink, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.kvcache import BlockHashChain, SequenceBlocks
from kvist.openai.requests import SamplingParams
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.router.config import RouterConfig
from kvist.router.index import FleetIndex

pytestmark = pytest.mark.xdist_group("whole system")

Until = Callable[[Callable[[], object]], Awaitable[None]]
WINDOW, BLOCK_SIZE, CHUNK = 64, 32, 96
NUM_PROMPT, NUM_DECODED = 300, 200


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_engine(sink: EventSink | None = None, **settings: Any) -> EngineCore:
    settings = {"block_size": BLOCK_SIZE, "max_model_len": 544, "max_num_batched_tokens": CHUNK} | settings
    return load_engine(EngineConfig(model_dir=bundled_model_path(), **settings), sink).core


def make_prompt(seed: int, count: int = NUM_PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 2000) for _ in range(count)]


def run(
    core: EngineCore, prompt: list[int], max_tokens: int, every_step: Callable[[], None] | None = None
) -> list[int]:
    """Return the prompt and what greedy decoding adds to it."""
    core.add_request(
        "r", SequenceInput(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    )
    tokens = list(prompt)
    while core.has_work:
        tokens += [token_id for output in core.step() for token_id in output.token_ids]
        if every_step is not None and core.has_work:
            every_step()
    return tokens


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[EngineCore], list[SequenceBlocks]]:
    """Return a function that lists the sequences which an engine opens from now on."""

    def watch(core: EngineCore) -> list[SequenceBlocks]:
        sequences: list[SequenceBlocks] = []
        open_sequence = core.kv_cache.open

        def spy(*arguments: Any, **options: Any) -> SequenceBlocks | None:
            sequence = open_sequence(*arguments, **options)
            if sequence is not None:
                sequences.append(sequence)
            return sequence

        monkeypatch.setattr(core.kv_cache, "open", spy)
        return sequences

    return watch


def first_needed(num_tokens: int, window: Any) -> int:
    """Return the block with the oldest key that the query at position `num_tokens` sees."""
    return 0 if window is FULL else max(0, num_tokens + 1 - window) // BLOCK_SIZE


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@pytest.mark.parametrize("has_scratch", [False, True])
def test_a_sequence_holds_what_its_windows_see_and_says_what_dense_attention_does(has_scratch: bool, opened) -> None:
    core = make_engine(has_swa_scratch=has_scratch)
    sequences, lengths = opened(core), [0]

    def check() -> None:
        (sequence,) = sequences
        lengths.append(sequence.num_tokens)
        for pool, table in zip(core.kv_cache.pools, sequence.tables, strict=True):
            first = first_needed(sequence.num_tokens, pool.group.window)
            live = [ordinal for ordinal, block_id in enumerate(table.block_ids) if block_id >= 0]
            assert live == list(range(first, num_blocks(sequence.num_tokens)))
            assert pool.statistics().num_used == len(live)
            # What would be sent of this sequence: by position, and counted from its end.
            by_position = [block_id for block_id in table.block_ids if block_id >= 0]
            kept = num_blocks(sequence.num_tokens) - first
            assert by_position == table.block_ids.tolist()[-kept:]

    tokens = run(core, make_prompt(0), NUM_DECODED, check)
    cached = {pool.window: pool.num_cached for pool in core.statistics().kv_cache.pools}
    assert cached == {FULL: 15, WINDOW: 12 if has_scratch else 15}, "each whole chunk has one block in scratch"
    assert lengths[:5] == [0, 96, 192, 288, 300]
    assert lengths[5:] == list(range(301, 499))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_model_path(), dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, NUM_PROMPT - 1 : -1].argmax(-1).tolist()
    assert tokens[NUM_PROMPT:] == expected


class Ledger:
    """An event sink that passes everything on and keeps by group what the events say is held and was removed."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self.held: dict[int, set[int]] = {}
        self.lost: dict[int, set[int]] = {}

    def created(self, *, group: int, **about: Any) -> None:
        self.held[group], self.lost[group] = set(), set()
        self._sink.created(group=group, **about)

    def stored(self, block_hashes: list[int], token_ids: list[int], *, group: int, **about: Any) -> None:
        self.held[group] |= set(block_hashes)
        self._sink.stored(block_hashes, token_ids, group=group, **about)

    def removed(self, block_hashes: list[int], *, group: int, **about: Any) -> None:
        self.held[group] -= set(block_hashes)
        self.lost[group] |= set(block_hashes)
        self._sink.removed(block_hashes, group=group, **about)

    def cleared(self, **about: Any) -> None:
        self._sink.cleared(**about)


def num_leading(core: EngineCore, group_id: int, tokens: list[int]) -> int:
    """Return how many leading blocks of a sequence a group has in its cache."""
    chain = BlockHashChain(BLOCK_SIZE)
    chain.extend(tokens)
    pool = core.kv_cache.pools[group_id]
    return next((i for i, digest in enumerate(chain.digests) if digest not in pool), len(chain.digests))


async def test_what_the_windowed_group_reuses_stays_on_the_router(until: Until) -> None:
    """A second prompt takes the slots of the first one's head in the windowed group, of its tail in the full one."""
    limits = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.1)
    with KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=BLOCK_SIZE, limits=limits) as publisher:
        ledger = Ledger(publisher)
        core = make_engine(ledger, num_blocks=20)
        async with FleetIndex(RouterConfig(block_size=BLOCK_SIZE), time.monotonic) as index:
            index.follow("engine", [publisher.endpoint])

            def score(tokens: list[int]) -> int:
                overlaps = index.match(block_hashes(tokens, BLOCK_SIZE))
                return max(overlaps.get(WorkerRank("engine", 0), (0,)))

            def num_known() -> int:
                return sum(status.num_blocks for status in index.ranks("engine"))

            first = run(core, make_prompt(1), NUM_DECODED)
            await until(lambda: score(first) == 15 == num_leading(core, 0, first))
            second = run(core, make_prompt(2), 1)
            await until(lambda: score(second) == 9 == num_leading(core, 0, second))
            assert ledger.lost[1] & ledger.held[0], "the windowed group reused what the full one still has"
            assert 0 < num_leading(core, 0, first) < 15
            assert num_leading(core, 1, first) == 0
            await until(lambda: score(first) == num_leading(core, 0, first))
            assert score(first[:NUM_PROMPT]) == min(NUM_PROMPT // BLOCK_SIZE, num_leading(core, 0, first))
            assert num_known() == core.kv_cache.pools[0].statistics().num_cached == len(ledger.held[0])
