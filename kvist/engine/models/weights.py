"""Loads weights from safetensors: one file, or shards with an index."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from kvist.engine.models.config import ModelConfig, rank_config, rank_slices
from kvist.engine.models.projections import (
    allocate_weights,
    has_fp8_products,
    pack_projections,
    weights_without_memory,
)
from kvist.engine.models.quantization import dequantize, quantizes_activations, split_name
from kvist.engine.models.transformer import CausalLM, fuse_norms, split_vocabulary
from kvist.errors import InvalidValueError
from kvist.settings import read_json_object
from kvist.transfer.heads import WHOLE, Part

logger = logging.getLogger(__name__)

Location: TypeAlias = tuple[str, Any, str]  # a tensor's name in the text part, its file, and its name in the file
Stored: TypeAlias = dict[str, tuple[Any, str]]  # the parts of a weight: each one's file and its name in the file

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
_SHARABLE = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.(?:weight|bias)")
_KV_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale")
_FP8_DEVICES = ("cuda",)
"""Where FP8 weights stay so. A CPU without instructions for them takes about 15 times as long for a decode step as in
bfloat16 (10 layers of 1,024, one core of an AMD EPYC, torch 2.13, 2026-11-28)."""
_NUM_NAMED = 5  # weights that an error names


def load_model(
    model_dir: Path,
    config: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: Part = WHOLE,
) -> CausalLM:
    """Return the model with every parameter filled from the checkpoint, in `dtype`.

    `config` is that of the whole model; the result is the `shard`'s, and only its part of the weights is read. Raises
    InvalidValueError if weights are missing or unknown, or a shape or dtype is wrong.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(_opened(path)) for path in weight_files(model_dir)]
        locations = [
            (ours, file, theirs) for file in files for ours, theirs in _text_names(file.keys(), config).items()
        ]
        stored = _stored_parts(locations, config)
        can_keep = device.type in _FP8_DEVICES and has_fp8_products(device, dtype)
        with device, weights_without_memory():
            model = CausalLM(rank_config(config, shard.num_ranks), max_model_len, dtype)
            kept = allocate_weights(model.decoder, _fp8_weights(stored, config, shard.num_ranks) if can_keep else ())
        for name in kept:
            stored[f"{name}_scale"] = {"weight": stored[name].pop("weight_scale")}
        targets = checkpoint_targets(model, stored)
        wholes = targets
        if shard.num_ranks > 1:
            with torch.device("meta"):  # shapes without memory
                wholes = checkpoint_targets(CausalLM(config, 1, torch.float32), stored)
            wholes |= {f"{name}_scale": wholes[name][:, :1] for name in kept}
        model.kv_scales = _kv_scales(locations)
        missing, unknown = targets.keys() - stored.keys(), stored.keys() - targets.keys()
        for name in targets.keys() - missing:
            _fill(name, targets[name], list(wholes[name].shape), stored[name], config, shard)
    if missing:
        raise InvalidValueError(f"weights in {model_dir}", f"none for {_some(missing)}", "every parameter of the model")
    unknown = {name for name in unknown if not _is_redundant(name, config)}
    if unknown:
        raise InvalidValueError(f"weights in {model_dir}", _some(unknown), f"only those of {config.architecture}")
    if config.quantization is not None:
        counts = len(kept), sum(len(parts) > 1 for parts in stored.values())
        logger.info("quantised weights loaded num_fp8=%d num_dequantised=%d", *counts)
    fuse_norms(model.decoder)
    if model.config.vocab_size < config.vocab_size:
        split_vocabulary(model.decoder, shard.rank, config.vocab_size)
    if device.type == "cuda":
        pack_projections(model.decoder)
    elif dtype == torch.float32 and not kept:
        _transpose(model)
    return model


def _transpose(model: CausalLM) -> None:
    """Store projections column by column: a step of 32 tokens takes 12 % less time, of one 1 % (MKL, 2026-11).

    Not the head, whose rows may be the embedding's, which are looked up.
    """
    for name, module in model.decoder.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = module.weight.t().contiguous().t()


def _stored_parts(locations: Iterable[Location], config: ModelConfig) -> dict[str, Stored]:
    parts: dict[str, Stored] = {}
    for ours, file, theirs in locations:
        split = (ours, "weight") if config.quantization is None else split_name(ours)
        if split is not None:
            parts.setdefault(split[0], {})[split[1]] = (file, theirs)
    return parts


