"""How much attention to earlier tokens costs a model, by the `config.json` that Hugging Face models come with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def alpha_of(config: Mapping[str, Any]) -> float | None:
    """Return the α of `priced`: multiplications for each token that a token attends to, a share of all its others.

    Layers that attend to a window count as if they looked back no further than a block: their share does not grow. None
    where the config does not say enough, as of models that compress keys and values (MLA), or of other architectures.
    """
    text = config.get("text_config", config)
    try:
        hidden, num_heads, num_layers = text["hidden_size"], text["num_attention_heads"], text["num_hidden_layers"]
        head_dim = text.get("head_dim") or hidden // num_heads
        num_kv_heads = text.get("num_key_value_heads") or num_heads
        num_experts = text.get("num_experts_per_tok")
        width = (
            text["intermediate_size"]
            if num_experts is None
            else (
                num_experts * (text.get("moe_intermediate_size") or text["intermediate_size"])
                + (text.get("shared_expert_intermediate_size") or 0)
            )
        )
        layer_types = text.get("layer_types") or ["full_attention"] * num_layers
        num_full = sum(each == "full_attention" for each in layer_types)
        others = num_layers * hidden * (2 * (num_heads + num_kv_heads) * head_dim + 3 * width)
        alpha: float = 2 * num_full * num_heads * head_dim / others
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None
    return None if "kv_lora_rank" in text else alpha
