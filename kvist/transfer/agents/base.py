"""What every agent does: register memory, tell a peer of it, and write into a peer's, without blocking the caller."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple, NewType, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError, KvistError, MalformedMessageError

RegionId = NewType("RegionId", int)
PeerId = NewType("PeerId", str)
Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
# What a peer may say: the end of any piece is still an int64.
Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]


class Fragment(NamedTuple):
    """One contiguous piece of a write: where it lies here, and where it belongs at the peer."""

    local_address: int
    remote_address: int
    size_bytes: int


Fragments: TypeAlias = Sequence[Fragment] | Int64s  # or an array [num_fragments, 3] with the columns of a Fragment


class WriteState(Enum):
    """How far a write is. Only an abandoned one may still reach the peer's memory after it has ended."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"


class PeerUnreachableError(KvistError):
    """A peer's memory cannot be reached from here: it has died, or lives on a host that the agent does not reach."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer!r} cannot be reached: {reason}")
        self.peer = peer
        self.reason = reason


class Transfer:
    """A write under way: `state` is polled and never goes back; DONE means that the peer can read every byte."""

    __slots__ = ("_callbacks", "_ended", "_lock", "num_fragments", "reason", "size_bytes", "state")

    def __init__(self, num_fragments: int, size_bytes: int) -> None:
        self.num_fragments = num_fragments
        self.size_bytes = size_bytes
        self.state = WriteState.PENDING
        self.reason: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def end(self, state: WriteState, reason: str | None = None) -> None:
        """Leave PENDING, once: for the agent alone."""
        with self._lock:
            assert self.state is WriteState.PENDING
            self.reason = reason
            self.state = state
        self._ended.set()
        for callback in self._callbacks:
            callback()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call once it has ended, from the agent's thread, or now if it has: it must neither wait nor raise."""
        with self._lock:
            if self.state is WriteState.PENDING:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, at the latest after `timeout_s`: off the loop."""
        return self._ended.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class AgentStatistics:
    """What an agent has written since it began, and what it would not or could not."""

    num_written: int = 0
    num_fragments_written: int = 0
    bytes_written: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    num_rejected: int = 0
    num_pending: int = 0


class TransferAgent(Protocol):
    """Writes registered memory into a peer's registered memory.

    Writes to one peer may overtake each other. A peer knows what was registered when `metadata` was called: connect
    again to tell it of more. Safe to call from several threads; only `close` waits.
    """

    name: str

    def allocate(self, size_bytes: int) -> Bytes:
        """Return zeroed, page-aligned memory that can be registered; it lives as long as a view of it."""
        ...

    def register(self, address: int, size_bytes: int, device_idx: int | None = None) -> RegionId:
        """Let peers write there, and write from there; `device_idx` is a GPU's. Raises InvalidValueError."""
        ...

    def deregister(self, region: RegionId) -> None:
        """Take a region back, once; nothing may be writing to it. Raises InvalidValueError for one it does not have."""
        ...

    def metadata(self) -> bytes:
        """Return what a peer needs to connect."""
        ...

    def connect(self, metadata: bytes) -> PeerId:
        """Reach a peer, or learn of its new regions; raises MalformedMessageError or PeerUnreachableError."""
        ...

    def write(self, peer: PeerId, fragments: Fragments) -> Transfer:
        """Begin a write. Raises InvalidValueError, before a byte moves, for a fragment outside registered memory.

        Local memory must stay as it is until the transfer has ended. A full queue rejects: the transfer has FAILED.
        """
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; writes to it that are under way fail, and the same id can connect again.

        What one of these has under way in a network may still land: where that matters, let them end first.
        """
        ...

    def close(self, timeout_s: float = 2.0) -> bool:
        """End every write, then let go of all memory; once. Return whether nothing was left behind at the timeout."""
        ...

    def statistics(self) -> AgentStatistics:
        """Return the counters."""
        ...


class Region(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A registered piece of memory, as a peer is told of it; `device_idx` is None in a host's memory."""

    address: Address
    size_bytes: Size
    device_idx: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] | None = None


