import pytest
import torch

from kvist.kernels import paged_decode, paged_prefill, paged_prefill_reference
from kvist.kernels._triton import is_launched

SCALE = 0.3


def start_locs(query_lens, device):
    return torch.tensor([0, *query_lens]).cumsum(0).int().to(device)


@pytest.mark.parametrize(
    ("num_kv_heads", "heads_per_kv", "head_dim", "block_size", "window", "soft_cap"),
    [
        (1, 1, 16, 8, None, None),
        (2, 1, 20, 8, 3, None),  # a window smaller than a page
        (1, 3, 80, 16, 21, 5.0),  # no multiple of a page, no power of two
        (1, 2, 16, 32, 70, None),
        (1, 8, 16, 4, 1, None),  # a window of the token itself
    ],
)
@pytest.mark.parametrize("is_local", [False, True])
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
    inputs = (query.to(device), kv_cache, tables, start_locs(query_lens, device), lengths)
    out = paged_prefill(*inputs, page_offsets=paged.page_offsets, **options)
    for rows, rows_out, first, key, value in zip(
        query.split(query_lens), out.split(query_lens), first_queries, paged.keys, paged.values, strict=True
    ):
        positions = list(range(first, first + len(rows)))
        assert_attends(rows_out, dense_attention(rows, positions, key, value, **options))


@pytest.mark.parametrize("window", [None, 21])
def test_sinks_take_their_share_of_each_softmax(make_paged, dense_attention, assert_attends, window):
    paged = make_paged([83], first_queries=[40], window=window, is_local=True, num_kv_heads=2)
    device = paged.kv_cache.device
    query, sinks = torch.randn(43, 4, 16), torch.tensor([0.0, 3.0, -torch.inf, -60.0])
    kv_cache, tables, lengths = paged.inputs()
    options = {"scale": SCALE, "page_offsets": paged.page_offsets, "sinks": sinks.to(device), "window": window}
    out = paged_prefill(query.to(device), kv_cache, tables, start_locs([43], device), lengths, **options)
    key, value = paged.keys[0], paged.values[0]
    positions = list(range(40, 83))
    assert_attends(out, dense_attention(query, positions, key, value, scale=SCALE, window=window, sinks=sinks))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_of_eight_bits_are_read_as_they_are(
    make_paged, dense_attention, assert_attends, cache_dtype, dtype
):
    paged = make_paged([83], first_queries=[40], window=21, num_kv_heads=2, head_dim=20, dtype=cache_dtype)
    query = torch.randn(43, 4, 20).to(dtype)
    kv_cache, tables, lengths = paged.inputs()
    starts = start_locs([43], kv_cache.device)
    out = paged_prefill(query.to(kv_cache.device), kv_cache, tables, starts, lengths, scale=SCALE, window=21)
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
def test_half_precision_is_as_good_as_its_rounding(
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
    inputs = (query.to(kv_cache.device), kv_cache, tables, starts, lengths)
    out = paged_prefill(*inputs, page_offsets=paged.page_offsets, **options)
    expected = dense_attention(query, list(range(first, end)), paged.keys[0], paged.values[0], **options)
    assert out.dtype == dtype
    assert_attends(out, expected)


def test_padding_rows_are_zero_and_every_row_of_out_is_written(make_paged):
    paged = make_paged([20], first_queries=[17])
    kv_cache, tables, lengths = paged.inputs()
    out = torch.full((70, 2, 16), torch.nan, device=kv_cache.device)
    starts = start_locs([3], kv_cache.device)
    result = paged_prefill(torch.ones_like(out), kv_cache, tables, starts, lengths, scale=SCALE, out=out)
    assert result is out
    assert out[:3].isfinite().all()
    assert out[3:].count_nonzero() == 0


def test_no_rows_are_no_work(make_paged):
    kv_cache, tables, lengths = make_paged([20]).inputs()
    query = torch.empty(0, 2, 16, device=kv_cache.device)
    assert paged_prefill(query, kv_cache, tables, start_locs([0], query.device), lengths, scale=SCALE).shape == (
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
        return paged_prefill(query, kv_cache, tables, starts, lengths, **options)[:, 0, 0].tolist()

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
    extended = paged_prefill(query, kv_cache, tables, starts, lengths, scale=SCALE, window=21)
    torch.testing.assert_close(extended, paged_decode(query, *paged.inputs(), scale=SCALE, window=21))


def test_a_length_capped_to_the_live_tokens_admits_no_key_and_the_reference_refuses_it(device):
    # 18 cached tokens and two new ones, a window of 6 on pages of 4, 3 pages gone. Told that the length is what is
    # left, 10, the rows would stand at positions 8 and 9, before every key of the table.
    kv_cache = torch.zeros(2, 2, 1, 4, 16, device=device)
    tables, offsets = torch.tensor([[0, 1]], device=device).int(), torch.tensor([3], device=device).int()
    inputs = (torch.zeros(2, 1, 16, device=device), kv_cache, tables, start_locs([2], device))
    options = {"scale": 1.0, "page_offsets": offsets, "window": 6}
    capped = torch.tensor([10], dtype=torch.int32, device=device)
    with pytest.raises(IndexError, match="page_offsets has 3; expected at most 0, the first page in sight"):
        paged_prefill_reference(*inputs, capped, **options)
    if is_launched(kv_cache):  # The kernel cannot raise, but neither does it leave its tables.
        kv_cache[:, 1] = 1.0
        assert paged_prefill(*inputs, capped, **options).count_nonzero() == 0
        torch.testing.assert_close(paged_prefill(*inputs, capped + 10, **options), torch.ones_like(inputs[0]))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("query_start_loc", torch.zeros(2, dtype=torch.int32), r"query_start_loc has shape \[2\]; expected \[3\]"),
        ("query_start_loc", torch.zeros(3), "query_start_loc has dtype torch.float32; expected torch.int32"),
        ("kv_cache", torch.zeros(4, 2, 2, 8, 32), r"query has shape \[7, 4, 16\]; expected \[any, any, 32\]"),
        ("page_offsets", torch.zeros(3, dtype=torch.int32), r"page_offsets has shape \[3\]; expected \[2\]"),
        ("window", -1, "window is -1; expected at least 1 token, or None"),
    ],
)
def test_an_argument_out_of_order_is_named_with_what_was_expected(name, value, expected):
    arguments = {
        "query": torch.zeros(7, 4, 16),
        "kv_cache": torch.zeros(4, 2, 2, 8, 16),
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 3, 7], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 4], dtype=torch.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=expected):
        paged_prefill(**{**arguments, name: value})
