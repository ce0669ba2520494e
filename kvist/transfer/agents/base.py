"""What every agent does: register memory, tell a peer of it, and write into a peer's in short steps."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import Annotated, Any, ClassVar, NewType, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError, KvistError, MalformedMessageError

PeerId = NewType("PeerId", str)

Write: TypeAlias = Generator[bool, None, None]
"""A write under way: each step yields whether it has moved bytes, and takes about a millisecond.

Once it ends, the peer can read every byte; it fails with a `WriteFailedError`. One that is thrown in asks it to end: it
may take some more steps, of its own bound.
"""

_IDLE_WAIT_S = 0.0002  # between looks at a library that moves the bytes by itself
Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
# What a peer may say: the end of any piece is still an int64.
Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]


@dataclass(slots=True)
class AgentStatistics:
    """What an agent has written since it began, and how many writes may still go on though they have ended."""

    num_fragments_written: int = 0
    bytes_written: int = 0
    num_abandoned: int = 0


class WriteFailedError(KvistError):
    """A write has ended early; unless it `is_quiescent`, it may still reach the peer's memory."""

    def __init__(self, reason: str, *, is_quiescent: bool = True) -> None:
        super().__init__(reason)
        self.is_quiescent = is_quiescent


def finish(write: Write) -> None:
    """Move a write on to its end; raises WriteFailedError."""
    for has_moved in write:
        if not has_moved:
            sleep(_IDLE_WAIT_S)


