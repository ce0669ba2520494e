# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
"""Attention of a ragged batch of new tokens over a paged cache that already holds them: prefill and extend.

A program takes a block of one sequence's query rows and one head, and walks its keys in order (FlashAttention-2,
arXiv:2307.08691): those that the window hides from some rows, those that every row sees, which need no mask, and those
on the causal boundary.
"""

from __future__ import annotations

from typing import Unpack

import torch

from kvist.kernels._checks import AttentionOptions, check_attention, check_tensor
from kvist.kernels._dense import attend, gather_kv
from kvist.kernels._fp8 import as_bytes, mantissa_bits
from kvist.kernels._tile import attend_tile, load_tile, pad_head_dim, prefill_tile, softmax_sum
from kvist.kernels._triton import device_facts, is_launched, jit, next_power_of_2, tl, widen_for_interpreter

# Bounds the score matrix of the reference, and lets it skip the keys that a chunk of rows cannot see. Of 32, 64, 128
# and 256 rows, 64 was fastest for 2,048 tokens, 4 and 8 heads (float32, one core of an x86-64 server, 2026-11).
_REFERENCE_ROWS = 64


# fmt: off
@jit
def _find_rows(
    block, query_start_loc_ptr, num_tokens, batch, BATCH_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    # fmt: on
    """The sequence whose rows block `block` takes, the first of them, and where the sequence's rows end.

    Sequence i owns the blocks from `start[i] // ROWS + i` on: enough for its rows however they straddle, so the grid
    needs only the number of tokens and sequences, and no length has to come from the device.
    """
    seqs = tl.arange(0, BATCH_PAD)
    starts = tl.load(query_start_loc_ptr + seqs, mask=seqs <= batch, other=0)
    is_begun = (seqs <= batch) & (starts // ROWS + seqs <= block)
    seq = tl.sum(is_begun.to(tl.int32), 0) - 1
    start = tl.load(query_start_loc_ptr + seq)
    end = tl.load(query_start_loc_ptr + seq + 1, mask=seq < batch, other=num_tokens)
    return seq, start + (block - start // ROWS - seq) * ROWS, end


# fmt: off
@jit
def _paged_prefill_kernel(
    query_ptr, kv_cache_ptr, block_tables_ptr, page_offsets_ptr, query_start_loc_ptr, seq_lens_ptr,
    sinks_ptr, out_ptr,
    num_tokens, batch, scale, query_stride, block_stride, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, BATCH_PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, FP8_MANTISSA: tl.constexpr,
):
    # fmt: on
    """Program (head, block of rows from the last) attends with up to ROWS rows; padding is a last, empty sequence.

    Programs start in order: the heads of a block share its keys in L2, and the late blocks of a prompt, which see the
    most keys, do not end up as the tail.
    """
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    seq, first_row, end_row = _find_rows(block, query_start_loc_ptr, num_tokens, batch, BATCH_PAD, ROWS)
    if first_row >= end_row:
        return
    head = tl.program_id(0)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    mask = (rows < end_row)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = rows.to(tl.int64) * query_stride + head * HEAD_DIM
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=mask, other=0.0)

    # Positions are absolute: a sequence's last row stands at seq_len - 1.
    row_to_position = tl.load(seq_lens_ptr + seq, mask=seq < batch, other=0) - end_row
    positions = rows + row_to_position
    first_query = first_row + row_to_position
    end_key = tl.minimum(first_row + ROWS, end_row) + row_to_position
    first_key = 0
    if WINDOW is not None:
        first_key = tl.maximum(first_query - WINDOW + 1, 0)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    if page_offsets_ptr is not None:
        page_offset = tl.load(page_offsets_ptr + seq, mask=seq < batch, other=0)
        first_key = tl.maximum(first_key, page_offset * BLOCK_SIZE)
        block_table_ptr -= page_offset
    # Whole tiles until every row sees all of one, whole tiles as long as that lasts, and the rest.
    shared = first_key
    if WINDOW is not None:
        shared += tl.cdiv(tl.maximum(end_key - WINDOW - first_key, 0), TILE) * TILE
    boundary = shared + tl.maximum(first_query + 1 - shared, 0) // TILE * TILE

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    start, end = first_key, tl.minimum(shared, end_key)
    for phase in tl.static_range(1 if WINDOW is None else 0, 3):
        if phase == 1:
            start, end = shared, boundary
        elif phase == 2:
            start, end = boundary, end_key
        for tile in range(start, end, TILE):
            keys = tile + tl.arange(0, TILE)
            is_present, is_visible = None, None
            if phase != 1:
                is_present = keys < end
                is_visible = is_present[None, :] & (keys[None, :] <= positions[:, None])
                if WINDOW is not None:
                    is_visible = is_visible & (positions[:, None] - keys[None, :] < WINDOW)
            key, value = load_tile(
                kv_cache_ptr, block_table_ptr, keys, is_present, kv_head, block_stride, query.dtype,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PAD, FP8_MANTISSA,
            )  # fmt: skip
            row_max, row_sum, weighted = attend_tile(
                query, key, value, is_visible, row_max, row_sum, weighted, scale, SOFT_CAP
            )

    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
    attended = (weighted / softmax_sum(row_max, row_sum, sink)[:, None]).to(out_ptr.dtype.element_ty)
    out_offsets = rows.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], attended, mask=mask)


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Every new token attends to the keys of its window, its own included; rows of no sequence are zero.

    `query`: `[num_tokens, num_heads, head_dim]`; rows `query_start_loc[i]` to `query_start_loc[i + 1]` (int32
    `[batch + 1]`, from 0) are the last tokens of sequence i, whose length after this step is `seq_lens[i]` (int32
    `[batch]`). Rows past `query_start_loc[-1]` are padding. All else as in `paged_decode`.
    """
    check_attention(query, kv_cache, block_tables, seq_lens, options, out)
    check_tensor("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), (torch.int32,), kv_cache)
    if not is_launched(query):
        result = paged_prefill_reference(query, kv_cache, block_tables, query_start_loc, seq_lens, **options)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    (num_tokens, num_heads, head_dim), batch = query.shape, seq_lens.shape[0]
    if num_tokens == 0:
        return out
    mantissa = mantissa_bits(kv_cache.dtype)
    query, kv_cache, wide_out = map(widen_for_interpreter, (query, as_bytes(kv_cache), out))
    tile = prefill_tile(head_dim, query.dtype, mantissa is not None, device_facts(query.device).capability)
    with torch.cuda.device_of(query):
        _paged_prefill_kernel[(num_heads, num_tokens // tile.rows + batch + 1)](
            query, kv_cache, block_tables, options.get("page_offsets"), query_start_loc, seq_lens,
            options.get("sinks"), wide_out,
            num_tokens, batch, options["scale"], query.stride(0), kv_cache.stride(0), block_tables.stride(0),
            NUM_HEADS=num_heads, NUM_KV_HEADS=kv_cache.shape[2], BLOCK_SIZE=kv_cache.shape[3],
            HEAD_DIM=head_dim, HEAD_DIM_PAD=pad_head_dim(head_dim),
            BATCH_PAD=next_power_of_2(batch + 1), ROWS=tile.rows,
            TILE=tile.keys, WINDOW=options.get("window"), SOFT_CAP=options.get("soft_cap"), FP8_MANTISSA=mantissa,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out.copy_(wide_out)  # Nothing to copy but in the interpreter.


def paged_prefill_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """`paged_prefill` in torch: a sequence at a time, and of its rows a chunk at a time."""
    block_size, window, page_offsets = kv_cache.shape[3], options.get("window"), options.get("page_offsets")
    out = torch.zeros_like(query)
    starts = query_start_loc.tolist()
    offsets = [0] * len(seq_lens) if page_offsets is None else page_offsets.tolist()
    seqs = zip(block_tables, offsets, starts[:-1], starts[1:], seq_lens.tolist(), strict=True)
    for table, page_offset, start, end, seq_len in seqs:
        if start == end:
            continue
        first_query = seq_len - (end - start)
        first_page = 0 if window is None else max(0, first_query - window + 1) // block_size
        if first_page < page_offset:
            raise IndexError(f"page_offsets has {page_offset}; expected at most {first_page}, the first page in sight")
        block_idxs = table[first_page - page_offset : -(-seq_len // block_size) - page_offset]
        key, value = (pages[:, 0] for pages in gather_kv(kv_cache, block_idxs[None]))
        for row in range(start, end, _REFERENCE_ROWS):
            rows = slice(row, min(row + _REFERENCE_ROWS, end))
            first_row = first_query + row - start - first_page * block_size
            out[rows] = _attend_rows(query[rows], first_row, key, value, options)
    return out


def _attend_rows(
    query: torch.Tensor, first_query: int, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Consecutive rows `[rows, num_heads, head_dim]` attend; `first_query` counts from the first key given."""
    window, sinks = options.get("window"), options.get("sinks")
    scale, soft_cap = options["scale"], options.get("soft_cap")
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[0]
    low = 0 if window is None else max(0, first_query - window + 1)
    keys = torch.arange(low, first_query + num_rows, device=query.device)
    positions = torch.arange(first_query, first_query + num_rows, device=query.device)[:, None]
    visible = keys <= positions
    if window is not None:
        visible &= positions - keys < window
    heads_per_kv = num_heads // num_kv_heads
    grouped = query.transpose(0, 1).reshape(num_kv_heads, heads_per_kv * num_rows, head_dim)
    seen = slice(low, first_query + num_rows)
    visible = visible.repeat(heads_per_kv, 1)
    if sinks is not None:
        sinks = sinks.repeat_interleave(num_rows).view(num_kv_heads, heads_per_kv * num_rows, 1)
    attended = attend(grouped, key[:, seen], value[:, seen], visible, scale=scale, soft_cap=soft_cap, sinks=sinks)
    return attended.view(num_heads, num_rows, head_dim).transpose(0, 1).to(query.dtype)
