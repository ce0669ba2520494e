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
    values in shared memory, one being filled while the other is used; 2 and 3 keep one.
    """

    tokens: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def num_fed(self, row_bytes: int) -> int:
        """Return how many programs a multiprocessor's share of the memory's bandwidth feeds: 64 KiB under way."""
        return max(1, 65536 // (2 * self.keys * row_bytes))


def decode_tile(heads_per_kv: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tile of decodes: in 16 bits 64 KiB of keys and values, which one program waits for at a time.

    Decode waits for memory, and what hides the wait is bytes under way: a multiprocessor's share of 3.35 TB/s at 0.8 us
    is 20 KiB. Of tiles of 16 to 128 KiB, 4 and 8 warps, 3 to 7 stages, this was fastest or within 3 % of it (H100,
    2026-11). float32 is there to compare with, not for speed: its products keep full precision, so they miss the tensor
    cores and want many registers.
    """
    rows = max(MIN_DOT_SIZE, next_power_of_2(heads_per_kv))
    if dtype == torch.float32:
        return TileShape(1, rows, keys=16, num_warps=4, num_stages=3)
    return TileShape(1, rows, keys=min(128, 16384 // pad_head_dim(head_dim)), num_warps=4, num_stages=5)


def prefill_tile(heads_per_kv: int, head_dim: int, dtype: torch.dtype, is_fp8: bool, capability: int) -> TileShape:
    """Return the tile of prefills.

    More rows read the keys less often; sm_90 has 227 KiB of shared memory and products that take an operand from it:
    its tiles were the fastest of up to 30 tried on an H100 (2026-11). Every other target gets tiles that fit into
    99 KiB and whose accumulators stay in registers: 128 x 64 at 128 and 128 x 32 at 256 do not, as 128 x 32 at 128 does
    not over e4m3 (Triton 3.7.1).
    """
    width, is_sm_90 = pad_head_dim(head_dim), capability // 10 == 9
    if dtype == torch.float32:
        rows, keys, num_warps, num_stages = 16, 16, 8, 3
    elif is_sm_90:
        rows, keys = 128 if width <= 256 else 64, 128 if width == 128 else 64 if width <= 256 else 32
        num_warps, num_stages = 8, 5 if width <= 128 else 2
    elif width > 256:
        rows, keys, num_warps, num_stages = 32, 32, 8, 3
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
    FP8_MANTISSA: tl.constexpr, IS_FP8_NATIVE: tl.constexpr,
):
    # fmt: on
    """Load keys and values `[len(keys), HEAD_DIM_PAD]` at these positions; absent ones are zeros, and not read.

    Keys come in the query's dtype; values too, but eight-bit ones of a query in 16 bits in float16, which is exact.

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
        key = decode_fp8(key, FP8_MANTISSA, IS_FP8_NATIVE).to(dtype)
        value = decode_fp8(value, FP8_MANTISSA, IS_FP8_NATIVE)
        if dtype == tl.float32:
            value = value.to(dtype)
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
