"""What the families' configurations have in common: the fields that are read, as what, and how they are spelt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from kvist.engine.models.config import Activation, LayerConfig, Llama3Scaling, RopeConfig, YarnScaling
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
