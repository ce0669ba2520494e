"""What the stages of attention hand over; run interpreted by test_interpreter.py.

With a query of zeros every score is 0, so e^lse of a split is the number of keys it attended to.
"""

import math

import pytest
import torch

from kvist.kernels.paged_attention import attend_splits, merge_splits


def num_keys_per_split(seq_len, *, block_size, num_splits, window=None):
    kv_cache = torch.zeros(1, 2, 1, block_size, 16)
    tables = torch.zeros(1, -(-seq_len // block_size), dtype=torch.int32)
    split_out = torch.full((1, 1, num_splits, 16), torch.nan)
    lengths = torch.tensor([seq_len], dtype=torch.int32)
    lse, query = torch.full((1, 1, num_splits), torch.nan), torch.zeros(1, 1, 16)
    attend_splits(query, kv_cache, tables, lengths, None, split_out, lse, scale=1.0, window=window)
    assert split_out.count_nonzero() == 0
    return lse.exp().round().int().flatten().tolist()


def test_splits_cover_the_window_only():
    # Pages 224 to 255 in 16 splits of 2; the window of 1000 starts 24 keys into page 224.
    assert num_keys_per_split(8192, block_size=32, window=1024, num_splits=16) == [64] * 16
    assert num_keys_per_split(8192, block_size=32, window=1000, num_splits=16) == [40] + [64] * 15


def test_nine_pages_over_four_splits_leave_one_empty():
    # Pages 2 to 10 as [2, 5), [5, 8), [8, 11) and nothing.
    assert num_keys_per_split(88, block_size=8, window=72, num_splits=4) == [24, 24, 24, 0]


def test_ten_pages_over_eight_splits_keep_five_of_them_busy():
    assert num_keys_per_split(80, block_size=8, num_splits=8) == [16] * 5 + [0] * 3


@pytest.mark.parametrize(
    ("values", "lses", "expected"),
    [
        ([6.0, 15.6], [0.0, math.log(5)], 14.0),
        ([6.0, 0.0], [1000.0, -math.inf], 6.0),
        ([0.0, 0.0], [-math.inf, -math.inf], 0.0),
    ],
)
def test_merging_weighs_each_split_by_its_lse(values, lses, expected):
    split_out = torch.tensor(values)[None, None, :, None].expand(1, 1, 2, 20).contiguous()
    out = torch.full((1, 1, 20), torch.nan)
    merge_splits(split_out, torch.tensor(lses)[None, None], out)
    torch.testing.assert_close(out, torch.full_like(out, expected))


@pytest.mark.parametrize(
    ("heads_per_kv", "dtype", "cache_dtype", "window", "soft_cap", "num_splits"),
    [
        (1, torch.bfloat16, torch.bfloat16, None, None, 3),
        (2, torch.float16, torch.float16, 40, None, 2),
        (3, torch.float16, torch.float8_e4m3fn, None, 5.0, 2),
        (4, torch.bfloat16, torch.bfloat16, None, None, 3),
        (5, torch.bfloat16, torch.float8_e5m2, 100, None, 2),
        (6, torch.float16, torch.float16, 7, 2.0, 2),
        (7, torch.bfloat16, torch.bfloat16, 120, None, 2),
        (8, torch.float16, torch.float16, None, None, 2),
    ],
)
def test_splits_of_1_to_129_tokens_behind_a_history_merge_to_dense_attention(
    make_paged, dense_attention, assert_attends, heads_per_kv, dtype, cache_dtype, window, soft_cap, num_splits
):
    query_lens = list(range(heads_per_kv, 130, 8))  # all lengths, an eighth of them in each case
    first_queries = [40 + 13 * seq % 60 for seq in range(len(query_lens))]
    seq_lens = [first + new for first, new in zip(first_queries, query_lens, strict=True)]
    paged = make_paged(
        seq_lens, first_queries=first_queries, window=window, is_local=heads_per_kv % 2 == 1, dtype=cache_dtype
    )
    query = torch.randn(sum(query_lens), heads_per_kv, 16).to(dtype)
    split_out = torch.full((*query.shape[:2], num_splits, 16), torch.nan)
    lse, starts = torch.full(split_out.shape[:3], torch.nan), torch.tensor([0, *query_lens]).cumsum(0).int()
    options = {"scale": 0.3, "window": window, "soft_cap": soft_cap}
    attend_splits(query, *paged.inputs(), starts, split_out, lse, page_offsets=paged.page_offsets, **options)
    merged = (lse.softmax(-1)[..., None] * split_out).sum(2).to(dtype)
    for rows, rows_out, first, key, value in zip(
        query.split(query_lens), merged.split(query_lens), first_queries, paged.keys, paged.values, strict=True
    ):
        positions = list(range(first, first + len(rows)))
        assert_attends(rows_out, dense_attention(rows, positions, key, value, **options))
