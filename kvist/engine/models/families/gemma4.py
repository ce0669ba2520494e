"""Gemma 4: layers that slide and layers that do not differ in heads and rotary embedding; the last may share caches."""

from __future__ import annotations

from kvist.engine.models.checkpoint_fields import (
    PER_LAYER_INPUTS,
    SANDWICH_NORM,
    SLIDING,
    WHOLE,
    LayerFields,
    Raw,
    checked,
    common,
    every_nth_full,
    layer_sizes,
    rope,
    shared_sources,
    windows,
)
from kvist.engine.models.config import LayerConfig, ModelConfig, MoeConfig, PerLayerInputConfig, RopeConfig
from kvist.errors import InvalidValueError

_PARALLEL_EXPERTS = {
    "parallel_experts": "",
    "dense_out_norm": "post_feedforward_layernorm_1",
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_out_norm": "post_feedforward_layernorm_2",
}


def gemma4(raw: Raw) -> ModelConfig:
    """Return the configuration of a `Gemma4ForCausalLM`; raises InvalidValueError for one that looks ahead.

    The last layer is always full, whatever its type says.
    """
    looks_ahead = raw.get("use_bidirectional_attention", "vision")
    if looks_ahead != "vision":
        raise InvalidValueError("use_bidirectional_attention", looks_ahead, "null, or vision: text only looks back")
    return ModelConfig(
        **common({"tie_word_embeddings": True} | raw) | {"attention_scale": 1.0},
        layers=_layers(raw),
        embedding_scale=raw["hidden_size"] ** 0.5,
        has_qk_norm=True,
        has_v_norm=True,
        has_output_norms=True,
        logit_soft_cap=raw.get("final_logit_softcapping"),
        per_layer_inputs=_per_layer_inputs(raw),
        renamed_weights=SANDWICH_NORM | _PARALLEL_EXPERTS | PER_LAYER_INPUTS,
    )


def _layers(raw: Raw) -> tuple[LayerConfig, ...]:
    types = [*(raw.get("layer_types", every_nth_full(raw, 6)))[:-1], WHOLE]
    sources = shared_sources(types, raw.get("num_kv_shared_layers", 0))
    ropes, sizes, moe = _ropes(raw), _sizes(raw, types), _moe(raw)
    is_value_key, is_double_wide = raw.get("attention_k_eq_v", False), raw.get("use_double_wide_mlp", False)
    layers = []
    for layer_idx, window in enumerate(windows(raw, types)):
        kind, source, own = types[layer_idx], sources[layer_idx], sizes[layer_idx]
        if is_double_wide and source is not None:
            own = own | {"intermediate_size": 2 * own["intermediate_size"]}
        layer = LayerConfig(
            window=window,
            rope=ropes[kind],
            **own,
            kv_source=source,
            is_value_key=is_value_key and kind == WHOLE,
            moe=moe,
        )
        layers.append(layer)
    return tuple(layers)


def _ropes(raw: Raw) -> dict[str, RopeConfig]:
    by_type, length = raw.get("rope_parameters") or {}, raw["max_position_embeddings"]
    whole = by_type.get(WHOLE) or {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    return {SLIDING: rope(by_type.get(SLIDING) or {}, 10_000.0, length), WHOLE: rope(whole, 1_000_000.0, length)}


def _sizes(raw: Raw, types: list[str]) -> list[Raw]:
    """Return each layer's sizes: full ones differ, by two fields of their own or by one that has every layer's."""
    alike = layer_sizes(raw)
    if "per_layer_config" not in raw:
        whole = {"head_dim": raw.get("global_head_dim", 512)}
        if raw.get("attention_k_eq_v", False) and "num_global_key_value_heads" in raw:
            whole["num_kv_heads"] = raw["num_global_key_value_heads"]
        return [alike | whole if kind == WHOLE else alike for kind in types]
    renamed = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    sizes = [alike] * len(types)
    for key, differing in raw["per_layer_config"].items():
        if not key.isdecimal() or int(key) >= len(types):
            raise InvalidValueError("per_layer_config", key, f"the number of one of {len(types)} layers")
        unknown = set(differing) - set(renamed)
        if unknown:
            raise InvalidValueError(f"per_layer_config.{key}", sorted(unknown), f"only {sorted(renamed)}")
        own = checked(differing, LayerFields)
        sizes[int(key)] = alike | {renamed[field]: value for field, value in own.items()}
    return sizes


def _moe(raw: Raw) -> MoeConfig | None:
    if not raw.get("enable_moe_block", False):
        return None
    return MoeConfig(raw["num_experts"], raw["top_k_experts"], raw["moe_intermediate_size"], is_normalised=True)


def _per_layer_inputs(raw: Raw) -> PerLayerInputConfig | None:
    size = raw.get("hidden_size_per_layer_input", 0)
    if not size:
        return None
    vocab_size = raw["vocab_size_per_layer_input"]
    if vocab_size < raw["vocab_size"]:
        raise InvalidValueError("vocab_size_per_layer_input", vocab_size, f"all {raw['vocab_size']} of vocab_size")
    return PerLayerInputConfig(vocab_size, size)
