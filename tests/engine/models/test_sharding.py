"""Ranks' models as threads of this process: the sum of activations is all that passes between them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kvist.engine.batch import GroupPages, HostBatch
from kvist.engine.models import projections
from kvist.engine.models.config import load_model_config, rank_config, rank_slices
from kvist.engine.models.transformer import CausalLM
from kvist.engine.models.weights import load_model
from kvist.engine.runner import Runner
from kvist.errors import InvalidValueError
from kvist.kvcache import KvDtype, plan_windows
from kvist.kvcache.tensors import KvTensors
from kvist.transfer.heads import WHOLE, Part

NUM_TOKENS, BLOCK_SIZE, MAX_LEN = 30, 4, 64
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE + 1


class Sum:
    """Stands in for torch.distributed.all_reduce among threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._parts: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> None:
        self._parts.append(tensor)
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        tensor.copy_(total)
        self._parts = []
        self._barrier.wait()


def load(model_dir: Path, shard: Part) -> CausalLM:
    return load_model(model_dir, load_model_config(model_dir), MAX_LEN, torch.float32, torch.device("cpu"), shard)


def logits_of(model: CausalLM) -> torch.Tensor:
    """Return the logits of a prompt's every token."""
    device = torch.device("cpu")
    plan = plan_windows(model.config.layer_kv(KvDtype.FLOAT32), MAX_LEN)
    tensors = KvTensors(plan, [NUM_BLOCKS] * len(plan.groups), BLOCK_SIZE, device)
    rows = np.arange(NUM_TOKENS)
    table, offsets = np.arange(NUM_BLOCKS, dtype=np.int32)[None, None], np.zeros(1, dtype=np.int32)
    group = GroupPages(table, offsets, rows[None])
    batch = HostBatch(
        input_ids=rows * 7 % 500 + 5,
        positions=rows,
        seq_lens=np.array([NUM_TOKENS], dtype=np.int32),
        num_decodes=0,
        prefill_start_loc=np.array([0, NUM_TOKENS], dtype=np.int32),
        logit_rows=rows,
        groups=(group,) * len(plan.groups),
    )
    return Runner(model, plan, tensors, BLOCK_SIZE).compute(batch)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-tied-biased-llama3",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3-sliding",
        "smollm3",
        "gemma2",
        "gemma3",
        "gemma3-capped",
        "gemma4-shared",
    ],
)
def test_ranks_together_give_the_whole_models_logits(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int
) -> None:
    """The checkpoints have four heads and two KV heads: of four ranks, two share each KV head."""
    model_dir = checkpoint(name)
    whole = logits_of(load(model_dir, WHOLE))
    monkeypatch.setattr(projections.distributed, "all_reduce", Sum(num_ranks))
    ranks = [load(model_dir, Part(rank, num_ranks)) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        by_rank = list(pool.map(logits_of, ranks))
    for rank, logits in zip(ranks, by_rank, strict=True):
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        assert rank.decoder.get_input_embeddings().weight.shape[0] == whole.shape[1] // num_ranks
        assert rank.decoder.get_output_embeddings().weight.shape[0] == whole.shape[1] // num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_multiply_fp8_weights_by_what_each_rounds_of_its_inputs(
    fp8_checkpoint, keep_fp8, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """With four, keys and values are dequantised: their 32 rows are not 16 or more for each rank."""
    by_token = {"group_0": {"input_activations": {"dynamic": True, "strategy": "token"}}}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": by_token}
    model_dir = fp8_checkpoint("llama", quantization)

    def logits_of_ranks(ranks: list[CausalLM]) -> torch.Tensor:
        monkeypatch.setattr(projections.distributed, "all_reduce", Sum(num_ranks))
        with ThreadPoolExecutor(num_ranks) as pool:
            return next(pool.map(logits_of, ranks))

    def project(x: torch.Tensor, module: nn.Linear, bias: torch.Tensor | None) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return functional.linear((x / scale).to(torch.float8_e4m3fn).float() * scale, module.weight, bias)

    dequantised = [load(model_dir, Part(rank, num_ranks)) for rank in range(num_ranks)]
    keep_fp8()
    ranks = [load(model_dir, Part(rank, num_ranks)) for rank in range(num_ranks)]
    kept = [name for name, weight in ranks[1].decoder.state_dict().items() if weight.dtype == torch.float8_e4m3fn]
    assert len(kept) == (14 if num_ranks == 2 else 10)
    got = logits_of_ranks(ranks)
    for rank in dequantised:
        for name in kept:
            module = rank.decoder.get_submodule(name.removesuffix(".weight"))
            if type(module) is nn.Linear:
                module.forward = lambda x, it=module: project(x, it, it.bias)
    monkeypatch.setattr(projections, "_project", project)
    errors = (got - logits_of_ranks(dequantised)).abs()
    assert errors.median() < 1e-5
    assert errors.max() < 0.05


def test_a_vocabulary_that_ranks_do_not_divide_is_whole_on_each(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 511}))
    assert rank_config(load_model_config(tmp_path), 2).vocab_size == 511


def test_a_whole_model_has_no_linear_that_sums(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("llama"), WHOLE)
    assert not [each for each in model.modules() if isinstance(each, projections.RowParallelLinear)]
    assert rank_config(model.config, 1) is model.config


@pytest.mark.parametrize(
    ("whole", "part", "expected"),
    [
        ((8, 6), (2, 6), [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ((4, 6), (2, 6), [(0, 2), (0, 2), (2, 4), (2, 4)]),
        ((2, 6), (2, 6), [(0, 2)] * 4),
    ],
)
def test_a_part_is_the_ranks_and_shared_by_neighbours_where_parts_are_few(
    whole: tuple[int, int], part: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    for rank, (start, stop) in enumerate(expected):
        assert rank_slices(whole, part, Part(rank, 4)) == (slice(start, stop), slice(0, 6))


@pytest.mark.parametrize(
    ("name", "num_ranks", "expected"),
    [
        ("llama", 3, "a divisor of 4 attention heads"),
        ("llama", 8, "a divisor of 4 attention heads"),
        ("qwen3-moe", 2, "1 for Qwen3MoeForCausalLM with experts"),
        ("gpt-oss", 2, "1 for GptOssForCausalLM with experts"),
        ("gemma4-moe", 2, "1 for Gemma4ForCausalLM with experts"),
        ("gemma3n", 2, "1 for Gemma3nForCausalLM"),
        ("glm4", 2, "1 for Glm4ForCausalLM"),
        ("olmo2", 2, "1 for Olmo2ForCausalLM"),
        ("phi3", 2, "1 for Phi3ForCausalLM"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    checkpoint: Callable[[str], Path], name: str, num_ranks: int, expected: str
) -> None:
    with pytest.raises(InvalidValueError, match=expected) as caught:
        rank_config(load_model_config(checkpoint(name)), num_ranks)
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", num_ranks)
