"""The engine's side of disaggregated prefill: prompts that it offers to other workers, and prompts that it fetches.

The engine moves no bytes: it exchanges the messages of `kvist.transfer.commands` with the transfer service, which does.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvist.engine.request import Request
from kvist.errors import InvalidValueError
from kvist.kvcache import ABSENT, KvCacheManager, SequenceBlocks, num_blocks_for
from kvist.openai.requests import RemotePrefill
from kvist.transfer import commands

logger = logging.getLogger(__name__)

_MAX_HELD = 256

_HALF_LIFE_S, _GUESS_S = 30.0, 0.1
"""Half-life of a measured fetch speed, and how many seconds of fetching the first guess counts for: after a fetch that
failed after 30 s, routers avoid the worker for some minutes."""


@dataclass(slots=True)
class HandoffStatistics:
    """Numbers of sequences that other workers may read or write now, and counts since the start.

    `num_held` prompts wait to be fetched. The blocks of `num_abandoned` fetches are not needed any more, but another
    worker may still write to them.
    """

    num_held: int = 0
    num_abandoned: int = 0
    num_offered: int = 0
    num_sent: int = 0
    num_given_up: int = 0
    num_fetched: int = 0
    num_failed: int = 0
    num_fallbacks: int = 0
    tokens_per_s: float | None = None
    """How fast prefixes are fetched; None if this worker does not fetch prefixes."""


class FetchSpeed:
    """A running average of how fast prompts were fetched. A failed fetch counts with its time and no tokens."""

    def __init__(self, tokens_per_s: float) -> None:
        """Start from a first guess, which keeps some weight for good."""
        self._guess = tokens_per_s
        self._tokens = self._seconds = self._at_s = 0.0

    def add(self, num_tokens: int, began_s: float, ended_s: float) -> None:
        decay = self._decay(ended_s)
        self._tokens = self._tokens * decay + num_tokens
        self._seconds = self._seconds * decay + ended_s - began_s
        self._at_s = ended_s

    def tokens_per_s(self, now_s: float) -> float:
        decay = self._decay(now_s)
        tokens, seconds = self._tokens * decay + self._guess * _GUESS_S, self._seconds * decay + _GUESS_S
        return tokens / seconds

    def _decay(self, now_s: float) -> float:
        return math.exp2((self._at_s - now_s) / _HALF_LIFE_S)


@dataclass(slots=True)
class _Held:
    """Filled blocks of a prompt that another worker may fetch, and the request that still computes the rest, if any."""

    blocks: SequenceBlocks
    request: Request | None


class Handoffs:
    """Keeps every sequence whose blocks another worker may read or write until its transfer has ended."""

    def __init__(self, kv_cache: KvCacheManager) -> None:
        self.is_attached = self.is_fallback_allowed = False
        self._command: Callable[[commands.Command], None]
        self._speed: FetchSpeed | None = None
        self._kv_cache = kv_cache
        self._held: dict[str, _Held] = {}
        self._abandoned: dict[str, SequenceBlocks] = {}
        self._counts = HandoffStatistics()

    def attach(
        self,
        command: Callable[[commands.Command], None],
        *,
        is_fallback_allowed: bool = True,
        tokens_per_s: float | None = None,
    ) -> None:
        """Take part in transfers: send commands to the transfer service by `command`. Called before the first step.

        With `is_fallback_allowed`, a prompt that cannot be fetched is computed here. `tokens_per_s` is a first guess
        of how fast prompts are fetched, given only if this worker fetches prefixes.
        """
        self.is_attached, self.is_fallback_allowed, self._command = True, is_fallback_allowed, command
        self._speed = None if tokens_per_s is None else FetchSpeed(tokens_per_s)

    def offer_computed(self, request: Request, first_token_id: int | None = None) -> str | None:
        """Hold the computed blocks of a prompt for another worker; return the random, unique id to fetch them by.

        Called first when no block may be computed yet, then after each chunk, and with the first token once the whole
        prompt is computed. The blocks stay held whatever happens to the request. Returns None if too many prompts are
        held to begin with this one.
        """
        num_tokens, size = len(request.prompt_token_ids), self._kv_cache.block_size
        is_whole = first_token_id is not None
        remote_request_id = request.times.remote_request_id
        if remote_request_id is None:
            if len(self._held) >= _MAX_HELD:
                return None
            remote_request_id = self._offer(request, self._kv_cache.open_empty(request.chain, num_tokens))
        if request.blocks is not None:
            num_blocks = num_blocks_for(num_tokens, size) if is_whole else request.num_computed_tokens // size
            self._kv_cache.share(self._held[remote_request_id].blocks, request.blocks, num_blocks)
        self._send_computed(remote_request_id, first_token_id, is_whole=is_whole)
        return remote_request_id

    def offer_cached(self, request: Request, max_tokens: int) -> tuple[int, str | None]:
        """Hold the cached part of a prompt's first `max_tokens` tokens; return its length, and its id unless 0."""
        prompt = request.token_ids[:max_tokens]
        hit = self._kv_cache.match(request.chain, prompt, is_next_known=True)
        if not hit.num_tokens or len(self._held) >= _MAX_HELD:
            return 0, None
        blocks = self._kv_cache.reserve(hit, request.chain, prompt, hit.num_tokens)
        assert blocks is not None, "cached blocks need no free ones"
        remote_request_id = self._offer(request, blocks)
        self._send_computed(remote_request_id, None, is_whole=True)
        return hit.num_tokens, remote_request_id

    def on_offer_released(self, remote_request_id: str, is_fetched: bool) -> Request | None:
        """Release a held prompt's blocks; return the request if it still computes the prompt, which nobody fetches."""
        if not is_fetched:
            logger.info("held prompt given up remote_request_id=%s", remote_request_id)
        self._counts.num_sent += is_fetched
        self._counts.num_given_up += not is_fetched
        held = self._held.pop(remote_request_id)
        self._kv_cache.close(held.blocks)
        return held.request

    def withdraw_preempted(self) -> None:
        """Withdraw the prompts of preempted requests: their held blocks would keep the memory full."""
        for remote_request_id, held in self._held.items():
            has_blocks = any(table.held() for table in held.blocks.tables)
            if has_blocks and held.request is not None and held.request.blocks is None:
                self.withdraw(remote_request_id)

    def withdraw(self, remote_request_id: str) -> None:
        """Let a prompt be fetched no more, and have it released, if it is held."""
        if remote_request_id in self._held:
            self._command(commands.WithdrawOffer(remote_request_id))

    def fetch(self, request: Request) -> None:
        """Start to fetch the blocks of a prompt that are reserved and not cached here."""
        blocks, source = request.blocks, request.handoff
        assert blocks is not None
        assert isinstance(source, RemotePrefill)
        remote = (source.remote_endpoints, source.remote_request_id)
        missing = []
        for table in blocks.tables:
            num_held = table.first_held + len(table.adopted)
            missing.append((ABSENT,) * num_held + tuple(table.block_ids[num_held:]))
        self._command(commands.Fetch(request.request_id, *remote, blocks.num_tokens, tuple(missing)))

    def on_fetch_completed(self, request: Request) -> None:
        """Accept the blocks of a request, which are filled now."""
        assert request.blocks is not None
        self._kv_cache.accept(request.blocks, request.token_ids)
        self._counts.num_fetched += 1
        self._record_fetch_end(request, request.blocks.num_tokens - (request.num_cached_tokens or 0))

    def on_fetch_failed(self, request: Request, reason: str) -> None:
        """Take from a request the blocks that could not be filled."""
        logger.warning("kv transfer failed request_id=%s reason=%s", request.request_id, reason)
        self._abandon_blocks(request)
        self._record_fetch_end(request, 0)
        self._counts.num_failed += 1
        self._counts.num_fallbacks += self.is_fallback_allowed

    def on_fetch_released(self, request_id: str) -> None:
        """Release the blocks of a fetch that failed or whose request was aborted: nobody writes to them any more."""
        self._kv_cache.close(self._abandoned.pop(request_id))

    def cancel_fetch(self, request: Request) -> None:
        """Cancel the fetch of an aborted request."""
        self._abandon_blocks(request)
        self._command(commands.CancelFetch(request.request_id))

    def statistics(self) -> HandoffStatistics:
        return replace(
            self._counts,
            num_held=len(self._held),
            num_abandoned=len(self._abandoned),
            tokens_per_s=None if self._speed is None else self._speed.tokens_per_s(time.monotonic()),
        )

    def _offer(self, request: Request, blocks: SequenceBlocks) -> str:
        remote_request_id = request.times.remote_request_id = uuid.uuid4().hex
        self._held[remote_request_id] = _Held(blocks, request)
        self._counts.num_offered += 1
        self._command(commands.Offer(remote_request_id, blocks.num_tokens))
        return remote_request_id

    def _send_computed(self, remote_request_id: str, first_token_id: int | None, *, is_whole: bool) -> None:
        """Report the filled blocks of a held prompt to the transfer service; `is_whole` when all are."""
        held = self._held[remote_request_id]
        if is_whole:
            held.request = None
        lists = tuple(tuple(table.block_ids) for table in held.blocks.tables)
        self._command(commands.Computed(remote_request_id, lists, is_whole, first_token_id))

    def _record_fetch_end(self, request: Request, num_tokens: int) -> None:
        """Record when a fetch ended, and how fast it was.

        The speed is that of prefixes alone: the worker that holds a whole prompt may still be computing it.
        """
        times, source = request.times, request.handoff
        times.fetched_s = time.monotonic()
        is_prefix = isinstance(source, RemotePrefill) and source.num_tokens < len(request.prompt_token_ids)
        if self._speed is not None and is_prefix and times.fetching_s is not None:
            self._speed.add(num_tokens, times.fetching_s, times.fetched_s)

    def _abandon_blocks(self, request: Request) -> None:
        """Take from a request its blocks, which another worker may still write to."""
        assert request.blocks is not None
        self._abandoned[request.request_id] = request.blocks
        request.blocks = request.num_cached_tokens = None


def check_handoff(handoff: RemotePrefill, num_prompt_tokens: int) -> None:
    """Raise InvalidValueError unless a handoff fits its prompt, and its worker can be asked for the blocks."""
    try:
        if handoff.num_tokens > num_prompt_tokens:
            raise InvalidValueError("num_tokens", handoff.num_tokens, f"at most {num_prompt_tokens}, as the prompt")
        if not 1 <= len(handoff.remote_request_id) <= commands.MAX_NAME_LEN:
            # Its worker could read neither the fetch nor a cancel, and the blocks would wait for an answer for ever.
            expected = f"1 to {commands.MAX_NAME_LEN} characters"
            raise InvalidValueError("remote_request_id", handoff.remote_request_id, expected)
        commands.check_endpoints(handoff.remote_endpoints)
    except InvalidValueError as error:
        raise InvalidValueError(f"kv_transfer_params.{error.field}", error.value, error.expected) from None
