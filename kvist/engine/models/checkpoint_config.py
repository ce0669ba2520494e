"""Hugging Face's config.json to `ModelConfig`: one small function a family. Reads the rope spellings of v4 and v5."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec

from kvist.engine.models.config import Activation, LayerConfig, Llama3Scaling, ModelConfig, RopeConfig
from kvist.errors import InvalidValueError
from kvist.events.windows import FULL, KnownWindow

SLIDING, WHOLE = "sliding_attention", "full_attention"

PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
PositiveNumber: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class _Generation(TypedDict, total=False):
    eos_token_id: int | list[int]


class _Fields(_Generation, total=False):
    """What is read of config.json, and as what; a field that is null counts as left out."""

    architectures: list[str]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    sliding_window: int
    sliding_window_pattern: PositiveInt
    _sliding_window_pattern: PositiveInt
    max_window_layers: int
    layer_types: list[str]
    hidden_act: str
    hidden_activation: str
    rms_norm_eps: PositiveNumber
    rope_theta: PositiveNumber
    rope_local_base_freq: PositiveNumber
    rope_parameters: dict[str, Any]
    rope_scaling: dict[str, Any]
    query_pre_attn_scalar: PositiveNumber
    attn_logit_softcapping: PositiveNumber
    final_logit_softcapping: PositiveNumber
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    use_sliding_window: bool
    use_bidirectional_attention: bool
    quantization_config: dict[str, Any]


class _Rope(TypedDict, total=False):
    rope_type: str
    type: str
    rope_theta: PositiveNumber
    factor: PositiveNumber
    low_freq_factor: PositiveNumber
    high_freq_factor: PositiveNumber
    original_max_position_embeddings: PositiveNumber
    partial_rotary_factor: PositiveNumber


def load_model_config(model_dir: Path) -> ModelConfig:
    """Return the model's configuration; raises InvalidValueError that names the field and what is supported."""
    raw = _checked(read_json_object(model_dir / "config.json"), _Fields)
    architecture = str((raw.get("architectures") or [None])[0])
    family = _FAMILIES.get(architecture)
    if family is None:
        raise InvalidValueError("architectures", raw.get("architectures"), f"one of {sorted(_FAMILIES)}")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method")
        raise InvalidValueError("quantization_config", method, "none: weights are floating-point numbers")
    generation = model_dir / "generation_config.json"
    extra = _checked(read_json_object(generation), _Generation) if generation.is_file() else {}
    try:
        return family(raw | {"architecture": architecture, "eos_token_ids": _eos(raw) | _eos(extra)})
    except KeyError as missing:
        raise InvalidValueError(f"config.json: {missing.args[0]}", None, "a value") from None


def _llama(raw: dict[str, Any]) -> ModelConfig:
    rope = _single_rope(raw)
    layers = (LayerConfig(FULL, rope),) * raw["num_hidden_layers"]
    has_mlp_bias = raw.get("mlp_bias", False)
    return ModelConfig(**_common(raw), layers=layers, has_mlp_bias=has_mlp_bias, renamed_weights=_PRE_NORM)


def _qwen3(raw: dict[str, Any]) -> ModelConfig:
    rope = _single_rope(raw)
    first_sliding = raw.get("max_window_layers", 28)
    is_sliding = bool(raw.get("use_sliding_window"))
    default = [SLIDING if is_sliding and i >= first_sliding else WHOLE for i in range(raw["num_hidden_layers"])]
    layers = tuple(LayerConfig(window, rope) for window in _windows(raw, raw.get("layer_types") or default))
    return ModelConfig(**_common(raw), layers=layers, has_qk_norm=True, renamed_weights=_PRE_NORM)


