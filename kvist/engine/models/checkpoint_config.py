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


def load_model_config(model_dir: Path) -> ModelConfig:
    """Return the model's configuration; raises InvalidValueError that names the field and what is supported."""
    raw = checked(read_json_object(model_dir / "config.json"), ConfigFields)
    architecture = str((raw.get("architectures") or [None])[0])
    family = _FAMILIES.get(architecture)
    if family is None:
        raise InvalidValueError("architectures", raw.get("architectures"), f"one of {sorted(_FAMILIES)}")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method")
        raise InvalidValueError("quantization_config", method, "none: weights are floating-point numbers")
    generation = model_dir / "generation_config.json"
    extra = checked(read_json_object(generation), GenerationFields) if generation.is_file() else {}
    try:
        return family(raw | {"architecture": architecture, "eos_token_ids": _eos(raw) | _eos(extra)})
    except KeyError as missing:
        raise InvalidValueError(f"config.json: {missing.args[0]}", None, "a value") from None


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
