# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
"""What both attention kernels do with a tile of keys: load it through the block table, then fold it into the softmax.

The softmax is online (Milakov and Gimelshein 2018, arXiv:1805.02867), in base 2: a row carries its running maximum,
the sum of its weights and its weighted values, and is rescaled whenever the maximum grows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvist.kernels._triton import jit, next_power_of_2, tl

MIN_DOT_SIZE = 16  # No side of a tensor-core product may be smaller on sm_80 and sm_90 in 16-bit types.


def pad_head_dim(head_dim: int) -> int:
    """The width of a tile's rows: a power of two, as Triton's ranges require, and wide enough for a product."""
    return max(MIN_DOT_SIZE, next_power_of_2(head_dim))


class TileShape(NamedTuple):
    """Query rows a program of prefill takes, keys a step of either kernel takes, and the warps of prefill."""

    rows: int
    keys: int
    num_warps: int


def tile_shape(head_dim: int, dtype: torch.dtype) -> TileShape:
    """A tile whose accumulators stay in registers: no 16-bit kernel spills on sm_80 and sm_90. Speed is not tuned.

    float32 is there to compare with, not for speed: its products keep full precision, so they miss the tensor cores
    and want many registers. In 16 bits, 64 rows of 128 spill with 4 warps on sm_80, and 64 rows of 512 with 8 warps on
    both (Triton 3.7.1, 2026-11).
    """
    width = pad_head_dim(head_dim)
    if dtype == torch.float32:
        return TileShape(rows=16, keys=16, num_warps=4)
    return TileShape(
        rows=64 if width <= 256 else 32, keys=64 if width <= 128 else 32, num_warps=4 if width < 128 else 8
    )


# fmt: off
@jit
def load_tile(
    kv_cache_ptr, block_table_ptr, keys, is_present, kv_head, block_stride,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
):
    # fmt: on
    """Keys and values `[len(keys), HEAD_DIM_PAD]` at these positions; absent ones are not read and come as zeros.

    Positions are absolute: `block_table_ptr` points to where page 0 of the sequence stands, or would stand.
    """
    # int64: a cache of more than 2**31 elements is ordinary, and the product overflows without a word.
    block_idxs = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=is_present, other=0).to(tl.int64)
    offsets = block_idxs * block_stride + (kv_head * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM_PAD)
    pointers = kv_cache_ptr + offsets[:, None] + dims[None, :]
    mask = is_present[:, None] & (dims < HEAD_DIM)[None, :]
    key = tl.load(pointers, mask=mask, other=0.0)
    value = tl.load(pointers + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=mask, other=0.0)
    return key, value


# fmt: off
@jit
def attend_tile(
    query, key, value, is_visible, row_max, row_sum, weighted, scale, SOFT_CAP: tl.constexpr,
):
    # fmt: on
    """The three running quantities of each row after this tile; a row that has seen nothing stays at -inf, 0, 0."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFT_CAP is not None:
        # cap * tanh(s / cap): a sigmoid, because the interpreter has no tanh; exact at both ends.
        scores = SOFT_CAP * (2.0 * tl.sigmoid(2.0 / SOFT_CAP * scores) - 1.0)
    scores = tl.where(is_visible, scores * 1.4426950408889634, float("-inf"))  # log2(e)
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # -inf - (-inf) is NaN: a row whose keys were all masked so far takes its exponents against 0 instead.
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(row_max - pivot)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(value.dtype), value, weighted * decay[:, None], input_precision="ieee")
    return new_max, row_sum, weighted


@jit
def softmax_sum(row_max, row_sum, sink):
    """What divides each row's weighted values: its weights and, where there is one, its sink; 1 for a row of nothing.

    The bound keeps the sum finite: a sink so far above every score leaves nothing of the row either way.
    """
    if sink is not None:
        pivot = tl.where(row_max == float("-inf"), 0.0, row_max)
        row_sum += tl.exp2(tl.minimum(sink * 1.4426950408889634 - pivot, 120.0))
    return tl.where(row_sum > 0, row_sum, 1.0)
