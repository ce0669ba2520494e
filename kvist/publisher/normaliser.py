"""The normaliser: engine events of the published group become canonical events, or are left out.

Only tokens give a canonical hash; the engine's own hash is opaque and serves to find parents and removed blocks. A
block whose place in a chain is not certain is left out, with all that follow it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence

from kvist.errors import InvalidValueError
from kvist.events.engine_events import EngineCleared, EngineHash, EngineStored
from kvist.events.hashing import chain_hashes
from kvist.events.types import Cleared, Event, Removed, Stored, Tier
from kvist.publisher.filter import PassedEvent
from kvist.publisher.residency import NO_SCOPE, Chain, Holdings, Residency, Scope

_logger = logging.getLogger(__name__)


class Normaliser:
    """Turns one rank's engine events into canonical events, and keeps the set of blocks they add up to.

    Never raises for what an engine reported. `lora_names` names the adapters of engines that send only a number: an
    adapter without a name is left out, because its blocks must not be taken for the base model's. LoRA and salt are
    inherited from the parent block where an event does not repeat them.
    """

    def __init__(
        self,
        block_size: int,
        *,
        rank: int = 0,
        lora_names: Mapping[int, str] | None = None,
        holdings: Holdings | None = None,
    ) -> None:
        """Keep what is held in `holdings`, by default a `Residency`."""
        if block_size <= 0:
            raise InvalidValueError("block_size", block_size, "a positive number of tokens")
        self._block_size = block_size
        self._rank = rank
        self._lora_names = dict(lora_names or {})
        self._residency: Holdings = Residency() if holdings is None else holdings
        self._warned: set[str] = set()

    def normalise(self, event: PassedEvent) -> tuple[Event, ...]:
        """Return the canonical events this one amounts to, in order; none when it changes nothing."""
        if isinstance(event, EngineCleared):
            self._residency.clear()
            return (Cleared(),)
        if isinstance(event, EngineStored):
            return self._stored(event)
        tiers = Tier if event.tier is None else (event.tier,)
        released = ((tier, self._residency.release(event.block_hashes, tier)) for tier in tiers)
        return tuple(Removed(_pack(block_hashes), tier) for tier, block_hashes in released if block_hashes)

    def _stored(self, event: EngineStored) -> tuple[Event, ...]:
        if len(event.token_ids) == 0:
            return self._stored_without_tokens(event)
        if event.block_size != self._block_size:
            text = "the engine's blocks are not of the configured size, and are left out"
            text += " rank=%d engine_block_size=%d block_size=%d"
            self._warn_once(text, self._rank, event.block_size, self._block_size)
        lora_name = event.lora_name or None
        if lora_name is None and event.lora_id:
            lora_name = self._lora_names.get(event.lora_id)
            if not lora_name:
                return ()
        parent = None
        if event.parent_block_hash is not None:
            parent = self._residency.find(event.parent_block_hash)
            if parent is None:
                return ()
        scope = self._scope(lora_name, event.cache_salt or None, parent)
        engine_hashes = self._leading_full_blocks(event)
        if not engine_hashes:
            return ()
        block_hashes = self._canonical_hashes(event, len(engine_hashes), parent, scope)
        if block_hashes is None:
            return ()
        return self._hold(Chain(engine_hashes, block_hashes, parent, event.tier, scope))

    def _hold(self, chain: Chain) -> tuple[Event, ...]:
        """Hold a chain; the event covers it from its first new block to its last, since a store is idempotent."""
        new_idxs, displaced = self._residency.hold(chain)
        events: list[Event] = []
        if displaced:
            events.append(Removed(_pack(displaced), chain.tier))
        if new_idxs:
            first, last = new_idxs[0], new_idxs[-1]
            before_first = chain.block_hashes[first - 1] if first else chain.parent
            events.append(Stored(_pack(chain.block_hashes[first : last + 1]), before_first, chain.tier))
        return tuple(events)

    def _stored_without_tokens(self, event: EngineStored) -> tuple[Event, ...]:
        """Hold blocks that another tier holds already, which engines offload by hash alone; ignore all others."""
        events: list[Event] = []
        for engine_hash in event.block_hashes:
            block_hash = None if engine_hash is None else self._residency.find(engine_hash)
            if engine_hash is None or block_hash is None:
                continue
            parent = self._residency.parent(block_hash)
            if parent is not None and not self._residency.holds(parent):
                continue
            scope = self._residency.scope(block_hash)
            events += self._hold(Chain((engine_hash,), (block_hash,), parent, event.tier, scope))
        return tuple(events)

    def _leading_full_blocks(self, event: EngineStored) -> list[EngineHash]:
        """Return the hashes up to the first block that is a hole, partial, too long or a repetition."""
        lengths = event.block_lengths
        if lengths is None:
            lengths = (event.block_size,) * len(event.block_hashes)
        # Cache groups that skip blocks send the tokens of the whole span: which are whose cannot be told.
        if len(lengths) != len(event.block_hashes) or len(event.token_ids) != sum(lengths) + event.is_eagle:
            return []
        leading: list[EngineHash] = []
        seen = {event.parent_block_hash}
        for engine_hash, length in zip(event.block_hashes, lengths, strict=True):
            if engine_hash is None:
                break
            if length != self._block_size:
                if length > self._block_size == event.block_size:
                    text = "block left out: too long rank=%d length=%d block_size=%d"
                    self._warn_once(text, self._rank, length, self._block_size)
                break
            if engine_hash in seen:
                break
            seen.add(engine_hash)
            leading.append(engine_hash)
        return leading

    def _scope(self, lora_name: str | None, cache_salt: str | None, parent: int | None) -> Scope:
        inherited = NO_SCOPE if parent is None else self._residency.scope(parent)
        if lora_name is None and cache_salt is None:
            return inherited
        return Scope(lora_name or inherited.lora_name, cache_salt or inherited.cache_salt)

    def _canonical_hashes(
        self, event: EngineStored, num_blocks: int, parent: int | None, scope: Scope
    ) -> list[int] | None:
        """Return the canonical hashes of the first blocks; None when a token or image hash is out of range."""
        num_tokens = num_blocks * self._block_size + event.is_eagle
        try:
            return chain_hashes(
                event.token_ids[:num_tokens],
                self._block_size,
                parent,
                lora_name=scope.lora_name,
                cache_salt=scope.cache_salt,
                mm_hashes=event.mm_hashes,
                is_eagle=event.is_eagle,
            )
        except InvalidValueError as error:
            _logger.debug("event dropped: %s rank=%d", error, self._rank)
            return None

    def _warn_once(self, text: str, *values: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _logger.warning(text, *values)


def _pack(block_hashes: Sequence[int]) -> bytes:
    """Return the hashes as u64 in the machine's order, which is little-endian wherever engines run."""
    return array("Q", block_hashes).tobytes()
