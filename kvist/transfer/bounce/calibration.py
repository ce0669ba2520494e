"""Measures what a cost model needs, with the agents and the copies that transfers will use."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch

from kvist.errors import KvistError
from kvist.transfer.agents.base import Int64s, TransferAgent, WriteState
from kvist.transfer.bounce.copier import TorchCopier
from kvist.transfer.bounce.gate import CostModel, calibrate

_WRITE_TIMEOUT_S = 30.0


class CalibrationError(KvistError):
    """A write that was to be timed has not succeeded, so that nothing is known of its cost."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"costs of transfers cannot be measured: {reason}")
        self.reason = reason


def calibrate_agents(source: TransferAgent, target: TransferAgent, total_bytes: int = 8 << 20) -> CostModel:
    """Measure writes from one agent to another of this process, and copies in host memory; some tenths of a second.

    On one host that is what transfers cost; between hosts writes cost more, so that this bounces rather too seldom.
    Raises CalibrationError.
    """
    pools = [agent.allocate(total_bytes) for agent in (source, target)]
    regions = [agent.register(m.ctypes.data, total_bytes) for agent, m in zip((source, target), pools, strict=True)]
    peer = source.connect(target.metadata())
    pool = torch.from_numpy(pools[0])
    copier, buffer = TorchCopier([pool]), torch.empty(total_bytes, dtype=torch.uint8)

    def write(num_fragments: int, size_bytes: int) -> float:
        offsets = _scattered(num_fragments, size_bytes)
        rows = (pools[0].ctypes.data + offsets, pools[1].ctypes.data + offsets[::-1], np.full_like(offsets, size_bytes))
        began = perf_counter()
        transfer = source.write(peer, np.stack(rows, axis=1))
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
        source.disconnect(peer)
        for agent, region in zip((source, target), regions, strict=True):
            agent.deregister(region)


def _scattered(num_fragments: int, size_bytes: int) -> Int64s:
    return np.random.default_rng(0).permutation(num_fragments) * size_bytes
