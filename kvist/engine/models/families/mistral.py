"""Mistral: Llama whose layers all slide, or, without a window, none."""

from __future__ import annotations

from kvist.engine.models.checkpoint_fields import PRE_NORM, Raw, common, layer_sizes, single_rope
from kvist.engine.models.config import LayerConfig, ModelConfig
from kvist.errors import InvalidValueError
from kvist.events.windows import FULL


def mistral(raw: Raw) -> ModelConfig:
    """Return the configuration of a `MistralForCausalLM`; raises InvalidValueError for layers that differ."""
    if "layer_types" in raw:
        expected = "none: sliding_window holds for every layer"
        raise InvalidValueError("layer_types", sorted(set(raw["layer_types"])), expected)
    layer = LayerConfig(window=raw.get("sliding_window", FULL), rope=single_rope(raw), **layer_sizes(raw))
    return ModelConfig(**common(raw), layers=(layer,) * raw["num_hidden_layers"], renamed_weights=PRE_NORM)
