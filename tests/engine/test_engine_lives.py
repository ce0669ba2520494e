"""Random lives of an engine, as seeds have them: whatever is asked at once, in memory that is too small for it, each
answer is the one that a request gets alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, reduce
from itertools import takewhile
from operator import add
from typing import Any
from unittest.mock import patch

from late_device import late_devices
from lives import seeds
from lone_answers import Ask, Asker, LoneEngine
from memory_invariants import check_engine

from kvist.engine.core import EngineCore
from kvist.engine.request import RequestOutput

LIVES = seeds(6)
NUM_ACTS = 60
MAX_LEN, VOCAB_SIZE = 96, 512
FAMILIES = ("llama", "qwen3-sliding", "gemma3")  # nothing slides, every other layer, five of six

REACHED = (
    *("sure", "tokens found again", "preempted", "aborted", "failed", "finished by length", "finished by stop"),
    *(
        "looked ahead",
        "stopped by a text",
        "stopped by a token",
        "failed by a grammar",
        "log probabilities of a prompt",
    ),
)


class Life:
    """Drives an engine as a seed has it, and notes what each request was answered."""

    def __init__(self, seed: int, make_core: Callable[..., EngineCore], follower: Any, reached: Counter[str]) -> None:
        self.random = rng = random.Random(seed)
        self.reached = reached
        self.family = FAMILIES[seed % len(FAMILIES)]
        max_num_seqs = rng.randint(2, 8)
        self.has_scratch = self.family != "llama" and rng.random() < 0.5
        settings = {
            "max_model_len": MAX_LEN,
            "block_size": 4,
            "num_blocks": rng.choice((25, 30, 60)),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + rng.choice((0, 5, 40)),
            "has_prefix_cache": rng.random() < 0.85,
            "has_swa_scratch": self.has_scratch,
        }
        self.follower = follower
        self.core = make_core(self.family, follower, **settings)
        self.looks_ahead = rng.random() < 0.6
        self.asker = Asker(rng, VOCAB_SIZE, MAX_LEN)
        self.asked: dict[str, Ask] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.dropped: set[str] = set()

    def live(self) -> None:
        acts = {self.ask: 12, self.step: 40, self.abort: 3, self.flush: 1, self.fail: 1}
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_ACTS):
            act()
            self.check()
        while self.core.has_work:
            self.step()
            self.check()
        statistics = self.core.statistics()
        self.reached["preempted"] += statistics.scheduler.num_preemptions
        self.reached["tokens found again"] += statistics.kv_cache.num_hit_tokens
        assert (statistics.scheduler.num_running, statistics.scheduler.num_waiting) == (0, 0)
        assert statistics.kv_cache.num_used == 0
        assert all(outputs[-1].is_last for name, outputs in self.outputs.items() if name not in self.dropped)

    def ask(self) -> None:
        for ask in self.asker.ask():
            name = str(len(self.asked))
            if self.has_scratch and self.random.random() < 0.2:
                ask = replace(ask, swa_scratch=False)
            self.asked[name], self.outputs[name] = ask, []
            self.core.add_request(name, ask.sequence())

    def step(self) -> None:
        self.reached["looked ahead"] += self.core._ahead is not None
        for output in self.core.step():
            assert output.request_id not in self.dropped
            self.outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                answer = [token_id for each in self.outputs[output.request_id] for token_id in each.token_ids]
                self.asker.texts.append(self.asked[output.request_id].prompt + answer)
                self.reached[f"finished by {output.finish_reason}"] += 1
                self.reached["stopped by a text"] += isinstance(output.stop_reason, str)
                self.reached["stopped by a token"] += isinstance(output.stop_reason, int)

    def abort(self) -> None:
        if self.asked:
            name = self.random.choice([*self.asked])
            is_open = not (self.outputs[name] and self.outputs[name][-1].is_last)
            self.reached["aborted"] += is_open
            if is_open:
                self.dropped.add(name)
            self.core.abort(name)

    def flush(self) -> None:
        self.core.kv_cache.flush()

    def fail(self) -> None:
        with patch.object(self.core._runner, "forward", side_effect=RuntimeError("lost")):
            for output in self.core.step():
                self.outputs[output.request_id].append(output)
                self.reached["failed"] += output.error is not None

    def check(self) -> None:
        check_engine(self.core)
        self.follower.assert_equals(self.core.kv_cache)

    def compare(self, lone: LoneEngine) -> None:
        """Raise AssertionError unless every answer is that of a lone engine, as far as it went."""
        for name, ask in self.asked.items():
            outputs = self.outputs[name]
            if not outputs:
                assert name in self.dropped
                continue
            output = reduce(add, outputs)
            has_failed = output.error is not None and output.error.endswith("lost")
            expected = lone.answer(ask)
            self.reached["sure"] += expected.num_sure >= len(expected.output.token_ids)
            self.reached["failed by a grammar"] += expected.output.error is not None
            self.reached["log probabilities of a prompt"] += bool(expected.output.prompt_logprobs)
            assert output.num_cached_tokens % 4 == 0
            assert output.num_cached_tokens <= min(len(ask.prompt) - 1, self.num_shared(name))
            expected.check(output, is_whole=name not in self.dropped and not has_failed)

    def num_shared(self, name: str) -> int:
        """Return how many first tokens of a prompt another text of the same salt has, at most."""
        ask, shared = self.asked[name], [0]
        for other, outputs in self.outputs.items():
            if other != name and self.asked[other].cache_salt == ask.cache_salt:
                text = self.asked[other].prompt + [token_id for each in outputs for token_id in each.token_ids]
                pairs = zip(ask.prompt, text, strict=False)
                shared.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return max(shared)


def test_whatever_else_is_asked_each_request_is_answered_as_if_it_were_alone(make_core, new_follower) -> None:
    reached: Counter[str] = Counter()
    lone = cache(
        lambda family: LoneEngine(make_core(family, max_model_len=MAX_LEN, num_blocks=64, has_prefix_cache=False))
    )
    for seed in LIVES:
        life = Life(seed, make_core, new_follower(), reached)
        try:
            with late_devices() if life.looks_ahead else nullcontext():
                life.live()
            life.compare(lone(life.family))
        except BaseException as error:
            error.add_note(f"life {seed}")
            raise
    assert min(reached[each] for each in REACHED) >= len(LIVES) // 6, reached
