"""Copies between fragments of the pools and one contiguous piece of a region, on the device that both are on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvist.errors import InvalidValueError
from kvist.kernels.copy_pages import gather_pages, scatter_pages
from kvist.transfer.agents import TransferAgent
from kvist.transfer.agents.base import Int64s

_VECTOR_BYTES = 16


class _Run(NamedTuple):
    """Consecutive fragments of one size and one pool: rows of the pool where `pages` is not None."""

    pool: torch.Tensor
    offsets: Int64s
    pages: Int64s | None
    size_bytes: int


class TensorRegion:
    """A region for bouncing, in one contiguous tensor of bytes."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.address = memory.data_ptr()
        self.size_bytes = memory.numel()
        self.device_idx = memory.device.index if memory.device.type == "cuda" else None

    def part(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return a view of a part."""
        return self._memory[offset : offset + size_bytes]


def host_region(agent: TransferAgent, size_bytes: int) -> TensorRegion:
    """Return a region in memory that the agent can register."""
    return TensorRegion(torch.from_numpy(agent.allocate(size_bytes)))


class TorchCopier:
    """Copies a whole run of equal, aligned fragments at a time, others one by one; returns when every byte lies there.

    `pools` are the tensors that fragments lie in, each contiguous, all on one device.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        """Raise InvalidValueError without pools, or for one that is not contiguous or on another device."""
        if not pools:
            raise InvalidValueError("pools", pools, "at least one")
        for pool in pools:
            if not pool.is_contiguous() or pool.device != pools[0].device:
                raise InvalidValueError("pools", tuple(pool.shape), f"contiguous tensors on {pools[0].device}")
        self.device = pools[0].device
        flat = [pool.detach().flatten().view(torch.uint8) for pool in pools]
        self._pools = sorted(flat, key=lambda pool: pool.data_ptr())
        self._bases = np.array([pool.data_ptr() for pool in self._pools], np.int64)
        self._ends = self._bases + np.array([pool.numel() for pool in self._pools], np.int64)

    def gather(self, addresses: Int64s, sizes: Int64s, out: torch.Tensor) -> None:
        """Fill `out`, bytes, with the fragments one after the other; raises InvalidValueError outside the pools."""
        for run, piece in self._runs(addresses, sizes, out):
            if run.pages is not None:
                gather_pages(_rows(run), torch.from_numpy(run.pages).to(self.device), piece)
            else:
                for row, offset in zip(piece, run.offsets.tolist(), strict=True):
                    row.copy_(run.pool[offset : offset + run.size_bytes])
        self._synchronise()

    def scatter(self, addresses: Int64s, sizes: Int64s, source: torch.Tensor) -> None:
        """Write what `gather` would read: fragments must not overlap; raises InvalidValueError outside the pools."""
        for run, piece in self._runs(addresses, sizes, source):
            if run.pages is not None:
                scatter_pages(piece, torch.from_numpy(run.pages).to(self.device), _rows(run))
            else:
                for row, offset in zip(piece, run.offsets.tolist(), strict=True):
                    run.pool[offset : offset + run.size_bytes].copy_(row)
        self._synchronise()

    def _runs(self, addresses: Int64s, sizes: Int64s, buffer: torch.Tensor) -> Iterator[tuple[_Run, torch.Tensor]]:
        """Yield each run, and its piece of the buffer as rows of a fragment each."""
        if len(addresses) != len(sizes):
            raise InvalidValueError("sizes", len(sizes), f"{len(addresses)}: a size for each address")
        if int(sizes.sum()) != buffer.numel() or sizes.min(initial=1) < 1:
            raise InvalidValueError("sizes", int(sizes.sum()), f"positive, {buffer.numel()} bytes together")
        pools = np.searchsorted(self._bases, addresses, side="right") - 1
        is_outside = (pools < 0) | (addresses > self._ends[pools] - sizes)
        if is_outside.any():
            first = int(is_outside.argmax())
            raise InvalidValueError("address", f"{sizes[first]} bytes at {addresses[first]:#x}", "within a pool")
        is_new = np.flatnonzero((np.diff(pools) != 0) | (np.diff(sizes) != 0)) + 1
        can_vectorise = not (sizes % _VECTOR_BYTES).any()
        start = 0
        for group in np.split(np.arange(len(addresses)), is_new):
            if not len(group):
                return
            pool, size = int(pools[group[0]]), int(sizes[group[0]])
            offsets = addresses[group] - self._bases[pool]
            pages = offsets // size if can_vectorise and not (offsets % size).any() else None
            end = start + len(group) * size
            yield _Run(self._pools[pool], offsets, pages, size), buffer[start:end].view(-1, size)
            start = end

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _rows(run: _Run) -> torch.Tensor:
    """Return the pool as rows of the run's size; what is left over at its end belongs to no row."""
    num_rows = run.pool.numel() // run.size_bytes
    return run.pool[: num_rows * run.size_bytes].view(num_rows, run.size_bytes)
