# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
"""Attention of new tokens over a paged cache that already holds them: decode, short suffixes and whole prompts.

A program takes a block of one sequence's tokens with all query heads of one kv head (a decode: one token), and one
split of the pages they see (FlashAttention-2, arXiv:2307.08691; PagedAttention, arXiv:2309.06180). Where there are
several splits, a second kernel merges them by their log-sum-exp (Dao et al., "Flash-Decoding for long-context
inference", 2023). What Triton compiles depends on the model and its cache, never on lengths or the size of a batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Unpack

import torch
from torch.nn import functional

from kvist.kernels._checks import AttentionOptions, check_attention, check_tensor, row_stride
from kvist.kernels._fp8 import as_bytes, mantissa_bits
from kvist.kernels._tile import TileShape, attend_tile, decode_tile, load_tile, pad_head_dim, prefill_tile, softmax_sum
from kvist.kernels._triton import (
    FUSED,
    device_facts,
    is_launched,
    jit,
    loops_for,
    tl,
    widen_for_interpreter,
)

MAX_SPLITS = 128
# Bounds the score matrix, and lets a chunk of rows skip the keys that it cannot see. Of 32, 64, 128 and 256 rows, 64
# was fastest for 2,048 tokens, 4 and 8 heads (float32, one core of an x86-64 server, 2026-11).
_CHUNK_ROWS = 64
_MERGED_DIMS = 64  # 128 splits of 64 dimensions stay in the registers of 4 warps; of 256 they do not.


@jit()
def _find_tokens(block, query_start_loc_ptr, num_tokens, batch, TOKENS: tl.constexpr):
    """Return the sequence of block `block` of tokens, the block's first token, and the end of the sequence's tokens.

    Sequence i owns the blocks from `start[i] // TOKENS + i` on, which are enough for its tokens wherever they begin. So
    the grid depends only on the numbers of tokens and sequences, and no length is read from the device.
    """
    num_begun = 0
    for first in range(0, batch + 1, 128):
        seqs = first + tl.arange(0, 128)
        starts = tl.load(query_start_loc_ptr + seqs, mask=seqs <= batch, other=0)
        num_begun += tl.sum(((seqs <= batch) & (starts // TOKENS + seqs <= block)).to(tl.int32), 0)
    seq = num_begun - 1
    start = tl.load(query_start_loc_ptr + seq)
    end = tl.load(query_start_loc_ptr + seq + 1, mask=seq < batch, other=num_tokens)
    return seq, start + (block - start // TOKENS - seq) * TOKENS, end


# fmt: off
@jit(
    do_not_specialize=["num_tokens", "batch", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "page_offsets_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)
def _paged_attention_kernel(
    query_ptr, kv_cache_ptr, block_tables_ptr, page_offsets_ptr, query_start_loc_ptr, seq_lens_ptr, sinks_ptr,
    out_ptr, lse_ptr, num_tokens, batch, num_splits, scale, query_stride, block_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, FP8_MANTISSA: tl.constexpr, IS_FP8_NATIVE: tl.constexpr,
):
    # fmt: on
    """Program (kv head, block of tokens from the last, split); padding is a last, empty sequence.

    Programs start in order, so the late blocks of a prompt, which see the most keys, come first. A split without keys
    gives 0 and an lse of -inf. Sinks are passed only if there is one split; of several, `merge_splits` counts them.
    """
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    seq, first_token, end_token = block, block, block + 1
    if query_start_loc_ptr is not None:
        seq, first_token, end_token = _find_tokens(block, query_start_loc_ptr, num_tokens, batch, TOKENS)
    if first_token >= end_token:
        return
    rows = tl.arange(0, ROWS)
    tokens = first_token + rows // HEADS_PER_KV
    heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    is_row = (rows < TOKENS * HEADS_PER_KV) & (tokens < end_token)
    dims = tl.arange(0, HEAD_DIM_PAD)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = tokens.to(tl.int64) * query_stride + heads * HEAD_DIM
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=mask, other=0.0)

    # Positions are absolute: a sequence's last token stands at seq_len - 1.
    token_to_position = tl.load(seq_lens_ptr + seq, mask=seq < batch, other=0) - end_token
    positions = tokens + token_to_position
    first_query = first_token + token_to_position
    end_key = tl.minimum(first_token + TOKENS, end_token) + token_to_position
    first_key = 0
    if WINDOW is not None:
        first_key = tl.maximum(first_query - WINDOW + 1, 0)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    if page_offsets_ptr is not None:
        page_offset = tl.load(page_offsets_ptr + seq, mask=seq < batch, other=0)
        first_key = tl.maximum(first_key, page_offset * BLOCK_SIZE)
        block_table_ptr -= page_offset
    first_page = first_key // BLOCK_SIZE
    pages_per_split = tl.cdiv(tl.cdiv(end_key, BLOCK_SIZE) - first_page, num_splits)
    split_page = first_page + split * pages_per_split
    start = tl.maximum(split_page * BLOCK_SIZE, first_key)  # The first page usually lies only partly in the window.
    end = tl.minimum((split_page + pages_per_split) * BLOCK_SIZE, end_key)
    # Phase 0: tiles before the first that every token sees whole; phase 1: the tiles that every token sees whole; phase
    # 2: the rest, which for a single token is everything.
    shared, boundary = start, start
    if TOKENS > 1:
        if WINDOW is not None:
            shared += tl.cdiv(tl.maximum(end_key - WINDOW - start, 0), TILE) * TILE
        boundary = shared + tl.maximum(tl.minimum(first_query + 1, end) - shared, 0) // TILE * TILE

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    low, high = start, tl.minimum(shared, end)
    for phase in tl.static_range(2 if TOKENS == 1 else 1 if WINDOW is None else 0, 3):
        if phase == 1:
            low, high = shared, boundary
        elif phase == 2:
            low, high = boundary, end
        for tile in range(low, high, TILE):
            keys = tile + tl.arange(0, TILE)
            is_present, is_visible = None, None
            if phase != 1:
                is_present = keys < high
                is_visible = is_present[None, :] & (keys[None, :] <= positions[:, None])
                if WINDOW is not None:
                    is_visible = is_visible & (positions[:, None] - keys[None, :] < WINDOW)
            key, value = load_tile(
                kv_cache_ptr, block_table_ptr, keys, is_present, kv_head, block_stride, query.dtype,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM_PAD, FP8_MANTISSA, IS_FP8_NATIVE,
            )  # fmt: skip
            row_max, row_sum, weighted = attend_tile(
                query, key, value, is_visible, row_max, row_sum, weighted, scale, SOFT_CAP
            )

    cells = (tokens.to(tl.int64) * (NUM_KV_HEADS * HEADS_PER_KV) + heads) * num_splits + split
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=is_row, other=float("-inf"))
    row_sum = softmax_sum(row_max, row_sum, sink)
    attended = (weighted / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cells[:, None] * HEAD_DIM + dims[None, :], attended, mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + cells, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=is_row)  # ln(2)


# fmt: off
@jit(do_not_specialize=["num_heads", "num_splits"])
def _merge_splits_kernel(
    out_ptr, split_out_ptr, split_lse_ptr, sinks_ptr, num_heads, num_splits,
    HEAD_DIM: tl.constexpr, NUM_DIMS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):
    # fmt: on
    """Program (row, part of head_dim) weighs the row's splits by e^(lse - max lse); a row without visible keys is 0."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS_PAD)
    is_split = splits < num_splits
    cells = row * num_splits + splits
    dims = tl.program_id(1) * NUM_DIMS + tl.arange(0, NUM_DIMS)
    lse = tl.load(split_lse_ptr + cells, mask=is_split, other=float("-inf"))
    largest = tl.max(lse, 0)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(lse - pivot)
    mask = is_split[:, None] & (dims < HEAD_DIM)[None, :]
    split_out = tl.load(split_out_ptr + cells[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.exp(tl.minimum(tl.load(sinks_ptr + row % num_heads) - pivot, 80.0))  # Finite, as in softmax_sum.
    merged = tl.sum(weights[:, None] * split_out, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@lru_cache
def choose_num_splits(num_programs: int, num_keys: int, keys_per_split: int, num_slots: int) -> int:
    """Return the fewest splits, up to 128, with which at least nine tenths of the device's slots are busy to the end.

    Programs run in waves of `num_slots`, and what the last wave leaves empty is lost. If no number of splits is as
    good, return the best. No split has fewer than `keys_per_split` of the `num_keys`.
    """

    def busy(num_splits: int) -> float:
        programs = num_programs * num_splits
        return programs / (-(-programs // num_slots) * num_slots)

    choices = range(1, max(1, min(MAX_SPLITS, num_keys // keys_per_split)) + 1)
    return next((choice for choice in choices if busy(choice) >= 0.9), max(choices, key=busy))


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    *,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Let every new token attend to the keys of its window, its own included; a row that sees none is zero.

    `query`: `[num_tokens, num_heads, head_dim]`, in the cache's dtype, or in 16 or 32 bits over a cache of eight; rows
    `query_start_loc[i]` to `query_start_loc[i + 1]` (int32 `[batch + 1]`, from 0; None: a row a sequence) are the last
    tokens of sequence i, already in the cache, whose length is `seq_lens[i]` (int32 `[batch]`, absolute). Rows past
    `query_start_loc[-1]` are padding and become zero. `kv_cache` and `block_tables` (int32 `[batch, max_blocks]`) as in
    `kvist.kernels`; `page_offsets`: int32 `[batch]`, the pages that the front of a table lacks (None: none), at most
    the first that holds a visible key. Key k is visible to query q iff `k <= q` and `q - k < window`. A score s is
    `scale * q.k`, with a cap `soft_cap * tanh(s / soft_cap)`; `sinks`: float32 `[num_heads]`, learned scores that take
    their share of each softmax and give nothing (gpt-oss). `num_splits` (1 to 128; None: `choose_num_splits`) changes
    speed and rounding only. Returns `out`, or a new tensor shaped like `query`. Raises ValueError. Never synchronises
    with the device.
    """
    check_attention(query, kv_cache, block_tables, seq_lens, options, out)
    batch, num_tokens = seq_lens.shape[0], query.shape[0]
    if query_start_loc is not None:
        check_tensor("query_start_loc", query_start_loc, (batch + 1,), (torch.int32,), kv_cache)
    elif num_tokens != batch:
        raise ValueError(f"seq_lens has shape {list(seq_lens.shape)}; expected one length a query: [{num_tokens}]")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}; expected 1 to {MAX_SPLITS}, or None")
    inputs = (query, kv_cache, block_tables, seq_lens, query_start_loc)
    if not is_launched(query):
        if query_start_loc is None and (loops := loops_for(kv_cache)):
            result = loops.attend_last(query, kv_cache, block_tables, seq_lens, options)
        else:
            result = paged_attention_reference(*inputs, **options)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    num_kv_heads, block_size = kv_cache.shape[2:4]
    tile = _tile(query, kv_cache, query_start_loc is None)
    if num_splits is None:
        # The length of the longest sequence is on the device; the table's width bounds it without a synchronisation.
        num_keys, window = block_tables.shape[1] * block_size, options.get("window")
        if window is not None:
            num_keys = min(num_keys, window + tile.tokens - 1)
        # A split writes no more, in float32, than it reads.
        keys_per_split = max(2 * block_size, 2 * tile.tokens * query.shape[1] // num_kv_heads)
        num_blocks = max(batch, -(-num_tokens // tile.tokens))
        num_fed = tile.num_fed(kv_cache.shape[4] * kv_cache.itemsize) if query_start_loc is None else 1
        num_slots = device_facts(query.device).num_multiprocessors * num_fed
        num_splits = choose_num_splits(num_blocks * num_kv_heads, num_keys, keys_per_split, num_slots)
    wide_out = widen_for_interpreter(out)
    if num_splits == 1:
        attend_splits(*inputs, wide_out[:, :, None], None, **options)
    else:
        # Splits stay in float32 until they are merged.
        split_out = out.new_empty((*out.shape[:2], num_splits, out.shape[2]), dtype=torch.float32)
        split_lse = split_out.new_empty(split_out.shape[:3])
        attend_splits(*inputs, split_out, split_lse, **options)
        merge_splits(split_out, split_lse, wide_out, options.get("sinks"))
    return out.copy_(wide_out)  # Copies in the interpreter alone.


def _tile(query: torch.Tensor, kv_cache: torch.Tensor, is_decode: bool) -> TileShape:
    (_, num_heads, head_dim), num_kv_heads = query.shape, kv_cache.shape[2]
    if is_decode:
        return decode_tile(num_heads // num_kv_heads, head_dim, query.dtype)
    is_fp8, capability = mantissa_bits(kv_cache.dtype) is not None, device_facts(query.device).capability
    return prefill_tile(num_heads // num_kv_heads, head_dim, query.dtype, is_fp8, capability)


def attend_splits(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    split_out: torch.Tensor,
    split_lse: torch.Tensor | None,
    **options: Unpack[AttentionOptions],
) -> None:
    """Fill `split_out`, `[num_tokens, num_heads, num_splits, head_dim]`, and `split_lse`, each split's natural lse.

    Without `split_lse` there is one split, in which sinks are counted; for several, `merge_splits` counts them.
    """
    num_tokens, num_heads, num_splits, head_dim = split_out.shape
    (num_kv_heads, block_size), batch = kv_cache.shape[2:4], seq_lens.shape[0]
    tile, mantissa = _tile(query, kv_cache, query_start_loc is None), mantissa_bits(kv_cache.dtype)
    query, kv_cache = widen_for_interpreter(query), widen_for_interpreter(as_bytes(kv_cache))
    num_blocks = num_tokens if query_start_loc is None else num_tokens // tile.tokens + batch + 1
    with torch.cuda.device_of(query):
        _paged_attention_kernel[(num_kv_heads, num_blocks, num_splits)](
            query, kv_cache, block_tables, options.get("page_offsets"), query_start_loc, seq_lens,
            options.get("sinks") if split_lse is None else None, split_out, split_lse,
            num_tokens, batch, num_splits, options["scale"],
            row_stride(query), kv_cache.stride(0), block_tables.stride(0),
            NUM_KV_HEADS=num_kv_heads, HEADS_PER_KV=num_heads // num_kv_heads, BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim, HEAD_DIM_PAD=pad_head_dim(head_dim),
            TOKENS=tile.tokens, ROWS=tile.rows, TILE=tile.keys,
            WINDOW=options.get("window"), SOFT_CAP=options.get("soft_cap"), FP8_MANTISSA=mantissa,
            IS_FP8_NATIVE=device_facts(query.device).capability >= 89,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **FUSED,
        )  # fmt: skip


def merge_splits(
    split_out: torch.Tensor, split_lse: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
) -> None:
    """Fill `out`, `[num_tokens, num_heads, head_dim]`, with the splits of `attend_splits`, each weighed by its lse."""
    num_tokens, num_heads, num_splits, head_dim = split_out.shape
    with torch.cuda.device_of(out):
        _merge_splits_kernel[(num_tokens * num_heads, -(-head_dim // _MERGED_DIMS))](
            out, split_out, split_lse, sinks, num_heads, num_splits,
            HEAD_DIM=head_dim, NUM_DIMS=_MERGED_DIMS, SPLITS_PAD=MAX_SPLITS, **FUSED,
        )  # fmt: skip


def paged_attention_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """`paged_attention` in torch, one sequence after another, in chunks of rows."""
    if query_start_loc is None:
        query_start_loc = torch.arange(len(query) + 1)
    block_size, window, page_offsets = kv_cache.shape[3], options.get("window"), options.get("page_offsets")
    out = torch.zeros_like(query)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    offsets = [0] * len(lengths) if page_offsets is None else page_offsets.tolist()
    seqs = zip(block_tables, offsets, starts[:-1], starts[1:], lengths, strict=True)
    for table, page_offset, start, end, seq_len in seqs:
        if start == end:
            continue
        first_query = seq_len - (end - start)
        first_key = 0 if window is None else max(0, first_query - window + 1)
        first_page = first_key // block_size
        if first_page < page_offset:
            raise IndexError(f"page_offsets has {page_offset}; expected at most {first_page}, the first page in sight")
        keys = torch.arange(first_key, seq_len, device=query.device)
        key, value = _gather(kv_cache, table[keys // block_size - page_offset], keys)
        for row in range(start, end, _CHUNK_ROWS):
            rows = slice(row, min(row + _CHUNK_ROWS, end))
            out[rows] = _attend_rows(query[rows], first_query + row - start - first_key, key, value, options)
    return out


def _attend_rows(
    query: torch.Tensor, first_query: int, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend with consecutive rows `[rows, num_heads, head_dim]`, the first of them at index `first_query` of `key`.

    `key` and `value` are as from `_gather`; all are finite, and each row sees at least one. The rows of all heads that
    share a KV head are computed as one head's.
    """
    window, sinks = options.get("window"), options.get("sinks")
    scale, soft_cap = options["scale"], options.get("soft_cap")
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    low = 0 if window is None else max(0, first_query - window + 1)
    end = first_query + num_rows
    keys = torch.arange(low, end, device=query.device)
    positions = torch.arange(first_query, end, device=query.device)[:, None]
    visible = keys <= positions
    if window is not None:
        visible &= positions - keys < window
    visible = visible.repeat(num_heads // num_kv_heads, 1)
    rows = query.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim).float()
    key, value = key[:, :, low:end], value[:, :, low:end]
    if soft_cap is None and sinks is None:
        attended = functional.scaled_dot_product_attention(rows, key, value, visible, scale=scale)
    else:
        scores = (rows * scale) @ key.mT
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        scores.masked_fill_(~visible, -torch.inf)
        if sinks is not None:  # one more score in each row, whose value is zero
            scores = torch.cat([scores, sinks.repeat_interleave(num_rows).view(1, num_kv_heads, -1, 1)], dim=-1)
        attended = scores.softmax(dim=-1)[..., : len(keys)] @ value
    return attended.reshape(num_heads, num_rows, head_dim).transpose(0, 1).to(query.dtype)


def _gather(kv_cache: torch.Tensor, pages: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values at these pages and positions, as float32 `[1, num_kv_heads, num_keys, head_dim]`.

    Indexing the cache in its five dimensions would take two to four times as long.
    """
    num_pages, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    rows_apart, rest = divmod(kv_cache.stride(0), head_dim)
    if rest:
        raise ValueError(f"kv_cache has strides {list(kv_cache.stride())}; expected pages a multiple of head_dim apart")
    heads = torch.arange(0, 2 * num_kv_heads * block_size, block_size, device=keys.device)
    rows = (pages * rows_apart + keys % block_size) + heads.view(2, 1, num_kv_heads, 1)
    num_rows = (num_pages - 1) * rows_apart + 2 * num_kv_heads * block_size
    cache_rows = kv_cache.as_strided((num_rows, head_dim), (head_dim, 1))
    key, value = cache_rows.index_select(0, rows.flatten()).view(*rows.shape, head_dim).float()
    return key, value
