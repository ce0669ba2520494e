"""A prompt computed by one worker and decoded by another, as the engine sees it: what is offered, and what is fetched.

The engine moves no bytes: `kvist.transfer.commands` is what it says to those who do, and what it hears from them.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvist.engine.request import Request
from kvist.errors import InvalidValueError
from kvist.kvcache import ABSENT, KvCacheManager, SequenceBlocks
from kvist.openai.requests import RemotePrefill
from kvist.transfer import commands

logger = logging.getLogger(__name__)

_MAX_HELD = 256


@dataclass(slots=True)
class HandoffStatistics:
    """Sequences in the reach of other workers now, and counts since the start.

    `num_held` wait to be fetched, `num_receiving` to be filled; the blocks of `num_abandoned` are not wanted any more,
    but may still be written to.
    """

    num_held: int = 0
    num_receiving: int = 0
    num_abandoned: int = 0
    num_offered: int = 0
    num_sent: int = 0
    num_given_up: int = 0
    num_fetched: int = 0
    num_failed: int = 0
    num_fallbacks: int = 0


class Handoffs:
    """Every sequence whose blocks another worker may read or write. Each leaves when its transfer has ended."""

    def __init__(
        self, kv_cache: KvCacheManager, command: Callable[[commands.Command], None], is_fallback_allowed: bool
    ) -> None:
        self.is_fallback_allowed = is_fallback_allowed
        self._kv_cache = kv_cache
        self._command = command
        self._held: dict[str, SequenceBlocks] = {}
        self._receiving: dict[str, Request] = {}
        self._abandoned: dict[str, SequenceBlocks] = {}
        self._counts = HandoffStatistics()

    @property
    def has_room_to_hold(self) -> bool:
        return len(self._held) < _MAX_HELD

    def offer(self, blocks: SequenceBlocks, num_tokens: int) -> str:
        """Hold a computed prompt's blocks; return the name to fetch them by, which nobody can guess or meet twice."""
        remote_request_id = uuid.uuid4().hex
        self._held[remote_request_id] = blocks
        self._counts.num_offered += 1
        self._command(commands.Offer(remote_request_id, num_tokens, _lists(blocks)))
        return remote_request_id

    def offer_released(self, remote_request_id: str, is_fetched: bool) -> None:
        if not is_fetched:
            logger.info("held prompt given up remote_request_id=%s", remote_request_id)
        self._counts.num_sent += is_fetched
        self._counts.num_given_up += not is_fetched
        self._kv_cache.close(self._held.pop(remote_request_id))

    def withdraw(self, remote_request_id: str) -> bool:
        """Have what is held under this name fetched no more, and released; False if nothing is."""
        if remote_request_id not in self._held:
            return False
        self._command(commands.WithdrawOffer(remote_request_id))
        return True

    def fetch(self, request: Request) -> None:
        blocks, source = request.blocks, request.handoff
        assert blocks is not None
        assert isinstance(source, RemotePrefill)
        self._receiving[request.request_id] = request
        remote = (source.remote_endpoints, source.remote_request_id)
        missing = []
        for table in blocks.tables:
            num_held = table.first_held + len(table.adopted)
            missing.append((ABSENT,) * num_held + tuple(table.block_ids[num_held:]))
        self._command(commands.Fetch(request.request_id, *remote, blocks.num_tokens, tuple(missing)))

    def fetch_completed(self, request_id: str) -> Request | None:
        """Return the request whose blocks are filled; None, its blocks given back, if nobody waits for it any more."""
        request = self._receiving.pop(request_id, None)
        if request is None:
            self.fetch_released(request_id)
            return None
        assert request.blocks is not None
        self._kv_cache.accept(request.blocks, request.token_ids)
        self._counts.num_fetched += 1
        return request

    def fetch_failed(self, request_id: str, reason: str) -> Request | None:
        """Return the request whose blocks will not be filled, without them: they may still be written to."""
        request = self._receiving.get(request_id)
        if request is None:
            return None
        logger.warning("kv transfer failed request_id=%s reason=%s", request_id, reason)
        self._leave(request)
        self._counts.num_failed += 1
        self._counts.num_fallbacks += self.is_fallback_allowed
        return request

    def fetch_released(self, request_id: str) -> None:
        """Give back the blocks of a fetch that failed, or that nobody waits for."""
        self._kv_cache.close(self._abandoned.pop(request_id))

    def abandon(self, request: Request) -> bool:
        """End the fetch of a request that is dropped; False if it has none under way."""
        if request.request_id not in self._receiving:
            return False
        self._leave(request)
        self._command(commands.CancelFetch(request.request_id))
        return True

    def statistics(self) -> HandoffStatistics:
        held, receiving, abandoned = len(self._held), len(self._receiving), len(self._abandoned)
        return replace(self._counts, num_held=held, num_receiving=receiving, num_abandoned=abandoned)

    def _leave(self, request: Request) -> None:
        """Part a request from blocks that are still in another's reach."""
        assert request.blocks is not None
        del self._receiving[request.request_id]
        self._abandoned[request.request_id] = request.blocks
        request.blocks = None


def check_handoff(handoff: RemotePrefill, num_prompt_tokens: int, vocab_size: int) -> None:
    """Raise InvalidValueError unless what another worker says of a prompt fits it, and that worker can be asked."""
    token_ids, name_len = handoff.first_token_ids, len(handoff.remote_request_id)
    try:
        if handoff.num_tokens != num_prompt_tokens:
            raise InvalidValueError("num_tokens", handoff.num_tokens, f"{num_prompt_tokens}, as the prompt")
        if len(token_ids) != 1 or token_ids[0] >= vocab_size:
            raise InvalidValueError("first_token_ids", token_ids, f"one token below {vocab_size}")
        if not 1 <= name_len <= commands.MAX_NAME_LEN:
            # Its worker would read neither the request nor a cancel, and the blocks would wait for an answer for ever.
            expected = f"1 to {commands.MAX_NAME_LEN} characters"
            raise InvalidValueError("remote_request_id", handoff.remote_request_id, expected)
        commands.check_endpoints(handoff.remote_endpoints)
    except InvalidValueError as error:
        raise InvalidValueError(f"kv_transfer_params.{error.field}", error.value, error.expected) from None


def _lists(blocks: SequenceBlocks) -> commands.BlockLists:
    return tuple(tuple(table.block_ids) for table in blocks.tables)
