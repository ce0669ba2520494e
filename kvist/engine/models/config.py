"""Reads a checkpoint's config.json with transformers, and splits the model between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from kvist.engine.models.quantization import check_quantization
from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL, KnownWindow
from kvist.kvcache.plan import KvDtype, LayerKv, SharedKv
from kvist.settings import read_json_object
from kvist.transfer.heads import Part

MAX_HEAD_DIM = 512  # what the attention kernels take

ARCHITECTURES = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
)
"""The architectures that tests compare with transformers' own attention."""

_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
"""The text parts of models that also take images or sound."""

_PARTLY_ROTATED = ("glm4", "phi3")
"""Models that rotate only the `partial_rotary_factor` of each head."""
_UNDIVIDED = {
    "Gemma3nForCausalLM": "whose MLP compares all its gates",
    "Glm4ForCausalLM": "whose MLP has gates and inputs in one weight",
    "Olmo2ForCausalLM": "which norms all heads together",
    "Phi3ForCausalLM": "whose weights hold several projections each",
}
"""Architectures that cannot be split over ranks, and why."""
_SLIDING, _WHOLE = "sliding_attention", "full_attention"
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The size of a layer's cache; with a `kv_source` it has none of its own, and reads that layer's."""

    window: KnownWindow
    num_kv_heads: int
    head_dim: int
    kv_source: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a transformers decoder; of a multimodal checkpoint (`is_text_part`), its text part.

    If the model is split over `num_ranks` processes, `text` is the part of one of them (`rank_config`).
    """

    architecture: str
    text: PreTrainedConfig
    layers: tuple[LayerConfig, ...]
    eos_token_ids: frozenset[int]
    is_text_part: bool = False
    quantization: dict[str, Any] | None = None
    num_ranks: int = 1

    @property
    def max_position(self) -> int:
        """Return the longest sequence by vLLM's rules: some ropes extend `max_position_embeddings`."""
        length: int = self.text.max_position_embeddings
        rope = self.text.rope_parameters or {}
        kind, factor = rope.get("rope_type"), rope.get("factor") or 1
        if kind == "yarn":
            return max(length, int(rope["original_max_position_embeddings"] * factor))
        return int(length * factor) if kind in ("dynamic", "linear") else length

    @property
    def vocab_size(self) -> int:
        size: int = self.text.vocab_size
        return size

    @property
    def has_experts(self) -> bool:
        is_enabled = getattr(self.text, "enable_moe_block", True)  # a field of Gemma 4 alone
        return is_enabled and any(getattr(self.text, name, None) for name in ("num_experts", "num_local_experts"))

    def layer_kv(self, dtype: KvDtype) -> list[LayerKv | SharedKv]:
        return [
            LayerKv(layer.window, layer.num_kv_heads, layer.head_dim, dtype)
            if layer.kv_source is None
            else SharedKv(layer.kv_source)
            for layer in self.layers
        ]


def load_model_config(model_dir: Path) -> ModelConfig:
    """Return the configuration of a model or its text part; raises InvalidValueError that names the field."""
    raw = read_json_object(model_dir / "config.json")
    named = str((raw.get("architectures") or [None])[0])
    architecture, is_text_part = _TEXT_PARTS.get(named, named), named in _TEXT_PARTS
    if architecture not in ARCHITECTURES:
        raise InvalidValueError(
            "architectures", raw.get("architectures"), f"one of {sorted((*ARCHITECTURES, *_TEXT_PARTS))}"
        )
    quantization = raw.pop("quantization_config", None)
    if quantization is not None:
        check_quantization(quantization)
    generation = model_dir / "generation_config.json"
    extra = read_json_object(generation) if generation.is_file() else {}
    if is_text_part:
        raw = _text_part(raw)
    kind = getattr(transformers, architecture).config_class
    text = _build_config(kind, raw)
    _check_text(text)
    eos_token_ids = _eos_token_ids(raw) | _eos_token_ids(extra)
    return ModelConfig(architecture, text, _layers(text), eos_token_ids, is_text_part, quantization)


