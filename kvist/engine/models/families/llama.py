"""Llama: full attention in every layer."""

from __future__ import annotations

from kvist.engine.models.checkpoint_fields import PRE_NORM, Raw, common, layer_sizes, single_rope
from kvist.engine.models.config import LayerConfig, ModelConfig
from kvist.events.windows import FULL


def llama(raw: Raw) -> ModelConfig:
    """Return the configuration of a `LlamaForCausalLM`."""
    layer = LayerConfig(window=FULL, rope=single_rope(raw), **layer_sizes(raw))
    return ModelConfig(
        **common(raw),
        layers=(layer,) * raw["num_hidden_layers"],
        has_mlp_bias=raw.get("mlp_bias", False),
        renamed_weights=PRE_NORM,
    )
