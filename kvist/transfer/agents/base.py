"""What every agent does: register memory, tell a peer of it, and write into a peer's, without blocking the caller."""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Annotated, Any, ClassVar, NewType, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError, KvistError, MalformedMessageError

PeerId = NewType("PeerId", str)

# A step yields whether bytes moved. The end of the generator is the end of the write; WriteFailedError is its failure.
# One that is thrown in asks it to end: it may take some more steps, of its own bound.
Steps: TypeAlias = Generator[bool, None, None]

MAX_PENDING_WRITES = 1024
_IDLE_WAIT_S = 0.0002  # between polls of a library that moves the bytes by itself
RegionId = NewType("RegionId", int)
Bytes: TypeAlias = npt.NDArray[np.uint8]
# What a peer may say: the end of any piece is still an int64.
Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]


Write: TypeAlias = Future[None]
"""A write under way: once it has a result, the peer can read every byte; it fails with a `WriteFailedError`.

Those who are told that it has ended are told on the agent's thread, and must neither wait nor raise.
"""


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


@dataclass(slots=True, eq=False)
class _Running:
    peer: PeerId
    num_fragments: int
    size_bytes: int
    steps: Steps
    deadline_s: float
    failure: str | None = None
    is_ending: bool = False
    write: Write = field(default_factory=Future)


class WriteThread:
    """Moves up to `MAX_PENDING_WRITES` along; one that is submitted beyond that has failed."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._writes: list[_Running] = []
        self.is_closing = False
        self._counts = AgentStatistics()
        self._thread = threading.Thread(target=self._run, name=f"writes of {name}", daemon=True)
        self._thread.start()

    def submit(self, peer: PeerId, num_fragments: int, size_bytes: int, steps: Steps) -> Write:
        """Begin a write; it has failed already if there are too many or the agent is closed."""
        running = _Running(peer, num_fragments, size_bytes, steps, monotonic() + self._timeout_s)
        with self._changed:
            if not self.is_closing and len(self._writes) < MAX_PENDING_WRITES:
                self._writes.append(running)
                self._changed.notify()
                return running.write
            reason = "the agent is closed" if self.is_closing else f"{len(self._writes)} writes are pending already"
        running.write.set_exception(WriteFailedError(reason))
        return running.write

    def fail_peer(self, peer: PeerId, reason: str) -> None:
        """Make every write to a peer that is under way fail at its next step."""
        with self._changed:
            for running in self._writes:
                if running.peer == peer:
                    running.failure = reason
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Fail what is under way; return whether the thread has ended in time. A second call only waits."""
        with self._changed:
            self.is_closing = True
            for running in self._writes:
                running.failure = "the agent is closing"
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> AgentStatistics:
        with self._changed:
            return replace(self._counts)

    def _run(self) -> None:
        try:
            self._move_all()
        finally:
            with self._changed:
                self.is_closing = True
                left = list(self._writes)
            for running in left:  # only after a defect: nobody waits for ever
                self._end(running, WriteFailedError("the thread that writes has failed", is_quiescent=False))

    def _move_all(self) -> None:
        has_moved = True
        while True:
            with self._changed:
                if self._writes and not has_moved:
                    self._changed.wait(_IDLE_WAIT_S)
                while not self._writes:
                    if self.is_closing:
                        return
                    self._changed.wait()
                writes = list(self._writes)
            has_moved = False
            for running in writes:
                has_moved |= self._step(running)

    def _step(self, running: _Running) -> bool:
        """Move a write on, or out; return whether anything has happened."""
        failure = running.failure
        if failure is None and monotonic() >= running.deadline_s:
            failure = f"not written within {self._timeout_s} s"
        try:
            if failure is None or running.is_ending:
                return next(running.steps)
            running.is_ending = True
            return running.steps.throw(WriteFailedError(failure))
        except StopIteration:
            self._end(running, None)
        except WriteFailedError as error:
            self._end(running, error)
        return True

    def _end(self, running: _Running, error: WriteFailedError | None) -> None:
        with self._changed:
            self._writes.remove(running)
            if error is None:
                self._counts.num_fragments_written += running.num_fragments
                self._counts.bytes_written += running.size_bytes
            else:
                self._counts.num_abandoned += not error.is_quiescent
        if error is None:
            running.write.set_result(None)
        else:
            running.write.set_exception(error.with_traceback(None))  # whose frames would keep the peer's memory


