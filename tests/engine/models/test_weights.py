from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvist.engine.models.config import load_model_config
from kvist.engine.models.transformer import CausalLM
from kvist.engine.models.weights import load_model
from kvist.errors import InvalidValueError

Tensors = dict[str, torch.Tensor]


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = load_model_config(model_dir)
    return load_model(model_dir, config, 64, dtype, torch.device("cpu"))


@pytest.fixture
def rewritten(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Callable[[Tensors], None]], Path]:
    """Copy a random model with its weights changed."""

    def rewrite(name: str, change: Callable[[Tensors], None]) -> Path:
        tensors = load_file(checkpoint(name) / "model.safetensors")
        change(tensors)
        shutil.copy(checkpoint(name) / "config.json", tmp_path)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return rewrite


def test_shards_with_an_index_load_like_one_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = checkpoint("qwen3")
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(source / "config.json", tmp_path)
    whole, sharded = load(source).state_dict(), load(tmp_path).state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(InvalidValueError, match=r"b\.safetensors"):
        load(tmp_path)


def test_experts_load_alike_stacked_and_one_by_one(checkpoint: Callable[[str], Path], rewritten) -> None:
    """Checkpoints of Qwen have a tensor an expert, those of Gemma one for all; either family may come either way."""

    def stack(tensors: Tensors) -> None:
        experts = "model.layers.0.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{experts}.{i}.{name}_proj.weight") for i in range(8)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{experts}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{experts}.down_proj"] = parts["down"]

    one_by_one, stacked = load(checkpoint("qwen3-moe")).state_dict(), load(rewritten("qwen3-moe", stack)).state_dict()
    assert all(torch.equal(one_by_one[name], stacked[name]) for name in one_by_one)


def test_a_missing_expert_is_named(rewritten) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    with pytest.raises(InvalidValueError, match=rf"none for {name}"):
        load(rewritten("qwen3-moe", lambda t: t.pop(name)))


def test_keys_and_values_of_a_layer_that_shares_are_not_loaded(rewritten) -> None:
    """Some exporters store what such a layer would have, had it a cache of its own."""
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    unused = {f"model.layers.6.self_attn.{name}.weight": torch.ones(1) for name in names}
    load(rewritten("gemma4-shared", lambda t: t.update(unused)))
    owner = {name.replace("layers.6", "layers.3"): weight for name, weight in unused.items()}
    with pytest.raises(InvalidValueError, match=r"model\.layers\.3\.self_attn"):
        load(rewritten("gemma4-shared", lambda t: t.update(owner)))


def test_a_redundant_tied_head_is_accepted(rewritten) -> None:
    path = rewritten("gemma3", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), r"none for model\.layers\.1\.self_attn\.k_proj"),
        (lambda t: t.update({"model.layers.0.mlp.experts": torch.ones(1)}), r"model\.layers\.0\.mlp\.experts"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"shape of model\.norm\.weight: got \[3\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), r"dtype of model\.norm\.weight"),
        (lambda t: t.clear(), "and 20 more"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_named(rewritten, change, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        load(rewritten("qwen3", change))


def test_weights_of_more_layers_than_the_model_has_are_named(rewritten) -> None:
    path = rewritten("llama", lambda _: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(InvalidValueError, match=r"model\.layers\.1\..* and 4 more', expected only those of LlamaFor"):
        load(path)


def test_a_directory_without_weights_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    with pytest.raises(InvalidValueError, match=r"a directory with model\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(InvalidValueError, match="a safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a.safetensors"]}'])
def test_an_index_of_shards_that_is_none_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, content: str
) -> None:
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InvalidValueError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)
