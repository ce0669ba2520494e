"""Writes between processes of one host by copying into the peer's memory, which this process maps as well.

Memory is an anonymous file of its owner; a peer opens it through the owner's descriptor in /proc. So both must run as
the same user and see each other's process ids. Nothing is left behind when a process dies, however it dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
from typing import Annotated

import msgspec
import numpy as np

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.agents import base
from kvist.transfer.agents.base import PeerId, Write, WriteFailedError

# Only files of this name are mapped, so that a write never changes another file of the user.
_FILE_PREFIX = "kvist-"

# A write checks its peer and lets other writes run after this much: less than a millisecond of copying.
_STEP_BYTES = 4 << 20
_STEP_FRAGMENTS = 256


class _File(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The file behind a region, by its owner's descriptor."""

    fd: Annotated[int, msgspec.Meta(ge=0)]
    inode: int


class _Details(msgspec.Struct, array_like=True, frozen=True):
    """The owner's process, and a file for each region."""

    pid: int
    files: tuple[_File, ...]


_details_decoder = msgspec.msgpack.Decoder(_Details)


class _Peer:
    """A peer's mapped memory, and a descriptor that shows whether its process has ended; freed with its last user."""

    def __init__(self, metadata: base.AgentMetadata, details: _Details) -> None:
        self.name = metadata.name
        if len(details.files) != len(metadata.regions):
            reason = f"{len(details.files)} files, expected one for each of {len(metadata.regions)} regions"
            raise MalformedMessageError(f"agent {self.name!r}", reason)
        if _is_this_process(details.pid):  # the peer would make us write into our own memory
            raise base.PeerUnreachableError(self.name, f"process {details.pid} is this one")
        try:
            self._pidfd = os.pidfd_open(details.pid)
        except (OSError, ValueError, OverflowError) as error:
            raise base.PeerUnreachableError(self.name, f"no process {details.pid} here ({error})") from error
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        places = sorted(zip(metadata.regions, details.files, strict=True), key=lambda place: place[0].address)
        self._table = base.RegionTable(f"peer {self.name!r}", [region for region, _ in places])
        self._mappings = [self._map(details.pid, file, region.size_bytes) for region, file in places]
        self._offsets = np.array(
            [m.ctypes.data - region.address for m, (region, _) in zip(self._mappings, places, strict=True)], np.int64
        )
        # If the process is alive now, its id was not reused while its files were opened.
        if self.has_died():
            raise base.PeerUnreachableError(self.name, f"process {details.pid} has died")

    def __del__(self) -> None:
        """Close the descriptor, which a constructor that failed may not have opened."""
        if hasattr(self, "_pidfd"):
            os.close(self._pidfd)

    def has_died(self) -> bool:
        return bool(self._poll.poll(0))

    def local_addresses(self, remote: base.Int64s, sizes: base.Int64s) -> base.Int64s:
        """Return the local addresses of pieces at the peer; raises InvalidValueError for one outside its regions."""
        return remote + self._offsets[self._table.find("remote_address", remote, sizes)]

    def _map(self, pid: int, file: _File, size_bytes: int) -> base.Bytes:
        try:
            fd = os.open(f"/proc/{pid}/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise base.PeerUnreachableError(self.name, f"its memory cannot be opened ({error})") from error
        try:
            status = os.fstat(fd)
            is_memory = os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_FILE_PREFIX}")
            is_fixed = is_memory and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_fixed or status.st_ino != file.inode or status.st_size < size_bytes:
                raise base.PeerUnreachableError(self.name, f"descriptor {file.fd} of process {pid} is not its memory")
            return base.allocate_pages(size_bytes, fd)
        except (OSError, ValueError) as error:
            raise base.PeerUnreachableError(self.name, f"its memory cannot be mapped ({error})") from error
        finally:
            os.close(fd)


class SharedMemoryAgent(base.TransferAgent):
    """A `TransferAgent` for processes of one host and user; it needs no extra, and writes host memory only."""

    kind = "shared_memory"

    def __init__(self, name: str, *, write_timeout_s: float = 30.0) -> None:
        super().__init__(name, write_timeout_s=write_timeout_s)
        self._allocations: dict[int, tuple[_File, base.Bytes]] = {}

    def allocate(self, size_bytes: int) -> base.Bytes:
        """Return memory that a peer can map; the agent keeps it until it is closed."""
        fd = os.memfd_create(f"{_FILE_PREFIX}{self.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(size_bytes, 0))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or a peer that writes could be killed by it
            memory = base.allocate_pages(size_bytes, fd)
        except BaseException:
            os.close(fd)
            raise
        address = memory.ctypes.data
        self._allocations[address] = (_File(fd, os.fstat(fd).st_ino), memory)
        return memory

    def _register(self, address: int, size_bytes: int, device_idx: int | None) -> None:
        if device_idx is not None:
            raise InvalidValueError("device_idx", device_idx, "None: shared memory is the host's")
        _, memory = self._allocations.get(address, (None, ()))
        if len(memory) != size_bytes:
            got = f"{size_bytes} bytes at {address:#x}"
            raise InvalidValueError("address", got, f"all of what {self.name!r} allocated there")

    def _details(self) -> bytes:
        files = tuple(self._allocations[region.address][0] for region in self._regions.values())
        return msgspec.msgpack.encode(_Details(os.getpid(), files))

    def _connect(self, metadata: base.AgentMetadata) -> _Peer:
        try:
            details = _details_decoder.decode(metadata.details)
        except (ValueError, RecursionError) as error:
            raise MalformedMessageError(f"agent {metadata.name!r}", f"its files: {error}") from error
        return _Peer(metadata, details)

    def _begin(self, peer: PeerId, known: _Peer, table: base.RegionTable, array: base.Int64s) -> Write:  # noqa: ARG002
        table.find("local_address", array[:, 0], array[:, 2])
        return _copy(known, known.local_addresses(array[:, 1], array[:, 2]), array)

    def _close(self, has_ended: bool) -> bool:
        """Close all files; peers keep what they have mapped, so late writes do no harm."""
        for file, _ in self._allocations.values():
            os.close(file.fd)
        if has_ended:
            self._allocations.clear()
        return has_ended


def _is_this_process(pid: int) -> bool:
    return pid == os.getpid()


def _copy(peer: _Peer, targets: base.Int64s, fragments: base.Int64s) -> Write:
    """Copy in steps; check between them and at the end that the peer still lives."""
    rows = zip(targets.tolist(), fragments[:, 0].tolist(), fragments[:, 2].tolist(), strict=True)
    num_bytes = num_fragments = 0
    for row in rows:
        target, source, size = row
        while size:
            piece = min(size, _STEP_BYTES - num_bytes)
            ctypes.memmove(target, source, piece)
            target, source, size = target + piece, source + piece, size - piece
            num_bytes += piece
            num_fragments += 1
            if num_bytes == _STEP_BYTES or num_fragments == _STEP_FRAGMENTS:
                num_bytes = num_fragments = 0
                if peer.has_died():
                    raise WriteFailedError(f"peer {peer.name!r} has died")
                yield True
    if peer.has_died():
        raise WriteFailedError(f"peer {peer.name!r} has died")
