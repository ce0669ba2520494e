"""Whether one worker computes a prompt and another goes on with it, and how far that is.

What is not worth the way, or cannot go it, stays local: one worker does all, as if there were no prefill workers.
Prefill workers are told which prompts nobody will fetch, so that they need not hold them until their time is over. One
that is not told frees the blocks all the same, later: so this is tried once, and given up when too many wait. Bundled
workers alone have the endpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from kvist.http import Headers, ResponseReceiver, UpstreamError, UpstreamPool
from kvist.openai.requests import Fields
from kvist.router.policy.decision import Decision, is_worth_handing_over
from kvist.router.prefill.dialect import Dialect, Handoff, Local
from kvist.router.prefill.sglang import SglangDialect
from kvist.router.prefill.trtllm import TrtllmDialect
from kvist.router.prefill.vllm import KvistDialect, VllmDialect

logger = logging.getLogger(__name__)

KVIST = KvistDialect()
DIALECTS: Mapping[str, Dialect] = {
    "kvist": KVIST,
    "vllm": VllmDialect(),
    "sglang": SglangDialect(),
    "tensorrt_llm": TrtllmDialect(),
}
"""By the names that engines have for themselves."""

MAX_WAITING = 1024
"""What a decode worker that dies can leave behind at once; beyond it releases are dropped, and counted."""

_OUTCOMES = {204: "released", 404: "unknown"}


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Who answers the client and, unless that is local, who computes the prompt for it, asked by these `fields`.

    `handoff` is what the two are told at once, if they are a pair. So it is for each of several answers, if it
    `is_several`: they are different requests. With `pulled_tokens` nobody else computes: so many
    first tokens of the prompt are fetched from what `prefill` holds, and the rest is for who answers. `local` is None
    where the plan is not, or where the fleet has no prefill workers and nothing was to be decided.
    """

    answer: Decision
    prefill: Decision | None = None
    local: Local | None = None
    dialect: Dialect = KVIST
    fields: Fields = {}
    handoff: Handoff | None = None
    pulled_tokens: int = 0
    is_several: bool = False


def why_local(local: Decision, max_local_prefill_tokens: int) -> Local | None:
    """Return why the worker that would do all of a request should, None if its prompt is worth handing over."""
    if is_worth_handing_over(local.prompt, local.overlap_tokens, max_local_prefill_tokens):
        return None
    return Local.SHORT if local.prompt.num_tokens <= max_local_prefill_tokens else Local.CACHED


@dataclass(slots=True)
class Handover:
    """A prompt that one worker has for another, or computes beside it, and how long each part of the request took.

    The transfer lasts from when the prompt was computed and the decode worker asked to the first byte of its answer.
    Once that `is_fetched`, the decode worker has the blocks, or tells the prefill worker itself that it does not want
    them.
    """

    handoff: Handoff
    prefill_worker: str
    prefill_s: float = 0.0
    sent_s: float = 0.0
    transfer_s: float = 0.0
    is_fetched: bool = False

    def headers(self) -> Headers:
        """Return what a client that may know is told of it."""
        return [
            (b"x-kvist-prefill-worker", self.prefill_worker.encode()),
            (b"x-kvist-prefill-ms", b"%.1f" % (self.prefill_s * 1000)),
            (b"x-kvist-transfer-ms", b"%.1f" % (self.transfer_s * 1000)),
        ]


class Releases:
    """Sends releases, each at most once."""

    def __init__(self, pool: UpstreamPool, on_outcome: Callable[[str], None]) -> None:
        """`on_outcome` is told of each: `released`, `unknown` to its worker, `failed` or `dropped`."""
        self._pool = pool
        self._on_outcome = on_outcome
        self._num_waiting = 0

    def release(self, worker: str, remote_request_id: str, headers: Headers) -> None:
        """Tell the worker that nobody will fetch what it holds under this name. Never waits."""
        if self._num_waiting == MAX_WAITING:
            self._on_outcome("dropped")
            return
        self._num_waiting += 1
        target = "/kv_transfer/" + quote(remote_request_id, safe="")
        self._pool.send(_Release(worker, self._ended), worker, "DELETE", target, headers)

    def _ended(self, worker: str, status: int) -> None:
        self._num_waiting -= 1
        outcome = _OUTCOMES.get(status, "failed")
        if outcome == "failed":
            logger.info("prompt not released worker=%s status=%d", worker, status)
        self._on_outcome(outcome)


class _Release(ResponseReceiver):
    """Says what status it ended with, 0 without an answer."""

    status = 0

    def __init__(self, worker: str, on_ended: Callable[[str, int], None]) -> None:
        self._worker = worker
        self._on_ended = on_ended

    def on_head(self, status: int, _headers: Headers) -> None:
        self.status = status

    def on_data(self, piece: bytes) -> None:
        """Drop it."""

    def on_end(self) -> None:
        self._on_ended(self._worker, self.status)

    def on_failure(self, _: UpstreamError) -> None:
        self._on_ended(self._worker, 0)
