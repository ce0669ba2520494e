import math

import pytest
import torch

from kvist.kernels import paged_attention, paged_attention_reference
from kvist.kernels._triton import is_launched
from kvist.kernels.paged_attention import choose_num_splits

SCALE = 0.3


def start_locs(query_lens, device):
    return torch.tensor([0, *query_lens]).cumsum(0).int().to(device)


shapes = pytest.mark.parametrize(
    ("num_kv_heads", "heads_per_kv", "head_dim", "block_size", "window", "soft_cap", "num_splits", "is_local"),
    [
        (1, 1, 16, 8, None, None, None, False),
        (2, 2, 20, 8, 3, None, 2, True),  # a window smaller than a page
        (1, 3, 80, 16, 21, 5.0, 4, False),  # no multiple of a page, no power of two
        (1, 8, 16, 32, 64, None, 1, True),
        (1, 2, 32, 8, None, 2.0, 16, True),  # most splits empty
        (2, 1, 16, 4, 1, None, 1, False),  # a window of the token itself
        (1, 17, 16, 8, 1000, None, 2, True),  # more heads than the smallest tile, a window longer than every sequence
    ],
)


@shapes
def test_each_sequence_attends_like_dense_attention(
    make_paged,
    dense_attention,
    assert_attends,
    is_local,
    num_kv_heads,
    heads_per_kv,
    head_dim,
    block_size,
    window,
    soft_cap,
    num_splits,
):
    paged = make_paged(
        [37, 1, 83, 64],
        window=window,
        is_local=is_local,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    query = torch.randn(4, num_kv_heads * heads_per_kv, head_dim)
    out = paged_attention(
        query.to(paged.kv_cache.device),
        *paged.inputs(),
        scale=SCALE,
        page_offsets=paged.page_offsets,
        window=window,
        soft_cap=soft_cap,
        num_splits=num_splits,
    )
    for seq, (key, value) in enumerate(zip(paged.keys, paged.values, strict=True)):
        options = {"scale": SCALE, "window": window, "soft_cap": soft_cap}
        assert_attends(out[seq : seq + 1], dense_attention(query[seq : seq + 1], [len(key) - 1], key, value, **options))


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_sinks_take_their_share_of_each_softmax_once(make_paged, dense_attention, assert_attends, num_splits):
    paged = make_paged([37, 1, 83], window=21, is_local=True, num_kv_heads=2)
    device = paged.kv_cache.device
    query, sinks = torch.randn(3, 6, 16), torch.tensor([0.0, -2.0, 5.0, -torch.inf, 1.5, -60.0])
    options = {"scale": SCALE, "page_offsets": paged.page_offsets, "window": 21, "num_splits": num_splits}
    out = paged_attention(query.to(device), *paged.inputs(), sinks=sinks.to(device), **options)
    for seq, (key, value) in enumerate(zip(paged.keys, paged.values, strict=True)):
        row = slice(seq, seq + 1)
        expected = dense_attention(query[row], [len(key) - 1], key, value, scale=SCALE, window=21, sinks=sinks)
        assert_attends(out[row], expected)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_sink_above_every_score_takes_all_and_one_without_keys_yields_zeros(make_paged, num_splits):
    paged = make_paged([0, 9])
    device = paged.kv_cache.device
    sinks = torch.tensor([1e4, -torch.inf], device=device)
    options = {"scale": SCALE, "sinks": sinks, "num_splits": num_splits}
    out = paged_attention(torch.ones(2, 2, 16, device=device), *paged.inputs(), **options)
    assert out[0].count_nonzero() == 0
    torch.testing.assert_close(out[1, 0], torch.zeros_like(out[1, 0]), atol=1e-30, rtol=0)
    assert out[1, 1].count_nonzero() > 0


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_and_values_of_eight_bits_are_read_as_they_are(
    make_paged, dense_attention, assert_attends, cache_dtype, dtype
):
    paged = make_paged([45, 7], window=30, num_kv_heads=2, head_dim=20, dtype=cache_dtype)
    query = torch.randn(2, 4, 20).to(dtype)
    out = paged_attention(query.to(paged.kv_cache.device), *paged.inputs(), scale=SCALE, window=30, num_splits=2)
    assert out.dtype == dtype
    for seq, (key, value) in enumerate(zip(paged.keys, paged.values, strict=True)):
        row = slice(seq, seq + 1)
        assert_attends(out[row], dense_attention(query[row], [len(key) - 1], key, value, scale=SCALE, window=30))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, below the interpreter, about NaN and infinities
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_number_of_eight_bits_is_read_exactly(device, cache_dtype):
    # Sixteen sequences of one token, whose values hold 16 numbers each; infinities and NaN among them.
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(cache_dtype).view(16, 16).to(device)
    kv_cache = torch.zeros(16, 2, 1, 1, 16, dtype=cache_dtype, device=device)
    kv_cache[:, 1, 0, 0] = numbers
    tables = torch.arange(16, device=device).int()[:, None]
    query, lengths = torch.zeros(16, 1, 16, device=device), torch.ones_like(tables[:, 0])
    out = paged_attention(query, kv_cache, tables, lengths, scale=1.0)
    torch.testing.assert_close(out[:, 0], numbers.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_half_precision_is_as_good_as_its_rounding(make_paged, dense_attention, assert_attends, dtype, num_splits):
    paged = make_paged([45], num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype)
    query = torch.randn(1, 2, 64).to(dtype)
    out = paged_attention(query.to(paged.kv_cache.device), *paged.inputs(), scale=0.125, num_splits=num_splits)
    assert out.dtype == dtype
    assert_attends(out, dense_attention(query, [44], paged.keys[0], paged.values[0], scale=0.125))


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_wide_heads_attend_in_the_tiles_of_16_bits(make_paged, dense_attention, assert_attends, head_dim):
    paged = make_paged([150], window=141, is_local=True, head_dim=head_dim, block_size=4, dtype=torch.bfloat16)
    query = torch.randn(1, 4, head_dim).bfloat16()
    options = {"scale": head_dim**-0.5, "window": 141}
    out = paged_attention(
        query.to(paged.kv_cache.device), *paged.inputs(), page_offsets=paged.page_offsets, num_splits=1, **options
    )
    assert_attends(out, dense_attention(query, [149], paged.keys[0], paged.values[0], **options))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_sequence_without_keys_is_zero_and_every_row_of_out_is_written(make_paged, num_splits):
    paged = make_paged([0, 9, 0])
    out = torch.full((3, 2, 16), torch.nan, device=paged.kv_cache.device)
    result = paged_attention(torch.ones_like(out), *paged.inputs(), scale=SCALE, num_splits=num_splits, out=out)
    assert result is out
    assert out.isfinite().all()
    assert out[[0, 2]].count_nonzero() == 0
    assert out[1].count_nonzero() > 0


def test_an_empty_batch_is_empty(device):
    query = torch.empty(0, 2, 16, device=device)
    tables = torch.empty(0, 4, dtype=torch.int32, device=device)
    lengths = torch.empty(0, dtype=torch.int32, device=device)
    kv_cache = torch.zeros(1, 2, 1, 8, 16, device=device)
    assert paged_attention(query, kv_cache, tables, lengths, scale=1.0).shape == (0, 2, 16)


@pytest.mark.parametrize("page_offset", [0, 3, 4])
def test_query_199_of_a_window_of_64_reads_keys_136_to_199_and_no_other(device, page_offset):
    # 200 tokens on pages of 32: pages 0 to 3 are evicted, page 4 is visible from slot 8 on; 199 is slot 7 of page 6,
    # which is local page 2 of a table that lacks all four.
    kv_cache = torch.full((3, 2, 1, 32, 16), torch.nan, device=device)
    tables = torch.tensor([[-1, -1, -1, -1, 2, 0, 1]], dtype=torch.int32, device=device)
    for position in range(136, 200):
        kv_cache[tables[0, position // 32].long(), :, 0, position % 32] = float(position)
    tables = tables[:, page_offset:].contiguous()
    query = torch.zeros(1, 1, 16, device=device)
    lengths, offsets = torch.tensor([[200], [page_offset]], dtype=torch.int32, device=device)
    options = {"scale": 1.0, "page_offsets": offsets, "window": 64}
    for num_splits in (1, 2, 4):
        out = paged_attention(query, kv_cache, tables, lengths, num_splits=num_splits, **options)
        torch.testing.assert_close(out, torch.full_like(out, (136 + 199) / 2))


@pytest.mark.parametrize(("window", "expected"), [(None, 14.0), (3, 14.0), (2, 15.6)])
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_scores_of_0_ln2_ln3_weigh_values_one_to_two_to_three(device, window, expected, num_splits):
    # One token a page, so that 4 splits merge {6, lse 0}, {12, lse ln2}, {18, lse ln3} and an empty one.
    kv_cache = torch.zeros(3, 2, 1, 1, 16, device=device)
    kv_cache[:, 0, 0, 0, 0] = torch.tensor([0.0, math.log(2), math.log(3)])
    kv_cache[:, 1, 0, 0] = torch.tensor([6.0, 12.0, 18.0])[:, None]
    tables, lengths = torch.arange(3, device=device).int()[None], torch.tensor([3], device=device).int()
    query = torch.ones(1, 1, 16, device=device)
    out = paged_attention(query, kv_cache, tables, lengths, scale=1.0, window=window, num_splits=num_splits)
    torch.testing.assert_close(out, torch.full_like(out, expected))


def test_the_reference_refuses_pages_that_are_no_number_of_heads_apart():
    kv_cache = torch.zeros(2, 2 * 8 * 16 + 1)[:, 1:].view(2, 2, 1, 8, 16)
    tables, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kv_cache has strides .*; expected pages a multiple of head_dim apart"):
        paged_attention_reference(torch.zeros(1, 1, 16), kv_cache, tables, lengths, scale=1.0)


def attend_in_loops(*inputs, **options):
    return pytest.importorskip("kvist.kernels._loops").attend_last(*inputs, options)


@pytest.mark.parametrize("attend", [paged_attention_reference, attend_in_loops])
@pytest.mark.parametrize(
    ("table", "offset", "window"),
    [
        ([0, 0, 0, 0], 3, 8),  # a window of 8 over pages of 8 begins on page 2
        ([0, 0, 0, -1], 0, None),
        ([0, 0, 0, 2], 0, None),  # of two pages
        ([0, 0, 0], 0, None),
    ],
)
def test_a_cpu_refuses_a_table_that_lacks_a_visible_block(attend, table, offset, window):
    tables, lengths, offsets = torch.tensor([table]).int(), torch.tensor([25]).int(), torch.tensor([offset]).int()
    query, kv_cache = torch.zeros(1, 1, 16), torch.zeros(2, 2, 1, 8, 16)
    with pytest.raises(IndexError):
        attend(query, kv_cache, tables, lengths, scale=1.0, page_offsets=offsets, window=window)


def test_threads_share_the_heads_of_a_batch(monkeypatch):
    kv_cache, tables = torch.randn(256, 2, 3, 32, 32), torch.randperm(256).view(4, 64).int()
    inputs = torch.randn(4, 6, 32), kv_cache, tables, torch.tensor([2048, 0, 2048, 999]).int()
    expected = paged_attention_reference(*inputs, scale=SCALE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.testing.assert_close(attend_in_loops(*inputs, scale=SCALE), expected)


@pytest.mark.parametrize(
    ("batch", "num_kv_heads", "max_seq_len", "window", "expected"),
    [
        (16, 8, 8192, None, 1),  # 128 programs keep 132 multiprocessors busy
        (64, 8, 8192, None, 1),
        (8, 8, 8192, None, 2),
        (4, 8, 8192, None, 4),
        (1, 8, 8192, None, 15),
        (1, 8, 8192, 512, 8),  # no split has fewer than two pages of 32
        (17, 8, 8192, None, 7),  # 952 programs in 8 waves of 132; of 136 the last 4 would take a wave
        (1, 1, 96, None, 1),
        (1, 8, 0, None, 1),
    ],
)
def test_splits_fill_132_multiprocessors_but_keep_two_pages_of_32(batch, num_kv_heads, max_seq_len, window, expected):
    num_keys = max_seq_len if window is None else min(max_seq_len, window)
    assert choose_num_splits(batch * num_kv_heads, num_keys, 2 * 32, 132) == expected


@shapes
def test_every_row_of_a_ragged_batch_attends_like_dense_attention(
    make_paged,
    dense_attention,
    assert_attends,
    is_local,
    num_kv_heads,
    heads_per_kv,
    head_dim,
    block_size,
    window,
    soft_cap,
    num_splits,
):
    seq_lens, query_lens = [37, 83, 5, 9], [1, 69, 0, 9]  # a decode row, a chunk, a sequence that waits, a whole prompt
    first_queries = [seq_len - query_len for seq_len, query_len in zip(seq_lens, query_lens, strict=True)]
    paged = make_paged(
        seq_lens,
        first_queries=first_queries,
        window=window,
        is_local=is_local,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    device = paged.kv_cache.device
    query = torch.randn(sum(query_lens), num_kv_heads * heads_per_kv, head_dim)
    kv_cache, tables, lengths = paged.inputs()
    options = {"scale": SCALE, "window": window, "soft_cap": soft_cap}
    inputs = (query.to(device), kv_cache, tables, lengths, start_locs(query_lens, device))
    out = paged_attention(*inputs, page_offsets=paged.page_offsets, num_splits=num_splits, **options)
    for rows, rows_out, first, key, value in zip(
        query.split(query_lens), out.split(query_lens), first_queries, paged.keys, paged.values, strict=True
    ):
        positions = list(range(first, first + len(rows)))
        assert_attends(rows_out, dense_attention(rows, positions, key, value, **options))


@pytest.mark.parametrize(("window", "num_splits"), [(None, None), (21, None), (None, 3), (21, 2)])
def test_sinks_take_their_share_of_each_softmax_of_a_chunk_once(
    make_paged, dense_attention, assert_attends, window, num_splits
):
    paged = make_paged([83], first_queries=[40], window=window, is_local=True, num_kv_heads=2)
    device = paged.kv_cache.device
    query, sinks = torch.randn(43, 4, 16), torch.tensor([0.0, 3.0, -torch.inf, -60.0])
    kv_cache, tables, lengths = paged.inputs()
    options = {"scale": SCALE, "page_offsets": paged.page_offsets, "sinks": sinks.to(device), "window": window}
    inputs = (query.to(device), kv_cache, tables, lengths, start_locs([43], device))
    out = torch.full_like(inputs[0], torch.nan)
    paged_attention(*inputs, num_splits=num_splits, out=out, **options)
    key, value = paged.keys[0], paged.values[0]
    positions = list(range(40, 83))
    assert_attends(out, dense_attention(query, positions, key, value, scale=SCALE, window=window, sinks=sinks))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_reads_keys_and_values_of_eight_bits_as_they_are(
    make_paged, dense_attention, assert_attends, cache_dtype, dtype
):
    paged = make_paged([83], first_queries=[40], window=21, num_kv_heads=2, head_dim=20, dtype=cache_dtype)
    query = torch.randn(43, 4, 20).to(dtype)
    kv_cache, tables, lengths = paged.inputs()
    starts = start_locs([43], kv_cache.device)
    out = paged_attention(query.to(kv_cache.device), kv_cache, tables, lengths, starts, scale=SCALE, window=21)
    assert out.dtype == dtype
    expected = dense_attention(query, list(range(40, 83)), paged.keys[0], paged.values[0], scale=SCALE, window=21)
    assert_attends(out, expected)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "window"),
    [
        (64, torch.float16, 50),
        (64, torch.bfloat16, None),
        (64, torch.bfloat16, 170),  # wide enough for keys that every row of a block sees behind those hidden from some
        (256, torch.bfloat16, 3),
        (512, torch.bfloat16, 100),
    ],
)
def test_a_chunk_in_half_precision_is_as_good_as_its_rounding(
    make_paged, dense_attention, assert_attends, head_dim, dtype, window
):
    first, end = (60, 150) if window != 170 else (250, 400)
    paged = make_paged(
        [end], first_queries=[first], window=window, is_local=True, head_dim=head_dim, block_size=16, dtype=dtype
    )
    query = torch.randn(end - first, 1, head_dim).to(dtype)
    kv_cache, tables, lengths = paged.inputs()
    starts = start_locs([end - first], kv_cache.device)
    options = {"scale": head_dim**-0.5, "window": window}
    inputs = (query.to(kv_cache.device), kv_cache, tables, lengths, starts)
    out = paged_attention(*inputs, page_offsets=paged.page_offsets, **options)
    expected = dense_attention(query, list(range(first, end)), paged.keys[0], paged.values[0], **options)
    assert out.dtype == dtype
    assert_attends(out, expected)


def test_padding_rows_are_zero_and_every_row_of_out_is_written(make_paged):
    paged = make_paged([20], first_queries=[17])
    kv_cache, tables, lengths = paged.inputs()
    out = torch.full((70, 2, 16), torch.nan, device=kv_cache.device)
    starts = start_locs([3], kv_cache.device)
    result = paged_attention(torch.ones_like(out), kv_cache, tables, lengths, starts, scale=SCALE, out=out)
    assert result is out
    assert out[:3].isfinite().all()
    assert out[3:].count_nonzero() == 0


def test_no_rows_are_no_work(make_paged):
    kv_cache, tables, lengths = make_paged([20]).inputs()
    query = torch.empty(0, 2, 16, device=kv_cache.device)
    assert paged_attention(query, kv_cache, tables, lengths, start_locs([0], query.device), scale=SCALE).shape == (
        0,
        2,
        16,
    )


@pytest.fixture(params=["absolute", "local"])
def mean_positions(device, request):
    """Zero queries over values that are their positions: each row yields the mean of the positions it sees.

    Pages before `first_page` are evicted, and keys that no row may see are NaN.
    """

    def means(*, first_query, num_rows, window, block_size, first_page):
        seq_len = first_query + num_rows
        num_pages = -(-seq_len // block_size)
        kv_cache = torch.full((num_pages - first_page, 2, 1, block_size, 16), torch.nan, device=device)
        tables = torch.arange(num_pages, device=device).int() - first_page
        for position in range(max(0, first_query - window + 1), seq_len):
            kv_cache[tables[position // block_size].long(), :, 0, position % block_size] = float(position)
        is_local = request.param == "local"
        tables = tables[first_page * is_local :][None]
        lengths, offsets = torch.tensor([[seq_len], [first_page]], dtype=torch.int32, device=device)
        query, starts = torch.zeros(num_rows, 1, 16, device=device), start_locs([num_rows], device)
        options = {"scale": 1.0, "window": window, "page_offsets": offsets if is_local else None}
        return paged_attention(query, kv_cache, tables, lengths, starts, **options)[:, 0, 0].tolist()

    return means


def test_two_rows_after_eviction_read_six_keys_each_of_tokens_12_to_19(mean_positions):
    # 18 cached tokens on pages of 4, a window of 6: 3 pages are gone. Row 18 reads 13 to 18, row 19 reads 14 to 19.
    means = mean_positions(first_query=18, num_rows=2, window=6, block_size=4, first_page=3)
    assert means == pytest.approx([15.5, 16.5])


def test_eight_rows_over_a_history_of_twelve_still_find_key_8(mean_positions):
    # Evicting by the length after the step would take 3 pages, and key 8 with them, which row 12 needs.
    means = mean_positions(first_query=12, num_rows=8, window=5, block_size=4, first_page=2)
    assert means == pytest.approx([position - 2 for position in range(12, 20)])


def test_a_block_of_64_rows_at_256_reads_from_key_157_on_page_9(mean_positions):
    # A table may keep pages that no row sees: pages 5 to 8 with an offset of 5, and page 9 is local page 4.
    for first_page in (5, 9):
        means = mean_positions(first_query=256, num_rows=64, window=100, block_size=16, first_page=first_page)
        assert means == pytest.approx([position - 49.5 for position in range(256, 320)])


def test_a_single_row_is_a_decode_step(make_paged):
    paged = make_paged([37, 83, 9], window=21, head_dim=20)
    kv_cache, tables, lengths = paged.inputs()
    query = torch.randn(3, 4, 20, device=kv_cache.device)
    starts = start_locs([1, 1, 1], kv_cache.device)
    extended = paged_attention(query, kv_cache, tables, lengths, starts, scale=SCALE, window=21)
    torch.testing.assert_close(extended, paged_attention(query, *paged.inputs(), scale=SCALE, window=21))


def test_a_length_capped_to_the_live_tokens_admits_no_key_and_the_reference_refuses_it(device):
    # 18 cached tokens and two new ones, a window of 6 on pages of 4, 3 pages gone. Told that the length is what is
    # left, 10, the rows would stand at positions 8 and 9, before every key of the table.
    kv_cache = torch.zeros(2, 2, 1, 4, 16, device=device)
    tables, offsets = torch.tensor([[0, 1]], device=device).int(), torch.tensor([3], device=device).int()
    query, starts = torch.zeros(2, 1, 16, device=device), start_locs([2], device)
    options = {"scale": 1.0, "page_offsets": offsets, "window": 6}
    capped = torch.tensor([10], dtype=torch.int32, device=device)
    with pytest.raises(IndexError, match="page_offsets has 3; expected at most 0, the first page in sight"):
        paged_attention_reference(query, kv_cache, tables, capped, starts, **options)
    if is_launched(kv_cache):  # The kernel cannot raise, but neither does it leave its tables.
        kv_cache[:, 1] = 1.0
        assert paged_attention(query, kv_cache, tables, capped, starts, **options).count_nonzero() == 0
        out = paged_attention(query, kv_cache, tables, capped + 10, starts, **options)
        torch.testing.assert_close(out, torch.ones_like(query))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("query", torch.zeros(2, 3, 16), "query has 3 heads; expected a multiple of the cache's 2"),
        ("query", torch.zeros(2, 4, 32), r"query has shape \[2, 4, 32\]; expected \[any, any, 16\]"),
        ("kv_cache", torch.zeros(4, 2, 2, 8, 16).half(), "query has dtype torch.float32; expected torch.float16"),
        ("query", torch.zeros(2, 4, 16).half(), "query has dtype torch.float16; expected torch.float32"),
        ("query", torch.zeros(3, 4, 16), r"seq_lens has shape \[2\]; expected one length a query: \[3\]"),
        ("query", torch.zeros(2, 16, 4).mT, "query has strides"),
        ("seq_lens", torch.ones(2, dtype=torch.int64), "seq_lens has dtype torch.int64; expected torch.int32"),
        ("block_tables", torch.zeros(3, 4, dtype=torch.int32), r"block_tables has shape \[3, 4\]; expected \[2, any\]"),
        ("page_offsets", torch.zeros(3, dtype=torch.int32), r"page_offsets has shape \[3\]; expected \[2\]"),
        ("page_offsets", torch.zeros(2), "page_offsets has dtype torch.float32; expected torch.int32"),
        ("sinks", torch.zeros(2), r"sinks has shape \[2\]; expected \[4\]"),
        ("sinks", torch.zeros(4).half(), "sinks has dtype torch.float16; expected torch.float32"),
        ("scale", 0.0, "scale is 0.0; expected a positive number"),
        ("window", 0, "window is 0; expected at least 1 token, or None"),
        ("soft_cap", 0.0, "soft_cap is 0.0; expected a positive number, or None"),
        ("num_splits", 0, "num_splits is 0; expected 1 to 128, or None"),
        ("num_splits", 129, "num_splits is 129; expected 1 to 128, or None"),
        ("query_start_loc", torch.zeros(2).int(), r"query_start_loc has shape \[2\]; expected \[3\]"),
        ("query_start_loc", torch.zeros(3), "query_start_loc has dtype torch.float32; expected torch.int32"),
        ("out", torch.zeros(2, 4, 16).half(), "out has dtype torch.float16; expected torch.float32"),
        ("out", torch.zeros(4, 2, 16).transpose(0, 1), "out has strides .*; expected a contiguous tensor"),
    ],
)
def test_an_argument_out_of_order_is_named_with_what_was_expected(name, value, expected):
    arguments = {
        "query": torch.zeros(2, 4, 16),
        "kv_cache": torch.zeros(4, 2, 2, 8, 16),
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=expected):
        paged_attention(**{**arguments, name: value})
