from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvist.engine import bundled_model_path, loading
from kvist.engine.config import EngineConfig
from kvist.engine.models.config import ModelConfig
from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import KvDtype, LayerKv, SharedKv


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 12}, "block_size: got 12, expected a power of two"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: got 'int8', expected one of .*fp8_e5m2"),
        ({"kv_budget": "fair"}, "kv_budget: got 'fair', expected one of .*bounded"),
        ({"num_blocks": 0}, "num_blocks: got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens: got 8, expected at least max_num_seqs=64"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        EngineConfig(model_dir=Path(), **settings)


def test_a_pool_that_cannot_hold_one_sequence_is_refused(make_core) -> None:
    with pytest.raises(InvalidValueError, match=r"got 127, expected at least 128: one sequence of max_model_len=512"):
        make_core("gemma3", num_blocks=127)


def test_memory_is_split_by_the_policy_and_all_of_it_is_used(make_core) -> None:
    layer_bytes = 2 * 2 * 16 * 4 * 4

    def num_blocks(**settings: Any) -> list[int]:
        core = make_core("gemma3", num_blocks=None, max_num_batched_tokens=64, **settings)
        return [pool.num_blocks for pool in core.statistics().kv_cache.pools]

    full, sliding = num_blocks(kv_memory_mib=3, kv_budget="bounded")
    assert 0 <= 3 * 2**20 - (full + 5 * sliding) * layer_bytes < layer_bytes
    assert full > 2 * sliding
    full, sliding = num_blocks(kv_memory_mib=3, kv_budget="uniform")
    assert full == sliding
    full, sliding = num_blocks(kv_memory_mib=3, dtype="float16")
    assert 0 <= 3 * 2**20 - (full + 5 * sliding) * layer_bytes // 2 < layer_bytes // 2


@pytest.mark.parametrize(
    ("has_products", "size", "stored", "expected"),
    [
        (True, 512, "bfloat16", torch.bfloat16),
        (True, 192, "bfloat16", torch.float32),
        (True, 512, "float32", torch.float32),
        (False, 512, "bfloat16", torch.float32),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_weights_are_of_it_and_products_faster(
    has_products: bool, size: int, stored: str, expected: torch.dtype, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_products})
    config = json.loads((bundled_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": size, "dtype": stored}))
    facts = loading._facts(EngineConfig(model_dir=tmp_path), rank=0)
    assert facts.dtype is expected
    assert facts.plan.groups[0].layer.dtype.value == str(expected).removeprefix("torch.")


def test_a_cache_in_another_dtype_than_the_model_computes_in_is_refused_unless_it_has_eight_bits(make_core) -> None:
    with pytest.raises(InvalidValueError, match="kv_cache_dtype: got 'bfloat16', expected float32, in which the model"):
        make_core("gemma3", kv_cache_dtype="bfloat16")
    make_core("gemma3", kv_cache_dtype="fp8_e4m3")


def test_scratch_slots_that_cannot_be_are_refused_before_weights_are_read(make_core, monkeypatch) -> None:
    # Layer 5 reads what layer 2 wrote; layer 4, which is made an owner here, writes to the same scratch slots between.
    layer_kv = ModelConfig.layer_kv

    def with_another_owner(self: ModelConfig, dtype: KvDtype) -> list[LayerKv | SharedKv]:
        layers = layer_kv(self, dtype)
        return [layers[0] if i == 4 else layer for i, layer in enumerate(layers)]

    monkeypatch.setattr(ModelConfig, "layer_kv", with_another_owner)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("reads the weights first"))
    with pytest.raises(InvalidValueError, match=r"layers\[5\].source: got 2, expected layer 4"):
        make_core("gemma4-shared", has_swa_scratch=True)


def test_more_memory_than_there_is_is_refused(make_core) -> None:
    message = r"num_blocks: got .* fit into memory \(group 0: cpu has not \d+ MiB left\)$"
    with pytest.raises(InvalidValueError, match=message):
        make_core("qwen3", num_blocks=10**12)


def test_a_longer_context_than_the_models_is_refused(make_core) -> None:
    with pytest.raises(InvalidValueError, match="max_model_len: got 513, expected at most the model's 512"):
        make_core("qwen3", max_model_len=513)


@pytest.mark.parametrize("device", ["gpu", "meta", "mps", "cuda:x"])
def test_an_unknown_device_is_refused(make_core, device: str) -> None:
    with pytest.raises(InvalidValueError, match=f"device: got '{device}', expected cpu, cuda or cuda:N"):
        make_core("qwen3", device=device)


def test_too_little_memory_is_said_of_the_setting(make_core) -> None:
    expected = "kv_memory_mib: got 1, expected at least 2097152 bytes (2 MiB): one sequence of max_model_len=512"
    with pytest.raises(InvalidValueError, match=re.escape(expected)):
        make_core("llama", num_blocks=None, kv_memory_mib=1, block_size=4096)


def test_groups_follow_the_windows(make_core) -> None:
    windows = [pool.window for pool in make_core("gemma3").statistics().kv_cache.pools]
    assert windows == [FULL, 8]
    assert [pool.window for pool in make_core("gemma3", max_model_len=8).statistics().kv_cache.pools] == [FULL]
