"""A sidecar's state on disk: which canonical block each of the engine's own hashes names, up to which message.

    kvist-sidecar-state\\n   version   header size   header (msgpack)   columns   XXH3-64 of all before
    20 bytes                u16       u32                                        u64

All integers are little-endian. Columns come in slices, each a count (u32) and so many items of each column; a count of
0 ends them. For each rank of the header, in this order:

    for each tier   the engine's hashes (u64), the blocks they name (u64)
    the blocks      (u64), their parents (u64), depth << 4 | tier mask (u64)
    scoped blocks   (u64), the number of their scope (u32) in the header's list
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from xxhash import xxh3_64

from kvist.errors import InvalidValueError
from kvist.events.engine_events import EngineHash, UnsizedWindow
from kvist.events.types import NonNegative, Positive, Rank, Tier
from kvist.files import write_atomically
from kvist.publisher.filter import FilterState
from kvist.publisher.holdings import Scope
from kvist.publisher.residency import Residency
from kvist.publisher.stream import RankState

_logger = logging.getLogger(__name__)

MAGIC = b"kvist-sidecar-state\n"
VERSION = 1

_NUM_ITEMS_A_SLICE = 1 << 14
"""Items packed before the interpreter is offered to other threads: half a millisecond."""
_CHECKSUM_BYTES = 8
_PARENT_SHIFT = 36
_REST_MASK = (1 << _PARENT_SHIFT) - 1


class UnreadableStateError(Exception):
    """The bytes are not a state, or not one that this version reads: start empty and keep them aside."""


class EngineProgress(msgspec.Struct, array_like=True, frozen=True):
    """One of the engine's streams up to, and without, `next_sequence`: its last messages prove the same process."""

    name: str
    """The engine's dialect and the stream's address."""
    next_sequence: Positive
    is_complete: bool
    fingerprints: tuple[tuple[NonNegative, NonNegative], ...]
    """Sequence and XXH3-64 of the last messages, the newest included, oldest first."""
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class SidecarState:
    """All that a sidecar needs to go on, if it is the same engine and was configured alike (`settings`)."""

    block_size: int
    settings: str
    streams: tuple[EngineProgress, ...]
    ranks: dict[int, RankState]


def pack(state: SidecarState) -> Iterator[bytes]:
    """Yield the state's bytes piece by piece; between them other threads get the interpreter."""
    checksum = xxh3_64()
    for piece in _pieces(state):
        checksum.update(piece)
        yield piece
        time.sleep(0)
    yield checksum.intdigest().to_bytes(_CHECKSUM_BYTES, "little")


def unpack(data: bytes) -> SidecarState:
    """Return the state that was packed; raises UnreadableStateError that says what is wrong."""
    reader = _Reader(data)
    if reader.take(len(MAGIC)) != MAGIC:
        raise UnreadableStateError("it is no state of a sidecar")
    version = int.from_bytes(reader.take(2), "little")
    if version != VERSION:
        raise UnreadableStateError(f"its version is {version}, expected {VERSION}")
    if data[-_CHECKSUM_BYTES:] != xxh3_64(data[:-_CHECKSUM_BYTES]).intdigest().to_bytes(_CHECKSUM_BYTES, "little"):
        raise UnreadableStateError("its checksum differs: it was cut or altered")
    try:
        header = msgspec.msgpack.decode(reader.take(int.from_bytes(reader.take(4), "little")), type=_Header)
    except msgspec.DecodeError as error:
        raise UnreadableStateError(f"its header: {error}") from None
    ranks = {rank.rank: RankState(rank.filter.state, reader.residency(rank)) for rank in header.ranks}
    return SidecarState(header.block_size, header.settings, header.streams, ranks)


class _Filter(NamedTuple):
    """`FilterState` in types that can be read back."""

    is_created_phase: bool
    window: int | UnsizedWindow | None
    group: int | None
    is_learning: bool
    shown_groups: frozenset[tuple[int] | int | UnsizedWindow]
    has_published: bool
    has_published_unknown: bool

    @property
    def state(self) -> FilterState:
        return FilterState(*self)  # type: ignore[arg-type]  # UNKNOWN is no window that a filter publishes


class _Rank(msgspec.Struct, array_like=True, frozen=True):
    rank: Rank
    filter: _Filter
    scopes: tuple[tuple[str | None, str | None], ...]
    digest: NonNegative


class _Header(msgspec.Struct, array_like=True, frozen=True):
    block_size: Positive
    settings: str
    streams: tuple[EngineProgress, ...]
    ranks: tuple[_Rank, ...]


_NAMES, _PLACES, _SCOPED = ("<u8", "<u8"), ("<u8", "<u8", "<u8"), ("<u8", "<u4")


