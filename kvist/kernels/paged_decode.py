# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
"""Attention of one query token a sequence over a paged cache: split-K flash decoding.

A program takes one split of a sequence's window and all query heads of one kv head; a second kernel merges the splits
by their log-sum-exp (Dao et al., "Flash-Decoding for long-context inference", 2023; PagedAttention, arXiv:2309.06180).
"""

from __future__ import annotations

from typing import Unpack

import torch

from kvist.kernels._checks import AttentionOptions, check_attention
from kvist.kernels._dense import attend, gather_kv
from kvist.kernels._fp8 import as_bytes, mantissa_bits
from kvist.kernels._tile import attend_tile, decode_tile, load_tile, pad_head_dim, softmax_sum
from kvist.kernels._triton import device_facts, is_launched, jit, next_power_of_2, tl, widen_for_interpreter

MAX_SPLITS = 128
_MERGED_DIMS = 64  # 128 splits of 64 dimensions stay in the registers of 4 warps; of 256 they do not.


# fmt: off
@jit
def _paged_decode_kernel(
    query_ptr, kv_cache_ptr, block_tables_ptr, page_offsets_ptr, seq_lens_ptr, sinks_ptr, out_ptr, lse_ptr,
    scale, query_stride, block_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
):
    # fmt: on
    """Program (sequence, kv head, split) attends to its share of the window's pages; none: 0, lse -inf.

    Sinks are for a single split: several would each count them, so the merge does.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, HEAD_DIM_PAD)
    is_head = heads < HEADS_PER_KV
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    rows = kv_head * HEADS_PER_KV + heads
    query = tl.load(query_ptr + seq * query_stride + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)

    seq_len = tl.load(seq_lens_ptr + seq)
    first_key = 0
    if WINDOW is not None:
        first_key = tl.maximum(seq_len - WINDOW, 0)
    block_table_ptr = block_tables_ptr + seq * table_stride
    if page_offsets_ptr is not None:
        page_offset = tl.load(page_offsets_ptr + seq)
        first_key = tl.maximum(first_key, page_offset * BLOCK_SIZE)
        block_table_ptr -= page_offset
    first_page = first_key // BLOCK_SIZE
    pages_per_split = tl.cdiv(tl.cdiv(seq_len, BLOCK_SIZE) - first_page, NUM_SPLITS)
    split_page = first_page + split * pages_per_split
    start = tl.maximum(split_page * BLOCK_SIZE, first_key)  # The first page usually lies only partly in the window.
    end = tl.minimum((split_page + pages_per_split) * BLOCK_SIZE, seq_len)

    row_max = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS_PAD], tl.float32)
    weighted = tl.zeros([HEADS_PAD, HEAD_DIM_PAD], tl.float32)
    for tile in range(start, end, TILE):
        keys = tile + tl.arange(0, TILE)
        is_present = keys < end
        key, value = load_tile(
            kv_cache_ptr, block_table_ptr, keys, is_present, kv_head, block_stride, query.dtype,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PAD, FP8_MANTISSA,
        )  # fmt: skip
        row_max, row_sum, weighted = attend_tile(
            query, key, value, is_present[None, :], row_max, row_sum, weighted, scale, SOFT_CAP
        )

    cells = (seq * NUM_KV_HEADS * HEADS_PER_KV + rows) * NUM_SPLITS + split
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + rows, mask=is_head, other=float("-inf"))
    row_sum = softmax_sum(row_max, row_sum, sink)  # An empty split: 0 / 1, and an lse of -inf + 0.
    attended = (weighted / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cells[:, None] * HEAD_DIM + dims[None, :], attended, mask=mask)
    tl.store(lse_ptr + cells, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=is_head)  # ln(2)


# fmt: off
@jit
def _merge_splits_kernel(
    out_ptr, split_out_ptr, split_lse_ptr, sinks_ptr, num_heads,
    HEAD_DIM: tl.constexpr, NUM_DIMS: tl.constexpr, NUM_SPLITS: tl.constexpr,
):
    # fmt: on
    """Program (row, part of head_dim) weighs the row's splits by e^(lse - max lse); without a visible key it is 0."""
    row = tl.program_id(0).to(tl.int64)
    splits = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.program_id(1) * NUM_DIMS + tl.arange(0, NUM_DIMS)
    lse = tl.load(split_lse_ptr + splits)
    largest = tl.max(lse, 0)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(lse - pivot)
    mask = (dims < HEAD_DIM)[None, :]
    split_out = tl.load(split_out_ptr + splits[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.exp(tl.minimum(tl.load(sinks_ptr + row % num_heads) - pivot, 80.0))  # Finite, as in softmax_sum.
    merged = tl.sum(weights[:, None] * split_out, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_num_splits(
    batch: int, num_kv_heads: int, max_seq_len: int, block_size: int, window: int | None, num_multiprocessors: int
) -> int:
    """How many splits fill the device: a power of two up to 128, and 1 where the batch fills it by itself.

    Four programs a multiprocessor, but no split of fewer than two pages before rounding up. Rounding up may leave
    splits empty.
    """
    seq_len = max_seq_len if window is None else min(max_seq_len, window)
    programs = batch * num_kv_heads
    if seq_len <= 0 or programs >= 2 * num_multiprocessors:
        return 1
    wanted = -(-4 * num_multiprocessors // programs)
    return min(MAX_SPLITS, next_power_of_2(min(wanted, max(1, seq_len // block_size // 2))))


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Each sequence's last token attends to the keys of its window; a sequence of length 0 yields zeros.

    `query`: `[batch, num_heads, head_dim]`, the token at position `seq_lens - 1`, already in the cache, in the cache's
    dtype, or in 16 or 32 bits over a cache of eight; `kv_cache` and `block_tables` (int32 `[batch, max_blocks]`) as in
    `kvist.kernels`; `seq_lens`: int32 `[batch]`, absolute; `page_offsets`: int32 `[batch]`, the pages that the front of
    a table lacks (None: none), at most the first that holds a visible key. Key k is visible to query q iff `k <= q` and
    `q - k < window`. A score s is `scale * q.k`, with a cap `soft_cap * tanh(s / soft_cap)`; `sinks`: float32
    `[num_heads]`, learned scores that take their share of each softmax and give nothing (gpt-oss). `num_splits` (a
    power of two; None: `decode_num_splits`) changes speed and rounding only. Returns `out`, or a new tensor shaped like
    `query`. Raises ValueError. Never synchronises with the device.
    """
    check_attention(query, kv_cache, block_tables, seq_lens, options, out)
    batch, num_heads, head_dim = query.shape
    if batch != seq_lens.shape[0]:
        raise ValueError(f"seq_lens has shape {list(seq_lens.shape)}; expected one length a query: [{batch}]")
    if num_splits is not None and num_splits not in (1 << power for power in range(MAX_SPLITS.bit_length())):
        raise ValueError(f"num_splits is {num_splits}; expected a power of two from 1 to {MAX_SPLITS}, or None")
    if not is_launched(query):
        result = paged_decode_reference(query, kv_cache, block_tables, seq_lens, **options)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch == 0:
        return out
    if num_splits is None:
        num_kv_heads, block_size = kv_cache.shape[2:4]
        # The longest sequence is on the device; the width of the table bounds it without asking.
        max_seq_len = block_tables.shape[1] * block_size
        window, multiprocessors = options.get("window"), device_facts(query.device).num_multiprocessors
        num_splits = decode_num_splits(batch, num_kv_heads, max_seq_len, block_size, window, multiprocessors)
    wide_out = widen_for_interpreter(out)
    # A single split is the result already; several stay in float32 until they are merged.
    shape = (batch, num_heads, num_splits, head_dim)
    split_out = wide_out.view(shape) if num_splits == 1 else out.new_empty(shape, dtype=torch.float32)
    split_lse = decode_splits(query, kv_cache, block_tables, seq_lens, split_out, **options)
    if num_splits > 1:
        merge_splits(split_out, split_lse, wide_out, options.get("sinks"))
    return out.copy_(wide_out)  # Nothing to copy but in the interpreter.


def decode_splits(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    split_out: torch.Tensor,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Fill `split_out`, `[batch, num_heads, num_splits, head_dim]`, and return each split's natural lse in float32.

    A single split has its sinks counted; those of several are left to `merge_splits`.
    """
    batch, num_heads, num_splits, head_dim = split_out.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    lse = torch.empty(split_out.shape[:3], dtype=torch.float32, device=query.device)
    mantissa = mantissa_bits(kv_cache.dtype)
    query, kv_cache = widen_for_interpreter(query), widen_for_interpreter(as_bytes(kv_cache))
    heads_per_kv = num_heads // num_kv_heads
    tile = decode_tile(heads_per_kv, head_dim, query.dtype)
    with torch.cuda.device_of(query):
        _paged_decode_kernel[(batch, num_kv_heads, num_splits)](
            query, kv_cache, block_tables, options.get("page_offsets"), seq_lens,
            options.get("sinks") if num_splits == 1 else None, split_out, lse,
            options["scale"], query.stride(0), kv_cache.stride(0), block_tables.stride(0),
            NUM_KV_HEADS=num_kv_heads, HEADS_PER_KV=heads_per_kv, HEADS_PAD=tile.rows,
            BLOCK_SIZE=block_size, HEAD_DIM=head_dim, HEAD_DIM_PAD=pad_head_dim(head_dim),
            NUM_SPLITS=num_splits, TILE=tile.keys, WINDOW=options.get("window"), SOFT_CAP=options.get("soft_cap"),
            FP8_MANTISSA=mantissa,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return lse


def merge_splits(
    split_out: torch.Tensor, split_lse: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
) -> None:
    """Fill `out`, `[batch, num_heads, head_dim]`, with the splits of `decode_splits`, each weighed by its lse."""
    batch, num_heads, num_splits, head_dim = split_out.shape
    with torch.cuda.device_of(out):
        _merge_splits_kernel[(batch * num_heads, -(-head_dim // _MERGED_DIMS))](
            out, split_out, split_lse, sinks, num_heads,
            HEAD_DIM=head_dim, NUM_DIMS=_MERGED_DIMS, NUM_SPLITS=num_splits,
        )  # fmt: skip


def paged_decode_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """`paged_decode` in torch: the window's pages gathered, padded to the longest of the batch, one batched matmul."""
    scale, soft_cap = options["scale"], options.get("soft_cap")
    window, page_offsets, sinks = options.get("window"), options.get("page_offsets"), options.get("sinks")
    batch, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    lengths = seq_lens.long()
    first_key = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    first_page = first_key // block_size
    num_pages = int(((lengths + block_size - 1) // block_size - first_page).max()) if batch else 0
    if num_pages == 0:
        return torch.zeros_like(query)
    pages = first_page[:, None] + torch.arange(num_pages, device=query.device)
    keys = (first_page * block_size)[:, None] + torch.arange(num_pages * block_size, device=query.device)
    visible = (keys >= first_key[:, None]) & (keys < lengths[:, None])
    # Pages past a row's end only fill the rectangle: any block will do, nothing of it is visible.
    is_filler = pages * block_size >= lengths[:, None]
    columns = pages if page_offsets is None else pages - page_offsets[:, None]
    block_idxs = block_tables.gather(1, columns.masked_fill(is_filler, 0)).masked_fill(is_filler, 0)
    key, value = gather_kv(kv_cache, block_idxs)
    value[:, ~visible] = 0.0
    grouped = query.view(batch, num_kv_heads, -1, head_dim).transpose(0, 1)
    row_sinks = None if sinks is None else sinks.view(num_kv_heads, 1, -1, 1)
    attended = attend(grouped, key, value, visible[:, None, :], scale=scale, soft_cap=soft_cap, sinks=row_sinks)
    return attended.transpose(0, 1).reshape(batch, num_heads, head_dim).to(query.dtype)
