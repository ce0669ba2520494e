"""Hugging Face's config.json to `ModelConfig`: one function a family. Reads the rope spellings of v4 and v5."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from kvist.engine.models.config import (
    Activation,
    ClampedSwiglu,
    Gemma3nConfig,
    LayerConfig,
    Llama3Scaling,
    ModelConfig,
    MoeConfig,
    PerLayerInputConfig,
    RopeConfig,
    YarnScaling,
)
from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL, KnownWindow

SLIDING, WHOLE = "sliding_attention", "full_attention"

# "post_attention_layernorm" norms the MLP's input in one kind of block and the attention's output in the other.
PRE_NORM = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
SANDWICH_NORM = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

# The parts of these modules of ours are directly in a checkpoint's model and layers.
PER_LAYER_INPUTS = {"per_layer_inputs": "", "per_layer_gate": ""}

Raw: TypeAlias = dict[str, Any]
PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
PositiveNumber: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
_Value = TypeVar("_Value", int, float)


def _by_name(*kinds: tuple[Any, str]) -> dict[str, Any]:
    return {name: kind for kind, names in kinds for name in names.split()}


FIELDS: Final = _by_name(
    (
        PositiveInt,
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim sliding_window "
        "max_position_embeddings sliding_window_pattern _sliding_window_pattern num_experts num_local_experts "
        "num_experts_per_tok top_k_experts moe_intermediate_size decoder_sparse_step global_head_dim "
        "num_global_key_value_heads vocab_size_per_layer_input altup_num_inputs laurel_rank",
    ),
    (int, "max_window_layers hidden_size_per_layer_input num_kv_shared_layers altup_active_idx"),
    (
        PositiveNumber,
        "rms_norm_eps rope_theta rope_local_base_freq query_pre_attn_scalar attn_logit_softcapping "
        "final_logit_softcapping swiglu_alpha swiglu_limit",
    ),
    (
        bool,
        "attention_bias mlp_bias tie_word_embeddings use_sliding_window norm_topk_prob enable_moe_block "
        "attention_k_eq_v use_double_wide_mlp altup_correct_scale",
    ),
    (str, "hidden_act hidden_activation"),
    (list[str], "architectures layer_types"),
    (dict[str, Any], "rope_parameters rope_scaling quantization_config text_config"),
    (dict[str, dict[str, Any]], "per_layer_config"),
    (int | list[int], "eos_token_id"),
    (list[int], "mlp_only_layers"),
    (PositiveInt | list[PositiveInt], "intermediate_size"),
    (float | list[float], "activation_sparsity_pattern"),
    (bool | str, "use_bidirectional_attention"),
)
"""What is read of config.json and generation_config.json, and as what."""

_ROPE_FIELDS: Final = _by_name(
    (str, "rope_type type"),
    (PositiveNumber, "rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    (PositiveNumber, "beta_fast beta_slow attention_factor"),
    (float, "mscale mscale_all_dim"),
    (Annotated[float, msgspec.Meta(gt=0, le=1)], "partial_rotary_factor"),
    (bool, "truncate"),
)


def checked(raw: Mapping[str, Any], fields: Mapping[str, Any] = FIELDS) -> Raw:
    """Return the object without its nulls, which count as left out; raises InvalidValueError for a wrong type."""
    given = {name: value for name, value in raw.items() if value is not None}
    for name in [name for name in given if name in fields]:
        try:
            given[name] = msgspec.convert(given[name], fields[name])
        except msgspec.ValidationError as error:
            expected = str(error).partition(" - at ")[0].partition(", got ")[0].removeprefix("Expected ")
            raise InvalidValueError(name, given[name], expected) from None
    return given


def common(raw: Raw) -> Raw:
    """Return the arguments of `ModelConfig` that every family spells alike."""
    return {
        "architecture": raw["architecture"],
        "is_text_part": raw["is_text_part"],
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_heads": raw["num_attention_heads"],
        "max_position": raw["max_position_embeddings"],
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "activation": activation(raw),
        "attention_scale": head_dim(raw) ** -0.5,
        "has_attention_bias": raw.get("attention_bias", False),
        "has_tied_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": raw["eos_token_ids"],
    }


def layer_sizes(raw: Raw) -> Raw:
    """Return the arguments of `LayerConfig` that are sizes; raises InvalidValueError for layers that differ."""
    if isinstance(raw["intermediate_size"], list):
        raise InvalidValueError("intermediate_size", raw["intermediate_size"], "one number for all layers")
    return head_sizes(raw) | {"intermediate_size": raw["intermediate_size"]}


def head_sizes(raw: Raw) -> Raw:
    """Return the arguments of `LayerConfig` that are sizes of attention, where all layers have the same."""
    return {"num_kv_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"], "head_dim": head_dim(raw)}


def head_dim(raw: Raw) -> int:
    """Return the size of a head, where all layers have the same."""
    given: int = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return given


def activation(raw: Raw) -> Activation:
    """Return the gate's non-linearity, under either of its names; raises InvalidValueError."""
    field = "hidden_activation" if "hidden_activation" in raw else "hidden_act"
    try:
        return Activation(raw.get(field))
    except ValueError:
        raise InvalidValueError(field, raw.get(field), f"one of {[each.value for each in Activation]}") from None


