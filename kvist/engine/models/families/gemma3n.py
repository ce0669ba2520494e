"""Gemma 3n: four layers that slide to one that does not, of which the last ones read the caches of earlier ones."""

from __future__ import annotations

from typing import TypedDict, TypeVar

from kvist.engine.models.checkpoint_fields import (
    PER_LAYER_INPUTS,
    SANDWICH_NORM,
    SLIDING,
    WHOLE,
    PositiveInt,
    Raw,
    checked,
    common,
    every_nth_full,
    head_sizes,
    rope,
    shared_sources,
    windows,
)
from kvist.engine.models.config import Gemma3nConfig, LayerConfig, ModelConfig, PerLayerInputConfig, RopeConfig
from kvist.errors import InvalidValueError

_Value = TypeVar("_Value", int, float)


class _Fields(TypedDict, total=False):
    intermediate_size: PositiveInt | list[PositiveInt]
    altup_num_inputs: PositiveInt
    altup_active_idx: int
    altup_correct_scale: bool
    laurel_rank: PositiveInt
    activation_sparsity_pattern: float | list[float]


def gemma3n(raw: Raw) -> ModelConfig:
    """Return the configuration of a `Gemma3nForCausalLM`; raises InvalidValueError for lists of another length."""
    raw = checked(raw, _Fields)
    return ModelConfig(
        **common({"tie_word_embeddings": True} | raw) | {"attention_scale": 1.0},
        layers=_layers(raw),
        embedding_scale=raw["hidden_size"] ** 0.5,
        has_qk_norm=True,
        has_v_norm=True,
        has_output_norms=True,
        logit_soft_cap=raw.get("final_logit_softcapping"),
        per_layer_inputs=PerLayerInputConfig(raw["vocab_size_per_layer_input"], raw["hidden_size_per_layer_input"]),
        gemma3n=Gemma3nConfig(
            num_streams=raw.get("altup_num_inputs", 4),
            active_stream=raw.get("altup_active_idx", 0),
            has_output_scale=raw.get("altup_correct_scale", True),
            laurel_rank=raw["laurel_rank"],
        ),
        renamed_weights=SANDWICH_NORM | PER_LAYER_INPUTS,
    )


def _layers(raw: Raw) -> tuple[LayerConfig, ...]:
    types = raw.get("layer_types", every_nth_full(raw, 5))
    ropes, sources = _ropes(raw), shared_sources(types, raw.get("num_kv_shared_layers", 15))
    intermediate_sizes = _by_layer(raw, "intermediate_size", raw["intermediate_size"])
    sparsities = _by_layer(raw, "activation_sparsity_pattern", raw.get("activation_sparsity_pattern", _sparsity(raw)))
    if not all(0.0 <= sparsity < 1.0 for sparsity in sparsities):
        raise InvalidValueError("activation_sparsity_pattern", sparsities, "shares from 0 to below 1")
    heads = head_sizes(raw)
    return tuple(
        LayerConfig(
            window=window,
            rope=ropes[kind],
            **heads,
            intermediate_size=intermediate_size,
            kv_source=source,
            activation_sparsity=sparsity,
        )
        for window, kind, intermediate_size, source, sparsity in zip(
            windows(raw, types), types, intermediate_sizes, sources, sparsities, strict=True
        )
    )


def _ropes(raw: Raw) -> dict[str, RopeConfig]:
    by_type, length = raw.get("rope_parameters") or {}, raw["max_position_embeddings"]
    whole = by_type.get(WHOLE) or raw.get("rope_scaling") or {}
    return {
        SLIDING: rope(by_type.get(SLIDING) or {}, raw.get("rope_local_base_freq", 10_000.0), length),
        WHOLE: rope(whole, raw.get("rope_theta", 1_000_000.0), length),
    }


def _sparsity(raw: Raw) -> list[float]:
    """Return what a file means that does not say: a model of more than ten layers is sparse in the first ten."""
    num_layers = raw["num_hidden_layers"]
    return [0.95] * 10 + [0.0] * (num_layers - 10) if num_layers > 10 else [0.0] * num_layers


def _by_layer(raw: Raw, field: str, given: _Value | list[_Value]) -> list[_Value]:
    num_layers = raw["num_hidden_layers"]
    values = given if isinstance(given, list) else [given] * num_layers
    if len(values) != num_layers:
        raise InvalidValueError(field, values, f"one number, or one for each of {num_layers} layers")
    return values
