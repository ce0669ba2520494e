"""Gather and scatter against a slice-by-slice copy, over both paths, several pools and odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvist.errors import InvalidValueError
from kvist.transfer.copier import TorchCopier

torch.set_num_threads(1)


def i64(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("sizes", [(64, 32, 64), (32, 48), (32, 40), (64,) * 9, (1, 3, 7, 512), (512, 512, 96, 96)])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_what_is_gathered_and_scattered_again_is_what_was_there(sizes: tuple[int, ...], is_aligned: bool) -> None:
    random = np.random.default_rng(len(sizes))
    pools = [torch.from_numpy(random.integers(0, 256, 8192, dtype=np.uint8)).view(torch.float16) for _ in range(2)]
    copies = [torch.zeros_like(pool) for pool in pools]
    addresses, targets, expected = [], [], []
    for idx, size in enumerate(sizes):
        offset = (idx + 1) * 512 if is_aligned else idx * 601 + 5
        pool = idx * 2 // len(sizes)
        addresses.append(pools[pool].data_ptr() + offset)
        targets.append(copies[1 - pool].data_ptr() + offset)
        expected.append((1 - pool, offset, pools[pool].view(torch.uint8)[offset : offset + size]))
    buffer = torch.empty(sum(sizes), dtype=torch.uint8)
    TorchCopier(pools).gather(i64(*addresses), i64(*sizes), buffer)
    assert torch.equal(buffer, torch.cat([piece for _, _, piece in expected]))
    wanted = [torch.zeros(8192, dtype=torch.uint8) for _ in range(2)]
    for pool, offset, piece in expected:
        wanted[pool][offset : offset + len(piece)] = piece
    TorchCopier(copies).scatter(i64(*targets), i64(*sizes), buffer)
    for copy, want in zip(copies, wanted, strict=True):
        assert torch.equal(copy.view(torch.uint8), want)


def test_addresses_and_sizes_must_pair_and_fill_the_buffer_and_lie_in_a_pool() -> None:
    pool, buffer = torch.zeros(1024, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copier = TorchCopier([pool])
    base = pool.data_ptr()
    for addresses, sizes in (
        (i64(base, base + 64), i64(64)),
        (i64(base), i64(32)),
        (i64(base, base + 64), i64(128, -64)),
        (i64(base + 1024 - 63), i64(64)),
        (i64(base - 1), i64(64)),
    ):
        for copy in (copier.gather, copier.scatter):
            with pytest.raises(InvalidValueError):
                copy(addresses, sizes, buffer)
    assert not pool.any()


def test_pools_must_be_contiguous_and_there_must_be_one() -> None:
    with pytest.raises(InvalidValueError, match="pools"):
        TorchCopier([])
    with pytest.raises(InvalidValueError, match="contiguous"):
        TorchCopier([torch.zeros(8, 8).t()])
