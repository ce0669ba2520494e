from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvist.engine import bundled_model_path
from kvist.engine.models.checkpoint_config import load_model_config
from kvist.engine.models.config import RopeConfig
from kvist.errors import InvalidValueError
from kvist.events import FULL

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
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}, "sliding_window"),
        ({"sliding_window": "8"}, "sliding_window: got '8', expected `int`"),
        ({"head_dim": -16}, "head_dim: got -16, expected `int` >= 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: got 'small', expected `float`"),
        ({"eos_token_id": ["end"]}, r"eos_token_id: got \['end'\]"),
        ({"rope_parameters": ["llama3"]}, r"rope_parameters: got \['llama3'\], expected `object`"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta: got '1e6', expected `float`"),
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


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_usable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        load_model_config(tmp_path)
