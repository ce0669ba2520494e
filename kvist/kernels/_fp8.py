# mypy: disable-error-code="no-untyped-def"
"""Decodes and encodes eight-bit floats as bytes, so that all targets and the interpreter compute the same numbers.

Triton's own `fp8e4nv` does not compile for sm_80 and NumPy knows neither type; integer arithmetic works everywhere and
is compared with torch byte by byte. Formats: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3 without infinities).
"""

from __future__ import annotations

import torch

from kvist.kernels._triton import jit, tl

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def mantissa_bits(dtype: torch.dtype) -> int | None:
    """Return the mantissa bits by which kernels know an eight-bit float: 3 for e4m3, 2 for e5m2, None for others."""
    return {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, but eight-bit floats as uint8 over the same memory."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


@jit()
def decode_fp8(stored, MANTISSA: tl.constexpr, IS_NATIVE: tl.constexpr):  # noqa: N803
    """Decode bytes to float16, which has every value of both formats: exact, also subnormals, infinities and NaN."""
    if IS_NATIVE:  # one instruction for two numbers, from sm_89 on
        return stored.to(tl.float8e5 if MANTISSA == 2 else tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = stored.to(tl.uint16)
    if MANTISSA == 2:  # e5m2 is the upper half of a float16.
        return (wide << 8).to(tl.float16, bitcast=True)
    # The exponent of e4m3 is biased by 7, that of float16 by 15. NaN, 0x7F, comes out as 1.875, the only number here
    # that 34944 lifts over the largest float16: 0 * inf is NaN, and 0 * anything else changes nothing.
    small = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return small * 256.0 + small * 34944.0 * 0.0


@jit()
def encode_fp8(value, MANTISSA: tl.constexpr):  # noqa: N803
    """Encode float32 to bytes, rounded to nearest even; too large values become the largest finite one, NaN stays."""
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0  # noqa: N806
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15  # noqa: N806
    SHIFT: tl.constexpr = 23 - MANTISSA  # noqa: N806
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(value), LARGEST)
    # A normal number loses SHIFT bits; the carry of the rounding may change the exponent, which is correct.
    kept = magnitude.to(tl.int32, bitcast=True)
    normal = (kept + (1 << (SHIFT - 1)) - 1 + ((kept >> SHIFT) & 1) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # The numbers from MAGIC on are as far apart as the smallest eight-bit ones, so adding it rounds to these.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)  # noqa: N806
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) - ((150 - BIAS - MANTISSA + 1) << 23)
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(value != value, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