class PeerUnreachableError(KvistError):
    """A peer's memory cannot be reached from here: it has died, or lives on a host that the agent does not reach."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer!r} cannot be reached: {reason}")
        self.peer = peer
        self.reason = reason


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


def as_array(fragments: npt.ArrayLike) -> Int64s:
    """Return fragments as [num_fragments, 3]: addresses here and there, bytes; raises InvalidValueError for none."""
    array = np.asarray(fragments, dtype=np.int64)
    if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] != 3:
        raise InvalidValueError("fragments", array.shape, "at least one, each with two addresses and a size")
    if array[:, 2].min() < 1:
        raise InvalidValueError("size_bytes", int(array[:, 2].min()), "at least 1")
    return array


def allocate_pages(size_bytes: int, fd: int = -1) -> Bytes:
    """Return zeroed, page-aligned memory, of the file `fd` if one is given; it is freed with the last view of it."""
    if size_bytes < 1:
        raise InvalidValueError("size_bytes", size_bytes, "at least 1")
    return np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)


class TransferAgent(ABC):
    """Writes registered memory into a peer's registered memory, a step at a time, for whoever moves its writes on.

    Writes to one peer may overtake each other. A peer knows what was registered when `metadata` was called: connect
    again to tell it of more. For one thread at a time. What differs between agents is below: how memory is registered,
    how a peer is reached, and the steps of a write.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, *, write_timeout_s: float = 30.0) -> None:
        self.name = name
        self.is_closing = False
        """Once it is set, writes fail at their next step."""
        self._write_timeout_s = write_timeout_s
        self._regions: dict[int, Region] = {}
        self._table = RegionTable(f"agent {name!r}", ())
        self._peers: dict[PeerId, Any] = {}
        self._num_writing = 0
        self._counts = AgentStatistics()
        self._is_closed = False

    @abstractmethod
    def allocate(self, size_bytes: int) -> Bytes:
        """Return zeroed, page-aligned memory that can be registered; it lives as long as a view of it."""

    def register(self, address: int, size_bytes: int, device_idx: int | None = None) -> None:
        """Let peers write there, and write from there; `device_idx` is a GPU's. Raises InvalidValueError."""
        ends = [(each.address, each.address + each.size_bytes) for each in self._regions.values()]
        assert all(address >= end or address + size_bytes <= start for start, end in ends), "memory of no other region"
        self._register(address, size_bytes, device_idx)
        self._regions[address] = Region(address, size_bytes, device_idx)
        self._table = RegionTable(f"agent {self.name!r}", self._regions.values())

    def deregister(self, address: int) -> None:
        """Take a region back, to which nothing may be writing; raises InvalidValueError for one it does not have."""
        if self._regions.pop(address, None) is None:
            raise InvalidValueError("address", address, "that of a region that is registered")
        self._table = RegionTable(f"agent {self.name!r}", self._regions.values())
        self._deregister(address)

    def metadata(self) -> bytes:
        metadata = AgentMetadata(self.kind, self.name, tuple(self._regions.values()), self._details())
        return msgspec.msgpack.encode(metadata)

    def connect(self, metadata: bytes) -> PeerId:
        """Reach a peer, or learn of its new regions; raises MalformedMessageError or PeerUnreachableError."""
        decoded = decode_metadata(metadata, self.kind)
        peer_id = PeerId(decoded.name)
        self._peers[peer_id] = self._connect(decoded)
        return peer_id

    def write(self, peer: PeerId, fragments: npt.ArrayLike) -> Write:
        """Return a write. Raises InvalidValueError, before a byte moves, for a fragment outside registered memory.

        Local memory must stay as it is until the write has ended. It fails when it takes too long.
        """
        array = as_array(fragments)
        known = self._peers.get(peer)
        if known is None:
            raise InvalidValueError("peer", peer, "one that is connected")
        return self._watched(self._begin(peer, known, self._table, array), array)

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer, to which nothing may be being written; the same id can connect again."""
        if self._peers.pop(peer, None) is None:
            raise InvalidValueError("peer", peer, "one that is connected")
        self._disconnect(peer)

    def close(self) -> bool:
        """Let go of all memory, once; return whether nothing was left behind for writes that have not ended."""
        self.is_closing = True
        if not self._is_closed:
            self._is_closed = True
            if self._close(self._num_writing == 0):
                self._peers.clear()
                self._regions.clear()
                self._table = RegionTable(f"agent {self.name!r}", ())
        return not self._regions

    def statistics(self) -> AgentStatistics:
        return replace(self._counts)

    def _watched(self, write: Write, array: Int64s) -> Write:
        """Count a write, and have it end early when it takes too long or the agent closes."""
        deadline_s, is_ending = monotonic() + self._write_timeout_s, False
        self._num_writing += 1
        try:
            for has_moved in write:
                yield has_moved
                if not is_ending and (self.is_closing or monotonic() >= deadline_s):
                    is_ending = True
                    late = f"not written within {self._write_timeout_s} s"
                    write.throw(WriteFailedError("the agent is closing" if self.is_closing else late))
        except WriteFailedError as error:
            self._counts.num_abandoned += not error.is_quiescent
            raise
        finally:
            self._num_writing -= 1
        self._counts.num_fragments_written += len(array)
        self._counts.bytes_written += int(array[:, 2].sum())

    @abstractmethod
    def _register(self, address: int, size_bytes: int, device_idx: int | None) -> None:
        """Make memory ready to be written to and from; raises InvalidValueError."""

    def _deregister(self, address: int) -> None:  # noqa: B027
        """Undo `_register`; who has mapped the memory keeps it."""

    @abstractmethod
    def _details(self) -> bytes:
        """Return what only this kind of agent understands of its metadata."""

    @abstractmethod
    def _connect(self, metadata: AgentMetadata) -> Any:
        """Return what `_begin` wants to know of the peer, instead of what it knew; raises as `connect`."""

    def _disconnect(self, peer: PeerId) -> None:  # noqa: B027
        """Undo `_connect`; where writes hold on to what they need, that is nothing."""

    @abstractmethod
    def _begin(self, peer: PeerId, known: Any, table: RegionTable, array: Int64s) -> Write:
        """Return the bare steps of a write; raises InvalidValueError unless all of it is registered, here and there."""

    @abstractmethod
    def _close(self, has_ended: bool) -> bool:
        """Let go of all memory that no write can touch any more; `has_ended`: none is under way."""