def _gemma3(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("use_bidirectional_attention"):
        raise InvalidValueError("use_bidirectional_attention", True, "false: this is a decoder")
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    default = [SLIDING if (i + 1) % pattern else WHOLE for i in range(raw["num_hidden_layers"])]
    types = raw.get("layer_types") or default
    by_type = raw.get("rope_parameters") or {}
    ropes = {
        SLIDING: _rope(by_type.get(SLIDING) or {}, raw.get("rope_local_base_freq", 10_000.0)),
        WHOLE: _rope(by_type.get(WHOLE) or raw.get("rope_scaling") or {}, raw.get("rope_theta", 1_000_000.0)),
    }
    layers = tuple(LayerConfig(window, ropes[kind]) for window, kind in zip(_windows(raw, types), types, strict=True))
    common = _common({"tie_word_embeddings": True, "hidden_act": raw.get("hidden_activation")} | raw)
    common["attention_scale"] = raw["query_pre_attn_scalar"] ** -0.5
    return ModelConfig(
        **common,
        layers=layers,
        embedding_scale=raw["hidden_size"] ** 0.5,
        norm_offset=1.0,
        has_qk_norm=True,
        has_output_norms=True,
        attention_soft_cap=raw.get("attn_logit_softcapping"),
        logit_soft_cap=raw.get("final_logit_softcapping"),
        renamed_weights=_SANDWICH_NORM,
    )


_FAMILIES: dict[str, Callable[[dict[str, Any]], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
}
# "post_attention_layernorm" norms the MLP's input in one family and the attention's output in the other.
_PRE_NORM = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_SANDWICH_NORM = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _common(raw: dict[str, Any]) -> dict[str, Any]:
    num_heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    return {
        "architecture": raw["architecture"],
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_position": raw["max_position_embeddings"],
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "activation": _activation(raw.get("hidden_act")),
        "attention_scale": head_dim**-0.5,
        "has_attention_bias": raw.get("attention_bias", False),
        "has_tied_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": raw["eos_token_ids"],
    }


def _activation(name: str | None) -> Activation:
    try:
        return Activation(name)
    except ValueError:
        raise InvalidValueError("hidden_act", name, f"one of {[each.value for each in Activation]}") from None


def _windows(raw: dict[str, Any], layer_types: list[str]) -> list[KnownWindow]:
    if len(layer_types) != raw["num_hidden_layers"]:
        raise InvalidValueError("layer_types", layer_types, f"{raw['num_hidden_layers']} entries")
    unknown = set(layer_types) - {SLIDING, WHOLE}
    if unknown:
        raise InvalidValueError("layer_types", sorted(unknown), f"{SLIDING} or {WHOLE}")
    if SLIDING in layer_types and not raw.get("sliding_window"):
        raise InvalidValueError("sliding_window", raw.get("sliding_window"), "a number of tokens, as layers slide")
    return [raw["sliding_window"] if kind == SLIDING else FULL for kind in layer_types]


def _single_rope(raw: dict[str, Any]) -> RopeConfig:
    return _rope(raw.get("rope_parameters") or raw.get("rope_scaling") or {}, raw.get("rope_theta", 10_000.0))


def _rope(params: Any, default_theta: float) -> RopeConfig:
    if not isinstance(params, dict):
        raise InvalidValueError("rope_parameters", params, "an object")
    params = _checked(params, _Rope)
    kind = params.get("rope_type") or params.get("type") or "default"
    theta = params.get("rope_theta", default_theta)
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidValueError("partial_rotary_factor", params["partial_rotary_factor"], "1.0")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=params["factor"])
    if kind == "llama3":
        low, high = params["low_freq_factor"], params["high_freq_factor"]
        original = params["original_max_position_embeddings"]
        return RopeConfig(theta, llama3=Llama3Scaling(params["factor"], low, high, original))
    raise InvalidValueError("rope_type", kind, "one of ['default', 'linear', 'llama3']")


def _eos(raw: dict[str, Any]) -> frozenset[int]:
    eos = raw.get("eos_token_id")
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _checked(raw: dict[str, Any], fields: type[_Fields | _Generation | _Rope]) -> dict[str, Any]:
    """Return the object without its nulls, each of `fields` of its type; raises InvalidValueError that names one."""
    given = {name: value for name, value in raw.items() if value is not None}
    try:
        return given | msgspec.convert(given, fields)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        expected = reason.removeprefix("Expected ").partition(", got")[0]
        name = re.split(r"[.\[`]", path)[0]
        raise InvalidValueError(name, given[name], expected) from None


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
