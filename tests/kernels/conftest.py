"""Paged batches full of traps, and the naive attention they are judged by.

The tests of an op run on its torch reference, on its Triton kernel where there is a CUDA device, and once more, in a
process of their own (test_interpreter.py), on the interpreted kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvist.kernels import write_kv

# Kernel-only tests: they run where TRITON_INTERPRET=1 was set before Triton was imported.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_split_k.py"]

torch.set_num_threads(1)


def patch_once_a_launch() -> None:
    """Let Triton's interpreter replace what its language means once a launch, and not for each call within it anew.

    The others change nothing, and take a third of all its time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    class Patch(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(function: Callable[..., object]) -> object:
        seen = function.__globals__.values()
        found = {module.__name__ for module in (language, language.core) if any(each is module for each in seen)}
        if found <= patched:
            return None
        patched.update(found)
        return patch(function)

    interpreter._LangPatchScope, interpreter._patch_lang = Patch, patch_once


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once_a_launch()


@pytest.fixture(autouse=True)
def _draws_the_same_each_time() -> None:
    """Whatever was drawn in this process before."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences in a paged cache, and the same keys and values dense."""

    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    page_offsets: torch.Tensor | None
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kv_cache, self.block_tables, self.seq_lens


@pytest.fixture
def make_paged(device: str) -> Callable[..., Paged]:
    """Write sequences into a shuffled cache, block 0 and the last block among theirs, and poison everything else.

    Blocks that hold no key visible from `first_queries[i]` on are evicted: their table entry is negative and their
    memory is infinite; with `is_local` the table begins behind them. What no token was written to is NaN.
    """

    def make(
        seq_lens: list[int],
        *,
        first_queries: list[int] | None = None,
        window: int | None = None,
        is_local: bool = False,
        num_kv_heads: int = 1,
        head_dim: int = 16,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> Paged:
        random = torch.Generator().manual_seed(len(seq_lens) * 1000 + sum(seq_lens))
        num_pages = [-(-seq_len // block_size) for seq_len in seq_lens]
        num_blocks = sum(num_pages) + 2
        shuffled = (torch.randperm(num_blocks - 2, generator=random) + 1).tolist()
        free = [0, num_blocks - 1, *shuffled]
        kv_cache = torch.full(
            (num_blocks, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype, device=device
        )
        block_tables = torch.full((len(seq_lens), max(num_pages) + 1), -1, dtype=torch.int32)
        page_offsets = torch.zeros(len(seq_lens), dtype=torch.int32)
        keys, values = [], []
        for seq, (seq_len, pages) in enumerate(zip(seq_lens, num_pages, strict=True)):
            block_tables[seq, :pages] = torch.tensor([free.pop(0) for _ in range(pages)])
            key, value = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=random).to(dtype)
            if dtype.itemsize == 1:  # Tokens come in 16 or 32 bits; these lose nothing when they are written.
                key, value = key.float(), value.float()
            positions = torch.arange(seq_len)
            slots = block_tables[seq, positions // block_size].long() * block_size + positions % block_size
            write_kv(key.to(device), value.to(device), kv_cache, slots.to(device))
            first_query = seq_len - 1 if first_queries is None else first_queries[seq]
            num_stale = 0 if window is None else max(0, first_query - window + 1) // block_size
            kv_cache[block_tables[seq, :num_stale].long()] = torch.inf
            block_tables[seq, :num_stale] = -1
            if is_local:
                page_offsets[seq] = num_stale
                block_tables[seq] = block_tables[seq].roll(-num_stale)
            keys.append(key)
            values.append(value)
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        if is_local:
            block_tables = block_tables[:, : int((torch.tensor(num_pages) - page_offsets).max())]
        offsets = page_offsets.to(device) if is_local else None
        return Paged(kv_cache, block_tables.contiguous().to(device), lengths, offsets, keys, values)

    return make


@pytest.fixture
def sparse_cache(tmp_path: Path) -> torch.Tensor:
    """An e5m2 cache `[num_blocks, 2, 1, 16, 128]` of more than 2**31 elements in a file that holds none of them.

    Only what is touched takes memory or disk. Zeros otherwise.
    """
    num_blocks = 2**31 // (2 * 16 * 128) + 4
    path, num_elements = tmp_path / "cache", num_blocks * 2 * 16 * 128
    with path.open("wb") as file:
        file.truncate(num_elements)
    flat = torch.from_file(str(path), shared=True, size=num_elements, dtype=torch.uint8)
    return flat.view(torch.float8_e5m2).view(num_blocks, 2, 1, 16, 128)


@pytest.fixture
def dense_attention() -> Callable[..., torch.Tensor]:
    """Attention of rows at absolute positions over a whole sequence, in float64, straight from its definition."""

    def attention(
        query: torch.Tensor,
        positions: list[int],
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads_per_kv = query.shape[1] // key.shape[1]
        key, value = (tensor.double().repeat_interleave(heads_per_kv, dim=1) for tensor in (key, value))
        scores = torch.einsum("rhd,khd->hrk", query.cpu().double(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.tensor(positions)[:, None] - torch.arange(len(key))
        is_visible = (distance >= 0) & (distance < (window or len(key)))
        weights = scores.masked_fill(~is_visible, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.double().exp()[:, None, None])
        return torch.einsum("hrk,khd->rhd", weights / total, value)

    return attention


@pytest.fixture
def assert_attends() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compare with a float64 oracle as closely as the dtype allows."""

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[actual.dtype]
        torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance, rtol=tolerance)

    return compare
