"""Full reports: how the cache of a vLLM worker that is known in part becomes known again.

Where events were lost beyond recovery, the index lacks blocks that the engine holds, and shows the rank as partial.
A rank may be partial for another reason, with its copies still counted: a report, which cannot bring more of it to the
index, would look like one more copy, and is not asked for.
vLLM reports a request's cached blocks anew if its body says `"vllm_xargs": {"kv_cache_report_mode": "full"}`: requests
to a partial rank say so, and are otherwise value for value the client's, until the hits are stable. They also name a
session, which the events repeat, so that who knows the rank wholly counts no copies; one with its own is left as it is.

    hit      a block of a prompt that the engine said it had cached (`cached_tokens`) and the index had not, counted
             once, whether or not a report brought it into the index
    stable   `NUM_UNCHANGED_IN_A_ROW` answers, one after the other, had no new hit

So it ends where reports bring all that is hit, and where they never will: blocks of a store beside the engine, layers
that report otherwise. Another hit begins it again: the removal of one copy may have taken a block that has others. An
engine that does not tell (`--enable-prompt-tokens-details`), or has news for ever, is asked `MAX_ASKED` times. What was
never hit may be missing still, so the rank stays partial by name. A new loss begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, TypeAlias

from kvist.events import WorkerRank
from kvist.events.dialects.block_events import REPORT_SESSION
from kvist.events.session import SourceState
from kvist.openai.requests import with_fields
from kvist.router.fleet.fleet import Fleet
from kvist.router.index import Caches, RankStatus
from kvist.router.metrics import RouterMetrics
from kvist.router.policy.decision import Decision
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH
from kvist.router.usage import ReportedUsage

logger = logging.getLogger(__name__)

NUM_UNCHANGED_IN_A_ROW = 32
"""Full reports without a new hit, one after the other, before a rank is left alone."""
MAX_ASKED = 2048
"""Full reports after which a rank is left alone in any case: each makes the engine send its prompt's tokens again."""
MAX_HITS = 1 << 16
"""Hits remembered, to be counted once; those beyond count each time, so that healing is not ended for want of room."""

_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH, "/v1/responses"})
REPORT_MODE = ("vllm_xargs", "kv_cache_report_mode")
"""Where a body would say what only who follows the stream may: what vLLM reports anew looks like one more copy."""

BlockHashes: TypeAlias = Callable[[int, int], Iterable[int]]
"""Names the blocks that a prompt fills from its first to its second token of these numbers."""


class Report(StrEnum):
    """What a full report showed: blocks that the index lacked, none, or the worker did not tell."""

    LACKING = "lacking"
    KNOWN = "known"
    UNTOLD = "untold"


class End(StrEnum):
    """Why a rank is asked no more."""

    STABLE = "stable"
    ASKED_ENOUGH = "asked enough"


@dataclass(slots=True)
class _Healing:
    """How far one rank's healing has come since it was cleared."""

    clearing: int | None
    num_asked: int = 0
    num_unchanged_in_a_row: int = 0
    num_hits: int = 0
    hits: set[int] = field(default_factory=set)
    is_telling: bool = False
    end: End | None = None

    def learn(self, decision: Decision, usage: ReportedUsage | None, block_hashes: BlockHashes) -> Report:
        """Take what an answer tells."""
        if usage is None or not decision.prompt.is_tokenized:
            return Report.UNTOLD
        self.is_telling |= usage.cached_tokens is not None
        if not self.is_telling:
            return Report.UNTOLD
        num_cached_tokens = usage.cached_tokens or 0  # of which vLLM says nothing
        is_lacking = num_cached_tokens > decision.overlap_tokens
        new = set(block_hashes(decision.overlap_tokens, num_cached_tokens)) - self.hits if is_lacking else ()
        self.hits.update(islice(new, MAX_HITS - len(self.hits)))
        self.num_hits += len(new)
        self.num_unchanged_in_a_row = 0 if new else self.num_unchanged_in_a_row + 1
        return Report.LACKING if is_lacking else Report.KNOWN

    def reached_end(self) -> End | None:
        """Return why to ask no more, None if there is no reason yet."""
        if self.num_unchanged_in_a_row >= NUM_UNCHANGED_IN_A_ROW:
            return End.STABLE
        return End.ASKED_ENOUGH if self.num_asked >= MAX_ASKED else None


class Healer:
    """Decides which requests ask for a full report, and learns from their answers when it is enough."""

    def __init__(self, fleet: Fleet, index: Caches | None, metrics: RouterMetrics) -> None:
        """Heal what is partial in `index`; nothing without one."""
        self._fleet = fleet
        self._index = index
        self._metrics = metrics
        self._ranks: dict[WorkerRank, _Healing] = {}

    def body_for(self, target: WorkerRank, path: str, body: bytes, fields: Mapping[str, Any]) -> bytes:
        """Return what to send to the rank: the client's body, asking for a full report if that may bring something.

        `fields` is what the body says.
        """
        if path not in _PATHS or not self._is_lacking(target):
            return body
        asking = ask_full_report(body, fields)
        if asking is not body:
            self._ranks[target].num_asked += 1
        return asking

    def answered(self, decision: Decision, usage: ReportedUsage | None, block_hashes: BlockHashes) -> None:
        """Take what an answer tells: how many tokens of the prompt the engine found in its cache."""
        target = decision.chosen.target
        healing = self._ranks.get(target)
        if healing is None:
            return
        report = healing.learn(decision, usage, block_hashes)
        if healing.end is not None:
            if healing.end is End.STABLE and not healing.num_unchanged_in_a_row:
                healing.end = None
            return
        self._metrics.counts["full_reports", target.worker, report] += 1
        if healing.end is None and (end := healing.reached_end()) is not None:
            healing.end = end
            self._metrics.counts["healed", target.worker, end] += 1
            text = "partial rank is asked no more: %s worker=%s rank=%d num_asked=%d num_hits=%d"
            logger.info(text, end, *target, healing.num_asked, healing.num_hits)

    def _is_lacking(self, target: WorkerRank) -> bool:
        """Return whether the rank is known in part and may hold blocks that are asked for and not known."""
        status = self._status(target)
        if status is None or status.state is SourceState.LIVE:
            self._ranks.pop(target, None)
        if status is None or status.state is not SourceState.PARTIAL or status.is_counted:
            return False
        worker = self._fleet.get(target.worker)
        if worker is None or worker.engine != "vllm":
            return False
        healing = self._ranks.get(target)
        if healing is None or healing.clearing != status.clearing:  # each loss clears the rank
            self._forget_removed()
            healing = self._ranks[target] = _Healing(status.clearing)
        return healing.end is None and healing.num_asked < MAX_ASKED

    def _forget_removed(self) -> None:
        for target in [target for target in self._ranks if self._fleet.get(target.worker) is None]:
            del self._ranks[target]

    def _status(self, target: WorkerRank) -> RankStatus | None:
        ranks = [] if self._index is None else self._index.ranks(target.worker)
        return next((status for status in ranks if status.target == target), None)


def ask_full_report(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the body with the request for a full report put in; the very same object where it has no place."""
    name, mode = REPORT_MODE
    arguments = fields.get(name, {})
    if not body or not isinstance(arguments, dict) or fields.get("session_id") is not None:
        return body
    return with_fields(body, {name: arguments | {mode: "full"}, "session_id": REPORT_SESSION})
