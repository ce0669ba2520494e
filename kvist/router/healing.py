"""Full reports: how the index learns the cache of a vLLM worker again of which it knows only a part.

Where events were lost beyond recovery, the index lacks blocks that the engine holds, and shows the rank as partial.
A rank may be partial for another reason, with its copies still counted: a report would then bring nothing new to the
index and look like one more copy of each block, so none is requested.
vLLM reports a request's cached blocks again if its body says `"vllm_xargs": {"kv_cache_report_mode": "full"}`: the
router adds that to requests to a partial rank, changing nothing else, until the hits are stable. It also adds a
session, which the events repeat, so that indexers which know the rank exactly count no copies; a request with a session
of its own is left alone.

    hit      a block of a prompt that the engine reported as cached (`cached_tokens`) and the index did not have,
             counted once, whether or not a report brought it into the index
    stable   `NUM_UNCHANGED_IN_A_ROW` answers in a row had no new hit

So healing ends when reports have brought everything that is hit, and also where they never will: blocks of a store
beside the engine, layers that report otherwise. Another hit begins it again: the removal of one copy may have removed a
block that has others. An engine that does not report cached tokens (`--enable-prompt-tokens-details`), or has new hits
for ever, is asked `MAX_ASKED` times. Blocks that were never hit may still be missing, so the rank stays partial by
name. A new loss begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from kvist.events import WorkerRank
from kvist.events.dialects.block_events import REPORT_SESSION
from kvist.events.session import SourceState
from kvist.openai.requests import with_fields
from kvist.router.fleet.fleet import Fleet
from kvist.router.metrics import RouterMetrics
from kvist.router.policy.decision import Decision
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, ParsedRequest
from kvist.router.usage import ReportedUsage

logger = logging.getLogger(__name__)

NUM_UNCHANGED_IN_A_ROW = 32
"""Answers in a row without a new hit after which no more reports are requested from a rank."""
MAX_ASKED = 2048
"""Reports after which no more are requested in any case: each makes the engine send its prompt's tokens again."""
MAX_HITS = 1 << 16
"""Hits that are remembered, to be counted once; further ones count each time, so that they do not end the healing."""

_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH, "/v1/responses"})
REPORT_MODE = ("vllm_xargs", "kv_cache_report_mode")
"""The field that asks for a report. Only the router may set it, as what vLLM reports again looks like another copy."""

BlockHashes: TypeAlias = Callable[[int, int], Iterable[int]]
"""Returns the hashes of a prompt's blocks between two of its tokens, given by their numbers."""


@dataclass(slots=True)
class _Healing:
    """The progress of one rank's healing since it was cleared."""

    clearing: int | None
    num_asked: int = 0
    num_unchanged_in_a_row: int = 0
    num_hits: int = 0
    hits: set[int] = field(default_factory=set)
    reports_cached_tokens: bool = False
    has_ended: bool = False

    def update(self, decision: Decision, usage: ReportedUsage | None, block_hashes: BlockHashes) -> str:
        """Count an answer's new hits; return if blocks were `lacking` in the index, none was (`known`), or nothing."""
        if usage is None or not decision.prompt.is_exact:
            return "unreported"
        self.reports_cached_tokens |= usage.cached_tokens is not None
        if not self.reports_cached_tokens:
            return "unreported"
        num_cached_tokens = usage.cached_tokens or 0  # vLLM leaves a 0 out
        is_lacking = num_cached_tokens > decision.overlap_tokens
        new = set(block_hashes(decision.overlap_tokens, num_cached_tokens)) - self.hits if is_lacking else ()
        self.hits.update(islice(new, MAX_HITS - len(self.hits)))
        self.num_hits += len(new)
        self.num_unchanged_in_a_row = 0 if new else self.num_unchanged_in_a_row + 1
        return "lacking" if is_lacking else "known"


class Healer:
    """Decides which requests ask for a full report, and ends that by what their answers show."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._ranks: dict[WorkerRank, _Healing] = {}

    def body_for(self, target: WorkerRank, parsed: ParsedRequest, body: bytes) -> bytes:
        """Return the body to send to the rank: the client's, with a request for a full report if that may be of use."""
        if parsed.path not in _PATHS or not self._needs_report(target):
            return body
        asking = ask_full_report(body, parsed.fields)
        if asking is not body:
            self._ranks[target].num_asked += 1
        return asking

    def on_answer(self, decision: Decision, usage: ReportedUsage | None, block_hashes: BlockHashes) -> None:
        """Update the rank's healing by how many tokens of the prompt the engine found in its cache."""
        target = decision.chosen.target
        healing = self._ranks.get(target)
        if healing is None:
            return
        report = healing.update(decision, usage, block_hashes)
        if healing.has_ended:
            healing.has_ended = healing.num_unchanged_in_a_row > 0 or healing.num_asked >= MAX_ASKED
            return
        self._metrics.counts["full_reports", target.worker, report] += 1
        is_stable = healing.num_unchanged_in_a_row >= NUM_UNCHANGED_IN_A_ROW
        if is_stable or healing.num_asked >= MAX_ASKED:
            healing.has_ended, reason = True, "stable" if is_stable else "report limit"
            self._metrics.counts["healed", target.worker, reason] += 1
            text = "partial rank gets no more requests for full reports: %s worker=%s rank=%d num_asked=%d num_hits=%d"
            logger.info(text, reason, *target, healing.num_asked, healing.num_hits)

    def _needs_report(self, target: WorkerRank) -> bool:
        """Return whether the rank is known only in part, and a report may bring more of it to the index."""
        worker = self._fleet.get(target.worker)
        ranks = [] if worker is None else self._fleet.ranks(worker)
        status = next((status for status in ranks if status.target == target), None)
        if status is None or status.state is SourceState.LIVE:
            self._ranks.pop(target, None)
        if status is None or status.state is not SourceState.PARTIAL or status.is_counted:
            return False
        if worker is None or worker.engine != "vllm":
            return False
        healing = self._ranks.get(target)
        if healing is None or healing.clearing != status.clearing:  # each loss clears the rank
            for removed in [each for each in self._ranks if self._fleet.get(each.worker) is None]:
                del self._ranks[removed]
            healing = self._ranks[target] = _Healing(status.clearing)
        return not healing.has_ended and healing.num_asked < MAX_ASKED


def ask_full_report(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the body with a request for a full report; the very same object if that cannot be added."""
    name, mode = REPORT_MODE
    arguments = fields.get(name, {})
    if not body or not isinstance(arguments, dict) or fields.get("session_id") is not None:
        return body
    return with_fields(body, {name: arguments | {mode: "full"}, "session_id": REPORT_SESSION})
