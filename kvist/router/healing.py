"""Full reports: how the cache of a vLLM worker that is known in part becomes known again.

Where events were lost beyond recovery, the index lacks blocks that the engine holds, and shows the rank as partial.
vLLM reports a request's cached blocks anew if its body says `"vllm_xargs": {"kv_cache_report_mode": "full"}`: requests
to a partial rank say so, and are otherwise byte for byte the client's, until what is hit is known:

- after `NUM_KNOWN_IN_A_ROW` answers in a row whose `cached_tokens` were no more than the index had predicted;
- or, of an engine that does not tell (`--enable-prompt-tokens-details`), after `MAX_ASKED` requests.

What was never hit may then still be missing, so the rank stays partial by name. A new loss begins anew.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvist.events import WorkerRank
from kvist.events.session import SourceState
from kvist.router.fleet import Fleet
from kvist.router.index import FleetIndex, RankStatus
from kvist.router.metrics import RouterMetrics
from kvist.router.policy import Decision
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH
from kvist.router.routing import RANKS_MAX_AGE_S
from kvist.router.usage import ReportedUsage
from kvist.router.worker import Worker

logger = logging.getLogger(__name__)

NUM_KNOWN_IN_A_ROW = 32
"""Full reports that bring nothing new, one after the other, before a rank is left alone."""
MAX_ASKED = 2048
"""Full reports after which a rank is left alone in any case: each makes the engine send its prompt's tokens again."""

_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH, "/v1/responses"})
_FIELD = b'"vllm_xargs":{"kv_cache_report_mode":"full"}'
_ARGUMENT = b'"kv_cache_report_mode":"full"'
_ARGUMENTS = re.compile(rb'"vllm_xargs"\s*:\s*\{')


class Report(StrEnum):
    """What a full report showed: blocks that the index lacked, none, or the worker did not tell."""

    LACKING = "lacking"
    KNOWN = "known"
    UNTOLD = "untold"


@dataclass(slots=True)
class _Healing:
    """How far one rank's healing has come."""

    most_blocks: int = 0
    num_asked: int = 0
    num_known_in_a_row: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_known_in_a_row >= NUM_KNOWN_IN_A_ROW or self.num_asked >= MAX_ASKED


class Healer:
    """Decides which requests ask for a full report, and learns from their answers when it is enough."""

    def __init__(self, fleet: Fleet, index: FleetIndex | None, metrics: RouterMetrics) -> None:
        """Heal what is partial in `index`; nothing without one."""
        self._fleet = fleet
        self._index = index
        self._metrics = metrics
        self._ranks: dict[WorkerRank, _Healing] = {}

    def body_for(self, target: WorkerRank, path: str, body: bytes) -> bytes:
        """Return what to send to the rank: the client's body, asking for a full report if that may bring something."""
        if path not in _PATHS or not self._is_lacking(target):
            return body
        asking = ask_full_report(body)
        if asking is not body:
            self._ranks[target].num_asked += 1
        return asking

    def answered(self, decision: Decision, usage: ReportedUsage | None) -> None:
        """Take what the answer to a full report tells: how many tokens the engine found in its cache."""
        target = decision.chosen.target
        healing = self._ranks.get(target)
        if healing is None:
            return
        report = _judge(decision, usage)
        self._metrics.full_report(target.worker, report)
        was_over = healing.is_over
        if report is Report.LACKING:
            healing.num_known_in_a_row = 0
        elif report is Report.KNOWN:
            healing.num_known_in_a_row += 1
        if healing.is_over and not was_over:
            logger.info("partial rank is asked no more worker=%s rank=%d num_asked=%d", *target, healing.num_asked)

    def _is_lacking(self, target: WorkerRank) -> bool:
        """Return whether the rank is known in part and may hold blocks that are asked for and not known."""
        status = self._status(target)
        if status is None or status.state is not SourceState.PARTIAL:
            self._ranks.pop(target, None)
            return False
        worker = self._fleet.get(target.worker)
        if worker is None or not _is_vllm(worker):
            return False
        healing = self._ranks.get(target)
        if healing is None or status.num_blocks < healing.most_blocks // 2:  # each loss clears the rank
            self._forget_removed()
            healing = self._ranks[target] = _Healing()
        healing.most_blocks = max(healing.most_blocks, status.num_blocks)
        return not healing.is_over

    def _forget_removed(self) -> None:
        for target in [target for target in self._ranks if self._fleet.get(target.worker) is None]:
            del self._ranks[target]

    def _status(self, target: WorkerRank) -> RankStatus | None:
        ranks = () if self._index is None else self._index.ranks(target.worker, RANKS_MAX_AGE_S)
        return next((status for status in ranks if status.target == target), None)


def ask_full_report(body: bytes) -> bytes:
    """Return the body with the request for a full report put in; the very same object where it cannot be, for certain.

    A client that says anything of `kv_cache_report_mode` itself has its way.
    """
    try:
        arguments = _decode(body).vllm_xargs
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    if isinstance(arguments, msgspec.UnsetType):
        return _inserted(body, body.index(b"{") + 1, _FIELD)
    places = [match.end() for match in _ARGUMENTS.finditer(body)]
    if arguments is None or "kv_cache_report_mode" in arguments or len(places) != 1:
        return body
    return _inserted(body, places[0], _ARGUMENT)


class _Body(msgspec.Struct, frozen=True):
    vllm_xargs: dict[str, msgspec.Raw] | msgspec.UnsetType | None = msgspec.UNSET


_decode = msgspec.json.Decoder(_Body).decode


def _inserted(body: bytes, place: int, field: bytes) -> bytes:
    """Return the body with a field put in where an object begins."""
    separator = b"" if body[place:].lstrip().startswith(b"}") else b","
    return b"".join((body[:place], field, separator, body[place:]))


def _judge(decision: Decision, usage: ReportedUsage | None) -> Report:
    if usage is None or usage.cached_tokens is None or not decision.prompt.is_tokenized:
        return Report.UNTOLD
    return Report.LACKING if usage.cached_tokens > decision.overlap_tokens else Report.KNOWN


def _is_vllm(worker: Worker) -> bool:
    """Return whether the worker's API is vLLM's, which it says in its model list."""
    return any(model.entry.get("owned_by") == "vllm" for model in worker.identity.models or ())
