"""Copies between fragments of KV pools and a contiguous buffer on the same device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvist.errors import InvalidValueError
from kvist.transfer.agents.base import Int64s, Region, RegionTable


class TorchCopier:
    """Copies a whole run of equal, aligned fragments at a time, others one by one; returns when all bytes are copied.

    `pools` are the tensors that contain the fragments, each contiguous, all on one device.
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
        self._table = RegionTable("the pools", [Region(pool.data_ptr(), pool.numel()) for pool in self._pools])

    def gather(self, addresses: Int64s, sizes: Int64s, out: torch.Tensor) -> None:
        """Copy fragments one after the other into `out`, bytes; raises InvalidValueError outside the pools."""
        for pool, places, piece in self._runs(addresses, sizes, out):
            if pool.ndim == 2:
                torch.index_select(pool, 0, torch.from_numpy(places).to(self.device), out=piece)
            else:
                for row, start in zip(piece, places.tolist(), strict=True):
                    row.copy_(pool[start : start + len(row)])
        self._synchronise()

    def scatter(self, addresses: Int64s, sizes: Int64s, source: torch.Tensor) -> None:
        """Copy `source` back into fragments, which must not overlap; raises InvalidValueError outside the pools."""
        for pool, places, piece in self._runs(addresses, sizes, source):
            if pool.ndim == 2:
                pool.index_copy_(0, torch.from_numpy(places).to(self.device), piece)
            else:
                for row, start in zip(piece, places.tolist(), strict=True):
                    pool[start : start + len(row)].copy_(row)
        self._synchronise()

    def _runs(
        self, addresses: Int64s, sizes: Int64s, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Int64s, torch.Tensor]]:
        """Yield runs of fragments of one size in one pool: the pool, their places, and their rows in the buffer.

        If fragments are aligned to their size, the pool has rows of it and places are row indices; else the pool has
        single bytes and places are offsets.
        """
        if len(addresses) != len(sizes):
            raise InvalidValueError("sizes", len(sizes), f"{len(addresses)}: a size for each address")
        if int(sizes.sum()) != buffer.numel() or sizes.min(initial=1) < 1:
            raise InvalidValueError("sizes", int(sizes.sum()), f"positive, {buffer.numel()} bytes together")
        if not len(sizes):
            return
        pools = self._table.find("address", addresses, sizes)
        is_new = np.flatnonzero((np.diff(pools) != 0) | (np.diff(sizes) != 0)) + 1
        start = 0
        for run in np.split(np.arange(len(addresses)), is_new):
            pool, size = self._pools[pools[run[0]]], int(sizes[run[0]])
            piece = buffer[start : start + len(run) * size].view(-1, size)
            start += len(run) * size
            offsets = addresses[run] - pool.data_ptr()
            if (offsets % size).any():
                yield pool, offsets, piece
                continue
            rows = pool[: len(pool) // size * size].view(-1, size)
            # Words take half the time of bytes.
            is_of_words = not any(each % 8 for each in (size, rows.storage_offset(), piece.storage_offset()))
            dtype = torch.int64 if is_of_words else torch.uint8
            yield rows.view(dtype), offsets // size, piece.view(dtype)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
