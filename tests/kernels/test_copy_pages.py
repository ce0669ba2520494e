import pytest
import torch

from kvist.kernels import gather_pages, scatter_pages
from kvist.kernels.copy_pages import _as_words


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).flatten(1)


def random_pages(shape, dtype, device):
    """Every bit pattern, NaN of all kinds among them: a copy that computes anything would change some."""
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size_bytes,), dtype=torch.uint8, device=device).view(dtype).view(shape)


@pytest.mark.parametrize(
    ("page_shape", "dtype", "word_bytes"),
    [
        ((2, 2, 16, 64), torch.bfloat16, 16),  # more than one program a page
        ((2, 1, 4, 24), torch.float8_e4m3fn, 16),
        ((2, 1, 4, 3), torch.float16, 16),
        ((2, 3, 1, 5), torch.float32, 8),
        ((2, 1, 1, 5), torch.float16, 4),
        ((1, 3, 1, 1), torch.float16, 2),
        ((1, 1, 1, 7), torch.uint8, 1),
    ],
)
def test_pages_leave_and_come_back_byte_for_byte(device, page_shape, dtype, word_bytes):
    pool = random_pages((9, *page_shape), dtype, device)
    before = pool.clone()
    page_ids = torch.tensor([8, 0, 3, 5], device=device)  # the last page and page 0 among them
    out = random_pages((4, *page_shape), dtype, device)
    pool_words, _, is_paired = _as_words(pool, out)
    assert pool_words.element_size() * (2 if is_paired else 1) == word_bytes

    assert gather_pages(pool, page_ids, out) is out
    assert torch.equal(as_bytes(out), as_bytes(pool)[page_ids])

    other = random_pages((9, *page_shape), dtype, device)
    expected = as_bytes(other)
    expected[page_ids] = as_bytes(out)
    scatter_pages(out, page_ids, other)
    assert torch.equal(as_bytes(other), expected)
    assert torch.equal(as_bytes(pool), as_bytes(before))


def test_one_layer_of_a_slot_is_copied_and_its_neighbours_are_not(device):
    pool = random_pages((6, 3, 2, 1, 8, 16), torch.float16, device)
    before, page_ids = pool.clone(), torch.tensor([5, 1], device=device)
    out = torch.empty(2, 2, 1, 8, 16, dtype=torch.float16, device=device)
    gather_pages(pool[:, 1], page_ids, out)
    assert torch.equal(as_bytes(out), as_bytes(before[page_ids, 1]))
    scatter_pages(torch.zeros_like(out), page_ids, pool[:, 1])
    assert pool[page_ids, 1].count_nonzero() == 0
    assert torch.equal(as_bytes(pool[:, [0, 2]]), as_bytes(before[:, [0, 2]]))


def test_a_buffer_at_an_odd_address_is_copied_in_narrower_words(device):
    pool = random_pages((4, 2, 1, 8, 16), torch.uint8, device)
    out = torch.zeros(2 * 256 + 4, dtype=torch.uint8, device=device)[4:].view(2, 2, 1, 8, 16)
    gather_pages(pool, torch.tensor([3, 2], device=device), out)
    assert torch.equal(out, pool[[3, 2]])


def test_no_pages_copy_nothing(device):
    pool = random_pages((4, 2, 1, 8, 16), torch.uint8, device)
    none, page_ids = pool[:0].clone(), torch.empty(0, dtype=torch.int64, device=device)
    assert gather_pages(pool, page_ids, none).numel() == 0
    before = pool.clone()
    scatter_pages(none, page_ids, pool)
    assert torch.equal(pool, before)


def test_pages_past_two_to_the_31_elements_are_copied(sparse_cache):
    pool, last = sparse_cache, len(sparse_cache) - 1
    page = random_pages((1, *pool.shape[1:]), pool.dtype, "cpu")
    scatter_pages(page, torch.tensor([last]), pool)
    assert torch.equal(as_bytes(pool[last:]), as_bytes(page))
    out = torch.zeros_like(page)
    gather_pages(pool, torch.tensor([last]), out)
    assert torch.equal(as_bytes(out), as_bytes(page))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("out", torch.zeros(3, 2, 1, 8, 16), r"out has shape \[3, 2, 1, 8, 16\]; expected \[2, 2, 1, 8, 16\]"),
        ("out", torch.zeros(2, 2, 1, 8, 16).half(), "out has dtype torch.float16; expected torch.float32"),
        ("pool", torch.zeros(4, 2, 1, 16, 8).mT, "pool has strides .*; expected contiguous rows"),
        ("page_ids", torch.zeros(2, dtype=torch.int32), "page_ids has dtype torch.int32; expected torch.int64"),
        ("page_ids", torch.arange(4)[::2], r"page_ids has strides \[2\]; expected contiguous rows"),
    ],
)
def test_an_argument_out_of_order_is_named_with_what_was_expected(name, value, expected):
    arguments = {
        "pool": torch.zeros(4, 2, 1, 8, 16),
        "page_ids": torch.arange(2),
        "out": torch.zeros(2, 2, 1, 8, 16),
    }
    with pytest.raises(ValueError, match=expected):
        gather_pages(**{**arguments, name: value})