Int64s: TypeAlias = npt.NDArray[np.int64]


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


class TransferAgent(ABC):
    """Writes registered memory into a peer's registered memory.

    Writes to one peer may overtake each other. A peer knows what was registered when `metadata` was called: connect
    again to tell it of more. Safe to call from several threads; only `close` waits. What differs between agents is
    below: how memory is registered, how a peer is reached, and the steps of a write.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, *, write_timeout_s: float = 30.0) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._regions: dict[RegionId, Region] = {}
        self._num_registered = 0
        self._table = RegionTable(f"agent {name!r}", ())
        self._peers: dict[PeerId, Any] = {}
        self._is_closed = False
        self._thread = WriteThread(name, write_timeout_s)

    @abstractmethod
    def allocate(self, size_bytes: int) -> Bytes:
        """Return zeroed, page-aligned memory that can be registered; it lives as long as a view of it."""

    def register(self, address: int, size_bytes: int, device_idx: int | None = None) -> RegionId:
        """Let peers write there, and write from there; `device_idx` is a GPU's. Raises InvalidValueError."""
        with self._lock:
            check_region(address, size_bytes, self._regions.values())
            region_id = RegionId(self._num_registered)
            self._register(region_id, address, size_bytes, device_idx)
            self._num_registered += 1
            self._regions[region_id] = Region(address, size_bytes, device_idx)
            self._table = RegionTable(f"agent {self.name!r}", self._regions.values())
            return region_id

    def deregister(self, region: RegionId) -> None:
        """Take a region back, to which nothing may be writing; raises InvalidValueError for one it does not have."""
        with self._lock:
            if self._regions.pop(region, None) is None:
                raise InvalidValueError("region", region, "one that is registered")
            self._table = RegionTable(f"agent {self.name!r}", self._regions.values())
            self._deregister(region)

    def metadata(self) -> bytes:
        with self._lock:
            metadata = AgentMetadata(self.kind, self.name, tuple(self._regions.values()), self._details())
            return msgspec.msgpack.encode(metadata)

    def connect(self, metadata: bytes) -> PeerId:
        """Reach a peer, or learn of its new regions; raises MalformedMessageError or PeerUnreachableError."""
        decoded = decode_metadata(metadata, self.kind)
        peer_id = PeerId(decoded.name)
        with self._lock:
            self._peers[peer_id] = self._connect(decoded)
        return peer_id

    def write(self, peer: PeerId, fragments: npt.ArrayLike) -> Write:
        """Begin a write. Raises InvalidValueError, before a byte moves, for a fragment outside registered memory.

        Local memory must stay as it is until the write has ended. A full queue rejects: the write has failed.
        """
        array = as_array(fragments)
        with self._lock:
            known, table = self._peers.get(peer), self._table
        if known is None:
            raise InvalidValueError("peer", peer, "one that is connected")
        steps = self._begin(peer, known, table, array)
        return self._thread.submit(peer, len(array), int(array[:, 2].sum()), steps)

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; writes to it fail, but may still land in a network. The same id can connect again."""
        with self._lock:
            if self._peers.pop(peer, None) is None:
                raise InvalidValueError("peer", peer, "one that is connected")
            self._thread.fail_peer(peer, "disconnected")
            self._disconnect(peer)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End every write, then let go of all memory; once. Return whether nothing was left behind at the timeout."""
        has_ended = self._thread.close(timeout_s)
        with self._lock:
            if self._is_closed:
                return has_ended
            self._is_closed = True
            if not self._close(has_ended):
                return False
            self._peers.clear()
            self._regions.clear()
            self._table = RegionTable(f"agent {self.name!r}", ())
            return True

    def statistics(self) -> AgentStatistics:
        return self._thread.statistics()

    @abstractmethod
    def _register(self, region: RegionId, address: int, size_bytes: int, device_idx: int | None) -> None:
        """Make memory ready to be written to and from; raises InvalidValueError."""

    def _deregister(self, region: RegionId) -> None:  # noqa: B027
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
    def _begin(self, peer: PeerId, known: Any, table: RegionTable, array: Int64s) -> Steps:
        """Return the steps of a write; raises InvalidValueError unless all of it is registered, here and there."""

    @abstractmethod
    def _close(self, has_ended: bool) -> bool:
        """Let go of all memory that no write can touch any more; `has_ended`: none is under way."""
