# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
"""Store the keys and values of a step into the slots of a paged cache."""

from __future__ import annotations

import torch

from kvist.kernels._checks import DTYPES, check_kv_cache, check_tensor, row_stride
from kvist.kernels._fp8 import FP8_DTYPES, as_bytes, encode_fp8, mantissa_bits
from kvist.kernels._triton import FUSED, IS_INTERPRETED, is_launched, jit, loops_for, next_power_of_2, tl

_TOKENS_PER_PROGRAM = 16  # 4 KiB of keys at head_dim 128 in 16 bits; not tuned.


# fmt: off
@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _write_kv_kernel(
    key_ptr, value_ptr, kv_cache_ptr, slot_mapping_ptr, num_tokens, key_stride, value_stride, block_stride,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr, FP8_MANTISSA: tl.constexpr,
):
    # fmt: on
    """A program copies one head of TOKENS tokens."""
    kv_head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    mask = (slots >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    source = kv_head * HEAD_DIM + dims[None, :]
    key = tl.load(key_ptr + tokens[:, None] * key_stride + source, mask=mask, other=0.0)
    value = tl.load(value_ptr + tokens[:, None] * value_stride + source, mask=mask, other=0.0)
    if FP8_MANTISSA is not None:
        key = encode_fp8(key.to(tl.float32), FP8_MANTISSA)
        value = encode_fp8(value.to(tl.float32), FP8_MANTISSA)
    offsets = slots // BLOCK_SIZE * block_stride + (kv_head * BLOCK_SIZE + slots % BLOCK_SIZE) * HEAD_DIM
    target = kv_cache_ptr + offsets[:, None] + dims[None, :]
    tl.store(target, key.to(kv_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(target + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, value.to(kv_cache_ptr.dtype.element_ty), mask=mask)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write every token with a slot to the cache, rounded to the cache's dtype; a negative slot writes nothing.

    `key`, `value`: `[num_tokens, num_kv_heads, head_dim]` in 16 or 32 bits; `kv_cache` as in `kvist.kernels`, changed
    in place: in eight bits, too large values become the largest finite one; `slot_mapping`: int64 `[num_tokens]`,
    `block_idx * block_size + offset`, no slot twice. Raises ValueError.
    """
    check_kv_cache(kv_cache)
    num_tokens, (_, _, num_kv_heads, block_size, head_dim) = key.shape[0], kv_cache.shape
    for name, tensor in (("key", key), ("value", value)):
        check_tensor(name, tensor, (num_tokens, num_kv_heads, head_dim), DTYPES, kv_cache)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), kv_cache)
    if not is_launched(kv_cache):
        loops = loops_for(kv_cache)
        write = write_kv_reference if loops is None else loops.write_rows
        write(key, value, kv_cache, slot_mapping)
    elif num_tokens:
        mantissa = mantissa_bits(kv_cache.dtype)
        if IS_INTERPRETED:  # The interpreter has no bfloat16, and truncates where the device rounds.
            dtype = kv_cache.dtype if mantissa is None else torch.float32
            key, value = key.to(dtype), value.to(dtype)
        grid = (-(-num_tokens // _TOKENS_PER_PROGRAM), num_kv_heads)
        with torch.cuda.device_of(kv_cache):
            _write_kv_kernel[grid](
                key, value, as_bytes(kv_cache), slot_mapping,
                num_tokens, row_stride(key), row_stride(value), kv_cache.stride(0),
                NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, HEAD_DIM=head_dim,
                HEAD_DIM_PAD=next_power_of_2(head_dim), TOKENS=_TOKENS_PER_PROGRAM, FP8_MANTISSA=mantissa, **FUSED,
            )  # fmt: skip


def write_kv_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`write_kv` in torch: an indexed assignment."""
    rows, block_size = torch.stack([key, value], dim=1), kv_cache.shape[3]
    is_unwritten = slot_mapping < 0
    if is_unwritten.any():
        rows, slot_mapping = rows[~is_unwritten], slot_mapping[~is_unwritten]
    if kv_cache.dtype in FP8_DTYPES:
        # torch would make infinities of values too large for e5m2.
        largest = torch.finfo(kv_cache.dtype).max
        rows = rows.clamp(-largest, largest)
    kv_cache[slot_mapping // block_size, :, :, slot_mapping % block_size] = rows.to(kv_cache.dtype)
