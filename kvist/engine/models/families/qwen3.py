"""Qwen 3, dense and with experts: queries and keys are normed; some layers may slide."""

from __future__ import annotations

from kvist.engine.models.checkpoint_fields import (
    PRE_NORM,
    SLIDING,
    WHOLE,
    Raw,
    common,
    layer_sizes,
    single_rope,
    windows,
)
from kvist.engine.models.config import LayerConfig, ModelConfig, MoeConfig


def qwen3(raw: Raw) -> ModelConfig:
    """Return the configuration of a `Qwen3ForCausalLM`."""
    first_sliding = raw.get("max_window_layers", 28)
    is_sliding = raw.get("use_sliding_window", False)
    default = [SLIDING if is_sliding and i >= first_sliding else WHOLE for i in range(raw["num_hidden_layers"])]
    rope, sizes = single_rope(raw), layer_sizes(raw)
    layers = tuple(
        LayerConfig(window=window, rope=rope, **sizes) for window in windows(raw, raw.get("layer_types", default))
    )
    return ModelConfig(**common(raw), layers=layers, has_qk_norm=True, renamed_weights=PRE_NORM)


def qwen3_moe(raw: Raw) -> ModelConfig:
    """Return the configuration of a `Qwen3MoeForCausalLM`: all layers slide or none, some may have a plain MLP."""
    moe = MoeConfig(
        num_experts=raw.get("num_experts") or raw["num_local_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        is_normalised=raw.get("norm_topk_prob", False),
    )
    kind = SLIDING if raw.get("use_sliding_window", False) else WHOLE
    [window] = set(windows(raw, [kind] * raw["num_hidden_layers"]))
    dense, step = raw.get("mlp_only_layers", []), raw.get("decoder_sparse_step", 1)
    rope, sizes = single_rope(raw), layer_sizes(raw)
    layers = tuple(
        LayerConfig(window=window, rope=rope, **sizes, moe=None if i in dense or (i + 1) % step else moe)
        for i in range(raw["num_hidden_layers"])
    )
    return ModelConfig(**common(raw), layers=layers, has_qk_norm=True, renamed_weights=PRE_NORM | {"router": "gate"})
