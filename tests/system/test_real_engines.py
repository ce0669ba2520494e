"""Engines' own caches run requests, and an index that hears their events says what they would take from them.

It is a small part of `benchmarks/verify_engines.py`, without sockets. `make engines` fetches what it needs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from _engine_files import MISSING, versions
from _engine_followers import TARGET, Healing, mm_hashes_of
from _engine_traffic import Engine, Prompt, Traffic
from _vllm_rule import CountedBlocks
from verify_engines import SCENARIOS

from kvist.events import Tier, WorkerRank
from kvist.events.codec import encode_batch
from kvist.events.dialects import decode_block_events
from kvist.events.dialects.block_events import REPORT_SESSION
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.transports import Message
from kvist.indexer.source import Source
from kvist.publisher.stream import RankStream, with_companions
from kvist.radix import RadixIndex
from kvist.router.healing import NUM_UNCHANGED_IN_A_ROW
from kvist.router.index import RankStatus

pytestmark = pytest.mark.skipif(not versions(), reason=MISSING)

NUM_STEPS = 400
RANK = WorkerRank("engine", 0)
WITHIN = "full attention + states, hits within blocks"


@dataclass
class Listener:
    """An index that hears one rank's stream: the engine's own, or what a publisher beside the engine makes of it."""

    engine: str
    block_size: int
    has_full_reports: bool = False
    drops_last_block: bool = False
    publisher: RankStream | None = None
    index: RadixIndex = field(default_factory=RadixIndex)
    num_messages: int = 0

    def __post_init__(self) -> None:
        url = f"tcp://127.0.0.1:1?engine={self.engine}{'&eagle=drop' if self.drops_last_block else ''}"
        told = {"has_full_reports": self.has_full_reports}
        self._source = Source(RANK.worker, url, self.block_size, self.index, set(), **told)

    def receive(self, batch: Any) -> None:
        """Take what the engine sends."""
        payload = msgspec.msgpack.encode(batch)
        payloads = [payload]
        if self.publisher is not None:
            for event in decode_block_events(payload, "test", self.engine).events:
                self.publisher.admit(event)
            streams = with_companions({0: self.publisher}).values()
            batches = [batch for stream in streams for batch in stream.close_batches(time.time())]
            payloads = [encode_batch(batch) for batch in [*batches, *(each.heartbeat(time.time()) for each in streams)]]
        for each in payloads:
            for _ in self._source.receive_all([Message(b"", self.num_messages, each)], time.monotonic()):
                pass
            self.num_messages += 1

    def hits(self, prompt: Prompt, engine: Engine) -> list[int]:
        """Return how many of a prompt's tokens the rank holds, with each tier, as a router asks."""
        size, keys = self.block_size, {"lora_name": prompt.lora_name, "cache_salt": prompt.cache_salt}
        num_usable = (len(prompt.token_ids) - 1) // size * size
        mm_hashes = mm_hashes_of(prompt, size)
        hashes = block_hashes(prompt.token_ids, size, mm_hashes=mm_hashes, **keys)
        found = self.index.match(hashes, num_usable // size)
        if engine.names_ahead:
            num_seen = len(prompt.token_ids) - (self.engine == "sglang")  # which does not look at the last
            hashes = block_hashes(prompt.token_ids[: min(num_usable + 1, num_seen)], size, is_eagle=True, **keys)
            found = self.index.match(hashes) or found
        depths = found[RANK] if RANK in found else [0] * len(Tier)
        return [num_blocks * size for num_blocks in depths[: engine.num_tiers]]

    @property
    def state(self) -> SourceState:
        return self._source.states()[0]


def lives_of(
    name: str, listeners: list[Callable[[Any], None]], engine: Engine, rng: random.Random, session_id: str | None = None
) -> Iterator[Prompt]:
    """Let an engine serve a scenario's requests, told of at each step; yield probes at some of them."""
    traffic = Traffic(rng, SCENARIOS[name].mix)
    for step in range(NUM_STEPS):
        if rng.random() < 0.01:
            engine.reset()
        if rng.random() < 0.7:
            for prompt in traffic.request():
                engine.submit(replace(prompt, session_id=session_id), rng.randint(1, 40))
        traffic.ended(engine.step())
        batch = engine.take_batch()
        if batch is not None:
            for listener in listeners:
                listener(batch)
        if step % 4 == 3:
            yield traffic.probe()


def play(name: str, has_full_reports: bool = False, session_id: str | None = None) -> list[tuple[list[int], list[int]]]:
    """Return what the engine would have taken from its cache, and what was said of it, for each probe and listener.

    Only what was said of a rank in the state it ought to be in: one that may have kept blocks through a reset is not.
    """
    scenario, rng = SCENARIOS[name], random.Random(name)
    engine = scenario.start(rng)
    is_dropping = getattr(scenario.model, "eagle", None) == "drop"
    publisher = RankStream(
        RANK,
        engine.block_size,
        1,
        counts_copies=scenario.engine == "vllm",
        has_full_reports=has_full_reports,
        has_all_groups=True,
        num_ahead=int(is_dropping),
    )
    due = SourceState.PARTIAL if has_full_reports or name == WITHIN else SourceState.LIVE
    listeners = [
        Listener(scenario.engine, engine.block_size, has_full_reports, is_dropping),
        Listener(scenario.engine, engine.block_size, publisher=publisher),
    ]
    answers = []
    for prompt in lives_of(name, [listener.receive for listener in listeners], engine, rng, session_id):
        for listener in listeners:
            answer = engine.hits(prompt), listener.hits(prompt, engine)
            if listener.state is due:
                answers.append(answer)
            else:  # not yet partial, or since a reset
                assert answer[0] == answer[1] or "offloaded" in name
    assert sum(held[0] > 0 for held, _ in answers) > len(answers) / 2
    return answers


@pytest.mark.parametrize(
    "name",
    [
        "full attention, blocks of 16",
        "concurrent duplicates",
        "EAGLE, lookahead hashes",
        "LoRA",
        "cache salts",
        "images",
        "context parallelism",
        "hashes as bytes",
        "offloaded, by hash",
        "offloaded, with tokens",
        "offloaded, not reset",
        "full + sliding",
        "full + three sliding",
        "two sliding",
        "sliding only",
        "EAGLE, last block computed again",
        "full + sliding, EAGLE",
        "blocks of 16 full, 32 sliding",
        "blocks of 32 full, 16 sliding",
        "blocks of 64 full, 16 sliding",
        "full + sliding, sparsely kept",
        "full attention + states",
        "full attention + states of larger blocks",
        "SGLang",
        "SGLang, pages of 64",
        "SGLang, EAGLE",
        "SGLang, LoRA and salts",
        "SGLang, HiCache",
    ],
)
def test_an_index_says_what_the_engine_would_take_from_its_cache(name):
    if "HiCache" in name:
        pytest.importorskip("torch")
    assert all(said == held for held, said in play(name))


def test_hits_that_end_within_blocks_are_never_said_to_be_longer_and_the_rank_is_partial():
    answers = play(WITHIN)
    assert all(held[0] - 16 <= said[0] <= held[0] for held, said in answers)


@pytest.mark.parametrize(
    "name",
    [
        "full reports",
        "full + sliding, full reports",
        "full attention, blocks of 32",
        "blocks of 32 full, 16 sliding",
    ],
)
def test_reports_that_others_ask_for_are_told_from_copies_by_what_a_hit_needs(name):
    answers = play(name, has_full_reports=True)
    assert all(said <= held for held, said in answers)
    assert sum(held == said for held, said in answers) >= len(answers) * 0.95


def test_prompts_to_a_rank_that_is_known_in_part_ask_for_reports_until_the_judges_router_lacks_nothing():
    engine = SCENARIOS["full attention, blocks of 16"].start(random.Random(1))
    healing = Healing(Mock(ask=Mock(return_value={})), "m", 0)
    prompt = Prompt(tuple(range(100)))
    assert healing.send(prompt, engine) == prompt
    healing.status = RankStatus(TARGET, SourceState.PARTIAL)
    asked = [healing.send(prompt, engine).is_reported for _ in range(NUM_UNCHANGED_IN_A_ROW + 1)]
    assert asked == [True] * NUM_UNCHANGED_IN_A_ROW + [False]


@pytest.mark.parametrize("name", ["full reports", "full + sliding, full reports"])
def test_reports_that_the_router_asked_for_are_no_copies(name):
    answers = play(name, session_id=REPORT_SESSION)
    assert all(said <= held for held, said in answers)
    assert sum(held == said for held, said in answers) >= len(answers) * 0.95


@pytest.mark.parametrize(
    "name",
    [
        "full + sliding",
        "full + three sliding",
        "two sliding",
        "sliding only",
        "EAGLE, last block computed again",
        "full + sliding, EAGLE",
        "blocks of 32 full, 16 sliding",
        "blocks of 64 full, 16 sliding",
        "full + sliding, sparsely kept",
        "full attention + states",
        "full attention + states of larger blocks",
    ],
)
def test_the_events_of_vllm_tell_what_it_would_take_by_the_rule_of_its_groups(name):
    scenario, rng = SCENARIOS[name], random.Random(name)
    engine, told = scenario.start(rng), CountedBlocks(scenario.model)
    for prompt in lives_of(name, [told.receive], engine, rng):
        assert engine.hits(prompt) == [told.hit(engine.wire_hashes(prompt), len(prompt.token_ids))]
