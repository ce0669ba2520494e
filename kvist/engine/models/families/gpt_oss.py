"""gpt-oss: every other layer slides, attention has learned sinks, and every layer has experts. Unquantised only."""

from __future__ import annotations

from kvist.engine.models.checkpoint_fields import (
    PRE_NORM,
    Raw,
    common,
    every_nth_full,
    layer_sizes,
    single_rope,
    windows,
)
from kvist.engine.models.config import ClampedSwiglu, LayerConfig, ModelConfig, MoeConfig

_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def gpt_oss(raw: Raw) -> ModelConfig:
    """Return the configuration of a `GptOssForCausalLM`."""
    moe = MoeConfig(
        num_experts=raw.get("num_local_experts") or raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
        is_normalised=True,
        swiglu=ClampedSwiglu(raw.get("swiglu_alpha", 1.702), raw.get("swiglu_limit", 7.0)),
    )
    has_rope = "rope_parameters" in raw or "rope_scaling" in raw
    rope, sizes = single_rope(raw if has_rope else raw | {"rope_parameters": _YARN}, 150_000.0), layer_sizes(raw)
    types = raw.get("layer_types", every_nth_full(raw, 2))
    layers = tuple(LayerConfig(window=window, rope=rope, **sizes, moe=moe) for window in windows(raw, types))
    return ModelConfig(
        **common({"rms_norm_eps": 1e-5, "attention_bias": True} | raw),
        layers=layers,
        has_sinks=True,
        renamed_weights=PRE_NORM,
    )
