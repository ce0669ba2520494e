"""Tiny random checkpoints, written by transformers, and short ways to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from memory_invariants import check_engine
from torch import nn
from transformers.models.gemma3 import modeling_gemma3

from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore
from kvist.engine.loading import load_engine
from kvist.engine.request import RequestOutput, SequenceInput
from kvist.events import EventSink
from kvist.kvcache import KvCacheManager
from kvist.kvcache.sequences import event_hash
from kvist.openai.requests import SamplingParams

S, F = "sliding_attention", "full_attention"
MAX_LEN, WINDOW = 512, 8
BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHORT, LONG = MAX_LEN, 4  # what a model was trained on, so that LongRoPE stays short, or no prompt is


def longrope(trained_length: int, num_turned: int = 16) -> dict[str, Any]:
    """Return a LongRoPE for heads of which so many numbers are turned."""
    factors = {"short_factor": [1.0, 0.7] * (num_turned // 4), "long_factor": [1.0, 3.0] * (num_turned // 4)}
    stretch = {"original_max_position_embeddings": trained_length, **factors}
    return {"rope_type": "longrope", "rope_theta": 1_000.0, **stretch}


GEMMA: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": [S] * 5 + [F],
    "query_pre_attn_scalar": 24,
}
MOE: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 32}

# One entry a family or trait of one. `tests/engine/models` runs each through everything that paged memory can do to it.
FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**BASE, num_hidden_layers=2),
    "llama-tied-biased-llama3": transformers.LlamaConfig(
        **BASE,
        num_hidden_layers=2,
        rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "qwen3": transformers.Qwen3Config(**BASE, num_hidden_layers=2),
    "qwen3-sliding": transformers.Qwen3Config(
        **BASE, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, layer_types=[F, S, F, S]
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **BASE, num_hidden_layers=3, **MOE, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen3-moe-sliding": transformers.Qwen3MoeConfig(
        **BASE,
        num_hidden_layers=2,
        **MOE,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "qwen2": transformers.Qwen2Config(
        **{key: value for key, value in BASE.items() if key != "head_dim"} | {"max_position_embeddings": LONG},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1_000.0, "factor": MAX_LEN / LONG},
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "gemma2": transformers.Gemma2Config(
        **BASE,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "phi3": transformers.Phi3Config(
        **BASE,
        num_hidden_layers=2,
        sliding_window=WINDOW,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=LONG,
        rope_parameters=longrope(LONG, num_turned=8),
    ),
    "glm4": transformers.Glm4Config(**BASE, num_hidden_layers=2, attention_bias=True),
    "olmo2": transformers.Olmo2Config(**BASE, num_hidden_layers=2),
    "smollm3": transformers.SmolLM3Config(
        **BASE,
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 1, 0],
        rope_parameters={"rope_type": "linear", "rope_theta": 1_000.0, "factor": 4.0},
    ),
    "mistral": transformers.MistralConfig(
        **BASE | {"max_position_embeddings": 2 * SHORT},
        num_hidden_layers=2,
        sliding_window=WINDOW,
        rope_parameters=longrope(SHORT),
    ),
    "gemma3": transformers.Gemma3TextConfig(**BASE, **GEMMA),
    "gemma3-capped": transformers.Gemma3TextConfig(
        **BASE,
        **GEMMA,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        rope_parameters={
            S: longrope(LONG),
            F: {"rope_type": "linear", "factor": 4.0, "rope_theta": 20_000.0},
        },
    ),
    "gemma4-moe": transformers.Gemma4TextConfig(
        **(BASE | {"num_key_value_heads": 4}),
        **MOE,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=[S] * 5 + [F],
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        top_k_experts=3,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=3.0,
    ),
    "gemma4-shared": transformers.Gemma4TextConfig(
        **BASE,
        num_hidden_layers=7,
        sliding_window=WINDOW,
        layer_types=[S, F, S, F, S, S, F],
        global_head_dim=32,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=512,
    ),
    "gpt-oss": transformers.GptOssConfig(
        **BASE,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        num_local_experts=8,
        num_experts_per_tok=3,
        swiglu_limit=0.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma3n": transformers.Gemma3nTextConfig(
        **BASE,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=[S, S, F, S, S, F],
        num_kv_shared_layers=3,
        vocab_size_per_layer_input=400,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.95, 0.8, 0.0, 0.0, 0.0, 0.0],
    ),
    "gemma3n-three-streams": transformers.Gemma3nTextConfig(
        **BASE | {"intermediate_size": [128, 96, 64, 96, 128]},
        num_hidden_layers=5,
        sliding_window=WINDOW,
        layer_types=[F, S, S, F, S],
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=24,
        laurel_rank=8,
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
        final_logit_softcapping=2.0,
        activation_sparsity_pattern=[0.0, 0.5, 0.9, 0.0, 0.6],
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a `family` for each; if it takes `has_scratch`, for those that slide once more with it."""
    if "has_scratch" in metafunc.fixturenames:
        cases = [pytest.param(name, False, id=name) for name in FAMILIES]
        slides = [name for name, config in FAMILIES.items() if getattr(config, "sliding_window", None)]
        cases += [pytest.param(name, True, id=f"{name}-scratch") for name in slides]
        metafunc.parametrize(("family", "has_scratch"), cases)
    elif "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _draws_the_same_each_time() -> None:
    """Whatever was drawn in this process before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the named random model once a session; every weight is far from where an initialiser would leave it."""

    @cache
    def write(name: str) -> Path:
        with torch.random.fork_rng(), torch.no_grad():  # who asks first draws no other numbers than the next
            torch.manual_seed(hash_of(name))
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name])
            stored = model.state_dict()
            buffers = [buffer for key, buffer in model.named_buffers() if key in stored]
            for weight in (*model.parameters(), *buffers):
                spread = 0.3 if weight.dim() == 1 else 0.08
                weight.add_(torch.randn_like(weight) * spread)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        return path

    return write


