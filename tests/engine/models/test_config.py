from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvist.engine import bundled_model_path
from kvist.engine.models.config import MAX_HEAD_DIM, load_model_config
from kvist.engine.models.transformer import CausalLM
from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kernels._checks import MAX_HEAD_DIM as KERNEL_MAX_HEAD_DIM
from kvist.kvcache import KvDtype, plan_windows

Edit = Callable[..., Path]
MAX_LEN = 512


@pytest.fixture
def edited(checkpoint: Callable[[str], Path], tmp_path: Path) -> Edit:
    """Copy a random model's config.json with some fields set, or removed when None."""

    def edit(name: str, **changes: Any) -> Path:
        config = json.loads((checkpoint(name) / "config.json").read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return tmp_path

    return edit


def test_the_bundled_model_slides_in_five_of_six_layers() -> None:
    config = load_model_config(bundled_model_path())
    windows = [layer.window for layer in config.layers]
    assert windows.count(FULL) == 1
    assert windows.count(FULL) < len(windows)


def test_both_spellings_of_rope_say_the_same(edited: Edit) -> None:
    new = load_model_config(edited("llama-tied-biased-llama3"))
    rope = dict(json.loads((edited("llama-tied-biased-llama3") / "config.json").read_text())["rope_parameters"])
    theta = rope.pop("rope_theta")
    old_path = edited("llama-tied-biased-llama3", rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    assert load_model_config(old_path).text.rope_parameters == new.text.rope_parameters


def test_an_old_gemma_file_says_how_often_a_layer_is_full(edited: Edit) -> None:
    path = edited("gemma3", layer_types=None, _sliding_window_pattern=None, sliding_window_pattern=3)
    assert [layer.window for layer in load_model_config(path).layers] == [8, 8, FULL, 8, 8, FULL]


def test_a_qwen_that_does_not_slide_attends_fully(edited: Edit) -> None:
    path = edited("qwen3-sliding", use_sliding_window=False, layer_types=None)
    assert {layer.window for layer in load_model_config(path).layers} == {FULL}


def test_end_tokens_come_from_both_files(edited: Edit) -> None:
    path = edited("qwen3", eos_token_id=5)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_model_config(path).eos_token_ids == {5, 7}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3",
            {"architectures": ["GPT2LMHeadModel"], "quantization_config": {"quant_method": "bitsandbytes"}},
            "architectures: .*Gemma3ForCausalLM.*LlamaForCausalLM",
        ),
        ("qwen3", {"architectures": None}, "architectures: got None"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads: got 3, expected a divisor of 4"),
        ("qwen3", {"rope_parameters": {"rope_type": "axial"}}, "rope_type: got 'axial'"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": "2"}}, "factor: got '2', expected a number"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor: got 0.5, expected a number"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "linear", "factor": 1e308}},
            "factor: got 1e.308, expected a number",
        ),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "config.json: .*factor"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: got 0.5"),
        ("qwen3", {"rope_parameters": ["llama3"]}, "config.json: .*rope_parameters"),
        ("qwen3", {"layer_types": ["full_attention"]}, "config.json: .*layer"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}, "sliding_window"),
        ("qwen3", {"vocab_size": "8"}, "config.json: .*vocab_size"),
        ("qwen3", {"rms_norm_eps": "small"}, "config.json: .*rms_norm_eps"),
        ("qwen3", {"eos_token_id": ["end"]}, "eos_token_id"),
        ("qwen3", {"head_dim": -16}, "head_dim: got -16, expected an even number up to 512"),
        ("qwen3", {"head_dim": 514}, "head_dim: got 514, expected an even number up to 512"),
        ("qwen3", {"head_dim": 15}, "config.json: .*head_dim"),
        ("qwen3", {"quantization_config": "fp8"}, "quantization_config.quant_method: got 'fp8', expected one of"),
        ("qwen3", {"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method: got 'aqlm'"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config.bits: got 3"),
        ("qwen3", {"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "version: got 'gemv'"),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            "quantization_config.format: got 'nvfp4-pack-quantized', expected one of",
        ),
        (
            "qwen3",
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
                }
            },
            "quantization_config: got .*, expected num_bits 2, 4 or 8 .*3",
        ),
        ("qwen3", {"quantization_config": {"quant_method": "fp8", "config_groups": ["group_0"]}}, "config_groups"),
        ("qwen3", {"quantization_config": {"quant_method": ["fp8"]}}, "quant_method: got .'fp8'., expected one of"),
        ("qwen3-sliding", {"sliding_window": 0}, "sliding_window: got 0"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types: .* sliding_window holds for every layer"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
        ("gemma3", {"rope_parameters": {"full_attention": "default"}}, "config.json"),
        ("gemma4-moe", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all'"),
        ("gemma4-moe", {"per_layer_config": {"6": {"head_dim": 8}}}, "config.json: .*per_layer_config"),
        ("gemma4-moe", {"per_layer_config": {"5": {"head_dim": 0}}}, "head_dim: got 0"),
        ("gemma4-moe", {"top_k_experts": 9}, "top_k_experts: got 9, expected at most the 8 experts"),
        ("gemma4-shared", {"num_kv_shared_layers": 7}, "num_kv_shared_layers: got 7"),
        ("gemma4-shared", {"num_kv_shared_layers": 6}, "num_kv_shared_layers: got 6"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 511}, "vocab_size_per_layer_input: got 511"),
        ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx: got 4, expected 0 to 3"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5] * 5}, "config.json: .*activation_sparsity"),
        ("gemma3n", {"intermediate_size": [128] * 7}, "config.json: .*intermediate_size"),
        ("gpt-oss", {"num_experts_per_tok": 9}, "num_experts_per_tok: got 9, expected at most the 8 experts"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(edited: Edit, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        load_model_config(edited(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"hidden_size": -64}),
        ("qwen3", {"hidden_act": "none of it"}),
        ("gemma4-moe", {"moe_intermediate_size": None}),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 0,
                    **dict.fromkeys(("short_factor", "long_factor"), [1.0] * 8),
                }
            },
        ),
    ],
)
def test_sizes_and_names_that_are_no_models_are_refused(edited: Edit, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=r"config\.json: got '.*ForCausalLM', expected a model"):
        CausalLM(load_model_config(edited(name, **changes)), MAX_LEN, torch.float32)


