"""Fresh random checkpoints, written and run by transformers, give the same tokens through `kvist serve`."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kvist.cli.up import ProcessGroup

pytestmark = [pytest.mark.xdist_group("whole system"), pytest.mark.asyncio(loop_scope="module")]

SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK_SIZE, WINDOW, VOCAB_SIZE, EOS, MAX_TOKENS = 8, 12, 512, 1, 20
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": EOS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**BASE, num_hidden_layers=2, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(
        **BASE,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=[FULL, SLIDING, FULL, SLIDING],
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **BASE,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=[SLIDING] * 5 + [FULL],
        query_pre_attn_scalar=40,
        final_logit_softcapping=4.0,
    ),
}
# A sequence fits, eight do not; prompts are computed a few blocks at a time.
PRESSURE = ("--num-blocks", "20", "--max-num-batched-tokens", "24", "--max-num-seqs", "8")


@dataclass(frozen=True, slots=True)
class Served:
    """One checkpoint, behind a server and inside transformers."""

    url: str
    client: openai.AsyncOpenAI
    model: Any

    async def complete(self, prompts: list[list[int]], **options: Any) -> openai.types.Completion:
        options = {"max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 3} | options
        return await self.client.completions.create(model="random", prompt=prompts, **options)

    def check(self, prompt: list[int], choice: openai.types.CompletionChoice) -> int:
        """Assert that transformers gives the same tokens, end and log probabilities; return how many tokens."""
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.top_logprobs is not None
        greedy = transformers.GenerationConfig(max_new_tokens=MAX_TOKENS, pad_token_id=0, eos_token_id=EOS)
        with torch.inference_mode():
            expected = self.model.generate(
                torch.tensor([prompt]), greedy, output_logits=True, return_dict_in_generate=True
            )
        token_ids = expected.sequences[0, len(prompt) :].tolist()
        assert [int(token) for token in choice.logprobs.tokens] == token_ids
        assert choice.finish_reason == ("stop" if token_ids[-1] == EOS else "length")
        for logits, top in zip(expected.logits, choice.logprobs.top_logprobs, strict=True):
            values, indices = logits[0].log_softmax(-1).topk(3)
            best = dict(zip(map(str, indices.tolist()), values.tolist(), strict=True))
            assert top == pytest.approx(best, abs=1e-4)
        return len(token_ids)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def write_checkpoint(name: str, path: Path) -> None:
    """Save a random model, far from where an initialiser would leave it, whose token 7 reads "7"."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.08))
    model.save_pretrained(path, max_shard_size="200KB")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))


@pytest_asyncio.fixture(params=CONFIGS, scope="module", loop_scope="module")
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    async with ProcessGroup() as group:
        worker = await group.start(
            *("worker", "serve", "--model", str(path), "--served-model-name", "random", "--port", "0"),
            *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), *PRESSURE),
        )
        async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
            yield Served(worker.url, client, model)


def make_prompt(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


async def test_a_batch_under_memory_pressure_gives_the_tokens_of_transformers(served: Served) -> None:
    prompts = [make_prompt(count, seed=count) for count in (1, 7, 24, 30, 41, 48, 63, 100)]
    answer = await served.complete(prompts)
    num_tokens = sum(served.check(*each) for each in zip(prompts, answer.choices, strict=True))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens
    assert served.metric("kvist_engine_preemptions_total") > 0
    assert served.metric("kvist_engine_kv_blocks_used") == 0


async def test_a_cached_prefix_is_counted_and_changes_no_token(served: Served) -> None:
    stem = make_prompt(53, seed=0)
    turns = [(stem, 0), (stem, 48), ([*stem[:45], *make_prompt(20, seed=1)], 40), ([*stem[:4], 5, 6], 0)]
    for prompt, num_cached in turns:
        answer = await served.complete([prompt])
        served.check(prompt, answer.choices[0])
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == num_cached