class AgentMetadata(msgspec.Struct, array_like=True, frozen=True):
    """What one agent tells another: its kind, its name, its regions, and what only its kind understands."""

    kind: str
    name: str
    regions: tuple[Region, ...]
    details: bytes


_decoder = msgspec.msgpack.Decoder(AgentMetadata)


def decode_metadata(metadata: bytes, kind: str) -> AgentMetadata:
    """Return a peer's metadata; raises MalformedMessageError for broken bytes or another kind of agent."""
    try:
        decoded = _decoder.decode(metadata)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("an agent", f"its metadata: {error}") from error
    if decoded.kind != kind:
        raise MalformedMessageError(f"agent {decoded.name!r}", f"it is of kind {decoded.kind!r}, expected {kind!r}")
    return decoded


class RegionTable:
    """Which addresses may be touched: a fragment must lie in one region, also where two regions touch."""

    def __init__(self, owner: str, regions: Iterable[Region]) -> None:
        self._owner = owner
        self._regions = sorted(regions, key=lambda region: region.address)
        self._bases = np.array([region.address for region in self._regions], np.int64)
        self._ends = np.array([region.address + region.size_bytes for region in self._regions], np.int64)
        self._devices = np.array([region.device_idx or 0 for region in self._regions], np.int64)
        self._is_device = np.array([region.device_idx is not None for region in self._regions], np.bool_)

    def find(self, field: str, addresses: Int64s, sizes: Int64s) -> Int64s:
        """Return each piece's region; raises InvalidValueError, naming the first that is in none."""
        if not self._regions:
            raise InvalidValueError(
                field, int(addresses[0]), f"an address within a region of {self._owner}: it has none"
            )
        idx = np.searchsorted(self._bases, addresses, side="right") - 1
        is_outside = (idx < 0) | (addresses > self._ends[idx] - sizes)
        if is_outside.any():
            first = int(is_outside.argmax())
            known = ", ".join(f"{r.address:#x}..{r.address + r.size_bytes:#x}" for r in self._regions[:8])
            more = f" and {len(self._regions) - 8} more" if len(self._regions) > 8 else ""
            got = f"{sizes[first]} bytes at {addresses[first]:#x}"
            raise InvalidValueError(field, got, f"within one region of {self._owner}: {known}{more}")
        return idx

    def devices_of(self, field: str, idx: Int64s) -> tuple[bool, Int64s]:
        """Return whether the pieces lie in devices' memory, and in which; raises InvalidValueError if only some do."""
        is_device = self._is_device[idx]
        if is_device.any() and not is_device.all():
            raise InvalidValueError(field, "host and device memory", "one of both in a write")
        return bool(is_device[0]), self._devices[idx]


def as_array(fragments: Fragments) -> Int64s:
    """Return the fragments as an array [num_fragments, 3]; raises InvalidValueError for none, or an empty one."""
    array = np.asarray(fragments, dtype=np.int64)
    if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] != 3:
        raise InvalidValueError("fragments", array.shape, "at least one, each with two addresses and a size")
    if array[:, 2].min() < 1:
        raise InvalidValueError("size_bytes", int(array[:, 2].min()), "at least 1")
    return array


def check_region(address: int, size_bytes: int, regions: Iterable[Region]) -> None:
    """Raise InvalidValueError for an empty region, or one that overlaps another."""
    if size_bytes < 1:
        raise InvalidValueError("size_bytes", size_bytes, "at least 1")
    for region in regions:
        if address < region.address + region.size_bytes and region.address < address + size_bytes:
            raise InvalidValueError(
                "address", f"{size_bytes} bytes at {address:#x}", f"no overlap with the region at {region.address:#x}"
            )


def allocate_pages(size_bytes: int, fd: int = -1) -> Bytes:
    """Return zeroed, page-aligned memory, of the file `fd` if one is given; it is freed with the last view of it."""
    if size_bytes < 1:
        raise InvalidValueError("size_bytes", size_bytes, "at least 1")
    return np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