def windows(raw: Raw, layer_types: Sequence[str]) -> list[KnownWindow]:
    """Return each layer's window; raises InvalidValueError for too many, too few or unknown types of layer."""
    if len(layer_types) != raw["num_hidden_layers"]:  # the list itself may be as long as the model is deep
        expected = f"{raw['num_hidden_layers']}, as num_hidden_layers"
        raise InvalidValueError("number of layer_types", len(layer_types), expected)
    unknown = set(layer_types) - {SLIDING, WHOLE}
    if unknown:
        raise InvalidValueError("layer_types", sorted(unknown), f"{SLIDING} or {WHOLE}")
    if SLIDING in layer_types and "sliding_window" not in raw:
        raise InvalidValueError("sliding_window", None, "a number of tokens, as layers slide")
    return [raw["sliding_window"] if kind == SLIDING else FULL for kind in layer_types]


def layers_of(
    raw: Raw, layer_types: Sequence[str], rope: RopeConfig | Mapping[str, RopeConfig], own: Sequence[Raw]
) -> tuple[LayerConfig, ...]:
    """Return the layers, by each one's type and its `own` arguments; raises InvalidValueError as `windows`."""
    by_type = dict.fromkeys(layer_types, rope) if isinstance(rope, RopeConfig) else rope
    rows = zip(windows(raw, layer_types), layer_types, own, strict=True)
    return tuple(LayerConfig(window=window, rope=by_type[kind], **each) for window, kind, each in rows)


def every_nth_full(raw: Raw, pattern: int) -> list[str]:
    """Return the types of layers that slide, but for every `pattern`-th."""
    return [SLIDING if (i + 1) % pattern else WHOLE for i in range(raw["num_hidden_layers"])]


def single_rope(raw: Raw, default_theta: float = 10_000.0) -> RopeConfig:
    """Return the rotary embedding of a model whose layers share one."""
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return rope(params, raw.get("rope_theta", default_theta), raw["max_position_embeddings"])


def rope(params: Any, default_theta: float, max_position: int) -> RopeConfig:
    """Return one rotary embedding, in the spelling of v4 or v5; raises InvalidValueError for kinds not supported."""
    if not isinstance(params, dict):
        raise InvalidValueError("rope_parameters", params, "an object")
    params = checked(params, _ROPE_FIELDS)
    kind = params.get("rope_type") or params.get("type") or "default"
    theta, share = params.get("rope_theta", default_theta), params.get("partial_rotary_factor", 1.0)
    if kind == "proportional":
        return RopeConfig(theta, linear_factor=params.get("factor", 1.0), rotated_share=share)
    if share != 1.0:
        raise InvalidValueError("partial_rotary_factor", share, "1.0, or rope_type proportional")
    original = params.get("original_max_position_embeddings", max_position)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=params["factor"])
    if kind == "llama3":
        low, high = params["low_freq_factor"], params["high_freq_factor"]
        return RopeConfig(theta, scaling=Llama3Scaling(params["factor"], low, high, original))
    if kind == "yarn":
        fast, slow = params.get("beta_fast", 32.0), params.get("beta_slow", 1.0)
        is_truncated = params.get("truncate", True)
        magnitude = _yarn_magnitude(params)
        return RopeConfig(theta, scaling=YarnScaling(params["factor"], fast, slow, original, is_truncated, magnitude))
    raise InvalidValueError("rope_type", kind, "one of ['default', 'linear', 'llama3', 'proportional', 'yarn']")


def _yarn_magnitude(params: Raw) -> float:
    if "attention_factor" in params:
        return float(params["attention_factor"])
    grown = 0.1 * math.log(max(params["factor"], 1.0))
    by_head, by_dim = params.get("mscale"), params.get("mscale_all_dim")
    return (by_head * grown + 1.0) / (by_dim * grown + 1.0) if by_head and by_dim else grown + 1.0


def shared_sources(layer_types: Sequence[str], num_shared: int) -> list[int | None]:
    """Return by layer whose cache it reads, None for its own; raises InvalidValueError if none has its type."""
    num_owners = len(layer_types) - num_shared
    if not 0 < num_owners <= len(layer_types):
        expected = f"0 to {len(layer_types) - 1}, so that a layer of {len(layer_types)} keeps its own cache"
        raise InvalidValueError("num_kv_shared_layers", num_shared, expected)
    last_owner = {kind: layer_idx for layer_idx, kind in enumerate(layer_types[:num_owners])}
    orphaned = sorted(set(layer_types[num_owners:]) - set(last_owner))
    if orphaned:
        expected = f"few enough that a layer before the shared ones has the type {orphaned[0]}"
        raise InvalidValueError("num_kv_shared_layers", num_shared, expected)
    return [None] * num_owners + [last_owner[kind] for kind in layer_types[num_owners:]]


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
