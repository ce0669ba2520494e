"""What the stages of decode hand over; run interpreted by test_interpreter.py.

With a query of zeros every score is 0, so e^lse of a split is the number of keys it attended to.
"""

import math

import pytest
import torch

from kvist.kernels.paged_decode import decode_splits, merge_splits


def num_keys_per_split(seq_len, *, block_size, num_splits, window=None):
    kv_cache = torch.zeros(1, 2, 1, block_size, 16)
    tables = torch.zeros(1, -(-seq_len // block_size), dtype=torch.int32)
    split_out = torch.full((1, 1, num_splits, 16), torch.nan)
    lengths = torch.tensor([seq_len], dtype=torch.int32)
    lse = decode_splits(torch.zeros(1, 1, 16), kv_cache, tables, lengths, split_out, scale=1.0, window=window)
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
