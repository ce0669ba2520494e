"""Measures what a cost model needs, with the agents and the copies that transfers will use."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch

from kvist.errors import KvistError
from kvist.transfer.agents.base import Int64s, PeerId, TransferAgent, WriteState
from kvist.transfer.bounce.copier import TorchCopier
from kvist.transfer.bounce.gate import CostModel, calibrate

_WRITE_TIMEOUT_S = 30.0


class CalibrationError(KvistError):
    """A write that was to be timed has not succeeded, so that nothing is known of its cost."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"costs of transfers cannot be measured: {reason}")
        self.reason = reason


def calibrate_agents(source: TransferAgent, target: TransferAgent, total_bytes: int = 8 << 20) -> CostModel:
    """Measure from one agent of this process to another; some tenths of a second. Raises CalibrationError.

    A peer of another process or host costs more: measure that one, where it is known, with `calibrate_peer`.
    """
    memory = target.allocate(total_bytes)
    region = target.register(memory.ctypes.data, total_bytes)
    peer = source.connect(target.metadata())
    try:
        return calibrate_peer(source, peer, memory.ctypes.data, total_bytes)
    finally:
        source.disconnect(peer)
        target.deregister(region)


def calibrate_peer(agent: TransferAgent, peer: PeerId, remote_address: int, total_bytes: int = 8 << 20) -> CostModel:
    """Measure writes to a connected peer, and copies in host memory here. Raises CalibrationError.

    Overwrites `total_bytes` of registered memory at the peer, which has to be nobody's: an unused bounce region.
    """
    memory = agent.allocate(total_bytes)
    memory[:] = 0  # every page is there before anything is timed
    region = agent.register(memory.ctypes.data, total_bytes)
    pool, buffer = torch.from_numpy(memory), torch.zeros(total_bytes, dtype=torch.uint8)
    copier = TorchCopier([pool])

    def write(num_fragments: int, size_bytes: int) -> float:
        offsets = _scattered(num_fragments, size_bytes)
        rows = (memory.ctypes.data + offsets, remote_address + offsets[::-1], np.full_like(offsets, size_bytes))
        began = perf_counter()
        transfer = agent.write(peer, np.stack(rows, axis=1))
        if not transfer.wait(_WRITE_TIMEOUT_S) or transfer.state is not WriteState.DONE:
            raise CalibrationError(transfer.reason or f"not written within {_WRITE_TIMEOUT_S} s")
        return perf_counter() - began

    def gather(num_fragments: int, size_bytes: int) -> float:
        addresses = pool.data_ptr() + _scattered(num_fragments, size_bytes)
        began = perf_counter()
        copier.gather(addresses, np.full_like(addresses, size_bytes), buffer[: num_fragments * size_bytes])
        return perf_counter() - began

    def scatter(num_fragments: int, size_bytes: int) -> float:
        addresses = pool.data_ptr() + _scattered(num_fragments, size_bytes)
        began = perf_counter()
        copier.scatter(addresses, np.full_like(addresses, size_bytes), buffer[: num_fragments * size_bytes])
        return perf_counter() - began

    try:
        return calibrate(write, gather, scatter, total_bytes)
    finally:
        agent.deregister(region)


def _scattered(num_fragments: int, size_bytes: int) -> Int64s:
    return np.random.default_rng(0).permutation(num_fragments) * size_bytes