def _fp8_weights(stored: dict[str, Stored], config: ModelConfig, num_ranks: int) -> Iterator[str]:
    """Yield the weights that may stay as they are stored: in FP8, with a scale for the tensor or for each row.

    Not the head, as a step may have no row of logits, which `multiply_fp8` cannot take.
    """
    for name, parts in stored.items() if quantizes_activations(config.quantization) else ():
        if parts.keys() == {"weight", "weight_scale"} and name != "lm_head.weight":
            weight, scale = (file.get_slice(theirs) for file, theirs in (parts["weight"], parts["weight_scale"]))
            shape = weight.get_shape()
            fits = all(size % (16 * num_ranks) == 0 for size in shape)  # as torch's products demand on a GPU
            is_by_row = scale.get_shape() in ([], [1], [1, 1], shape[:1], [*shape[:1], 1])
            if fits and is_by_row and weight.get_dtype() == "F8_E4M3":
                yield name


def _kv_scales(locations: Iterable[Location]) -> dict[int, tuple[float, float]]:
    """Return the scales of keys and values by layer, for layers that have any: the largest of several, 1 for none."""
    found: dict[tuple[int, str], float] = {}
    for ours, file, theirs in locations:
        if (match := _KV_SCALE.fullmatch(ours)) and (scale := float(file.get_tensor(theirs).max())) > 0:
            found[int(match[1]), match[2]] = scale
    return {layer: (found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0)) for layer, _ in found}


def _fill(name: str, target: torch.Tensor, shape: list[int], stored: Stored, config: ModelConfig, shard: Part) -> None:
    """Copy a stored weight, or a rank's part of it, into `target`; `shape` is that of the whole weight."""
    [(file, theirs), *others] = stored.values()
    whole: Any
    if others:
        parts = {part: file.get_tensor(theirs).to(target.device) for part, (file, theirs) in stored.items()}
        whole = dequantize(name, parts, config.quantization or {})
        found = list(whole.shape)
    else:
        whole = file.get_slice(theirs)
        found = whole.get_shape()
    if name.endswith(".weight_scale"):  # one for all rows, or one for each
        whole = file.get_tensor(theirs).reshape(-1, 1)
        whole, found = (whole.expand(shape), shape) if len(whole) == 1 else (whole, list(whole.shape))
    if found != shape:
        raise InvalidValueError(f"shape of {name}", found, f"{shape} by config.json")
    tensor = whole[rank_slices(shape, target.shape, shard)]
    if tensor.dtype not in (*_DTYPES, target.dtype):  # such weights mean nothing without their scales
        raise InvalidValueError(f"dtype of {name}", str(tensor.dtype), f"one of {list(map(str, _DTYPES))}")
    target.copy_(tensor)


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint; raises InvalidValueError if one is missing."""
    if (model_dir / _INDEX).is_file():
        weight_map = read_json_object(model_dir / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidValueError(f"{_INDEX}: weight_map", weight_map, "an object of file names by weight")
        files = [model_dir / shard for shard in sorted(set(map(str, weight_map.values())))]
    else:
        files = [model_dir / _SINGLE]
    for path in files:
        if not path.is_file():
            raise InvalidValueError("model path", str(model_dir), f"a directory with {path.name}")
    return files


def checkpoint_targets(model: CausalLM, stored: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the model's tensor for each stored weight; the experts of a layer are stored as one tensor or several."""
    targets: dict[str, torch.Tensor] = {}
    for name, weight in model.decoder.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".experts") or name in stored:
            targets[name] = weight
            continue
        parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
        for part, of_experts in parts.items() if kind == "gate_up_proj" else [(kind, weight)]:
            targets |= {f"{prefix}.{expert}.{part}.weight": each for expert, each in enumerate(of_experts)}
    if model.config.text.tie_word_embeddings:
        del targets["lm_head.weight"]
    return targets


def _text_names(stored: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """Return the stored names by their names in the text part, without the weights of other parts."""
    if not config.is_text_part:
        return {name: name for name in stored}
    prefixes = _TEXT_PREFIXES.items()
    return {
        ours + name.removeprefix(theirs): name
        for name in stored
        for theirs, ours in prefixes
        if name.startswith(theirs)
    }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise InvalidValueError("weights", str(path), f"a safetensors file ({error})") from None


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Return whether this is a weight without use that some exporters store nevertheless."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.text.tie_word_embeddings):
        return True
    if (config.quantization or {}).get("quant_method") == "gptq" and name.endswith(".bias"):
        return True  # AutoGPTQ gives every layer one, of zeros
    in_layer = _SHARABLE.fullmatch(name)
    sharing = {str(i) for i, layer in enumerate(config.layers) if layer.kv_source is not None}
    return in_layer is not None and in_layer[1] in sharing


def _some(names: Set[str]) -> str:
    listed = sorted(names)
    rest = len(listed) - _NUM_NAMED
    return ", ".join(listed[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
