"""The coalescer: neighbouring events that say the same become one, and what was added is cut into batches."""

from __future__ import annotations

from collections.abc import Iterator

from kvist.events.types import Event, Removed, Stored, Tier

MAX_BATCH_HASH_BYTES = 64 << 10
"""Hashes in one batch, 8,192 blocks: about a millisecond to apply, so that no batch holds up the subscriber's loop."""

_HASH_BYTES = 8


class Coalescer:
    """Joins neighbouring events that say the same in one: chains that continue each other, removals of one tier."""

    def __init__(self) -> None:
        self._closed: list[tuple[Event, ...]] = []
        self._events: list[Event] = []
        # The event being extended: its hashes are in pieces, which are joined once, so that a long chain is O(n).
        self._is_chain = False
        self._parent: int | None = None
        self._tier = Tier.GPU
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def add(self, event: Event) -> None:
        """Put an event behind the others."""
        if not isinstance(event, Stored) and not isinstance(event, Removed):
            self._settle()
            self._events.append(event)
            return
        for piece in (event,) if len(event.hashes) <= MAX_BATCH_HASH_BYTES else _cut(event):
            if isinstance(piece, Stored):
                self.add_stored(piece.hashes, piece.parent, piece.tier)
            else:
                self.add_removed(piece.hashes, piece.tier)

    def add_stored(self, hashes: bytes, parent: int | None, tier: Tier = Tier.GPU) -> None:
        """Put a `Stored` behind the others, of no more hashes than a batch has."""
        self._size_bytes += len(hashes)
        if self._size_bytes > MAX_BATCH_HASH_BYTES:
            self._close(len(hashes))
        pieces = self._pieces
        if pieces:
            continues = self._is_chain and tier == self._tier and parent is not None
            if continues and parent == _last_hash(pieces[-1]):
                pieces.append(hashes)
                return
            self._settle()
        self._is_chain, self._parent, self._tier = True, parent, tier
        self._pieces.append(hashes)

    def add_removed(self, hashes: bytes, tier: Tier = Tier.GPU) -> None:
        """Put a `Removed` behind the others, of no more hashes than a batch has."""
        self._size_bytes += len(hashes)
        if self._size_bytes > MAX_BATCH_HASH_BYTES:
            self._close(len(hashes))
        if self._pieces and (self._is_chain or tier != self._tier):
            self._settle()
        self._is_chain, self._tier = False, tier
        self._pieces.append(hashes)

    def take(self) -> list[tuple[Event, ...]]:
        """Return everything added, in order and cut into batches, and start anew."""
        self._close()
        closed, self._closed = self._closed, []
        return closed

    def _settle(self) -> None:
        """End the event being extended."""
        pieces = self._pieces
        if not pieces:
            return
        hashes = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._events.append(Stored(hashes, self._parent, self._tier) if self._is_chain else Removed(hashes, self._tier))
        pieces.clear()

    def _close(self, next_bytes: int = 0) -> None:
        """End the batch; the next one begins with an event of so many bytes."""
        self._settle()
        if self._events:
            self._closed.append(tuple(self._events))
        self._events = []
        self._size_bytes = next_bytes


def _cut(event: Stored | Removed) -> Iterator[Stored | Removed]:
    """Yield events of bounded size that amount to a larger one."""
    for start in range(0, len(event.hashes), MAX_BATCH_HASH_BYTES):
        hashes = event.hashes[start : start + MAX_BATCH_HASH_BYTES]
        if isinstance(event, Removed):
            yield Removed(hashes, event.tier)
        else:
            yield Stored(hashes, _last_hash(event.hashes[:start]) if start else event.parent, event.tier)


def _last_hash(hashes: bytes) -> int:
    return int.from_bytes(hashes[-_HASH_BYTES:], "little")
