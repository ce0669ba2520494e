"""The costs of a model's token, from the `config.json` that Hugging Face models come with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ModelCosts(NamedTuple):
    """Costs of one token, in numbers of weights, keys and values, not bytes."""

    weights_used: int
    """Multiplications of the layers, without attention; of experts those that compute one token."""
    weights: int
    """Weights of the whole model, with its embeddings."""
    attended: int
    """Multiplications for each earlier token, in layers with full attention."""
    kv: int
    """Keys and values of all layers."""
    window: int | None
    """How many tokens back layers with sliding attention see."""
    windowed: float
    """Share of the layers with sliding attention."""

    @property
    def alpha(self) -> float:
        """The α of `priced`: by which share of its own cost a token costs more for each one before it."""
        return self.attended / self.weights_used


def costs_of(config: Mapping[str, Any]) -> ModelCosts | None:
    """Return the costs of a model's tokens, None where the config does not say enough.

    That is so of models that compress keys and values (MLA), and of some other architectures. Layers with a window
    count as if they looked back no further than a block: their costs do not grow with the context.
    """
    text = config.get("text_config", config)
    try:
        hidden, num_heads, num_layers = text["hidden_size"], text["num_attention_heads"], text["num_hidden_layers"]
        head_dim = text.get("head_dim") or hidden // num_heads
        num_kv_heads = text.get("num_key_value_heads") or num_heads
        num_experts = text.get("num_experts") or text.get("num_local_experts") or 1
        width = text["intermediate_size"] if num_experts == 1 else text.get("moe_intermediate_size")
        width = width or text["intermediate_size"]
        shared = text.get("shared_expert_intermediate_size") or 0
        layer_types = text.get("layer_types") or ["full_attention"] * num_layers
        attention = 2 * hidden * (num_heads + num_kv_heads) * head_dim
        used, whole = (
            num_layers * (attention + 3 * hidden * (number * width + shared))
            for number in (text.get("num_experts_per_tok") or 1, num_experts)
        )
        num_full = sum(each == "full_attention" for each in layer_types)
        embeddings = hidden * (text.get("vocab_size") or 0) * (1 if text.get("tie_word_embeddings") else 2)
        num_windowed = sum(each == "sliding_attention" for each in layer_types)
        costs = ModelCosts(
            used,
            whole + embeddings,
            2 * num_full * num_heads * head_dim,
            2 * num_layers * num_kv_heads * head_dim,
            text.get("sliding_window") if num_windowed else None,
            num_windowed / num_layers,
        )
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None
    return None if "kv_lora_rank" in text or not costs.weights_used else costs
