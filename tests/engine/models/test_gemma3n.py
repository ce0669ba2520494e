from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvist.engine.models.checkpoint_config import load_model_config
from kvist.engine.models.config import RopeConfig
from kvist.engine.models.gemma import SparseGateMlp
from kvist.engine.models.weights import load_model
from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import plan_windows
from kvist.kvcache.plan import KvDtype

Edit = Callable[..., Path]


@pytest.fixture
def edited(checkpoint: Callable[[str], Path], tmp_path: Path) -> Edit:
    """Copy the random model's config.json with some fields set, or removed when None."""

    def edit(**changes: Any) -> Path:
        config = json.loads((checkpoint("gemma3n") / "config.json").read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return tmp_path

    return edit


def test_of_thirty_layers_ten_have_no_memory_of_their_own(edited: Edit) -> None:
    big = {"num_hidden_layers": 30, "num_kv_shared_layers": 10, "sliding_window": 512}
    config = load_model_config(edited(**big, layer_types=None, intermediate_size=96, activation_sparsity_pattern=None))
    plan = plan_windows(config.layer_kv(KvDtype.BFLOAT16), 32_768)
    assert [(group.window, len(group.layer_indices)) for group in plan.groups] == [(FULL, 4), (512, 16)]
    assert {plan.places[i] for i in (18, 20, 23, 25, 28)} == {plan.places[18]}
    assert plan.places[24] == plan.places[29] == plan.places[19]
    assert {layer.window for layer in config.layers[20:24]} == {512}
    assert [layer.activation_sparsity for layer in config.layers] == [0.95] * 10 + [0.0] * 20


def test_a_layer_may_have_an_mlp_of_its_own_size(edited: Edit) -> None:
    config = load_model_config(edited(intermediate_size=[128, 96, 64, 128, 128, 128], activation_sparsity_pattern=0.5))
    assert [layer.intermediate_size for layer in config.layers] == [128, 96, 64, 128, 128, 128]
    assert {layer.activation_sparsity for layer in config.layers} == {0.5}


def test_an_older_file_says_its_frequencies_apart(edited: Edit) -> None:
    layers = load_model_config(edited(rope_parameters=None, rope_theta=5e5, rope_local_base_freq=2e4)).layers
    assert layers[0].rope == RopeConfig(2e4)
    assert layers[2].rope == RopeConfig(5e5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 4}, "altup_active_idx: got 4, expected 0 to 3"),
        ({"activation_sparsity_pattern": [0.5] * 5}, "activation_sparsity_pattern: .* each of 6 layers"),
        ({"activation_sparsity_pattern": [0.5] * 5 + [1.0]}, "activation_sparsity_pattern: .* below 1"),
        ({"intermediate_size": [128] * 7}, "intermediate_size: .* each of 6 layers"),
        ({"intermediate_size": [0] * 6}, "intermediate_size: got"),
        ({"laurel_rank": None}, "laurel_rank"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers: got 5"),
        ({"hidden_activation": "relu"}, "hidden_activation: got 'relu'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(edited: Edit, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        load_model_config(edited(**changes))


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.95])
def test_a_sparse_gate_passes_about_that_share_less_of_a_bell_curve(edited: Edit, sparsity: float) -> None:
    size = 4096
    mlp = SparseGateMlp(load_model_config(edited(hidden_size=1)), size, sparsity).requires_grad_(False)
    torch.manual_seed(0)
    gate = 3.0 + 2.0 * torch.randn(size)
    mlp.gate_up_proj.weight.copy_(torch.cat([gate, torch.ones(size)]).unsqueeze(-1))
    given: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    mlp.down_proj.weight.zero_()
    mlp(torch.ones(1, 1))
    assert (given[0] > 0).float().mean().item() == pytest.approx(1 - sparsity, abs=0.02)


def test_keys_and_values_of_layers_that_share_are_ignored(checkpoint: Callable[[str], Path], edited: Edit) -> None:
    path = edited()
    tensors = load_file(checkpoint("gemma3n") / "model.safetensors")
    leftover = {
        name.replace("layers.2.", "layers.5."): torch.ones_like(tensors[name])
        for name in tensors
        if "layers.2.self_attn.k" in name or "layers.2.self_attn.v" in name
    }
    assert leftover
    save_file(tensors | leftover, path / "model.safetensors")
    load_model(path, load_model_config(path), 64, torch.float32, torch.device("cpu"))
