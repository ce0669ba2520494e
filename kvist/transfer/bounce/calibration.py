"""Measures what a cost model needs: whole bounces beside writes of the same fragments, in memory that is cold."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter

import numpy as np
import torch

from kvist.errors import KvistError
from kvist.transfer.agents.base import Bytes, Int64s, PeerId, Transfer, TransferAgent, WriteState
from kvist.transfer.bounce.base import Outgoing
from kvist.transfer.bounce.bounce import RegionBounce
from kvist.transfer.bounce.copier import TensorRegion, TorchCopier, host_region
from kvist.transfer.bounce.gate import CostModel, Seconds, calibrate
from kvist.transfer.bounce.region import BounceConfig
from kvist.transfer.frames import (
    BounceTail,
    Extent,
    Result,
    ResultStatus,
    check_tail,
    decode_report,
    encode_report,
    plan_scatter,
)

_TIMEOUT_S = 30.0
_TOTAL_BYTES = 4 << 20
# Read before each measurement, so that nothing of it lies in a cache: twice the largest one where this was tried. From
# 8 MiB that did, a gather of 64 MiB was predicted to take 0.45 of what it took, a scatter 0.6, a write of pieces 0.64
# (4 KiB, shared memory, 2 x AMD EPYC, 2026-11-21).
_SWEPT_BYTES = 64 << 20


class CalibrationError(KvistError):
    """A write that was to be timed has not succeeded, so that nothing is known of its cost."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"costs of transfers cannot be measured: {reason}")
        self.reason = reason


class _End:
    """An agent with a pool, and a bounce that is never asked whether it pays."""

    def __init__(self, agent: TransferAgent, total_bytes: int, exits: ExitStack) -> None:
        self.agent = agent
        self.pool: Bytes = agent.allocate(2 * total_bytes)
        self.pool[:] = 0  # every page is there before anything is timed
        exits.callback(agent.deregister, agent.register(self.pool.ctypes.data, len(self.pool)))
        copier = TorchCopier([torch.from_numpy(self.pool)])
        self.bounce = RegionBounce(agent, copier, self._region, None, BounceConfig())
        exits.callback(self.bounce.close)

    def _region(self) -> TensorRegion:
        region = host_region(self.agent, len(self.pool))
        region.part(0, region.size_bytes).zero_()
        return region

    def addresses(self, num_fragments: int, size_bytes: int, seed: int) -> tuple[Int64s, Int64s]:
        """Return two sets of places in the pool, in no order, that share none."""
        places = np.random.default_rng(seed).permutation(len(self.pool) // size_bytes) * size_bytes
        first, second = np.split(self.pool.ctypes.data + places[: 2 * num_fragments], 2)
        return first, second


class _Pair:
    """Two ends, one of which writes to the other."""

    def __init__(self, source: _End, target: _End, peer: PeerId) -> None:
        self._source, self._target, self._peer = source, target, peer
        self._swept = np.ones(_SWEPT_BYTES // 8, np.int64)

    def measure(self, num_fragments: int, size_bytes: int) -> Seconds:
        """Move fragments both ways, none of them twice, out of cold memory into cold memory."""
        sources = self._source.addresses(num_fragments, size_bytes, 0)
        targets = self._target.addresses(num_fragments, size_bytes, 1)
        sizes = np.full(num_fragments, size_bytes, np.int64)
        written, bounced = (np.stack((*ends, sizes), axis=1) for ends in zip(sources, targets, strict=True))
        self._swept.sum()
        return Seconds(self._write(written), *self._bounce(bounced))

    def _write(self, fragments: Int64s) -> float:
        began_s = perf_counter()
        _wait(self._source.agent.write(self._peer, fragments))
        return perf_counter() - began_s

    def _bounce(self, fragments: Int64s) -> tuple[float, float]:
        size_bytes = int(fragments[:, 2].sum())
        began_s = perf_counter()
        lease = self._target.bounce.reserve(size_bytes, len(fragments))
        assert lease is not None
        outgoing = self._source.bounce.send(self._peer, fragments, lease.extents[0].base)
        assert outgoing is not None
        _wait(outgoing)
        sent_s = perf_counter()
        blocks = fragments[np.argsort(fragments[:, 1]), 1:]
        tail = _told(outgoing.tail, size_bytes, lease.extents[0], blocks)
        scattering = self._target.bounce.scatter(lease, plan_scatter([tail]))
        if not scattering.wait(_TIMEOUT_S) or scattering.error is not None:
            raise CalibrationError(scattering.error or f"not scattered within {_TIMEOUT_S} s")
        self._target.bounce.release(lease)
        return sent_s - began_s, perf_counter() - sent_s


def calibrate_agents(source: TransferAgent, target: TransferAgent, total_bytes: int = _TOTAL_BYTES) -> CostModel:
    """Measure from one agent of this process to another, in host memory; about a second. Raises CalibrationError.

    Peers on other hosts may cost more: this knows nothing of a network.
    """
    with ExitStack() as exits:
        ends = (_End(source, total_bytes, exits), _End(target, total_bytes, exits))
        peer = source.connect(target.metadata())
        exits.callback(source.disconnect, peer)
        return calibrate(_Pair(*ends, peer).measure, total_bytes)


def _told(tail: BounceTail, size_bytes: int, region: Extent, blocks: Int64s) -> BounceTail:
    """Return the tail as the receiver gets it: sent, and checked, which costs something for each fragment."""
    frames = encode_report(Result(0, 0, 0, True, ResultStatus.SUCCESS, size_bytes), tail)
    told = decode_report(frames, "calibration").tail
    assert told is not None
    check_tail(told, size_bytes, region, blocks, "calibration")
    return told


def _wait(write: Transfer | Outgoing) -> None:
    if not write.wait(_TIMEOUT_S) or write.state is not WriteState.DONE:
        raise CalibrationError(write.reason or f"not written within {_TIMEOUT_S} s")
