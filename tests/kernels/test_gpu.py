"""What only a GPU can show; the tests of the ops run there as well, through their `device` fixture."""

import pytest
import torch

from kvist.kernels import (
    paged_attention,
    paged_attention_reference,
    write_kv,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

HALF_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def test_blocks_past_two_to_the_31_elements_are_written_and_read():
    block_size, head_dim = 16, 128
    num_blocks = 2**31 // (2 * block_size * head_dim) + 8
    if torch.cuda.mem_get_info()[0] < 2 * 2**32:
        pytest.skip("needs 8 GiB of free GPU memory")
    kv_cache = torch.full((num_blocks, 2, 1, block_size, head_dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    tables = torch.tensor([[num_blocks - 1, 0, num_blocks - 2]], dtype=torch.int32, device="cuda")
    positions = torch.arange(40, device="cuda")
    key, value = torch.randn(2, 40, 1, head_dim, device="cuda").bfloat16()
    write_kv(key, value, kv_cache, tables[0, positions // block_size].long() * block_size + positions % block_size)
    assert torch.equal(kv_cache[num_blocks - 1, 0, 0], key[:16, 0])
    lengths = torch.tensor([40], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    query = torch.randn(40, 4, head_dim, device="cuda").bfloat16()
    dense = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), *(tensor.transpose(0, 1).expand(4, -1, -1) for tensor in (key, value)), is_causal=True
    ).transpose(0, 1)
    prefilled = paged_attention(query, kv_cache, tables, lengths, starts, scale=head_dim**-0.5)
    torch.testing.assert_close(prefilled, dense, atol=1.6e-2, rtol=1.6e-2)
    for num_splits in (1, 4):
        decoded = paged_attention(query[-1:], kv_cache, tables, lengths, scale=head_dim**-0.5, num_splits=num_splits)
        torch.testing.assert_close(decoded, dense[-1:], atol=1.6e-2, rtol=1.6e-2)


CACHE_DTYPES = [None, torch.float8_e4m3fn, torch.float8_e5m2]  # None: the query's


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_kernels_agree_with_their_references_at_the_sizes_of_real_models(dtype, head_dim, window, cache_dtype):
    seq_lens, query_lens = [3000, 1, 517, 2048], [200, 1, 517, 1]
    kv_cache = torch.randn(400, 2, 2, 16, head_dim, device="cuda").to(cache_dtype or dtype)
    tables = torch.randperm(400, device="cuda").int()[:348].view(1, 348).expand(4, -1)
    page_offsets = torch.zeros(4, dtype=torch.int32, device="cuda")
    if window is not None:
        # Drop what no row sees: pages of 16 before the first visible key of the first row.
        first_queries = [seq_len - query_len for seq_len, query_len in zip(seq_lens, query_lens, strict=True)]
        page_offsets += torch.tensor([max(0, first - window + 1) // 16 for first in first_queries], device="cuda")
        columns = (torch.arange(348, device="cuda") + page_offsets[:, None]).clamp(max=347)
        tables = tables.gather(1, columns)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().cuda()
    query = torch.randn(sum(query_lens), 16, head_dim, device="cuda").to(dtype)
    sinks = torch.randn(16, device="cuda")
    options = {"scale": head_dim**-0.5, "window": window, "soft_cap": 30.0, "page_offsets": page_offsets}
    options["sinks"] = sinks
    tables, tolerance = tables.contiguous(), HALF_TOLERANCE[dtype]
    chunks, decodes = (query, kv_cache, tables, lengths, starts), (query[:4], kv_cache, tables, lengths)
    for inputs in (chunks, decodes):
        expected = paged_attention_reference(*inputs, **options)
        for num_splits in (None, 1, 5, 32):
            out = paged_attention(*inputs, num_splits=num_splits, **options)
            torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_a_step_is_captured_in_a_graph_and_replays_with_new_lengths_offsets_and_tables():
    kv_cache = torch.randn(64, 2, 1, 16, 64, device="cuda").half()
    tables = torch.randperm(64, device="cuda").int().view(4, 16)
    lengths = torch.tensor([20, 200, 0, 0], dtype=torch.int32, device="cuda")  # two rows of padding
    offsets = torch.zeros(4, dtype=torch.int32, device="cuda")
    slots = torch.tensor([3, 7, -1, -1], device="cuda")
    query, key, value = torch.randn(3, 4, 4, 64, device="cuda").half()
    key, value, out = key[:, :1], value[:, :1], torch.empty_like(query)
    options = {"scale": 0.125, "window": 100, "page_offsets": offsets}

    def step():
        write_kv(key, value, kv_cache, slots)
        paged_attention(query, kv_cache, tables, lengths, out=out, **options)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    tables.copy_(torch.randperm(64, device="cuda").view(4, 16))
    lengths += torch.tensor([7, 120, 0, 31], device="cuda")
    offsets += torch.tensor([0, 13, 0, 0], device="cuda")  # 320 - 100 = 220: page 13
    slots.copy_(torch.tensor([900, 901, -1, 902]))
    key.normal_()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(kv_cache[902 // 16, 0, 0, 902 % 16], key[3, 0])
    expected = paged_attention_reference(query, kv_cache, tables, lengths, **options)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    assert out[2].count_nonzero() == 0


def test_a_captured_chunk_replays_with_other_boundaries_between_its_sequences():
    kv_cache = torch.randn(64, 2, 2, 16, 128, device="cuda").bfloat16()
    tables = torch.randperm(64, device="cuda").int().view(2, 32)
    query = torch.randn(300, 8, 128, device="cuda").bfloat16()
    lengths = torch.tensor([280, 400], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 200, 300], dtype=torch.int32, device="cuda")
    options = {"scale": 0.1, "window": 150}
    out = paged_attention(query, kv_cache, tables, lengths, starts, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(query, kv_cache, tables, lengths, starts, out=out, **options)
    starts.copy_(torch.tensor([0, 17, 290]))  # ten rows of padding
    lengths.copy_(torch.tensor([17, 511]))
    out.fill_(torch.nan)
    graph.replay()
    expected = paged_attention_reference(query, kv_cache, tables, lengths, starts, **options)
    torch.testing.assert_close(out, expected, atol=1.6e-2, rtol=1.6e-2)