def rank_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return the configuration of one rank's model, which is the same for every rank.

    It is a smaller model, with the rank's share of heads, of the MLPs' inner width and of the vocabulary. Attention and
    MLP outputs, embedded tokens and logits are summed over the ranks, one all-reduce each (Megatron-LM,
    arXiv:1909.08053, section 3). Every rank has all of the rest, also of a vocabulary that the ranks do not divide. If
    there are more ranks than KV heads, each has a copy of the head that its query heads read. Raises InvalidValueError
    for a model that cannot be split like that.
    """
    if num_ranks == 1:
        return config
    fields = config.text.to_dict()
    _check_split(config, fields, num_ranks)
    if fields.get("head_dim") is None:  # transformers would divide the hidden size by the rank's number of heads
        fields["head_dim"] = config.layers[0].head_dim
    fields["num_attention_heads"] //= num_ranks
    if fields["vocab_size"] % num_ranks == 0:
        fields["vocab_size"] //= num_ranks
        fields["pad_token_id"] = None  # it may be another rank's
    for sizes in (fields, *fields.get("per_layer_config", {}).values()):
        for name, least in (("num_key_value_heads", 1), ("intermediate_size", 0)):
            if name in sizes:
                sizes[name] = max(least, sizes[name] // num_ranks)
    text = _build_config(type(config.text), fields)
    return replace(config, text=text, layers=_layers(text), num_ranks=num_ranks)


def rank_slices(whole: Sequence[int], part: Sequence[int], shard: Part) -> tuple[slice, ...]:
    """Return the slices of a whole weight that are a rank's part; if there are more ranks than parts, they share."""
    starts = (shard.rank * (all_ // one) // shard.num_ranks * one for all_, one in zip(whole, part, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, part, strict=True))


def _build_config(kind: type[PreTrainedConfig], fields: dict[str, Any]) -> PreTrainedConfig:
    try:
        return kind.from_dict(fields)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValueError("config.json", kind.__name__, f"what transformers takes ({reason})") from None


def _layers(text: PreTrainedConfig) -> tuple[LayerConfig, ...]:
    """Return the cache of each layer; raises InvalidValueError for one that the engine or the kernels cannot use."""
    layers: list[LayerConfig] = []
    owners: dict[str, int] = {}
    num_layers, num_heads = text.num_hidden_layers, text.num_attention_heads
    default = _WHOLE if getattr(text, "sliding_window", None) is None else _SLIDING
    kinds = getattr(text, "layer_types", None) or [default] * num_layers
    if unknown := set(kinds) - {_SLIDING, _WHOLE}:
        raise InvalidValueError("layer_types", sorted(unknown), f"{_SLIDING} or {_WHOLE}")
    try:
        sharing = getattr(text, "kv_sharing_modes", [None] * num_layers)
    except ValueError as error:
        raise InvalidValueError("num_kv_shared_layers", text.num_kv_shared_layers, f"fewer ({error})") from None
    for layer_idx, (kind, mode, sizes) in enumerate(zip(kinds, sharing, text.per_layer_config, strict=True)):
        num_kv_heads = getattr(sizes, "num_key_value_heads", None) or num_heads
        head_dim = text.hidden_size // num_heads if getattr(sizes, "head_dim", None) is None else sizes.head_dim
        size = sizes.sliding_window if kind == _SLIDING else None
        if kind == _SLIDING and (size is None or size < 1):
            raise InvalidValueError("sliding_window", size, "a number of tokens, as layers slide")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise InvalidValueError("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
        if head_dim < 1 or head_dim % 2 or head_dim > MAX_HEAD_DIM:
            raise InvalidValueError("head_dim", head_dim, f"an even number up to {MAX_HEAD_DIM}")
        if mode == "reuse" and kind not in owners:  # transformers refuses it itself up to 5.23
            raise InvalidValueError("num_kv_shared_layers", text.num_kv_shared_layers, f"fewer, as the first is {kind}")
        source = owners[kind] if mode == "reuse" else None
        if source is None:
            owners[kind] = layer_idx
        layers.append(LayerConfig(FULL if size is None else size, num_kv_heads, head_dim, source))
    return tuple(layers)


def _check_text(text: PreTrainedConfig) -> None:
    """Raise InvalidValueError for a field with which the paged model would differ from transformers' model."""
    if text.model_type == "mistral" and getattr(text, "layer_types", None):
        raise InvalidValueError("layer_types", text.layer_types, "none: sliding_window holds for every layer")
    looks_ahead = getattr(text, "use_bidirectional_attention", None)
    if looks_ahead not in (None, False, "vision"):
        raise InvalidValueError("use_bidirectional_attention", looks_ahead, "false, or vision: text only looks back")
    ropes = text.rope_parameters or {}
    for rope in ropes.values() if all(isinstance(each, dict) for each in ropes.values()) else [ropes]:
        kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
        if kind not in _ROPE_TYPES:
            raise InvalidValueError("rope_type", kind, f"one of {list(_ROPE_TYPES)}")
        if not isinstance(factor := rope.get("factor") or 1, int | float) or not 1 <= factor <= 1e6:
            raise InvalidValueError("factor", factor, "a number from 1 to 1e6, by which a rope is stretched")
        if share != 1.0 and kind != "proportional" and text.model_type not in _PARTLY_ROTATED:
            raise InvalidValueError("partial_rotary_factor", share, "1.0, or rope_type proportional")
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    for name in ("num_experts_per_tok", "top_k_experts"):
        if num_experts and (top_k := getattr(text, name, None) or 0) > num_experts:
            raise InvalidValueError(name, top_k, f"at most the {num_experts} experts")
    num_streams = getattr(text, "altup_num_inputs", 1)
    if not 0 <= getattr(text, "altup_active_idx", 0) < num_streams:
        raise InvalidValueError("altup_active_idx", text.altup_active_idx, f"0 to {num_streams - 1}")
    has_inputs = text.model_type == "gemma4_text" and text.hidden_size_per_layer_input
    if has_inputs and text.vocab_size_per_layer_input < text.vocab_size:
        expected = f"all {text.vocab_size} of vocab_size"
        raise InvalidValueError("vocab_size_per_layer_input", text.vocab_size_per_layer_input, expected)


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text part, with those of the whole model on weights and vocabulary."""
    if not isinstance(raw.get("text_config"), dict):
        raise InvalidValueError("config.json: text_config", raw.get("text_config"), "an object")
    whole = {
        field: raw[field] for field in ("dtype", "eos_token_id", "tie_word_embeddings") if raw.get(field) is not None
    }
    return raw["text_config"] | whole


def _eos_token_ids(raw: dict[str, Any]) -> frozenset[int]:
    given = raw.get("eos_token_id")
    try:
        eos: list[int] = msgspec.convert([given] if isinstance(given, int) else given or [], list[int])
    except msgspec.ValidationError:
        raise InvalidValueError("eos_token_id", given, "a token's number, or a list of them") from None
    return frozenset(eos)


def _check_split(config: ModelConfig, fields: dict[str, Any], num_ranks: int) -> None:
    expected = None
    if config.architecture in _UNDIVIDED:
        expected = f"1 for {config.architecture}, {_UNDIVIDED[config.architecture]}"
    elif config.has_experts:
        expected = f"1 for {config.architecture} with experts, which are not split"
    elif fields["num_attention_heads"] % num_ranks:
        expected = f"a divisor of {fields['num_attention_heads']} attention heads"
    elif fields["intermediate_size"] % num_ranks:
        expected = f"a divisor of intermediate_size={fields['intermediate_size']}"
    for num_kv_heads in {layer.num_kv_heads for layer in config.layers}:
        if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
            expected = expected or f"a divisor or a multiple of {num_kv_heads} KV heads"
    if expected is not None:
        raise InvalidValueError("tensor_parallel_size", num_ranks, expected)
