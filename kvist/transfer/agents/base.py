"""The interface of all agents: register memory, describe it to peers, and write into a peer's in short steps."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from time import monotonic, sleep
from typing import Annotated, Any, ClassVar, NewType, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError, KvistError, MalformedMessageError

PeerId = NewType("PeerId", str)

Write: TypeAlias = Generator[bool, None, None]
"""A write as a generator: each step takes about a millisecond, and yields whether it has moved bytes.

When it ends, the peer can read every byte; it fails with a `WriteFailedError`. Throwing one into it asks it to end, for
which it may take a bounded number of further steps.
"""

_IDLE_WAIT_S = 0.0002  # between polls of a library that moves the bytes by itself
Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
# Bounds for values from peers: the end of any piece is still an int64.
Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]


class WriteFailedError(KvistError):
    """A write has failed; unless it `is_quiescent`, it may still reach the peer's memory."""

    def __init__(self, reason: str, *, is_quiescent: bool = True) -> None:
        super().__init__(reason)
        self.is_quiescent = is_quiescent


def finish(write: Write) -> None:
    """Run a write to its end; raises WriteFailedError."""
    for has_moved in write:
        if not has_moved:
            sleep(_IDLE_WAIT_S)


class PeerUnreachableError(KvistError):
    """A peer's memory cannot be reached: its process has died, or is on a host that the agent does not reach."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer!r} cannot be reached: {reason}")
        self.peer = peer
        self.reason = reason


class Region(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A registered piece of memory, as peers see it; `device_idx` is None for a host's memory."""

    address: Address
    size_bytes: Size
    device_idx: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] | None = None


class AgentMetadata(msgspec.Struct, array_like=True, frozen=True):
    """What an agent sends to peers: kind, name, regions, and details that only its kind understands."""

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
    """Regions by address; each piece of memory must lie within one of them, also where two adjoin."""

    def __init__(self, owner: str, regions: Iterable[Region]) -> None:
        self._owner = owner
        self.regions = sorted(regions, key=lambda region: region.address)
        self._bases = np.array([region.address for region in self.regions], np.int64)
        self._ends = np.array([region.address + region.size_bytes for region in self.regions], np.int64)

    def find(self, field: str, addresses: Int64s, sizes: Int64s) -> Int64s:
        """Return the index of each piece's region; raises InvalidValueError, naming the first piece that is in none."""
        if not self.regions:
            raise InvalidValueError(
                field, int(addresses[0]), f"an address within a region of {self._owner}: it has none"
            )
        idx = np.searchsorted(self._bases, addresses, side="right") - 1
        is_outside = (idx < 0) | (addresses > self._ends[idx] - sizes)
        if is_outside.any():
            first = int(is_outside.argmax())
            known = ", ".join(f"{r.address:#x}..{r.address + r.size_bytes:#x}" for r in self.regions[:8])
            more = f" and {len(self.regions) - 8} more" if len(self.regions) > 8 else ""
            got = f"{sizes[first]} bytes at {addresses[first]:#x}"
            raise InvalidValueError(field, got, f"within one region of {self._owner}: {known}{more}")
        return idx


def allocate_pages(size_bytes: int, fd: int = -1) -> Bytes:
    """Return zeroed, page-aligned memory, mapped from the file `fd` if given; it is freed with its last view."""
    if size_bytes < 1:
        raise InvalidValueError("size_bytes", size_bytes, "at least 1")
    return np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)


