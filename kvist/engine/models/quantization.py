"""Reads quantised weights, and dequantises to floating-point numbers those that have to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvist.errors import InvalidValueError

Parts = dict[str, torch.Tensor]

_READABLE: dict[str, dict[str, tuple[Any, ...]]] = {
    "awq": {"bits": (4,), "version": ("gemm",)},
    "compressed-tensors": {"format": ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")},
    "fbgemm_fp8": {},
    "fp8": {},
    "gptq": {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2")},
    "mxfp4": {},
}
"""By quant_method: the values that its fields may have, the default first."""
_PARTS = {
    *("weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point", "weight_g_idx", "weight_shape"),
    *("qweight", "qzeros", "scales", "g_idx"),
}
"""The tensors that a linear layer stores for its weight, or beside it."""
_OF_ACTIVATIONS = ("activation_scale", "input_scale", "k_scale", "v_scale")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The order in which AutoAWQ packs eight neighbours (`packing_utils.py`)."""


class _Weights(msgspec.Struct, frozen=True):
    num_bits: Literal[2, 4, 8] | None = None
    block_structure: tuple[int, int] | None = None


class _Group(msgspec.Struct, frozen=True):
    weights: _Weights | None = None
    input_activations: Any = None


class _Sizes(msgspec.Struct, frozen=True):
    """The sizes in a `quantization_config`; numbers of other widths would not fill the integers they are packed in."""

    weight_block_size: tuple[int, int] | None = None
    config_groups: dict[str, _Group] | None = None


def check_quantization(quantization: Any) -> None:
    """Raise InvalidValueError for a `quantization_config` whose weights cannot be read."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not isinstance(quantization, dict) or method not in [*_READABLE]:
        raise InvalidValueError("quantization_config.quant_method", method, f"one of {[*_READABLE]}")
    for field, readable in _READABLE[quantization["quant_method"]].items():
        if (value := quantization.get(field, readable[0])) not in readable:
            raise InvalidValueError(f"quantization_config.{field}", value, f"one of {[*readable]}")
    try:
        msgspec.convert(quantization, _Sizes)
    except msgspec.ValidationError as error:
        expected = f"num_bits 2, 4 or 8 and blocks of two numbers ({error})"
        raise InvalidValueError("quantization_config", quantization, expected) from None


def quantizes_activations(quantization: dict[str, Any] | None) -> bool:
    """Return whether a checkpoint's activations may have eight bits, too."""
    if quantization is None or quantization["quant_method"] != "compressed-tensors":
        return quantization is not None and quantization["quant_method"] in ("fp8", "fbgemm_fp8")
    groups = (msgspec.convert(quantization, _Sizes).config_groups or {}).values()
    return bool(groups) and all(group.input_activations is not None for group in groups)


def split_name(stored: str) -> tuple[str, str] | None:
    """Return the weight that a stored tensor belongs to, and which part it is; None for scales of activations.

    The part `weight` may be the whole weight.
    """
    module, _, last = stored.rpartition(".")
    if last in _OF_ACTIVATIONS:
        return None
    if last in _PARTS:
        return f"{module}.weight", last.removesuffix("_inv")  # some call a scale its inverse
    for part in ("blocks", "scales"):
        if last.endswith(f"_{part}"):
            return stored.removesuffix(f"_{part}"), part
    return stored, "weight"


def dequantize(name: str, parts: Parts, quantization: dict[str, Any]) -> torch.Tensor:
    """Return a weight from its parts, in float32; from MXFP4 in bfloat16, which is exact.

    Raises InvalidValueError if parts are missing or do not fit each other.
    """
    try:
        if "blocks" in parts:
            return convert_moe_packed_tensors(parts["blocks"], parts["scales"])
        if "weight_packed" in parts:
            return _unpack_compressed(parts)
        if "qweight" in parts:
            return _unpack_awq(parts) if quantization["quant_method"] == "awq" else _unpack_gptq(parts, quantization)
        return _scale(parts, _block_size(quantization))
    except (AssertionError, ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
        expected = f"parts of one weight by {quantization['quant_method']} ({error})"
        raise InvalidValueError(f"parts of {name}", shapes, expected) from error


def _block_size(quantization: dict[str, Any]) -> tuple[int, int] | None:
    sizes = msgspec.convert(quantization, _Sizes)
    of_groups = [each.weights.block_structure for each in (sizes.config_groups or {}).values() if each.weights]
    return next((size for size in (sizes.weight_block_size, *of_groups) if size), None)


def _scale(parts: Parts, block_size: Sequence[int] | None) -> torch.Tensor:
    """Multiply eight-bit numbers by their scales: one for the tensor, for each row, or for each block.

    Blocks at the ends may be incomplete.
    """
    weight = parts["weight"].float()
    scales = parts["weight_scale"].float()
    scales = scales.reshape(scales.shape[0] if scales.dim() else 1, -1)
    sizes = [
        block if -(-whole // block) == count else whole // count
        for whole, count, block in zip(weight.shape, scales.shape, block_size or weight.shape, strict=True)
    ]

    def spread(by_block: torch.Tensor) -> torch.Tensor:
        by_row = by_block.repeat_interleave(sizes[0], 0)[: weight.shape[0]]
        return by_row.repeat_interleave(sizes[1], 1)[:, : weight.shape[1]]

    if "weight_zero_point" in parts:
        weight -= spread(parts["weight_zero_point"].float().reshape(scales.shape))
    return weight.mul_(spread(scales))


def _unpack_compressed(parts: Parts) -> torch.Tensor:
    rows, columns = parts["weight_shape"].tolist()
    bits = 32 * parts["weight_packed"].shape[1] // columns
    scales = parts["weight_scale"].float()
    zeros: torch.Tensor | int = 2 ** (bits - 1)
    if "weight_zero_point" in parts:
        zeros = _unpack(parts["weight_zero_point"].T, bits)[:, :rows].T
    numbers = _unpack(parts["weight_packed"], bits)[:, :columns]
    return _scale_groups(numbers, zeros, scales, parts.get("weight_g_idx"))


def _unpack_awq(parts: Parts) -> torch.Tensor:
    numbers, zeros = (_unpack(parts[name], 4, _AWQ_ORDER) for name in ("qweight", "qzeros"))
    return _scale_groups(numbers.T, zeros.T, parts["scales"].T.float(), None)


def _unpack_gptq(parts: Parts, quantization: dict[str, Any]) -> torch.Tensor:
    bits = quantization.get("bits", 4)
    zeros = _unpack(parts["qzeros"], bits)
    if quantization.get("checkpoint_format", "gptq") == "gptq":
        zeros += 1  # the first version of the format stores them less one
    return _scale_groups(_unpack(parts["qweight"].T, bits), zeros.T, parts["scales"].T.float(), parts.get("g_idx"))


def _unpack(packed: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Unpack int32s, `[rows, columns / (32 / bits)]`, to numbers, `[rows, columns]`, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    if order is not None:
        shifts = shifts[order]
    return (packed[..., None] >> shifts & 2**bits - 1).flatten(-2)


def _scale_groups(
    numbers: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, group_idx: torch.Tensor | None
) -> torch.Tensor:
    """Return a weight from numbers `[num_outputs, num_inputs]`, and the zeros and scales of each group of inputs."""
    if group_idx is None:
        num_inputs = numbers.shape[1]
        group_idx = torch.arange(num_inputs, device=numbers.device) // (num_inputs // scales.shape[1])
    origin = zeros[:, group_idx] if isinstance(zeros, torch.Tensor) else zeros
    return (numbers - origin) * scales[:, group_idx]
