"""Describes ended requests for the live page: where each went, the terms of its decision, how long each part took.

At most `RATE` requests a second are described, so that it costs next to nothing at any traffic; others are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvist.router.access_log import MAX_CHARS
from kvist.router.attempts import CLIENT_LEFT_STATUS, AnswerAttempt
from kvist.router.doors.explain import explain_choice, explain_pull
from kvist.router.policy.decision import usable_blocks
from kvist.router.prefill.split import SplitAttempt
from kvist.router.prompts import KnownModels

if TYPE_CHECKING:
    from kvist.router.forward import Forwarding
    from kvist.router.prompts import ParsedRequest

RATE, BURST = 20.0, 60.0
MAX_CANDIDATES = 8
"""How many candidates are shown, the best first."""
MAX_BLOCKS = 4096
"""How many blocks of a prompt the tree of prefixes gets."""
_QUOTED_TOKENS = 96

_encode = msgspec.json.Encoder().encode


class JournalEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that has ended, as the live page shows it."""

    row: bytes
    """Its description, in JSON."""
    num_skipped: int = 0
    """How many requests before it were not described."""
    model: str = ""
    block_size: int = 1
    num_held: int = 0
    """How many leading blocks the chosen rank was predicted to hold."""
    hashes: bytes = b""
    """The hashes of its leading blocks, u64."""
    tokens: bytes = b""
    """The tokens of these blocks, u32, if prompts may be shown."""


class Journal:
    """Describes requests as they end, at a limited rate; it belongs to the event loop."""

    def __init__(self, models: KnownModels, on_entry: Callable[[JournalEntry], None], *, shows_prompts: bool) -> None:
        self._models, self._on_entry, self._shows_prompts = models, on_entry, shows_prompts
        self._allowance, self._last_at_s, self._num_skipped = BURST, 0.0, 0

    def record(self, request: Forwarding, error: Exception | None) -> None:
        """Describe a request that has just ended, unless there were too many of late."""
        now_s = request.router.now_s()
        self._allowance = min(BURST, self._allowance + (now_s - self._last_at_s) * RATE)
        self._last_at_s = now_s
        if self._allowance < 1.0:
            self._num_skipped += 1
            return
        self._allowance -= 1.0
        num_skipped, self._num_skipped = self._num_skipped, 0
        parsed: ParsedRequest | None = getattr(request, "parsed", None)  # unset if the prompt could not be read
        row = self._row(request, parsed, error, now_s)
        if parsed is None or parsed.token_ids is None or request.attempt is None:
            self._on_entry(JournalEntry(_encode(row), num_skipped))
            return
        decision, hashes, tokens = request.attempt.decision, request.prefix.block_hashes, b""
        hashes = hashes[: min(usable_blocks(len(hashes), decision.prompt), MAX_BLOCKS)]
        if self._shows_prompts:
            tokenizer = self._models.tokenizer(parsed.model)
            quoted = parsed.token_ids[-_QUOTED_TOKENS:].tolist()
            row["prompt"] = tokenizer.text(quoted) if tokenizer is not None else None
            tokens = parsed.token_ids[: len(hashes) * decision.prompt.block_size].tobytes()
        block_size = decision.prompt.block_size
        num_held, model = decision.overlap_tokens // block_size, request.router.fleet.label_of(parsed.model)
        self._on_entry(JournalEntry(_encode(row), num_skipped, model, block_size, num_held, hashes.tobytes(), tokens))

    def _row(
        self, request: Forwarding, parsed: ParsedRequest | None, error: Exception | None, now_s: float
    ) -> dict[str, Any]:
        attempt, handover = request.attempt, request.handover
        queue_s = 0.0 if request.place is None else request.place.waited_s
        usage = None if attempt is None else attempt.usage
        row: dict[str, Any] = {
            "id": request.request_id.decode("latin-1")[:MAX_CHARS],
            "at": round(time(), 3),
            "path": request.request.path[:MAX_CHARS],
            "model": None if parsed is None or parsed.model is None else parsed.model[:MAX_CHARS],
            "tenant": request.tenant.name,
            "status": request.responder.status or CLIENT_LEFT_STATUS,
            "error": None if error is None else str(error)[:MAX_CHARS],
            "num_attempts": len(request.tried),
            "prompt_tokens": None if parsed is None else parsed.num_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "output_tokens": attempt.num_output_tokens if isinstance(attempt, AnswerAttempt | SplitAttempt) else None,
            "queue_s": round(queue_s, 4),
            "total_s": round(now_s - request.started_s, 4),
        }
        if attempt is not None and parsed is not None:
            row["sent_s"] = round(attempt.sent_s - request.started_s, 4)
            row["first_byte_s"] = attempt.first_byte_s
            row["decision"] = explain_choice(attempt.decision, parsed, MAX_CANDIDATES)
            if handover is not None and request.pull is not None:
                row["pull"] = explain_pull(request.pull)
            elif handover is not None and request.computed_by is not None:
                row |= {"prefill_s": round(handover.prefill_s, 4), "transfer_s": round(handover.transfer_s, 4)}
                row["prefill"] = explain_choice(request.computed_by, parsed, MAX_CANDIDATES)
        return row
