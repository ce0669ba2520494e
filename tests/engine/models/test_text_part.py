"""Checkpoints that see and hear as well: their text part alone is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from kvist.engine.models.config import load_model_config
from kvist.engine.models.weights import load_model
from kvist.errors import InvalidValueError

CPU = torch.device("cpu")
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def seeing_gemma3(text: transformers.PretrainedConfig) -> nn.Module:
    vision = transformers.SiglipVisionConfig(**VISION, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4_without_other_parts(text: transformers.PretrainedConfig) -> nn.Module:
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    return transformers.Gemma4ForConditionalGeneration(config)


def seeing_mistral3(text: transformers.PretrainedConfig) -> nn.Module:
    vision = transformers.PixtralVisionConfig(**VISION, image_size=28, patch_size=14)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    return transformers.Mistral3ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("mistral", seeing_mistral3),
        ("gemma3", seeing_gemma3),
        ("gemma4-moe", gemma4_without_other_parts),
        ("gemma4-shared", gemma4_without_other_parts),
    ],
)
def test_the_text_part_generates_what_the_whole_model_does(
    name: str, build: Callable[..., nn.Module], checkpoint, tmp_path: Path, assert_generates_like
) -> None:
    torch.manual_seed(7)
    model = build(transformers.AutoConfig.from_pretrained(checkpoint(name)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.08))
    model.save_pretrained(tmp_path)
    assert_generates_like(model, tmp_path)


@pytest.fixture
def wrapped(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Rewrite a random text model as the text part of one that has other weights too."""

    def wrap(name: str, prefix: str) -> Path:
        text = json.loads((checkpoint(name) / "config.json").read_text())
        [architecture] = text.pop("architectures")
        named = architecture.replace("CausalLM", "ConditionalGeneration")
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [named], "text_config": text}))
        tensors = load_file(checkpoint(name) / "model.safetensors")
        renamed = {key.replace("model.", prefix, 1): tensor for key, tensor in tensors.items()}
        save_file(renamed | {"vision_tower.patch.weight": torch.ones(3)}, tmp_path / "model.safetensors")
        return tmp_path

    return wrap


@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gemma4-moe"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_is_the_text_model_under_either_prefix(
    name: str, prefix: str, wrapped: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    part, alone = (
        load_model(path, load_model_config(path), 64, torch.float32, CPU).state_dict()
        for path in (wrapped(name, prefix), checkpoint(name))
    )
    assert part.keys() == alone.keys()
    assert all(torch.equal(part[key], alone[key]) for key in part)


def test_what_a_released_gemma_3_leaves_out_is_filled_in(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, expected = load_model_config(tmp_path), transformers.Gemma3TextConfig(**text)
    assert (config.vocab_size, config.max_position) == (expected.vocab_size, expected.max_position_embeddings)
    assert (config.layers[0].head_dim, config.layers[0].num_kv_heads) == (256, 4)
    assert config.eos_token_ids == {1, 106}


def test_a_model_without_its_text_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma4ForConditionalGeneration"]}')
    with pytest.raises(InvalidValueError, match=r"config\.json: text_config: got None, expected an object"):
        load_model_config(tmp_path)
