"""α against a count of multiplications, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.router.config import RouterConfig
from kvist.router.fleet.models import read_alpha
from kvist.router.policy.attention import costs_of
from kvist.router.policy.settings import DEFAULT_ALPHA, PriceSettings


def alpha_of(config: dict[str, Any]) -> float | None:
    costs = costs_of(config)
    return None if costs is None else costs.alpha


DENSE: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
}


def test_a_dense_model() -> None:
    queries_and_output, keys_and_values, mlp = 2 * 4096 * 4096, 2 * 4096 * 1024, 3 * 4096 * 14336
    expected = 2 * 4096 / (queries_and_output + keys_and_values + mlp)
    assert alpha_of(DENSE) == alpha_of({"text_config": DENSE, "vision_config": {}}) == pytest.approx(expected)


def test_experts_count_as_many_as_compute_a_token() -> None:
    experts = DENSE | {"head_dim": 64, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    attention = 2 * 4096 * 2048 + 2 * 4096 * 512
    assert alpha_of(experts) == pytest.approx(2 * 2048 / (attention + 3 * 4096 * 768 * 8))
    costs = costs_of(experts | {"vocab_size": 1000})
    assert costs is not None
    assert costs.weights == 32 * (attention + 3 * 4096 * 768 * 128) + 2 * 1000 * 4096
    assert costs.kv == 32 * 2 * 8 * 64


def test_layers_with_a_window_add_nothing_that_grows() -> None:
    layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8
    alpha = alpha_of(DENSE)
    assert alpha is not None
    assert alpha_of(DENSE | {"layer_types": layers}) == pytest.approx(alpha / 4)


@pytest.mark.parametrize(
    "config", [{}, {"text_config": None}, DENSE | {"hidden_size": "4096"}, DENSE | {"kv_lora_rank": 512}]
)
def test_what_does_not_say_enough(config: dict[str, Any]) -> None:
    assert alpha_of(config) is None


def test_a_models_directory_decides_what_is_weighed(tmp_path: Any) -> None:
    assert read_alpha(str(tmp_path)) == DEFAULT_ALPHA
    (tmp_path / "config.json").write_text("[]")
    assert read_alpha(str(tmp_path)) == DEFAULT_ALPHA
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}'
    )
    assert read_alpha(str(tmp_path)) == pytest.approx(16 / (4 * 64 + 3 * 64))
    settings = RouterConfig().make_policy(0.5)
    assert isinstance(settings, PriceSettings)
    assert settings.alpha == 0.5
