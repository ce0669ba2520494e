"""Rotary frequencies against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvist.engine.models.checkpoint_config import rope
from kvist.engine.models.config import RopeConfig
from kvist.engine.models.layers import RotaryTable, apply_rotary, rope_frequencies

HEAD_DIM, MAX_POSITION = 48, 2048
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional-slowed": {"rope_type": "proportional", "partial_rotary_factor": 0.7, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    "yarn-without-rounding": {"rope_type": "yarn", "factor": 8.0, "truncate": False},
    "yarn-all-ramp": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e9, "beta_slow": 1e-9},
    "yarn-no-ramp": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-9, "beta_slow": 1e-9},
    "yarn-magnitude": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    "yarn-magnitudes-of-two": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-shrunk": {"rope_type": "yarn", "factor": 0.5},
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_frequencies_and_magnitudes_are_those_of_transformers(name: str) -> None:
    params = {"rope_theta": 10_000.0} | KINDS[name]
    config = transformers.LlamaConfig(
        hidden_size=96, num_attention_heads=2, max_position_embeddings=MAX_POSITION, rope_parameters=dict(params)
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[params["rope_type"]](config)
    ours = rope(params, 1.0, MAX_POSITION)
    torch.testing.assert_close(rope_frequencies(ours, HEAD_DIM), expected)
    cos, sin = RotaryTable(ours, HEAD_DIM, 600).at(torch.tensor([0, 7, 599]))
    angles = torch.tensor([[0.0], [7.0], [599.0]]) * expected
    torch.testing.assert_close(cos[:, 0], angles.cos() * magnitude, rtol=0, atol=1e-4)
    torch.testing.assert_close(sin[:, 0], angles.sin() * magnitude, rtol=0, atol=1e-4)


def test_pairs_beyond_the_rotated_share_stay_as_they_are() -> None:
    table = RotaryTable(RopeConfig(10_000.0, rotated_share=0.25), 16, 100)
    x = torch.randn(1, 2, 16)
    turned = apply_rotary(x, *table.at(torch.tensor([99])))
    is_turned = (turned != x).any(dim=1)[0]
    assert is_turned.nonzero().flatten().tolist() == [0, 1, 8, 9], "two of eight pairs, halves apart"
