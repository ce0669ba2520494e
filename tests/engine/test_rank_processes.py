"""An engine of two processes against one of one, over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from kvist.engine import loading
from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore
from kvist.engine.loading import LoadedEngine, load_engine
from kvist.engine.rank_processes import RankLostError
from kvist.engine.request import RequestOutput, SequenceInput
from kvist.errors import InvalidValueError
from kvist.events import EventSink
from kvist.openai.requests import SamplingParams

SETTINGS: dict[str, Any] = {"block_size": 4, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 24}
SHARED = [7 * i % 500 + 5 for i in range(40)]
PROMPTS = [[*SHARED, 11, 12, 13], [*SHARED, 21, 22], [31 * i % 500 + 5 for i in range(50)], [9, 8, 7]]
NUM_TOKENS = 40


@contextmanager
def two_ranks(sink: EventSink | None = None, **settings: Any) -> Iterator[LoadedEngine]:
    loaded = load_engine(EngineConfig(tensor_parallel_size=2, **SETTINGS, **settings), sink)
    assert loaded.followers is not None
    try:
        yield loaded
    finally:
        loaded.followers.close()
        if distributed.is_initialized():  # that of a rank that was lost
            distributed.destroy_process_group()


def run_twice(core: EngineCore, generate: Callable[..., Any], params: SamplingParams) -> list[list[RequestOutput]]:
    """Run the prompts at once, in chunks and with preemption, and then again, reusing what is cached."""
    both = [generate(core, [(prompt, params) for prompt in PROMPTS]) for _ in range(2)]
    return [outputs for results in both for outputs in results.values()]


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"num_blocks": 33}),
        ("qwen3", {"num_blocks": 33}),
        ("gemma3", {"num_blocks": 40, "has_swa_scratch": True}),
    ],
)
def test_two_ranks_give_the_tokens_and_events_of_one(
    checkpoint: Callable[[str], Path],
    greedy: Callable[..., SamplingParams],
    generate: Callable[..., Any],
    tokens_of: Callable[[list[RequestOutput]], list[int]],
    new_follower: Callable[[], Any],
    name: str,
    settings: dict[str, Any],
) -> None:
    params, model_dir, events, events_alone = greedy(NUM_TOKENS), checkpoint(name), new_follower(), new_follower()
    config = EngineConfig(model_dir=model_dir, **SETTINGS, **settings)
    alone = load_engine(config, events_alone).core
    expected = run_twice(alone, generate, params)
    with two_ranks(events, model_dir=model_dir, **settings) as loaded:
        assert all(pool.group.layer.num_kv_heads == 1 for pool in loaded.core.kv_cache.pools)
        assert [pool.shape[3] for pool in loaded.tensors.pools] == [1] * len(loaded.tensors.pools)
        found = run_twice(loaded.core, generate, params)
        assert list(map(tokens_of, found)) == list(map(tokens_of, expected))
        assert loaded.core.statistics() == alone.statistics()
        assert alone.statistics().scheduler.num_preemptions > 0
        assert any(outputs[0].num_cached_tokens for outputs in expected)
        assert events.held == events_alone.held
        events.assert_equals(loaded.core.kv_cache)


def test_a_follower_that_dies_ends_the_engine_by_name(
    checkpoint: Callable[[str], Path], greedy: Callable[..., SamplingParams], until_true: Callable[..., None]
) -> None:
    with two_ranks(model_dir=checkpoint("llama"), num_blocks=40) as loaded:
        assert loaded.followers is not None
        losses: list[object] = []
        loaded.followers.on_loss(lambda: losses.append(1))
        loaded.core.add_request("0", SequenceInput(SHARED, greedy(80)))
        for _ in range(4):
            loaded.core.step()
        (other,) = multiprocessing.active_children()
        other.kill()
        with pytest.raises(RankLostError, match="rank 1 has ended with exit code -9") as caught:
            finish(loaded.core)
        assert caught.value.rank == 1
        assert loaded.followers.error is caught.value
        until_true(lambda: losses == [1])  # another thread may tell of it


def test_a_model_that_cannot_be_split_is_refused_before_a_process_is_started(checkpoint: Callable[[str], Path]) -> None:
    config = EngineConfig(model_dir=checkpoint("llama"), tensor_parallel_size=3)
    with pytest.raises(InvalidValueError, match="tensor_parallel_size: got 3, expected a divisor of 4 attention heads"):
        load_engine(config)
    assert not multiprocessing.active_children()


def test_groups_that_are_one_on_a_rank_are_refused_where_workers_are_to_exchange_them(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loading.load_model_config(checkpoint("llama"))
    one_head = replace(whole.layers[1], num_kv_heads=1)
    monkeypatch.setattr(loading, "load_model_config", lambda _: replace(whole, layers=(whole.layers[0], one_head)))
    config = EngineConfig(model_dir=checkpoint("llama"), tensor_parallel_size=2, **SETTINGS)
    with pytest.raises(InvalidValueError, match="tensor_parallel_size: got 2, expected fewer, or no --kv-transfer"):
        load_engine(config, open_server=lambda _: pytest.fail("nothing is to be served"))
    assert not multiprocessing.active_children()


def test_no_ranks_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="tensor_parallel_size: got 0, expected int >= 1"):
        EngineConfig(model_dir=tmp_path, tensor_parallel_size=0)


def test_memory_that_is_too_little_ends_the_followers_too(checkpoint: Callable[[str], Path]) -> None:
    config = EngineConfig(model_dir=checkpoint("llama"), num_blocks=3, tensor_parallel_size=2, **SETTINGS)
    with pytest.raises(InvalidValueError, match="num_blocks of group 0: got 3, expected at least 32"):
        load_engine(config)
    assert not multiprocessing.active_children()
