"""A sidecar's state on disk: which canonical block each of the engine's own hashes names, up to which message.

    kvist-sidecar-state\\n   version   XXH3-64 of all the rest   msgpack
    20 bytes                u16       u64

All integers are little-endian. What is kept by block stands in columns of u64, one item of each for each block.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64

from kvist.events.engine_events import EngineHash
from kvist.events.types import GroupRule, NonNegative, Positive, Rank, Tier
from kvist.files import exclusive_folder, set_aside, write_atomically
from kvist.publisher.filter import FilterState
from kvist.publisher.residency import Residency, Scope
from kvist.publisher.stream import RankState

MAGIC = b"kvist-sidecar-state\n"
VERSION = 2

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
    complete_ranks: tuple[Rank, ...] = ()
    """Those that lack no block, whatever the stream lacks."""


@dataclass(frozen=True, slots=True)
class SidecarState:
    """All that a sidecar needs to go on, if it is the same engine and was configured alike (`settings`)."""

    block_size: int
    settings: str
    streams: tuple[EngineProgress, ...]
    ranks: dict[int, RankState]


class _Rank(msgspec.Struct, array_like=True, frozen=True):
    """A `RankState`; columns of one tuple are equally long."""

    rank: Rank
    filter: FilterState
    digest: NonNegative
    names: tuple[tuple[bytes, bytes], ...]
    """For each tier the engine's hashes, and the blocks they name."""
    copies: tuple[tuple[bytes, bytes], ...]
    """For each tier those of them that have several copies, and how many beyond the first."""
    places: tuple[bytes, bytes, bytes]
    """The blocks, their parents, and depth << 4 | tier mask."""
    scopes: tuple[tuple[str | None, str | None], ...]
    scoped: tuple[bytes, bytes]
    """The blocks that have a scope, and its number in `scopes`."""
    others: tuple[tuple[int, GroupRule], ...] = ()
    counted: tuple[bytes, ...] = (b"", b"", b"")
    """What is counted of the other groups: the engine's hashes, groups, and numbers of copies."""

    @classmethod
    def of(cls, rank: int, state: RankState) -> _Rank:
        residency = state.residency
        copies: list[dict[EngineHash, int]] = [{} for _ in Tier]
        for (engine_hash, tier), num_copies in residency.copies.items():
            copies[tier][engine_hash] = num_copies
        number_of = {scope: number for number, scope in enumerate(dict.fromkeys(residency.scopes.values()))}
        places = residency.places.values
        return cls(
            rank,
            state.filter,
            residency.digest,
            tuple(_columns(residency.names(tier)) for tier in Tier),
            tuple(_columns(each) for each in copies),
            (
                _column(residency.places),
                _column(place >> _PARENT_SHIFT for place in places()),
                _column(place & _REST_MASK for place in places()),
            ),
            tuple(number_of),
            _columns({block: number_of[scope] for block, scope in residency.scopes.items()}),
            tuple(state.others.items()),
            tuple(_column(each[place] for each in state.counted) for place in range(3)),
        )

    def state(self) -> RankState:
        names = dict(zip(Tier, map(_mapping, self.names), strict=True))
        copies = {
            (engine_hash, tier): num_copies
            for tier, columns in zip(Tier, self.copies, strict=True)
            for engine_hash, num_copies in _mapping(columns).items()
        }
        places = {
            block: parent << _PARENT_SHIFT | rest for block, parent, rest in zip(*map(_items, self.places), strict=True)
        }
        scopes = {block: Scope(*self.scopes[number]) for block, number in _mapping(self.scoped).items()}
        residency = Residency.of(names, copies, places, scopes)
        if residency.digest != self.digest:
            raise UnreadableStateError(f"the blocks of rank {self.rank} do not add up to its digest")
        counted = [*zip(*map(_items, self.counted), strict=True)]
        return RankState(self.filter, residency, dict(self.others), counted)


class _State(msgspec.Struct, array_like=True, frozen=True):
    block_size: Positive
    settings: str
    streams: tuple[EngineProgress, ...]
    ranks: tuple[_Rank, ...]


def pack(state: SidecarState) -> bytes:
    """Return the state's bytes; other threads get the interpreter now and then."""
    ranks = tuple(_Rank.of(rank, each) for rank, each in state.ranks.items())
    content = msgspec.msgpack.encode(_State(state.block_size, state.settings, state.streams, ranks))
    return b"".join((MAGIC, VERSION.to_bytes(2, "little"), _checksum(content), content))


def unpack(data: bytes) -> SidecarState:
    """Return the state that was packed; raises UnreadableStateError that says what is wrong."""
    version_start, checksum_start = len(MAGIC), len(MAGIC) + 2
    content_start = checksum_start + _CHECKSUM_BYTES
    if data[:version_start] != MAGIC or len(data) < content_start:
        raise UnreadableStateError("it is no state of a sidecar")
    version = int.from_bytes(data[version_start:checksum_start], "little")
    if version != VERSION:
        raise UnreadableStateError(f"its version is {version}, expected {VERSION}")
    content = memoryview(data)[content_start:]
    if data[checksum_start:content_start] != _checksum(content):
        raise UnreadableStateError("its checksum differs: it was cut or altered")
    try:
        state = msgspec.msgpack.decode(content, type=_State)
        ranks = {each.rank: each.state() for each in state.ranks}
    except (ValueError, IndexError) as error:  # which a sidecar that packs otherwise may have left
        raise UnreadableStateError(str(error)) from None
    return SidecarState(state.block_size, state.settings, state.streams, ranks)


def _checksum(content: bytes | memoryview) -> bytes:
    return xxh3_64(content).intdigest().to_bytes(_CHECKSUM_BYTES, "little")


def _column(items: Iterable[Any]) -> bytes:
    """Return the items as u64, a slice at a time."""
    rest, slices = iter(items), []
    while some := list(islice(rest, _NUM_ITEMS_A_SLICE)):
        slices.append(np.array(some, "<u8").tobytes())
        time.sleep(0)
    return b"".join(slices)


def _columns(mapping: Mapping[Any, int]) -> tuple[bytes, bytes]:
    return _column(mapping), _column(mapping.values())


def _mapping(columns: tuple[bytes, bytes]) -> dict[Any, int]:
    return dict(zip(*map(_items, columns), strict=True))


def _items(column: bytes) -> list[int]:
    items: list[int] = np.frombuffer(column, "<u8").tolist()
    return items


class StateStore(ExitStack):
    """Keeps the state of the sidecar of one worker in a folder, until it is closed; methods block, and do file I/O."""

    def __init__(self, folder: Path, worker: str) -> None:
        """Make the folder if needed and lock the file; raises InvalidValueError if either is impossible."""
        super().__init__()
        self.path = folder / f"sidecar-{worker}.state"
        lock = exclusive_folder("state_dir", folder, f"{self.path.name}.lock", f"sidecar of worker {worker}")
        self.enter_context(lock)

    def load(self) -> SidecarState | None:
        """Return what was saved last, None for nothing; what cannot be read is logged and set aside."""
        try:
            return unpack(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (UnreadableStateError, OSError) as error:
            set_aside(self.path, self.path.with_suffix(".unreadable"), error)
            return None

    def save(self, state: SidecarState) -> int:
        """Replace what was saved; return the size in bytes. Raises OSError, and what was saved is still there."""
        return write_atomically(self.path, (pack(state),))
