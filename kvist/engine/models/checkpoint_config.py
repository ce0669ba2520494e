"""Hugging Face's config.json to `ModelConfig`: one function a family. Reads the rope spellings of v4 and v5."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvist.engine.models.checkpoint_fields import ConfigFields, GenerationFields, Raw, checked
from kvist.engine.models.config import ModelConfig
from kvist.engine.models.families.gemma3 import gemma3
from kvist.engine.models.families.gemma3n import gemma3n
from kvist.engine.models.families.gemma4 import gemma4
from kvist.engine.models.families.gpt_oss import gpt_oss
from kvist.engine.models.families.llama import llama
from kvist.engine.models.families.mistral import mistral
from kvist.engine.models.families.qwen3 import qwen3, qwen3_moe
from kvist.errors import InvalidValueError

_FAMILIES: dict[str, Callable[[Raw], ModelConfig]] = {
    "Gemma3ForCausalLM": gemma3,
    "Gemma3nForCausalLM": gemma3n,
    "Gemma4ForCausalLM": gemma4,
    "GptOssForCausalLM": gpt_oss,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}

# Models that take images or sound too: of these, what reads and writes text.
_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
}


def load_model_config(model_dir: Path) -> ModelConfig:
    """Return the configuration of a model, or of its text part; raises InvalidValueError that names the field."""
    raw = checked(read_json_object(model_dir / "config.json"), ConfigFields)
    named = str((raw.get("architectures") or [None])[0])
    architecture, is_text_part = _TEXT_PARTS.get(named, named), named in _TEXT_PARTS
    if architecture not in _FAMILIES:
        supported = sorted({*_FAMILIES, *_TEXT_PARTS})
        raise InvalidValueError("architectures", raw.get("architectures"), f"one of {supported}")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method")
        raise InvalidValueError("quantization_config", method, "none: weights are floating-point numbers")
    generation = model_dir / "generation_config.json"
    extra = checked(read_json_object(generation), GenerationFields) if generation.is_file() else {}
    if is_text_part:
        raw = _text_part(raw)
    found = {"architecture": architecture, "is_text_part": is_text_part, "eos_token_ids": _eos(raw) | _eos(extra)}
    try:
        return _FAMILIES[architecture](raw | found)
    except KeyError as missing:
        raise InvalidValueError(f"config.json: {missing.args[0]}", None, "a value") from None


def _text_part(raw: Raw) -> Raw:
    """Return the fields of the text part; what the whole model says of its vocabulary's ends holds for it."""
    whole = {field: raw[field] for field in ("eos_token_id", "tie_word_embeddings") if field in raw}
    return checked(raw.get("text_config", {}), ConfigFields) | whole


def _eos(raw: Raw) -> frozenset[int]:
    eos = raw.get("eos_token_id")
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


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
