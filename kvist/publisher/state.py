"""A sidecar's state on disk: which canonical block each of the engine's own hashes names, up to which message.

The file has a line that names format and version, a `SidecarState` in msgpack, and the XXH3-64 of both as a
little-endian u64.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvist.events.types import NonNegative, Positive, Rank, Tier
from kvist.files import exclusive_folder, set_aside, write_atomically
from kvist.publisher.residency import Residency, Scope
from kvist.publisher.stream import RankState

HEAD = b"kvist-sidecar-state 5\n"
_CHECKSUM_BYTES = 8
_PARENT_SHIFT = 36


class StreamProgress(msgspec.Struct, array_like=True, frozen=True):
    """How far one of the engine's streams was followed, and what proves that it is still the same process."""

    name: str
    """The engine's dialect and the stream's address."""
    next_sequence: Positive
    """That of the first message that was not applied."""
    is_complete: bool
    fingerprints: tuple[tuple[NonNegative, NonNegative], ...]
    """Sequence and XXH3-64 of the last messages, the newest included, oldest first."""
    ranks: tuple[Rank, ...]
    complete_ranks: tuple[Rank, ...] = ()
    """Those that lack no block, even if the stream is not complete."""


@dataclass(frozen=True, slots=True)
class SidecarState:
    """All that a sidecar of the same engine, with the same `settings`, needs to continue."""

    block_size: Positive
    settings: str
    streams: tuple[StreamProgress, ...]
    ranks: dict[Rank, RankState]


def pack(state: SidecarState) -> bytes:
    content = HEAD + msgspec.msgpack.encode(state, enc_hook=_encode_residency)
    return content + _checksum(content)


def unpack(data: bytes) -> SidecarState:
    """Return the state; raises ValueError that says what is wrong, perhaps that another version wrote it."""
    content = data[:-_CHECKSUM_BYTES]
    if not content.startswith(HEAD):
        raise ValueError(f"it begins with {data[: len(HEAD)]!r}, expected {HEAD!r}")
    if data[-_CHECKSUM_BYTES:] != _checksum(content):
        raise ValueError("its checksum differs: it was cut or altered")
    return msgspec.msgpack.decode(memoryview(content)[len(HEAD) :], type=SidecarState, dec_hook=_decode_residency)


def _encode_residency(residency: Residency) -> tuple[Any, ...]:
    """Return what `Residency.of` takes, in msgpack's types; places are split, since they exceed its integers."""
    places = {block: divmod(place, 1 << _PARENT_SHIFT) for block, place in residency.places.items()}
    copies = [(*of, num_copies) for of, num_copies in residency.copies.items()]
    return [residency.names(tier) for tier in Tier], copies, places, residency.scopes, residency.digest


def _decode_residency(_: type[Residency], encoded: Any) -> Residency:
    names, copies, places, scopes, digest = encoded
    copies = {(engine_hash, Tier(tier)): num_copies for engine_hash, tier, num_copies in copies}
    places = {block: parent << _PARENT_SHIFT | rest for block, (parent, rest) in places.items()}
    scopes = {block: Scope(*scope) for block, scope in scopes.items()}
    return Residency.of(dict(zip(Tier, names, strict=True)), copies, places, scopes, digest)


def _checksum(content: bytes) -> bytes:
    return xxh3_64_intdigest(content).to_bytes(_CHECKSUM_BYTES, "little")


class StateStore(ExitStack):
    """Loads and saves the state of one worker's sidecar in a folder, which it locks until closed; methods block."""

    def __init__(self, folder: Path, worker: str) -> None:
        """Make the folder if needed and lock the file; raises InvalidValueError if either is impossible."""
        super().__init__()
        self.path = folder / f"sidecar-{worker}.state"
        lock = exclusive_folder("state_dir", folder, f"{self.path.name}.lock", f"sidecar of worker {worker}")
        self.enter_context(lock)

    def load(self) -> SidecarState | None:
        """Return the state saved last, None if there is none; a file that cannot be read is logged and set aside."""
        try:
            return unpack(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            set_aside(self.path, self.path.with_suffix(".unreadable"), error)
            return None

    def save(self, state: SidecarState) -> int:
        """Replace the saved state; return its size in bytes. Raises OSError, and then the old state is still there."""
        return write_atomically(self.path, pack(state))
