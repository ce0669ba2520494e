"""Writes between hosts, or processes of one host, through NIXL and its UCX backend, from host or GPU memory.

Only this module imports NIXL. Its traps, as of 1.5.1: posting a write takes 5 to 100 ms, longer for more fragments; a
target over TCP has to be polled, so the progress thread is on; `UCX_TLS` without tcp cannot connect, so it is refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from time import monotonic

import numpy as np

from kvist.errors import InvalidValueError, MissingExtraError
from kvist.transfer.agents import base
from kvist.transfer.agents.base import PeerId, Write, WriteFailedError

try:
    from nixl import _bindings
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
except ModuleNotFoundError as error:
    raise MissingExtraError("nixl", str(error.name)) from error

_DRAIN_S = 1.0  # how long a closing agent waits for a write under way
_logger = logging.getLogger(__name__)
# The bindings' errors have no common base class but Exception.
_NIXL_ERRORS = tuple(getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error"))


class NixlAgent(base.TransferAgent):
    """A `TransferAgent` over NIXL; `num_threads` is UCX's, None leaves its default."""

    kind = "nixl"

    def __init__(self, name: str, *, write_timeout_s: float = 30.0, num_threads: int | None = None) -> None:
        """Raise InvalidValueError for a `UCX_TLS` that cannot work."""
        check_ucx_transports(os.environ.get("UCX_TLS"))
        config = nixl_agent_config(
            enable_prog_thread=True,
            num_threads=num_threads or 0,
            backends=["UCX"],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent = nixl_agent(name, config)
        self._handles: dict[int, object] = {}
        super().__init__(name, write_timeout_s=write_timeout_s)

    def _register(self, address: int, size_bytes: int, device_idx: int | None) -> None:
        kind = "DRAM" if device_idx is None else "VRAM"
        try:
            self._handles[address] = self._agent.register_memory([(address, size_bytes, device_idx or 0, "")], kind)
        except _NIXL_ERRORS as error:
            got = f"{size_bytes} bytes at {address:#x}"
            raise InvalidValueError("address", got, f"{kind} that NIXL can register ({error})") from error

    def _deregister(self, address: int) -> None:
        try:
            self._agent.deregister_memory(self._handles.pop(address))
        except _NIXL_ERRORS as error:
            _logger.warning("memory could not be deregistered: agent=%s error=%s", self.name, error)

    def _details(self) -> bytes:
        details: bytes = self._agent.get_agent_metadata()
        return details

    def _connect(self, metadata: base.AgentMetadata) -> base.RegionTable:
        if self._peers.pop(PeerId(metadata.name), None) is not None:
            self._disconnect(PeerId(metadata.name))
        try:
            self._agent.add_remote_agent(metadata.details)
        except _NIXL_ERRORS as error:
            raise base.PeerUnreachableError(metadata.name, f"NIXL does not take its metadata ({error})") from error
        return base.RegionTable(f"peer {metadata.name!r}", metadata.regions)

    def _disconnect(self, peer: PeerId) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except _NIXL_ERRORS as error:
            _logger.warning("a peer could not be forgotten: peer=%s error=%s", peer, error)

    def _close(self, has_ended: bool) -> bool:
        """Deregister all memory, or log that none is because a write may still access it."""
        if not has_ended or self.num_abandoned:
            _logger.warning("memory stays registered: a write has not ended: agent=%s", self.name)
            return False
        for peer in self._peers:
            self._disconnect(peer)
        for address in list(self._handles):
            self._deregister(address)
        return True

    def _begin(self, peer: PeerId, known: base.RegionTable, table: base.RegionTable, array: base.Int64s) -> Write:
        local = _descriptors("local_address", table, array[:, 0], array[:, 2])
        return self._write(peer, local, _descriptors("remote_address", known, array[:, 1], array[:, 2]))

    def _write(self, peer: PeerId, local: tuple[str, base.Int64s], remote: tuple[str, base.Int64s]) -> Write:
        """Post one write of all descriptors and poll it; if it fails, ask NIXL to cancel it."""
        handle = None
        try:
            descriptors = (self._agent.get_xfer_descs(rows.astype(np.uint64), kind) for kind, rows in (local, remote))
            handle = self._agent.initialize_xfer("WRITE", *descriptors, peer)
            state = self._agent.transfer(handle)
            while state == "PROC":
                yield False
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise WriteFailedError(f"NIXL reports {state} for a write to {peer!r}")
            self._agent.release_xfer_handle(handle)
        except (WriteFailedError, *_NIXL_ERRORS) as error:
            reason = str(error) if isinstance(error, WriteFailedError) else f"writing to {peer!r}: {error}"
            _logger.warning("kv write is late or has failed: agent=%s reason=%s", self.name, reason)
            is_over = handle is None or (yield from self._drain(handle))
            raise WriteFailedError(reason, is_quiescent=is_over) from error

    def _drain(self, handle: object) -> Generator[bool, None, bool]:
        """Wait until a failed write is over, or the agent has been closing for a while; return whether it is over.

        NIXL cannot cancel bytes that are under way, and does not know a write any more once its handle was released.
        """
        closing_s: float | None = None
        is_pending = True
        try:
            while is_pending and (closing_s is None or monotonic() < closing_s + _DRAIN_S):
                is_pending = self._agent.check_xfer_state(handle) == "PROC"
                if closing_s is None and self.is_closing:
                    closing_s = monotonic()
                yield False
        except _NIXL_ERRORS as error:  # the peer is gone, and with it the write
            _logger.info("a write has no state any more: agent=%s error=%s", self.name, error)
            is_pending = False
        try:
            self._agent.release_xfer_handle(handle)
        except _NIXL_ERRORS as error:
            _logger.warning("a write could not be cancelled: agent=%s error=%s", self.name, error)
        return not is_pending


def check_ucx_transports(setting: str | None) -> None:
    """Raise InvalidValueError for a `UCX_TLS` that lacks tcp, over which UCX connects its other transports."""
    if setting is None or setting.startswith("^"):
        return
    if not {"all", "tcp"} & {name.strip() for name in setting.split(",")}:
        raise InvalidValueError("UCX_TLS", setting, "a list with tcp in it, or all")


def parse_num_threads(setting: str | None) -> int | None:
    """Return the number of UCX threads in a setting; anything but a positive integer is ignored, and logged."""
    if setting is None:
        return None
    try:
        num_threads = int(setting)
    except ValueError:
        num_threads = 0
    if num_threads < 1:
        _logger.warning("the number of NIXL threads is ignored, expected a positive integer: value=%r", setting)
        return None
    return num_threads


def _descriptors(
    field: str, table: base.RegionTable, addresses: base.Int64s, sizes: base.Int64s
) -> tuple[str, base.Int64s]:
    """Return the kind of memory, and rows of address, size and device; raises InvalidValueError for mixed kinds."""
    idx = table.find(field, addresses, sizes)
    devices = np.array([-1 if each.device_idx is None else each.device_idx for each in table.regions], np.int64)[idx]
    if devices.min() < 0 <= devices.max():
        raise InvalidValueError(field, "host and device memory", "one of both in a write")
    kind = "DRAM" if devices[0] < 0 else "VRAM"
    return kind, np.stack((addresses, sizes, np.maximum(devices, 0)), axis=1)
