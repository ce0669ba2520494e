from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvist.engine import bundled_model_path
from kvist.engine.models.checkpoint_config import load_model_config
from kvist.engine.models.config import MAX_HEAD_DIM, RopeConfig, YarnScaling
from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kernels._checks import MAX_HEAD_DIM as KERNEL_MAX_HEAD_DIM
from kvist.kvcache import KvDtype, plan_windows

Edit = Callable[..., Path]


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
    assert load_model_config(old_path).layers == new.layers


def test_an_old_gemma_file_has_local_and_global_frequencies(edited: Edit) -> None:
    path = edited(
        "gemma3",
        rope_parameters=None,
        layer_types=None,
        _sliding_window_pattern=None,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    layers = load_model_config(path).layers
    assert [layer.window for layer in layers] == [8, 8, FULL, 8, 8, FULL]
    assert layers[0].rope == RopeConfig(1e4)
    assert layers[2].rope == RopeConfig(1e6, linear_factor=8.0)


def test_a_qwen_that_does_not_slide_attends_fully(edited: Edit) -> None:
    path = edited("qwen3-sliding", use_sliding_window=False, layer_types=None)
    assert {layer.window for layer in load_model_config(path).layers} == {FULL}


def test_end_tokens_come_from_both_files(edited: Edit) -> None:
    path = edited("qwen3", eos_token_id=5)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_model_config(path).eos_token_ids == {5, 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: .*Gemma3ForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures: got None"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, expected a divisor of 4"),
        ({"hidden_act": "relu"}, "hidden_act: got 'relu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: got 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor: got None, expected a value"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: got 0.5"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": []}, "number of layer_types: got 0, expected 2, as num_hidden_layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}, "sliding_window"),
        ({"sliding_window": "8"}, "sliding_window: got '8', expected `int`"),
        ({"head_dim": -16}, "head_dim: got -16, expected `int` >= 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: got 'small', expected `float`"),
        ({"eos_token_id": ["end"]}, r"eos_token_id: got \['end'\]"),
        ({"rope_parameters": ["llama3"]}, r"rope_parameters: got \['llama3'\], expected `object`"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta: got '1e6', expected `float`"),
        ({"head_dim": 514}, "head_dim: got 514, expected an even number up to 512"),
        ({"head_dim": 15}, "head_dim: got 15, expected an even number up to 512"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 0}, "sliding_window: got 0"),
        ({"layer_types": ["full_attention"] * 99}, "^number of layer_types: got 99, expected 2, as num_hidden_layers"),
        ({"intermediate_size": [64, 64]}, r"intermediate_size: got \[64, 64\], expected one number"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got 'fp8'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(edited: Edit, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        load_model_config(edited("qwen3", **changes))


def test_a_field_that_is_null_counts_as_left_out(edited: Edit) -> None:
    path = edited("qwen3")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": None, "rope_scaling": None}))
    assert load_model_config(path).norm_eps == 1e-6
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": None}))
    with pytest.raises(InvalidValueError, match="vocab_size: got None, expected a value"):
        load_model_config(path)


def test_frequencies_by_layer_type_are_objects(edited: Edit) -> None:
    with pytest.raises(InvalidValueError, match="rope_parameters: got 'default', expected an object"):
        load_model_config(edited("gemma3", rope_parameters={"full_attention": "default"}))


def test_a_gemma_that_looks_ahead_is_refused(edited: Edit) -> None:
    with pytest.raises(InvalidValueError, match="use_bidirectional_attention"):
        load_model_config(edited("gemma3", use_bidirectional_attention=True))


def test_a_window_pattern_longer_than_the_model_leaves_the_windows_that_are_there(edited: Edit) -> None:
    path = edited("gemma3", num_hidden_layers=4, layer_types=None, sliding_window_pattern=6)
    config = load_model_config(path)
    assert [layer.window for layer in config.layers] == [8] * 4
    assert len(plan_windows(config.layer_kv(KvDtype.FLOAT32), 512).groups) == 1


def test_gemma_4_spells_the_sizes_of_its_full_layers_in_two_ways(edited: Edit) -> None:
    saved = load_model_config(edited("gemma4-moe"))
    path = edited("gemma4-moe", per_layer_config=None, global_head_dim=32, num_global_key_value_heads=1)
    assert load_model_config(path).layers == saved.layers
    assert (saved.layers[5].head_dim, saved.layers[5].num_kv_heads, saved.layers[5].is_value_key) == (32, 1, True)
    separate = load_model_config(
        edited("gemma4-moe", per_layer_config=None, num_global_key_value_heads=1, attention_k_eq_v=False)
    )
    assert (separate.layers[5].head_dim, separate.layers[5].num_kv_heads) == (512, 4), "heads go with shared values"


def test_the_last_layer_of_gemma_4_is_full(edited: Edit) -> None:
    layers = load_model_config(edited("gemma4-moe", layer_types=None, num_hidden_layers=3, per_layer_config={})).layers
    assert [layer.window for layer in layers] == [8, 8, FULL]
    assert layers[2].rope == RopeConfig(1e6, rotated_share=0.25)


def test_the_last_layers_of_gemma_4_share_and_may_have_a_wider_mlp(edited: Edit) -> None:
    layers = load_model_config(edited("gemma4-shared")).layers
    assert [layer.kv_source for layer in layers] == [None, None, None, None, 2, 2, 3]
    assert [layer.intermediate_size for layer in layers] == [128] * 4 + [256] * 3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4-moe", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all'"),
        ("gemma4-moe", {"per_layer_config": {"6": {}}}, "per_layer_config: got '6', expected .* one of 6 layers"),
        ("gemma4-moe", {"per_layer_config": {"5": {"sliding_window": 4}}}, r"per_layer_config\.5: .*sliding_window"),
        ("gemma4-moe", {"per_layer_config": {"5": {"head_dim": 0}}}, "head_dim: got 0"),
        ("gemma4-moe", {"top_k_experts": 9}, "num_experts_per_tok: got 9, expected at most the 8 experts"),
        ("gemma4-moe", {"moe_intermediate_size": None}, "moe_intermediate_size: got None, expected a value"),
        ("gemma4-shared", {"num_kv_shared_layers": 7}, "num_kv_shared_layers: got 7"),
        ("gemma4-shared", {"num_kv_shared_layers": 6}, "num_kv_shared_layers: got 6"),
        ("gemma4-shared", {"vocab_size_per_layer_input": 511}, "vocab_size_per_layer_input: got 511"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, r"layer_types: got \['full_attention'\], expected none"),
        ("qwen3-moe-sliding", {"sliding_window": None}, "sliding_window: got None"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: got 'mxfp4'"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types: .*chunked_attention"),
    ],
)
def test_what_a_family_cannot_run_is_refused_by_name(
    edited: Edit, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        load_model_config(edited(name, **changes))


def test_the_largest_head_is_the_largest_that_attention_takes() -> None:
    assert MAX_HEAD_DIM == KERNEL_MAX_HEAD_DIM


def test_mistral_without_a_window_attends_fully(edited: Edit) -> None:
    assert {layer.window for layer in load_model_config(edited("mistral", sliding_window=None)).layers} == {FULL}


def test_gpt_oss_slides_in_every_other_layer_unless_told(edited: Edit) -> None:
    layers = load_model_config(edited("gpt-oss", layer_types=None, rope_parameters=None)).layers
    assert [layer.window for layer in layers] == [8, FULL, 8, FULL]
    assert isinstance(layers[0].rope.scaling, YarnScaling)
    assert (layers[0].rope.theta, layers[0].rope.scaling.factor) == (150_000.0, 32.0)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_usable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        load_model_config(tmp_path)