def _pieces(state: SidecarState) -> Iterator[bytes]:
    scopes = {number: tuple(dict.fromkeys(rank.residency.scopes.values())) for number, rank in state.ranks.items()}
    ranks = tuple(
        _Rank(number, _Filter(*rank.filter), scopes[number], rank.residency.digest)
        for number, rank in state.ranks.items()
    )
    header = msgspec.msgpack.encode(_Header(state.block_size, state.settings, state.streams, ranks))
    yield b"".join((MAGIC, VERSION.to_bytes(2, "little"), len(header).to_bytes(4, "little"), header))
    for number, rank in state.ranks.items():
        residency = rank.residency
        for tier in Tier:
            yield from _packed(_NAMES, _pairs(residency.names(tier)))
        yield from _packed(_PLACES, map(_split, residency.slices()))
        number_of = {scope: idx for idx, scope in enumerate(scopes[number])}
        scoped = {block_hash: number_of[scope] for block_hash, scope in residency.scopes.items()}
        yield from _packed(_SCOPED, _pairs(scoped))


def _pairs(mapping: Mapping[Any, int]) -> Iterator[tuple[Sequence[int], ...]]:
    keys, values = iter(mapping), iter(mapping.values())
    while chunk := list(islice(keys, _NUM_ITEMS_A_SLICE)):
        yield chunk, list(islice(values, _NUM_ITEMS_A_SLICE))


def _split(slice_: tuple[list[int], list[int]]) -> tuple[Sequence[int], ...]:
    blocks, packed = slice_
    return blocks, [place >> _PARENT_SHIFT for place in packed], [place & _REST_MASK for place in packed]


def _packed(kinds: Sequence[str], slices: Iterable[Sequence[Sequence[int]]]) -> Iterator[bytes]:
    """Yield columns of these kinds, a slice at a time."""
    for columns in slices:
        arrays = [np.array(column, kind).tobytes() for kind, column in zip(kinds, columns, strict=True)]
        yield b"".join((len(columns[0]).to_bytes(4, "little"), *arrays))
    yield bytes(4)


class _Reader:
    """Reads what was packed, from its beginning; raises UnreadableStateError where it ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def take(self, num_bytes: int) -> bytes:
        piece = self._data[self._place : self._place + num_bytes]
        if len(piece) != num_bytes:
            raise UnreadableStateError("it ends too early")
        self._place += num_bytes
        return piece

    def residency(self, rank: _Rank) -> Residency:
        names: dict[Tier, dict[EngineHash, int]] = {tier: {} for tier in Tier}
        for name_of in names.values():
            for engine_hashes, blocks in self._slices(_NAMES):
                name_of.update(zip(engine_hashes, blocks, strict=True))
        place_of: dict[int, int] = {}
        for blocks, parents, rest in self._slices(_PLACES):
            places = [parent << _PARENT_SHIFT | place for parent, place in zip(parents, rest, strict=True)]
            place_of.update(zip(blocks, places, strict=True))
        scopes: dict[int, Scope] = {}
        for blocks, numbers in self._slices(_SCOPED):
            scopes.update(zip(blocks, (Scope(*rank.scopes[number]) for number in numbers), strict=True))
        residency = Residency.of(names, place_of, scopes)
        if residency.digest != rank.digest:
            raise UnreadableStateError(f"the blocks of rank {rank.rank} do not add up to its digest")
        return residency

    def _slices(self, kinds: Sequence[str]) -> Iterator[list[list[int]]]:
        while num := int.from_bytes(self.take(4), "little"):
            yield [np.frombuffer(self.take(num * int(kind[-1])), kind).tolist() for kind in kinds]


class StateStore:
    """Keeps the state of the sidecar of one worker in a folder; methods block, and do file I/O."""

    def __init__(self, folder: Path, worker: str) -> None:
        """Make the folder if needed and lock the file; raises InvalidValueError if either is impossible."""
        self.path = folder / f"sidecar-{worker}.state"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / f"{self.path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidValueError("state_dir", str(folder), f"a folder that can be written ({error})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidValueError("state_dir", str(folder), f"no other sidecar of worker {worker}") from None

    def load(self) -> SidecarState | None:
        """Return what was saved last, None for nothing; what cannot be read is logged and set aside."""
        try:
            return unpack(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (UnreadableStateError, OSError) as error:
            aside = self.path.with_suffix(".unreadable")
            _logger.error("state cannot be used, starting empty: %s path=%s kept_as=%s", error, self.path, aside)
            self._set_aside(aside)
            return None

    def save(self, state: SidecarState) -> int:
        """Replace what was saved; return the size in bytes. Raises OSError, and what was saved is still there."""
        return write_atomically(self.path, pack(state))

    def close(self) -> None:
        """Let another sidecar have the file."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        """Return the store, whose file is locked."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _set_aside(self, aside: Path) -> None:
        try:
            self.path.replace(aside)
        except OSError as error:
            _logger.error("state cannot be set aside: %s path=%s", error, self.path)
