"""What the families' configurations have in common: the fields that are read, as what, and how they are spelt."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec

from kvist.engine.models.config import Activation, Llama3Scaling, RopeConfig, YarnScaling
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
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]


class GenerationFields(TypedDict, total=False):
    """What is read of generation_config.json."""

    eos_token_id: int | list[int]


class LayerFields(TypedDict, total=False):
    """What one layer may have for itself."""

    num_key_value_heads: PositiveInt
    head_dim: PositiveInt


class ConfigFields(GenerationFields, LayerFields, total=False):
    """What is read of config.json, and as what; a field that is null counts as left out."""

    architectures: list[str]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt | list[PositiveInt]
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    sliding_window: PositiveInt
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
    use_bidirectional_attention: bool | str
    quantization_config: dict[str, Any]
    text_config: dict[str, Any]
    num_experts: PositiveInt
    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    top_k_experts: PositiveInt
    moe_intermediate_size: PositiveInt
    norm_topk_prob: bool
    mlp_only_layers: list[int]
    decoder_sparse_step: PositiveInt
    enable_moe_block: bool
    swiglu_alpha: PositiveNumber
    swiglu_limit: PositiveNumber
    global_head_dim: PositiveInt
    num_global_key_value_heads: PositiveInt
    attention_k_eq_v: bool
    per_layer_config: dict[str, dict[str, Any]]
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: PositiveInt
    num_kv_shared_layers: int
    use_double_wide_mlp: bool


class RopeFields(TypedDict, total=False):
    """What is read of one object of rotary parameters."""

    rope_type: str
    type: str
    rope_theta: PositiveNumber
    factor: PositiveNumber
    low_freq_factor: PositiveNumber
    high_freq_factor: PositiveNumber
    original_max_position_embeddings: PositiveNumber
    partial_rotary_factor: Share
    beta_fast: PositiveNumber
    beta_slow: PositiveNumber
    truncate: bool
    attention_factor: PositiveNumber
    mscale: float
    mscale_all_dim: float


def checked(raw: Mapping[str, Any], fields: type[Mapping[str, object]]) -> Raw:
    """Return the object without its nulls, each of `fields` of its type; raises InvalidValueError that names one."""
    given = {name: value for name, value in raw.items() if value is not None}
    try:
        return given | dict(msgspec.convert(given, fields))
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        expected = reason.removeprefix("Expected ").partition(", got")[0]
        name = re.split(r"[.\[`]", path)[0]
        raise InvalidValueError(name, given[name], expected) from None


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
    params = checked(params, RopeFields)
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
    """Return by layer whose cache it reads: None for its own, else the last unshared layer of its type (Gemma 3n, 4).

    The last `num_shared` layers share. Raises InvalidValueError when that leaves a type without a layer to read from.
    """
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
