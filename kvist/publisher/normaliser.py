"""The normaliser: engine events of the published group become canonical events, or are left out and counted.

Only tokens give a canonical hash; the engine's own hash is opaque and serves to find parents and removed blocks. What
cannot be placed for certain is never guessed: a chain ends before the first block in doubt.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvist.errors import InvalidValueError
from kvist.events.engine_events import EngineHash, EngineRemoved, EngineStored
from kvist.events.hashing import chain_hashes
from kvist.events.types import Cleared, Event, Removed, Stored, Tier
from kvist.publisher.filter import PassedEvent
from kvist.publisher.residency import NO_SCOPE, Holdings, Residency, Scope

_logger = logging.getLogger(__name__)


class Status(StrEnum):
    """Why something an engine reported was left out; the label of a counter."""

    BLOCK_NOT_FOUND = "block_not_found"
    PARENT_BLOCK_NOT_FOUND = "parent_block_not_found"
    INVALID_BLOCK_SEQUENCE = "invalid_block_sequence"
    OVERSIZE_BLOCK = "oversize_block"
    WRONG_BLOCK_SIZE = "wrong_block_size"
    MISALIGNED_TOKENS = "misaligned_tokens"
    INVALID_TOKENS = "invalid_tokens"
    NO_TOKENS = "no_tokens"
    UNKNOWN_LORA = "unknown_lora"
    HASH_REUSED = "hash_reused"
    PARTIAL_BLOCK = "partial_block"


@dataclass(slots=True)
class NormaliserStatistics:
    """What one rank's normaliser did since it was made."""

    num_stored_blocks: int = 0
    num_removed_blocks: int = 0
    num_by_status: Counter[Status] = field(default_factory=Counter)


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
        self._counts = NormaliserStatistics()
        self._num_by_status = self._counts.num_by_status
        self._in_doubt: frozenset[tuple[Tier, EngineHash]] = frozenset()

    def normalise(self, event: PassedEvent) -> tuple[Event, ...]:
        """Return the canonical events this one amounts to, in order; none when it changes nothing."""
        if isinstance(event, EngineRemoved):
            self._believe(event)
            return self._removed(event)
        if isinstance(event, EngineStored):
            return self._doubted(event) + self._stored(event)
        self._in_doubt = frozenset()
        if event.tier is Tier.GPU:
            self.doubt()
        if self.is_in_doubt:
            dropped = self._residency.empty(Tier.GPU)
            return (Removed(_pack(dropped), Tier.GPU),) if dropped else ()
        self._residency.clear()
        return (Cleared(),)

    @property
    def is_in_doubt(self) -> bool:
        """Return whether blocks that are held beside the GPU may be gone."""
        return len(self._in_doubt) > 0

    def doubt(self) -> None:
        """Take what is held beside the GPU for what may be gone, until an event of it tells."""
        tiers = (tier for tier in Tier if tier is not Tier.GPU)
        self._in_doubt = frozenset((tier, name) for tier in tiers for name in self._residency.engine_hashes(tier))

    def _believe(self, event: EngineRemoved) -> None:
        """Take what is in doubt for what is there, if some of it only now goes."""
        if self._in_doubt and any((event.tier, name) in self._in_doubt for name in event.block_hashes):
            self._in_doubt = frozenset()

    def _doubted(self, event: EngineStored) -> tuple[Event, ...]:
        """Drop what is in doubt if some of it is stored anew: engines store what a tier lacks."""
        if not self._in_doubt or not any((event.tier, name) in self._in_doubt for name in event.block_hashes):
            return ()
        names, self._in_doubt = self._in_doubt, frozenset()
        return tuple(
            removed
            for tier in Tier
            for removed in self._removed(EngineRemoved([name for of, name in names if of is tier], tier=tier))
        )

    def statistics(self) -> NormaliserStatistics:
        return replace(self._counts, num_by_status=self._num_by_status.copy())

    def _stored(self, event: EngineStored) -> tuple[Event, ...]:
        if len(event.token_ids) == 0:
            return self._stored_without_tokens(event)
        if event.block_size != self._block_size:
            self._count_wrong_block_size(event.block_size)
        lora_name = event.lora_name or None
        if lora_name is None and event.lora_id:
            lora_name = self._lora_names.get(event.lora_id)
            if not lora_name:
                return self._leave_out(Status.UNKNOWN_LORA)
        parent = None
        if event.parent_block_hash is not None:
            parent = self._residency.find(event.parent_block_hash)
            if parent is None:
                return self._leave_out(Status.PARENT_BLOCK_NOT_FOUND)
        scope = self._scope(lora_name, event.cache_salt or None, parent)
        engine_hashes = self._leading_full_blocks(event)
        if not engine_hashes:
            return ()
        block_hashes = self._canonical_hashes(event, len(engine_hashes), parent, scope)
        if block_hashes is None:
            return self._leave_out(Status.INVALID_TOKENS)
        return self._hold(engine_hashes, block_hashes, parent, event.tier, scope)

    def _hold(
        self,
        engine_hashes: Sequence[EngineHash],
        block_hashes: Sequence[int],
        parent: int | None,
        tier: Tier,
        scope: Scope,
    ) -> tuple[Event, ...]:
        """Hold a chain; the event covers it from its first new block to its last, for a store is idempotent."""
        new_idxs, displaced = self._residency.hold(engine_hashes, block_hashes, parent, tier, scope)
        events: list[Event] = []
        if displaced:
            self._num_by_status[Status.HASH_REUSED] += len(displaced)
            self._counts.num_removed_blocks += len(displaced)
            events.append(Removed(_pack(displaced), tier))
        if new_idxs:
            self._counts.num_stored_blocks += len(new_idxs)
            first, last = new_idxs[0], new_idxs[-1]
            before_first = block_hashes[first - 1] if first else parent
            events.append(Stored(_pack(block_hashes[first : last + 1]), before_first, tier))
        return tuple(events)

    def _stored_without_tokens(self, event: EngineStored) -> tuple[Event, ...]:
        """Place blocks that another tier holds: engines offload by hash alone. Others cannot be placed."""
        events: list[Event] = []
        for engine_hash in event.block_hashes:
            block_hash = None if engine_hash is None else self._residency.find(engine_hash)
            if engine_hash is None or block_hash is None:
                self._num_by_status[Status.NO_TOKENS] += 1
                continue
            parent = self._residency.parent(block_hash)
            if parent is not None and not self._residency.holds(parent):
                self._num_by_status[Status.PARENT_BLOCK_NOT_FOUND] += 1
                continue
            scope = self._residency.scope(block_hash)
            events += self._hold((engine_hash,), (block_hash,), parent, event.tier, scope)
        return tuple(events)

    def _removed(self, event: EngineRemoved) -> tuple[Event, ...]:
        events: list[Event] = []
        missing: set[EngineHash] | None = None
        for tier in Tier if event.tier is None else (event.tier,):
            removed, not_found = self._residency.release(event.block_hashes, tier)
            missing = set(not_found) if missing is None else missing.intersection(not_found)
            if removed:
                self._counts.num_removed_blocks += len(removed)
                events.append(Removed(_pack(removed), tier))
        if missing:  # also of blocks that were not full when they were reported, and so never published
            self._num_by_status[Status.BLOCK_NOT_FOUND] += len(missing)
        return tuple(events)

    def _is_plain(self, event: EngineStored) -> bool:
        """Return whether all blocks are full, known by their hashes, and different: nearly always so."""
        hashes = event.block_hashes
        different = {*hashes, event.parent_block_hash, None}
        num_others = 1 if event.parent_block_hash is None else 2
        num_tokens = len(hashes) * self._block_size + event.is_eagle
        return (
            event.block_size == self._block_size
            and len(different) == len(hashes) + num_others
            and len(event.token_ids) == num_tokens
        )

    def _leading_full_blocks(self, event: EngineStored) -> list[EngineHash]:
        """Return the hashes up to the first block that is a hole, partial, too long or a repetition."""
        lengths = event.block_lengths
        if lengths is None and self._is_plain(event):
            return list(event.block_hashes)  # type: ignore[arg-type]  # none of them is None
        if lengths is None:
            lengths = (event.block_size,) * len(event.block_hashes)
        # Cache groups that skip blocks send the tokens of the whole span: positions are lost.
        if len(lengths) != len(event.block_hashes) or len(event.token_ids) != sum(lengths) + event.is_eagle:
            self._num_by_status[Status.MISALIGNED_TOKENS] += 1
            return []
        leading: list[EngineHash] = []
        seen = {event.parent_block_hash}
        for engine_hash, length in zip(event.block_hashes, lengths, strict=True):
            if engine_hash is None:
                break
            if length != self._block_size:
                self._end_chain_at(length)
                break
            if engine_hash in seen:
                self._num_by_status[Status.INVALID_BLOCK_SEQUENCE] += 1
                break
            seen.add(engine_hash)
            leading.append(engine_hash)
        return leading

    def _end_chain_at(self, length: int) -> None:
        if length <= self._block_size:
            self._num_by_status[Status.PARTIAL_BLOCK] += 1
            return
        self._num_by_status[Status.OVERSIZE_BLOCK] += 1
        if self._num_by_status[Status.OVERSIZE_BLOCK] == 1 and not self._num_by_status[Status.WRONG_BLOCK_SIZE]:
            text = "block left out: too long rank=%d length=%d block_size=%d"
            _logger.warning(text, self._rank, length, self._block_size)

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
        token_ids = event.token_ids if len(event.token_ids) == num_tokens else event.token_ids[:num_tokens]
        try:
            return chain_hashes(
                token_ids,
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

    def _count_wrong_block_size(self, engine_block_size: int) -> None:
        self._num_by_status[Status.WRONG_BLOCK_SIZE] += 1
        if self._num_by_status[Status.WRONG_BLOCK_SIZE] == 1:
            text = "the engine's blocks are not of the configured size, and are left out"
            sizes = engine_block_size, self._block_size
            _logger.warning("%s rank=%d engine_block_size=%d block_size=%d", text, self._rank, *sizes)

    def _leave_out(self, status: Status) -> tuple[Event, ...]:
        self._num_by_status[status] += 1
        return ()


def _pack(block_hashes: Sequence[int]) -> bytes:
    """Return the hashes as u64 in the machine's order, which is little-endian wherever engines run."""
    return array("Q", block_hashes).tobytes()
