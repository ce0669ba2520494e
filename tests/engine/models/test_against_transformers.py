"""Every family against transformers, in float32, through everything that can happen to a paged cache; where layers
slide, with scratch slots and without.

What is expected comes from one uncached pass over the whole sequence: dense attention under a mask.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from memory_invariants import check_memory

from kvist.engine.core import EngineCore
from kvist.engine.request import Request
from kvist.events import FULL
from kvist.kernels import write_kv
from kvist.kvcache import KvDtype

TOLERANCE = 1e-4
NUM_PROMPT, NUM_TOKENS = 30, 78  # decodes past six windows of 8 tokens, twelve blocks of 4


def make_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.5, "logits too small to tell anything"
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_prefill_and_decode_past_evictions(family: str, has_scratch: bool, harness, oracle) -> None:
    tokens = make_tokens(NUM_TOKENS)
    expected = oracle(family, tokens)
    model = harness(family, has_scratch=has_scratch)
    request = model.open(tokens)
    assert_close(model.step((request, NUM_PROMPT)), expected[:NUM_PROMPT])
    assert_close(model.decode(request, NUM_TOKENS), expected[NUM_PROMPT:])


@pytest.mark.parametrize("chunks", [(1, 2, 13, 5, 29), (25, 25), (4,) * 12])
def test_chunked_prefill(family: str, has_scratch: bool, chunks: tuple[int, ...], harness, oracle) -> None:
    tokens = make_tokens(sum(chunks), seed=1)
    model = harness(family, has_scratch=has_scratch)
    request = model.open(tokens)
    assert_close(torch.cat([model.step((request, count)) for count in chunks]), oracle(family, tokens))


def test_decodes_and_prefills_in_one_step(family: str, has_scratch: bool, harness, oracle) -> None:
    prompts = [make_tokens(count, seed=count) for count in (21, 40, 33, 5)]
    expected = [oracle(family, tokens) for tokens in prompts]
    model = harness(family, has_scratch=has_scratch)
    first, second, fourth = (model.open(prompts[i]) for i in (0, 1, 3))
    third = model.open(prompts[2], has_scratch=False)
    model.step((first, 20), (fourth, 4))
    model.step((second, 10))
    mixed = model.step((second, 30), (first, 1), (third, 33), (fourth, 1))
    assert_close(mixed, torch.cat([expected[0][20:], expected[3][4:], expected[1][10:], expected[2]]))


def test_sequences_of_different_lengths_decode_together(family: str, harness, oracle) -> None:
    prompts = [make_tokens(count, seed=count) for count in (60, 44, 29)]
    expected = [oracle(family, tokens) for tokens in prompts]
    model = harness(family)
    requests = [model.open(tokens) for tokens in prompts]
    model.step(*((request, len(request.token_ids) - 26) for request in requests))
    for left in range(26, 0, -1):
        assert_close(model.step(*((each, 1) for each in requests)), torch.stack([row[-left] for row in expected]))


def test_a_prefix_reused_while_its_sequence_is_far_past_it(family: str, has_scratch: bool, harness, oracle) -> None:
    shared, tail = make_tokens(41, seed=2), make_tokens(20, seed=3)
    model = harness(family, has_scratch=has_scratch)
    first = model.open(shared + make_tokens(30, seed=4))
    model.step((first, 41))
    model.decode(first, 71)
    second = model.open(shared + tail)
    assert second.num_computed_tokens == 40
    expected = oracle(family, shared + tail)
    assert_close(model.step((second, 9)), expected[40:49])
    assert_close(model.decode(second, 61), expected[49:])


def test_a_prefix_reused_after_its_sequence_ended(family: str, has_scratch: bool, harness, oracle) -> None:
    stem = make_tokens(50, seed=6)
    model = harness(family, has_scratch=has_scratch)
    first = model.open(stem)
    model.step((first, 50))
    model.close(first)
    for num_shared in (50, 33):
        tokens = stem[:num_shared] + make_tokens(10, seed=num_shared)
        second = model.open(tokens)
        reused = second.num_computed_tokens
        is_lost = has_scratch and num_shared < 50  # what 33 tokens' window sees was in scratch slots
        assert reused == (0 if is_lost else num_shared // 4 * 4)
        assert_close(model.step((second, len(tokens) - reused)), oracle(family, tokens)[reused:])


def test_equal_prompts_of_one_step_share_their_blocks(family: str, has_scratch: bool, harness, oracle) -> None:
    tokens = make_tokens(35, seed=5)
    expected = oracle(family, tokens)
    model = harness(family, has_scratch=has_scratch)
    first, second = model.open(tokens), model.open(tokens)
    assert_close(model.step((first, 30), (second, 30)), torch.cat([expected[:30]] * 2))
    third = model.open(tokens)
    assert third.num_computed_tokens == 28
    got = model.step(*((each, 35 - each.num_computed_tokens) for each in (first, second, third)))
    assert_close(got, torch.cat([expected[30:], expected[30:], expected[28:]]))
    assert any(table.adopted for table in second.blocks.tables)


def test_a_preempted_sequence_starts_over(family: str, has_scratch: bool, harness, oracle) -> None:
    tokens = make_tokens(60, seed=7)
    expected = oracle(family, tokens)
    model = harness(family, has_scratch=has_scratch)
    victim = model.open(tokens)
    model.step((victim, NUM_PROMPT))
    model.decode(victim, 44)
    model.close(victim)
    again = model.open(tokens)
    assert again.num_computed_tokens == 44
    assert_close(model.step((again, 6)), expected[44:50])
    model.close(again)
    model.manager.flush()
    without_cache = model.open(tokens)
    assert without_cache.num_computed_tokens == 0
    assert_close(model.step((without_cache, 52)), expected[:52])
    assert_close(model.decode(without_cache, 60), expected[52:])


@pytest.mark.parametrize("windowed", ["gemma3", "gemma3n", "gemma4-shared", "gpt-oss"])
def test_a_long_decode_equals_dense_attention(windowed: str, harness, oracle) -> None:
    tokens = make_tokens(160, seed=8)
    model = harness(windowed)
    request = model.open(tokens)
    model.step((request, 17))
    assert_close(model.decode(request, 160), oracle(windowed, tokens)[17:])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("windowed", ["gemma3", "gemma3n", "gemma4-shared", "gpt-oss", "mistral"])
def test_any_order_of_chunks_preemptions_and_reuse(windowed: str, seed: int, harness, oracle) -> None:
    rng = random.Random(seed)
    stem = make_tokens(40, seed)
    prompts = [stem[: rng.randrange(41)] + make_tokens(rng.randrange(10, 40), seed=100 + i) for i in range(6)]
    model = harness(windowed, num_blocks=66)  # three sequences fit, with what others left in the cache
    running: list[tuple[Request, torch.Tensor]] = []
    for _ in range(60):
        while len(running) < 3:
            tokens = rng.choice(prompts)
            running.append((model.open(tokens, has_scratch=rng.random() < 0.5), oracle(windowed, tokens)))
        chunks = []
        for request, expected in rng.sample(running, rng.randrange(1, 4)):
            left = len(request.token_ids) - request.num_computed_tokens
            num_new = rng.choice([1, 1, 1, rng.randrange(1, left + 1)])
            start = request.num_computed_tokens
            chunks.append((request, num_new, expected[start : start + num_new]))
        got = model.step(*((request, num_new) for request, num_new, _ in chunks))
        chunks.sort(key=lambda chunk: chunk[1] > 1)  # decodes come first
        assert_close(got, torch.cat([rows for _, _, rows in chunks]))
        for request, _ in list(running):
            if request.num_computed_tokens == len(request.token_ids) or rng.random() < 0.05:
                model.close(request)
                running = [each for each in running if each[0] is not request]
    check_memory(model.manager, [request.blocks for request, _ in running])


def test_in_bfloat16_the_error_is_no_larger_than_that_of_transformers(family: str, harness, oracle) -> None:
    tokens = make_tokens(60, seed=9)
    exact, theirs = oracle(family, tokens), oracle(family, tokens, torch.bfloat16)
    model = harness(family, dtype=torch.bfloat16, kv_dtype=KvDtype.BFLOAT16)
    request = model.open(tokens)
    ours = torch.cat([model.step((request, NUM_PROMPT)), model.decode(request, 60)])
    # Rounding alone: measured 0.7 to 1.1 of theirs, with a token that goes to another expert 1.6; a wrong mask or
    # position would give ten times theirs.
    bound = 2 if "moe" in family or family == "gpt-oss" else 1.2
    assert (ours - exact).square().mean() < bound * (theirs - exact).square().mean()


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_an_eight_bit_cache_rounds_keys_and_values_and_does_nothing_else(
    family: str, kv_dtype: str, harness, monkeypatch
) -> None:
    tokens = make_tokens(45, seed=10)
    monkeypatch.setattr("kvist.kernels._triton._import_loops", lambda: None)  # both attend by the same operations

    def run(model):
        request = model.open(tokens)
        return torch.cat([model.step((request, NUM_PROMPT)), model.decode(request, 45)])

    def write_rounded(key, value, *memory):
        stored = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_dtype]
        limit = torch.finfo(stored).max
        write_kv(*(x.clamp(-limit, limit).to(stored).float() for x in (key, value)), *memory)

    got = run(harness(family, kv_dtype=KvDtype(kv_dtype)))
    monkeypatch.setattr("kvist.engine.models.transformer.write_kv", write_rounded)
    assert_close(got, run(harness(family)))


def test_the_engine_under_pressure_generates_what_dense_attention_does(
    family: str, has_scratch: bool, make_core: Callable[..., EngineCore], greedy, generate, tokens_of, oracle
) -> None:
    stem = make_tokens(13)
    prompts = [stem[:num_shared] + make_tokens(30 - num_shared, seed=num_shared) for num_shared in (0, 9, 13, 4)]
    few = {"max_model_len": 80, "num_blocks": 26, "max_num_batched_tokens": 19, "max_num_seqs": 4}
    core = make_core(family, **few, has_swa_scratch=has_scratch)
    outputs = generate(core, [(prompt, greedy(36, logprobs=True)) for prompt in prompts])
    statistics = core.statistics()
    grows = any(pool.window is FULL for pool in statistics.kv_cache.pools)
    assert (statistics.scheduler.num_preemptions > 0) == grows, "only what grows with its sequence runs out"
    for i, prompt in enumerate(prompts):
        got = tokens_of(outputs[str(i)])
        expected = oracle(family, prompt + got)[len(prompt) - 1 : -1]
        assert got == expected.argmax(-1).tolist()
        chosen = [each.token.logprob for output in outputs[str(i)] for each in output.logprobs]
        assert chosen == pytest.approx(expected.log_softmax(-1).max(-1).values.tolist(), abs=TOLERANCE)


def test_a_prompts_log_probabilities_are_those_of_one_pass_whatever_is_cached(
    family: str, make_core: Callable[..., EngineCore], greedy, generate, oracle
) -> None:
    stem = make_tokens(20)
    prompts = [stem + make_tokens(12, seed=seed) for seed in (1, 2, 3)]
    core = make_core(family, max_model_len=80, num_blocks=40, max_num_batched_tokens=9, max_num_seqs=3)
    generate(core, [(prompts[0], greedy(2))])
    outputs = generate(core, [(prompt, greedy(4, prompt_logprobs=2)) for prompt in prompts])
    for i, prompt in enumerate(prompts):
        got = [each for output in outputs[str(i)] for each in output.prompt_logprobs]
        expected = oracle(family, prompt)[:-1].log_softmax(dim=-1)
        assert [each.token.token_id for each in got] == prompt[1:]
        chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None]).flatten()
        torch.testing.assert_close(torch.tensor([each.token.logprob for each in got]), chosen, rtol=0, atol=TOLERANCE)
        ranks = torch.tensor([each.rank for each in got])
        assert ((expected > chosen[:, None] + TOLERANCE).sum(1) < ranks).all()
        assert ((expected > chosen[:, None] - TOLERANCE).sum(1) >= ranks).all()
        top = torch.tensor([[entry.logprob for entry in each.top] for each in got])
        torch.testing.assert_close(top, expected.topk(2).values, rtol=0, atol=TOLERANCE)
    assert core.statistics().kv_cache.num_queried_tokens >= 4 * 32, "they count as others do"
