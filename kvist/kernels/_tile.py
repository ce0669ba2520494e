# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
"""The steps of attention for one tile of keys: load it through the block table, then add it to the softmax.

The softmax is online (Milakov and Gimelshein 2018, arXiv:1805.02867), in base 2: each row has a running maximum, the
sum of its weights and its weighted values, which are rescaled whenever the maximum grows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvist.kernels._fp8 import decode_fp8
from kvist.kernels._triton import jit, next_power_of_2, tl

MIN_DOT_SIZE = 16  # No side of a tensor-core product may be smaller on sm_80 and sm_90 in 16-bit types.


def pad_head_dim(head_dim: int) -> int:
    """Return the width of a tile's rows: a power of two, as Triton's ranges require, and wide enough for a product."""
    return max(MIN_DOT_SIZE, next_power_of_2(head_dim))


class TileShape(NamedTuple):
    """A program's tokens, the rows of their query heads of one kv head, the keys of a tile, and Triton's settings.

    Triton counts the block table's lookup as a stage of the pipeline as well: 5 stages keep two tiles of keys and
    values in shared memory, one being filled while the other is used; its default, 3, keeps one.
    """

    tokens: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tile(heads_per_kv: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tile of decodes: in 16 bits 32 KiB of keys and values, so that up to three programs share an sm_90.

    Decode waits for memory, and what hides the wait is bytes under way: a multiprocessor's share of 4.8 TB/s at 0.8 µs
    is 29 KiB, which the tile being filled covers once a program. float32 is there to compare with, not for speed: its
    products keep full precision, so they miss the tensor cores and want many registers.
    """
    rows = max(MIN_DOT_SIZE, next_power_of_2(heads_per_kv))
    if dtype == torch.float32:
        return TileShape(1, rows, keys=16, num_warps=4, num_stages=3)
    return TileShape(1, rows, keys=min(128, 8192 // pad_head_dim(head_dim)), num_warps=4, num_stages=5)


def prefill_tile(heads_per_kv: int, head_dim: int, dtype: torch.dtype, is_fp8: bool, capability: int) -> TileShape:
    """Return the largest tile of prefills whose accumulators stay in registers, also with a soft cap and a window.

    More rows read the keys less often; sm_90 has 227 KiB of shared memory and products that take an operand from it.
    Every other target gets tiles that fit into 99 KiB. What was tried and spills (Triton 3.7.1, 2026-11): 128 x 64 at
    128 and 128 x 32 at 256 on sm_80, as 128 x 32 at 128 does over e4m3; 128 x 128 at 128 and 128 x 64 at 256 on sm_90;
    64 rows at 512 on both. At 512 the rows are too few for sm_90's warpgroup products: it runs on sm_80's.
    """
    width, is_sm_90 = pad_head_dim(head_dim), capability // 10 == 9
    if dtype == torch.float32:
        rows, keys, num_warps, num_stages = 16, 16, 8, 3
    elif width > 256:
        rows, keys, num_warps, num_stages = 32, 32, 8, 5 if is_sm_90 else 3
    elif is_sm_90:
        rows, keys, num_warps, num_stages = 128, 64 if width <= 128 else 32, 8, 5
    elif width > 128 or (is_fp8 and width > 64):
        rows, keys, num_warps, num_stages = 64, 32, 8, 3
    else:
        rows, keys, num_warps, num_stages = 128, 32, 8, 5
    rows = max(rows, next_power_of_2(heads_per_kv))
    return TileShape(rows // heads_per_kv, rows, keys, num_warps, num_stages)


# fmt: off
@jit()
def load_tile(
    kv_cache_ptr, block_table_ptr, keys, is_present, kv_head, block_stride, dtype: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
):
    # fmt: on
    """Load keys and values `[len(keys), HEAD_DIM_PAD]` at these positions; absent ones are zeros, and not read.

    Positions are absolute: `block_table_ptr` points to the entry of the sequence's page 0, which the table may lack.
    With `is_present` None all positions are present.
    """
    dims = tl.arange(0, HEAD_DIM_PAD)
    mask = (dims < HEAD_DIM)[None, :]
    if is_present is None:
        block_idxs = tl.load(block_table_ptr + keys // BLOCK_SIZE)
    else:
        block_idxs = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=is_present, other=0)
        mask = mask & is_present[:, None]
    # int64: caches of more than 2**31 elements are common, and the product would overflow silently.
    offsets = block_idxs.to(tl.int64) * block_stride + (kv_head * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
    pointers = kv_cache_ptr + offsets[:, None] + dims[None, :]
    key = tl.load(pointers, mask=mask, other=0)
    value = tl.load(pointers + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=mask, other=0)
    if FP8_MANTISSA is not None:
        key = decode_fp8(key, FP8_MANTISSA).to(dtype)
        value = decode_fp8(value, FP8_MANTISSA).to(dtype)
    return key, value


# fmt: off
@jit()
def attend_tile(
    query, key, value, is_visible, row_max, row_sum, weighted, scale, SOFT_CAP: tl.constexpr,
):
    # fmt: on
    """Return each row's maximum, sum and weighted values after this tile; -inf, 0, 0 if it has seen no key yet.

    With `is_visible` None every row sees every key.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    factor = scale * 1.4426950408889634  # log2(e)
    if SOFT_CAP is not None:
        # cap * tanh(s / cap): a sigmoid, because the interpreter has no tanh; exact at both ends.
        scores = 2.0 * tl.sigmoid(2.0 / SOFT_CAP * scale * scores) - 1.0
        factor = SOFT_CAP * 1.4426950408889634
    if is_visible is not None:
        scores = tl.where(is_visible, scores, float("-inf"))
    # The factor is positive, so it can be applied later, where it costs nothing: each exponent is a multiply-add.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    pivot = new_max
    if is_visible is not None:
        # -inf - (-inf) is NaN: the exponents of a row whose keys were all masked so far are relative to 0 instead.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * factor - pivot[:, None])
    decay = tl.exp2(row_max - pivot)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(value.dtype), value, weighted * decay[:, None], input_precision="ieee")
    return new_max, row_sum, weighted


@jit()
def softmax_sum(row_max, row_sum, sink):
    """Return the divisor of each row's weighted values: the sum of its weights and its sink, if any; never 0.

    The bound keeps the sum finite: a sink that is so far above every score makes the row 0 either way.
    """
    if sink is not None:
        pivot = tl.where(row_max == float("-inf"), 0.0, row_max)
        row_sum += tl.exp2(tl.minimum(sink * 1.4426950408889634 - pivot, 120.0))
    return tl.where(row_sum > 0, row_sum, 1.0)
