"""Gemma 3: five layers that slide to one that does not, with rotary embeddings of their own; four norms a layer."""

from __future__ import annotations

from kvist.engine.models.checkpoint_fields import (
    SANDWICH_NORM,
    SLIDING,
    WHOLE,
    Raw,
    common,
    every_nth_full,
    layer_sizes,
    rope,
    windows,
)
from kvist.engine.models.config import LayerConfig, ModelConfig
from kvist.errors import InvalidValueError

# What the text part of a released model leaves out.
_DEFAULTS: Raw = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


def gemma3(raw: Raw) -> ModelConfig:
    """Return the configuration of a `Gemma3ForCausalLM`; raises InvalidValueError for one that looks ahead."""
    if raw.get("use_bidirectional_attention"):
        raise InvalidValueError("use_bidirectional_attention", True, "false: this is a decoder")
    raw = _DEFAULTS | raw
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    types = raw.get("layer_types", every_nth_full(raw, pattern))
    by_type, sizes, length = raw.get("rope_parameters") or {}, layer_sizes(raw), raw["max_position_embeddings"]
    whole = by_type.get(WHOLE) or raw.get("rope_scaling") or {}
    ropes = {
        SLIDING: rope(by_type.get(SLIDING) or {}, raw.get("rope_local_base_freq", 10_000.0), length),
        WHOLE: rope(whole, raw.get("rope_theta", 1_000_000.0), length),
    }
    layers = tuple(
        LayerConfig(window=window, rope=ropes[kind], **sizes)
        for window, kind in zip(windows(raw, types), types, strict=True)
    )
    return ModelConfig(
        **common({"tie_word_embeddings": True} | raw) | {"attention_scale": raw["query_pre_attn_scalar"] ** -0.5},
        layers=layers,
        embedding_scale=raw["hidden_size"] ** 0.5,
        norm_offset=1.0,
        has_qk_norm=True,
        has_output_norms=True,
        attention_soft_cap=raw.get("attn_logit_softcapping"),
        logit_soft_cap=raw.get("final_logit_softcapping"),
        renamed_weights=SANDWICH_NORM,
    )
