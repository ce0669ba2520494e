"""Every family against transformers, in float32, through the paged cache."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvist.engine.core import EngineCore
from kvist.engine.models.checkpoint_config import load_model_config
from kvist.engine.models.weights import load_model
from kvist.engine.request import Request
from kvist.engine.runner import Runner
from kvist.engine.scheduler import ScheduledRequest
from kvist.engine.text import TextStream
from kvist.events import FULL
from kvist.kvcache import BlockHashChain, KvCacheManager, group_layers
from kvist.kvcache.tensors import allocate_pool
from kvist.openai.requests import SamplingParams

MODELS = ("llama", "llama-tied-biased-llama3", "qwen3", "qwen3-sliding", "gemma3", "gemma3-capped")
BLOCK, NUM_BLOCKS, TOLERANCE = 4, 64, 1e-4


class Harness:
    """A model over paged memory, without scheduler and sampler: every row's logits can be looked at."""

    def __init__(self, model_dir: Path) -> None:
        config = load_model_config(model_dir)
        groups = group_layers(config.layer_kv(), config.max_position)
        num_blocks = [NUM_BLOCKS] * len(groups)
        cpu = torch.device("cpu")
        self.model = load_model(model_dir, config, groups, config.max_position, torch.float32, cpu)
        pools = [allocate_pool(group, NUM_BLOCKS, BLOCK, torch.float32, cpu) for group in groups]
        self.manager = KvCacheManager(groups, num_blocks, BLOCK)
        self.runner = Runner(self.model, groups, pools, BLOCK)

    def open(self, token_ids: list[int]) -> Request:
        text = TextStream(None, ())
        request = Request("r", token_ids, SamplingParams(), 1, BlockHashChain(BLOCK), text, random.Random(0))
        hit = self.manager.match(request.chain, token_ids)
        request.blocks = self.manager.open(hit, request.chain, token_ids, hit.num_tokens)
        request.num_computed_tokens = hit.num_tokens
        return request

    def step(self, *scheduled: ScheduledRequest) -> torch.Tensor:
        """Compute, and return the logits of every row."""
        for request, num_new in scheduled:
            assert request.blocks is not None
            assert self.manager.grow(request.blocks, request.token_ids, request.num_computed_tokens + num_new)
        batch = self.runner.build_batch(scheduled)
        for pages in batch.layers:
            written = pages.slot_mapping[pages.slot_mapping >= 0]
            assert len(written.unique()) == len(written), "a slot is written twice"
        batch = dataclasses.replace(batch, logit_rows=torch.arange(len(batch.input_ids)))
        with torch.inference_mode():
            logits = self.model(batch)
        for request, num_new in scheduled:
            request.num_computed_tokens += num_new
        self.manager.settle()
        return logits


def make_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.5, "logits too small to tell anything"
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_past_evictions_give_the_logits_of_transformers(name: str, checkpoint, oracle) -> None:
    tokens = make_tokens(70)
    expected = oracle(name, tokens)
    harness = Harness(checkpoint(name))
    request = harness.open(tokens)
    assert_close(harness.step(ScheduledRequest(request, 30)), expected[:30])
    for position in range(30, 70):
        assert_close(harness.step(ScheduledRequest(request, 1)), expected[position : position + 1])
    for pool, table in zip(harness.manager.pools, request.blocks.tables, strict=True):
        if pool.group.window is not FULL:
            assert len(table.held()) == 3, "a window of 8 spans at most 3 blocks of 4"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [(1, 2, 13, 5, 29), (25, 25)])
def test_chunked_prefill_gives_the_logits_of_transformers(
    name: str, chunks: tuple[int, ...], checkpoint, oracle
) -> None:
    tokens = make_tokens(50, seed=1)
    expected = oracle(name, tokens)
    harness = Harness(checkpoint(name))
    request = harness.open(tokens)
    got = torch.cat([harness.step(ScheduledRequest(request, count)) for count in chunks])
    assert_close(got, expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_decodes_and_prefills_share_a_step_without_touching_each_other(name: str, checkpoint, oracle) -> None:
    prompts = [make_tokens(count, seed=count) for count in (21, 40, 33)]
    expected = [oracle(name, tokens) for tokens in prompts]
    harness = Harness(checkpoint(name))
    first, second, third = map(harness.open, prompts)
    harness.step(ScheduledRequest(first, 20))
    harness.step(ScheduledRequest(second, 10))
    mixed = harness.step(ScheduledRequest(second, 30), ScheduledRequest(first, 1), ScheduledRequest(third, 33))
    assert_close(mixed, torch.cat([expected[0][20:], expected[1][10:], expected[2]]))


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma3"])
def test_a_reused_prefix_gives_the_logits_of_transformers(name: str, checkpoint, oracle) -> None:
    shared, tail = make_tokens(41, seed=2), make_tokens(20, seed=3)
    harness = Harness(checkpoint(name))
    first = harness.open(shared + make_tokens(30, seed=4))
    harness.step(ScheduledRequest(first, 41))
    for _ in range(30):
        harness.step(ScheduledRequest(first, 1))
    second = harness.open(shared + tail)
    assert second.num_computed_tokens == 40
    got = harness.step(ScheduledRequest(second, 21))
    assert_close(got, oracle(name, shared + tail)[40:])


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma3"])
def test_equal_prompts_of_one_step_share_their_blocks_and_their_logits(name: str, checkpoint, oracle) -> None:
    tokens = make_tokens(35, seed=5)
    expected = oracle(name, tokens)
    harness = Harness(checkpoint(name))
    first, second = harness.open(tokens), harness.open(tokens)
    got = harness.step(ScheduledRequest(first, 30), ScheduledRequest(second, 30))
    assert_close(got, torch.cat([expected[:30]] * 2))
    third = harness.open(tokens)
    assert third.num_computed_tokens == 28
    got = harness.step(*(ScheduledRequest(each, 35 - each.num_computed_tokens) for each in (first, second, third)))
    assert_close(got, torch.cat([expected[30:], expected[30:], expected[28:]]))
    assert second.blocks is not None
    assert any(table.adopted for table in second.blocks.tables)


def test_the_engine_generates_what_transformers_argmax_does(
    make_core: Callable[..., EngineCore], greedy, generate, tokens_of, oracle
) -> None:
    prompt = make_tokens(20)
    outputs = generate(make_core("gemma3"), [(prompt, greedy(30))])
    sequence = prompt + tokens_of(outputs["0"])
    assert oracle("gemma3", sequence)[19:-1].argmax(-1).tolist() == sequence[20:]
