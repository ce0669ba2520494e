"""Hugging Face's config.json to `ModelConfig`: one function a family. Reads the rope spellings of v4 and v5."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvist.engine.models.checkpoint_fields import (
    PER_LAYER_INPUTS,
    PRE_NORM,
    SANDWICH_NORM,
    SLIDING,
    WHOLE,
    Raw,
    checked,
    common,
    every_nth_full,
    head_sizes,
    layer_sizes,
    layers_of,
    rope,
    shared_sources,
    single_rope,
)
from kvist.engine.models.config import (
    ClampedSwiglu,
    Gemma3nConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    PerLayerInputConfig,
    RopeConfig,
)
from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL

_Value = TypeVar("_Value", int, float)


def load_model_config(model_dir: Path) -> ModelConfig:
    """Return the configuration of a model, or of its text part; raises InvalidValueError that names the field."""
    raw = checked(read_json_object(model_dir / "config.json"))
    named = str((raw.get("architectures") or [None])[0])
    architecture, is_text_part = _TEXT_PARTS.get(named, named), named in _TEXT_PARTS
    if architecture not in _FAMILIES:
        supported = sorted({*_FAMILIES, *_TEXT_PARTS})
        raise InvalidValueError("architectures", raw.get("architectures"), f"one of {supported}")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method")
        raise InvalidValueError("quantization_config", method, "none: weights are floating-point numbers")
    generation = model_dir / "generation_config.json"
    extra = checked(read_json_object(generation)) if generation.is_file() else {}
    if is_text_part:
        raw = _text_part(raw)
    found = {"architecture": architecture, "is_text_part": is_text_part, "eos_token_ids": _eos(raw) | _eos(extra)}
    try:
        return _FAMILIES[architecture](raw | found)
    except KeyError as missing:
        raise InvalidValueError(f"config.json: {missing.args[0]}", None, "a value") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of a model directory; raises InvalidValueError."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise InvalidValueError("model path", str(path.parent), f"a directory with {path.name}") from None
    except ValueError as error:
        raise InvalidValueError(path.name, str(path), f"valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidValueError(path.name, str(path), "a JSON object")
    return value


def _text_part(raw: Raw) -> Raw:
    """Return the fields of the text part; what the whole model says of its vocabulary's ends holds for it."""
    whole = {field: raw[field] for field in ("eos_token_id", "tie_word_embeddings") if field in raw}
    return checked(raw.get("text_config", {})) | whole


def _eos(raw: Raw) -> frozenset[int]:
    eos = raw.get("eos_token_id")
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _llama(raw: Raw) -> ModelConfig:
    """Llama: full attention in every layer."""
    layer = LayerConfig(window=FULL, rope=single_rope(raw), **layer_sizes(raw))
    return ModelConfig(
        **common(raw),
        layers=(layer,) * raw["num_hidden_layers"],
        has_mlp_bias=raw.get("mlp_bias", False),
        renamed_weights=PRE_NORM,
    )


def _mistral(raw: Raw) -> ModelConfig:
    """Mistral: Llama whose layers all slide, or, without a window, none."""
    if "layer_types" in raw:
        expected = "none: sliding_window holds for every layer"
        raise InvalidValueError("layer_types", sorted(set(raw["layer_types"])), expected)
    layer = LayerConfig(window=raw.get("sliding_window", FULL), rope=single_rope(raw), **layer_sizes(raw))
    return ModelConfig(**common(raw), layers=(layer,) * raw["num_hidden_layers"], renamed_weights=PRE_NORM)


def _qwen3(raw: Raw) -> ModelConfig:
    """Qwen 3: queries and keys are normed; some layers may slide."""
    num_layers, first_sliding = raw["num_hidden_layers"], raw.get("max_window_layers", 28)
    is_sliding = raw.get("use_sliding_window", False)
    default = [SLIDING if is_sliding and i >= first_sliding else WHOLE for i in range(num_layers)]
    layers = layers_of(raw, raw.get("layer_types", default), single_rope(raw), [layer_sizes(raw)] * num_layers)
    return ModelConfig(**common(raw), layers=layers, has_qk_norm=True, renamed_weights=PRE_NORM)