class TransferAgent(ABC):
    """Writes registered memory into a peer's registered memory; the caller advances each write step by step.

    Writes to one peer may overtake each other. A peer knows the regions that were registered when `metadata` was
    called; regions registered later need another `connect`. For one thread at a time. Subclasses implement how memory
    is registered, how a peer is reached, and the steps of a write.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, *, write_timeout_s: float = 30.0) -> None:
        self.name = name
        self.is_closing = False
        """Set it to make writes fail at their next step."""
        self._write_timeout_s = write_timeout_s
        self._regions: dict[int, Region] = {}
        self._peers: dict[PeerId, Any] = {}
        self._num_writing = 0
        self.num_fragments_written = self.bytes_written = 0
        self.num_abandoned = 0
        """Writes that have failed here, but may still reach a peer."""
        self._is_closed = False

    def allocate(self, size_bytes: int) -> Bytes:
        """Return zeroed, page-aligned host memory that can be registered; it lives as long as a view of it."""
        return allocate_pages(size_bytes)

    def register(self, address: int, size_bytes: int, device_idx: int | None = None) -> None:
        """Allow writes from and to this memory; `device_idx` is a GPU's. Raises InvalidValueError."""
        ends = [(each.address, each.address + each.size_bytes) for each in self._regions.values()]
        assert all(address >= end or address + size_bytes <= start for start, end in ends), "memory of no other region"
        self._register(address, size_bytes, device_idx)
        self._regions[address] = Region(address, size_bytes, device_idx)

    def deregister(self, address: int) -> None:
        """Undo `register` for a region that no write uses; raises InvalidValueError if it is not registered."""
        if self._regions.pop(address, None) is None:
            raise InvalidValueError("address", address, "that of a region that is registered")
        self._deregister(address)

    def metadata(self) -> bytes:
        metadata = AgentMetadata(self.kind, self.name, tuple(self._regions.values()), self._details())
        return msgspec.msgpack.encode(metadata)

    def connect(self, metadata: bytes) -> PeerId:
        """Connect to a peer, or update its regions; raises MalformedMessageError or PeerUnreachableError."""
        decoded = decode_metadata(metadata, self.kind)
        peer_id = PeerId(decoded.name)
        self._peers[peer_id] = self._connect(decoded)
        return peer_id

    def write(self, peer: PeerId, fragments: npt.ArrayLike) -> Write:
        """Return a write of fragments, `[num_fragments, 3]`: address here, address at the peer, bytes.

        Raises InvalidValueError, before a byte moves, unless all fragments lie in registered memory. Local memory must
        not change until the write has ended. A write that takes too long fails.
        """
        array = np.asarray(fragments, dtype=np.int64)
        if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] != 3:
            raise InvalidValueError("fragments", array.shape, "at least one, each with two addresses and a size")
        if array[:, 2].min() < 1:
            raise InvalidValueError("size_bytes", int(array[:, 2].min()), "at least 1")
        known = self._peers.get(peer)
        if known is None:
            raise InvalidValueError("peer", peer, "one that is connected")
        table = RegionTable(f"agent {self.name!r}", self._regions.values())
        return self._with_deadline(self._begin(peer, known, table, array), array)

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer, if it is known, to which no write is under way; the same id can connect again."""
        if self._peers.pop(peer, None) is not None:
            self._disconnect(peer)

    def close(self) -> bool:
        """Release all memory, once; return False if some was kept for writes that have not ended."""
        self.is_closing = True
        if not self._is_closed:
            self._is_closed = True
            if self._close(self._num_writing == 0):
                self._peers.clear()
                self._regions.clear()
        return not self._regions

    def _with_deadline(self, write: Write, array: Int64s) -> Write:
        """Run a write, make it fail when it takes too long or the agent closes, and count it."""
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
            self.num_abandoned += not error.is_quiescent
            raise
        finally:
            self._num_writing -= 1
        self.num_fragments_written += len(array)
        self.bytes_written += int(array[:, 2].sum())

    @abstractmethod
    def _register(self, address: int, size_bytes: int, device_idx: int | None) -> None:
        """Prepare memory for writes from and to it; raises InvalidValueError."""

    def _deregister(self, address: int) -> None:  # noqa: B027
        """Undo `_register`; peers that have mapped the memory keep it."""

    @abstractmethod
    def _details(self) -> bytes:
        """Return the part of the metadata that only this kind of agent understands."""

    @abstractmethod
    def _connect(self, metadata: AgentMetadata) -> Any:
        """Return the peer's state for `_begin`, which replaces an earlier one; raises as `connect` does."""

    def _disconnect(self, peer: PeerId) -> None:  # noqa: B027
        """Undo `_connect`, if there is anything to undo."""

    @abstractmethod
    def _begin(self, peer: PeerId, known: Any, table: RegionTable, array: Int64s) -> Write:
        """Return a write without deadline; raises InvalidValueError unless all memory is registered on both sides."""

    @abstractmethod
    def _close(self, has_ended: bool) -> bool:
        """Release memory, and return whether all could be; `has_ended` is whether no write is under way."""
