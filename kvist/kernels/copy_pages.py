# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
"""Copy pages of a pool into a contiguous buffer and back, byte for byte: one large transfer instead of many small."""

from __future__ import annotations

from math import gcd

import torch

from kvist.kernels._checks import check_rows, check_tensor
from kvist.kernels._triton import is_launched, jit, tl

# Eight bytes a word: 4 warps have 16 KiB under way, 8 loads of 16 bytes a thread. Not tuned.
_WORDS_PER_PROGRAM = 2048
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


# fmt: off
@jit
def _copy_pages_kernel(
    pool_ptr, buffer_ptr, page_ids_ptr, num_words, pool_stride, buffer_stride,
    PAIRED: tl.constexpr, IS_GATHER: tl.constexpr, WORDS: tl.constexpr,
):
    # fmt: on
    """Program (page, part of it) copies up to WORDS words. PAIRED: everything is a multiple of two, counted in twos."""
    page_id = tl.load(page_ids_ptr + tl.program_id(0))  # int64, and so is every offset
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    pool_ptr += page_id * pool_stride * (2 if PAIRED else 1) + words
    buffer_ptr += tl.program_id(0).to(tl.int64) * buffer_stride * (2 if PAIRED else 1) + words
    mask = words < num_words * (2 if PAIRED else 1)
    if IS_GATHER:
        tl.store(buffer_ptr, tl.load(pool_ptr, mask=mask), mask=mask)
    else:
        tl.store(pool_ptr, tl.load(buffer_ptr, mask=mask), mask=mask)


def gather_pages(pool: torch.Tensor, page_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Row i of `out` becomes the bytes of page `page_ids[i]`; returns `out`.

    `pool`: `[num_pages, ...]` of any dtype in contiguous pages, which may lie apart; `page_ids`: int64 `[num_copied]`;
    `out`: `[num_copied, ...]`, otherwise as `pool`. Raises ValueError. Never synchronises with the device.
    """
    _check(pool, page_ids, "out", out)
    if is_launched(pool):
        _launch(pool, page_ids, out, is_gather=True)
        return out
    return gather_pages_reference(pool, page_ids, out)


def scatter_pages(buffer: torch.Tensor, page_ids: torch.Tensor, pool: torch.Tensor) -> None:
    """Page `page_ids[i]` becomes the bytes of row i of `buffer`; no page twice. Otherwise as `gather_pages`."""
    _check(pool, page_ids, "buffer", buffer)
    if is_launched(pool):
        _launch(pool, page_ids, buffer, is_gather=False)
    else:
        scatter_pages_reference(buffer, page_ids, pool)


def gather_pages_reference(pool: torch.Tensor, page_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`gather_pages` in torch: an indexed selection of words, which takes half the time of one of bytes."""
    pool_words, out_words, _ = _as_words(pool, out)
    torch.index_select(pool_words, 0, page_ids, out=out_words)
    return out


def scatter_pages_reference(buffer: torch.Tensor, page_ids: torch.Tensor, pool: torch.Tensor) -> None:
    """`scatter_pages` in torch: an indexed copy of words."""
    pool_words, buffer_words, _ = _as_words(pool, buffer)
    pool_words.index_copy_(0, page_ids, buffer_words)


def _check(pool: torch.Tensor, page_ids: torch.Tensor, name: str, buffer: torch.Tensor) -> None:
    check_tensor(name, buffer, (page_ids.shape[0], *pool.shape[1:]), (pool.dtype,), pool)
    check_tensor("page_ids", page_ids, (None,), (torch.int64,), pool)
    for label, tensor in (("pool", pool), (name, buffer), ("page_ids", page_ids)):
        check_rows(label, tensor)


def _as_words(pool: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Both as `[pages, words]` of the widest word that all addresses are multiples of, and whether pairs of it are."""
    common = 16
    for tensor in (pool, buffer):
        page_bytes, stride_bytes = (count * tensor.element_size() for count in (tensor[:1].numel(), tensor.stride(0)))
        common = gcd(common, tensor.data_ptr(), page_bytes, stride_bytes)
    dtype = _WORDS[min(common, 8)]
    pool_words, buffer_words = (tensor.flatten(1).view(dtype) for tensor in (pool, buffer))
    return pool_words, buffer_words, common == 16


def _launch(pool: torch.Tensor, page_ids: torch.Tensor, buffer: torch.Tensor, *, is_gather: bool) -> None:
    if not buffer.numel():
        return
    pool_words, buffer_words, is_paired = _as_words(pool, buffer)
    num_pages, num_words = buffer_words.shape
    counts = (num_words, pool_words.stride(0), buffer_words.stride(0))
    with torch.cuda.device_of(pool):
        _copy_pages_kernel[(num_pages, -(-num_words // _WORDS_PER_PROGRAM))](
            pool_words, buffer_words, page_ids, *(count // 2 if is_paired else count for count in counts),
            PAIRED=is_paired, IS_GATHER=is_gather, WORDS=_WORDS_PER_PROGRAM,
        )  # fmt: skip