def _qwen3_moe(raw: Raw) -> ModelConfig:
    """Qwen 3 with experts: all layers slide or none, some may have a plain MLP."""
    num_layers, sizes = raw["num_hidden_layers"], layer_sizes(raw)
    moe = MoeConfig(
        num_experts=raw.get("num_experts") or raw["num_local_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        is_normalised=raw.get("norm_topk_prob", False),
    )
    kind = SLIDING if raw.get("use_sliding_window", False) else WHOLE
    dense, step = raw.get("mlp_only_layers", []), raw.get("decoder_sparse_step", 1)
    own = [sizes | {"moe": None if i in dense or (i + 1) % step else moe} for i in range(num_layers)]
    layers = layers_of(raw, [kind] * num_layers, single_rope(raw), own)
    return ModelConfig(**common(raw), layers=layers, has_qk_norm=True, renamed_weights=PRE_NORM | {"router": "gate"})


_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _gpt_oss(raw: Raw) -> ModelConfig:
    """gpt-oss: every other layer slides, attention has learned sinks, every layer has experts. Unquantised only."""
    moe = MoeConfig(
        num_experts=raw.get("num_local_experts") or raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
        is_normalised=True,
        swiglu=ClampedSwiglu(raw.get("swiglu_alpha", 1.702), raw.get("swiglu_limit", 7.0)),
    )
    has_rope = "rope_parameters" in raw or "rope_scaling" in raw
    own_rope = single_rope(raw if has_rope else raw | {"rope_parameters": _GPT_OSS_YARN}, 150_000.0)
    types, own = raw.get("layer_types", every_nth_full(raw, 2)), [layer_sizes(raw) | {"moe": moe}]
    return ModelConfig(
        **common({"rms_norm_eps": 1e-5, "attention_bias": True} | raw),
        layers=layers_of(raw, types, own_rope, own * raw["num_hidden_layers"]),
        has_sinks=True,
        renamed_weights=PRE_NORM,
    )


# What the text part of a released model leaves out.
_GEMMA3_DEFAULTS: Raw = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _gemma3(raw: Raw) -> ModelConfig:
    """Gemma 3: five layers that slide to one that does not, with rotary embeddings of their own; four norms a layer."""
    if raw.get("use_bidirectional_attention"):
        raise InvalidValueError("use_bidirectional_attention", True, "false: this is a decoder")
    raw = _GEMMA3_DEFAULTS | raw
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    types = raw.get("layer_types", every_nth_full(raw, pattern))
    return ModelConfig(
        **common({"tie_word_embeddings": True} | raw) | {"attention_scale": raw["query_pre_attn_scalar"] ** -0.5},
        layers=layers_of(raw, types, _gemma3_ropes(raw), [layer_sizes(raw)] * raw["num_hidden_layers"]),
        embedding_scale=raw["hidden_size"] ** 0.5,
        norm_offset=1.0,
        has_qk_norm=True,
        has_output_norms=True,
        attention_soft_cap=raw.get("attn_logit_softcapping"),
        logit_soft_cap=raw.get("final_logit_softcapping"),
        renamed_weights=SANDWICH_NORM,
    )


def _gemma3_ropes(raw: Raw) -> dict[str, RopeConfig]:
    """Return the rotary embeddings of Gemma 3 and 3n, by type of layer."""
    by_type, length = raw.get("rope_parameters") or {}, raw["max_position_embeddings"]
    whole = by_type.get(WHOLE) or raw.get("rope_scaling") or {}
    return {
        SLIDING: rope(by_type.get(SLIDING) or {}, raw.get("rope_local_base_freq", 10_000.0), length),
        WHOLE: rope(whole, raw.get("rope_theta", 1_000_000.0), length),
    }


def _gemma3n(raw: Raw) -> ModelConfig:
    """Gemma 3n: four layers that slide to one that does not, of which the last ones read the caches of earlier ones."""
    return ModelConfig(
        **_gemma_later(raw),
        layers=_gemma3n_layers(raw),
        per_layer_inputs=PerLayerInputConfig(raw["vocab_size_per_layer_input"], raw["hidden_size_per_layer_input"]),
        gemma3n=Gemma3nConfig(
            num_streams=raw.get("altup_num_inputs", 4),
            active_stream=raw.get("altup_active_idx", 0),
            has_output_scale=raw.get("altup_correct_scale", True),
            laurel_rank=raw["laurel_rank"],
        ),
        renamed_weights=SANDWICH_NORM | PER_LAYER_INPUTS,
    )


def _gemma_later(raw: Raw) -> Raw:
    """Return the arguments of `ModelConfig` that Gemma 3n and 4 spell alike."""
    return common({"tie_word_embeddings": True} | raw) | {
        "attention_scale": 1.0,
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "has_qk_norm": True,
        "has_v_norm": True,
        "has_output_norms": True,
        "logit_soft_cap": raw.get("final_logit_softcapping"),
    }


def _gemma3n_layers(raw: Raw) -> tuple[LayerConfig, ...]:
    """Return the layers, of which ten are sparse in a model of more, if the file does not say."""
    types, num_layers = raw.get("layer_types", every_nth_full(raw, 5)), raw["num_hidden_layers"]
    sources = shared_sources(types, raw.get("num_kv_shared_layers", 15))
    intermediate_sizes = _by_layer(raw, "intermediate_size", raw["intermediate_size"])
    default = [0.95] * 10 + [0.0] * (num_layers - 10) if num_layers > 10 else [0.0] * num_layers
    sparsities = _by_layer(raw, "activation_sparsity_pattern", raw.get("activation_sparsity_pattern", default))
    if not all(0.0 <= sparsity < 1.0 for sparsity in sparsities):
        raise InvalidValueError("activation_sparsity_pattern", sparsities, "shares from 0 to below 1")
    heads = head_sizes(raw)
    own = [
        heads | {"intermediate_size": size, "kv_source": source, "activation_sparsity": sparsity}
        for size, source, sparsity in zip(intermediate_sizes, sources, sparsities, strict=True)
    ]
    return layers_of(raw, types, _gemma3_ropes(raw), own)


def _by_layer(raw: Raw, field: str, given: _Value | list[_Value]) -> list[_Value]:
    num_layers = raw["num_hidden_layers"]
    values = given if isinstance(given, list) else [given] * num_layers
    if len(values) != num_layers:
        raise InvalidValueError(field, values, f"one number, or one for each of {num_layers} layers")
    return values


_GEMMA4_EXPERTS = {
    "parallel_experts": "",
    "dense_out_norm": "post_feedforward_layernorm_1",
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_out_norm": "post_feedforward_layernorm_2",
}


def _gemma4(raw: Raw) -> ModelConfig:
    """Gemma 4: sliding and full layers differ in heads and rope, some share caches, and the last one is always full."""
    looks_ahead = raw.get("use_bidirectional_attention", "vision")
    if looks_ahead != "vision":
        raise InvalidValueError("use_bidirectional_attention", looks_ahead, "null, or vision: text only looks back")
    return ModelConfig(
        **_gemma_later(raw),
        layers=_gemma4_layers(raw),
        per_layer_inputs=_gemma4_inputs(raw),
        renamed_weights=SANDWICH_NORM | _GEMMA4_EXPERTS | PER_LAYER_INPUTS,
    )


def _gemma4_layers(raw: Raw) -> tuple[LayerConfig, ...]:
    types = [*(raw.get("layer_types", every_nth_full(raw, 6)))[:-1], WHOLE]
    sources, sizes, moe = shared_sources(types, raw.get("num_kv_shared_layers", 0)), _gemma4_sizes(raw, types), None
    by_type, length = raw.get("rope_parameters") or {}, raw["max_position_embeddings"]
    whole = by_type.get(WHOLE) or {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    ropes = {SLIDING: rope(by_type.get(SLIDING) or {}, 10_000.0, length), WHOLE: rope(whole, 1_000_000.0, length)}
    if raw.get("enable_moe_block", False):
        moe = MoeConfig(raw["num_experts"], raw["top_k_experts"], raw["moe_intermediate_size"], is_normalised=True)
    is_value_key, is_double_wide = raw.get("attention_k_eq_v", False), raw.get("use_double_wide_mlp", False)
    own = []
    for kind, source, size in zip(types, sources, sizes, strict=True):
        doubled = {"intermediate_size": 2 * size["intermediate_size"]} if is_double_wide and source is not None else {}
        shared = {"kv_source": source, "is_value_key": is_value_key and kind == WHOLE, "moe": moe}
        own.append(size | doubled | shared)
    return layers_of(raw, types, ropes, own)


def _gemma4_sizes(raw: Raw, types: list[str]) -> list[Raw]:
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
        own = checked(differing)
        sizes[int(key)] = alike | {renamed[field]: value for field, value in own.items()}
    return sizes


def _gemma4_inputs(raw: Raw) -> PerLayerInputConfig | None:
    size = raw.get("hidden_size_per_layer_input", 0)
    if not size:
        return None
    vocab_size = raw["vocab_size_per_layer_input"]
    if vocab_size < raw["vocab_size"]:
        raise InvalidValueError("vocab_size_per_layer_input", vocab_size, f"all {raw['vocab_size']} of vocab_size")
    return PerLayerInputConfig(vocab_size, size)


_FAMILIES: dict[str, Callable[[Raw], ModelConfig]] = {
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3nForCausalLM": _gemma3n,
    "Gemma4ForCausalLM": _gemma4,
    "GptOssForCausalLM": _gpt_oss,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}

# Models that take images or sound too: of these, what reads and writes text.
_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
}