def test_a_window_pattern_longer_than_the_model_leaves_the_windows_that_are_there(edited: Edit) -> None:
    path = edited("gemma3", num_hidden_layers=4, layer_types=None, sliding_window_pattern=6)
    config = load_model_config(path)
    assert [layer.window for layer in config.layers] == [8] * 4
    assert len(plan_windows(config.layer_kv(KvDtype.FLOAT32), 512).groups) == 1


def test_gemma_4_spells_the_sizes_of_its_full_layers_in_two_ways(edited: Edit) -> None:
    saved = load_model_config(edited("gemma4-moe"))
    path = edited("gemma4-moe", per_layer_config=None, global_head_dim=32, num_global_key_value_heads=1)
    assert load_model_config(path).layers == saved.layers
    assert (saved.layers[5].head_dim, saved.layers[5].num_kv_heads) == (32, 1)


def test_the_last_layers_share_the_cache_of_the_last_owner_of_their_type(edited: Edit) -> None:
    layers = load_model_config(edited("gemma4-shared")).layers
    assert [layer.kv_source for layer in layers] == [None, None, None, None, 2, 2, 3]


def test_of_thirty_layers_ten_have_no_memory_of_their_own(edited: Edit) -> None:
    big = {"num_hidden_layers": 30, "num_kv_shared_layers": 10, "sliding_window": 512}
    config = load_model_config(
        edited("gemma3n", **big, layer_types=None, intermediate_size=96, activation_sparsity_pattern=None)
    )
    plan = plan_windows(config.layer_kv(KvDtype.BFLOAT16), 32_768)
    assert [(group.window, len(group.layer_indices)) for group in plan.groups] == [(FULL, 4), (512, 16)]
    assert {plan.places[i] for i in (18, 20, 23, 25, 28)} == {plan.places[18]}
    assert plan.places[24] == plan.places[29] == plan.places[19]


def test_the_largest_head_is_the_largest_that_attention_takes() -> None:
    assert MAX_HEAD_DIM == KERNEL_MAX_HEAD_DIM


def test_mistral_without_a_window_attends_fully(edited: Edit) -> None:
    path = edited("mistral")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    assert {layer.window for layer in load_model_config(path).layers} == {FULL}


def test_gpt_oss_slides_in_every_other_layer_unless_told(edited: Edit) -> None:
    layers = load_model_config(edited("gpt-oss", layer_types=None)).layers
    assert [layer.window for layer in layers] == [8, FULL, 8, FULL]


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 1.5}, 768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_a_rope_that_stretches_lengthens_what_a_sequence_may_be(edited: Edit, rope: Any, longest: int) -> None:
    assert load_model_config(edited("qwen3", rope_parameters=rope)).max_position == longest


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_usable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        load_model_config(tmp_path)