def hash_of(name: str) -> int:
    """Return a seed that does not change between runs."""
    return sum(name.encode())


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[..., torch.Tensor]:
    """Return transformers' logits, float32 `[num_tokens, vocab_size]`, of a whole sequence, uncached."""

    @cache
    def load(name: str, dtype: torch.dtype) -> nn.Module:
        eager = {"attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=dtype, **eager)
        if (model.config.rope_parameters or {}).get("rope_type") == "dynamic":
            model(torch.zeros(1, MAX_LEN, dtype=torch.int64))  # it keeps the frequencies of the longest sequence
        return model

    def logits(name: str, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model = load(name, dtype)
        soft_cap = getattr(model.config, "attn_logit_softcapping", None)
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            # transformers 5.23 can cap attention logits, but does not pass it what the configuration says.
            capped = partial(modeling_gemma3.eager_attention_forward, softcap=soft_cap)
            patch.setattr(modeling_gemma3, "eager_attention_forward", capped)
            return model(torch.tensor([token_ids])).logits[0].float()

    return logits


@pytest.fixture
def make_core(checkpoint: Callable[[str], Path]) -> Callable[..., EngineCore]:
    """Load an engine on a random checkpoint, with small blocks."""

    def make(name: str = "gemma3", sink: EventSink | None = None, **settings: Any) -> EngineCore:
        defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_model_len": MAX_LEN}
        return load_engine(EngineConfig(model_dir=checkpoint(name), **(defaults | settings)), sink).core

    return make


@pytest.fixture
def greedy() -> Callable[..., SamplingParams]:
    """Sampling parameters that leave nothing to chance."""

    def make(max_tokens: int, **params: Any) -> SamplingParams:
        return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | params))

    return make


@pytest.fixture
def generate() -> Callable[..., dict[str, list[RequestOutput]]]:
    """Run requests to their ends; check the engine's memory at every step and that nothing leaks."""

    def run(
        core: EngineCore,
        requests: Iterable[tuple[list[int], SamplingParams]],
        every_step: Callable[[], None] | None = None,
    ) -> dict[str, list[RequestOutput]]:
        outputs: dict[str, list[RequestOutput]] = {}
        for i, (prompt, params) in enumerate(requests):
            outputs[str(i)] = []
            core.add_request(str(i), SequenceInput(prompt, params))
        while core.has_work:
            for output in core.step():
                outputs[output.request_id].append(output)
            check_engine(core)
            if every_step is not None:
                every_step()
        assert all(pool.num_used == 0 for pool in core.statistics().kv_cache.pools)
        return outputs

    return run


@pytest.fixture
def tokens_of() -> Callable[[list[RequestOutput]], list[int]]:
    """Join the tokens of one request's outputs."""
    return lambda outputs: [token_id for output in outputs for token_id in output.token_ids]


class EventFollower:
    """Holds per group the hashes that the events say are cached."""

    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {}
        self.num_clears = 0

    def created(self, *, group: int, **_: Any) -> None:
        self.held[group] = set()

    def stored(self, block_hashes: list[int], token_ids: list[int], *, group: int, **_: Any) -> None:
        assert not self.held[group] & set(block_hashes)
        assert len(token_ids) % len(block_hashes) == 0
        self.held[group] |= set(block_hashes)

    def removed(self, block_hashes: list[int], *, group: int, **_: Any) -> None:
        assert self.held[group] >= set(block_hashes)
        self.held[group] -= set(block_hashes)

    def cleared(self, **_: Any) -> None:
        self.num_clears += 1
        self.held = {group: set() for group in self.held}

    def assert_equals(self, kv_cache: KvCacheManager) -> None:
        """Assert that following the events gives what the pools hold."""
        assert self.held == {
            pool.group.group_id: {event_hash(digest) for digest in pool._cached} for pool in kv_cache.pools
        }


@pytest.fixture
def new_follower() -> Callable[[], EventFollower]:
    """Return the class: property tests need one an example."""
    return EventFollower
