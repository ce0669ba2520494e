"""Handing a prompt that one worker has computed over to another: the plan, its state, and releasing the prompt.

A prompt that is not worth it, or cannot be handed over, stays local: one worker does all, as if there were no prefill
workers. Prefill workers are told of prompts that nobody will fetch, so that they need not hold them until a timeout.
That is tried once, and not at all when too many such messages wait: without it the blocks are freed all the same, only
later. Bundled workers alone have the endpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import quote

import msgspec

from kvist.http import Headers, ResponseReceiver, UpstreamError, UpstreamPool
from kvist.openai.requests import Fields
from kvist.router.policy.decision import Decision, is_worth_handing_over
from kvist.router.prefill.dialect import Dialect, Handoff, LocalReason
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
"""By the names that engines give themselves."""

MAX_WAITING = 1024
"""What a decode worker that dies can leave behind at once; beyond it releases are dropped, and counted."""

MAX_FIRST_EVENTS_BYTES = 65536
"""What is kept of a stream until it shows whether it begins with an error."""

_OUTCOMES = {204: "released", 404: "unknown"}


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Which worker answers the client, and which one computes the prompt for it, if another does."""

    answer: Decision
    prefill: Decision | None = None
    local_reason: LocalReason | None = None
    """Why one worker does all; None where it does not, or where the fleet has no prefill workers."""
    dialect: Dialect = KVIST
    fields: Fields = {}
    """What is set in the body for `prefill`."""
    handoff: Handoff | None = None
    """What the answering worker is sent, if it is asked at the same time as `prefill`."""
    pulled_tokens: int = 0
    """If not 0, `prefill` computes nothing: the answering worker fetches so many leading tokens from it."""
    is_split: bool = False
    """Whether the request is split into one for each answer, each of which is then planned by itself."""


def why_local(local: Decision, max_local_prefill_tokens: int) -> LocalReason | None:
    """Return why one worker should do all of a request, None if its prompt is worth handing over."""
    if is_worth_handing_over(local.prompt, local.overlap_tokens, max_local_prefill_tokens):
        return None
    return LocalReason.SHORT if local.prompt.num_tokens <= max_local_prefill_tokens else LocalReason.CACHED


def begins_with_failure(answer: bytes) -> bool | None:
    """Return whether a stream begins with a worker's own error; None if the bytes that follow may tell.

    vLLM answers 200 before it has fetched anything, and a chat with a first event that has no token yet.
    """
    start = answer.replace(b"\r\n", b"\n")
    if not start.startswith(b"data:"):
        return None if b"data:".startswith(start) else False
    event, end, rest = start.partition(b"\n\n")
    if end and b'"content":""' in event:
        event, end, _ = rest.partition(b"\n\n")
    if not end:
        return None if len(answer) < MAX_FIRST_EVENTS_BYTES else False
    try:
        failure = msgspec.json.decode(event.removeprefix(b"data:"), type=_Failure)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return failure.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR


class _Error(msgspec.Struct, frozen=True):
    code: int


class _Failure(msgspec.Struct, frozen=True):
    error: _Error


@dataclass(slots=True)
class Handover:
    """A prompt that one worker computes for another, and how long each part of the request took.

    The transfer lasts from when the prompt was computed and the decode worker asked to the first byte of its answer.
    Once `is_fetched`, the decode worker has the blocks, or tells the prefill worker itself that it does not want them.
    """

    handoff: Handoff
    prefill_worker: str
    prefill_s: float = 0.0
    sent_s: float = 0.0
    transfer_s: float = 0.0
    is_fetched: bool = False

    def headers(self) -> Headers:
        """Return the headers that tell an administrator of it."""
        return [
            (b"x-kvist-prefill-worker", self.prefill_worker.encode()),
            (b"x-kvist-prefill-ms", b"%.1f" % (self.prefill_s * 1000)),
            (b"x-kvist-transfer-ms", b"%.1f" % (self.transfer_s * 1000)),
        ]


class Releases:
    """Tells prefill workers which prompts nobody will fetch, each at most once."""

    def __init__(self, pool: UpstreamPool, on_outcome: Callable[[str], None]) -> None:
        """`on_outcome` is called for each: `released`, `unknown` to its worker, `failed` or `dropped`."""
        self._pool = pool
        self._on_outcome = on_outcome
        self._num_waiting = 0

    def release(self, worker: str, remote_request_id: str, headers: Headers) -> None:
        """Tell the worker that nobody will fetch the prompt it holds under this name. Never waits."""
        if self._num_waiting == MAX_WAITING:
            self._on_outcome("dropped")
            return
        self._num_waiting += 1
        target = "/kv_transfer/" + quote(remote_request_id, safe="")
        self._pool.send(_Release(partial(self._on_ended, worker)), worker, "DELETE", target, headers)

    def _on_ended(self, worker: str, status: int) -> None:
        self._num_waiting -= 1
        outcome = _OUTCOMES.get(status, "failed")
        if outcome == "failed":
            logger.info("prompt not released worker=%s status=%d", worker, status)
        self._on_outcome(outcome)


class _Release(ResponseReceiver):
    """Reports the status of the answer, 0 if there was none."""

    status = 0

    def __init__(self, on_ended: Callable[[int], None]) -> None:
        self._on_ended = on_ended

    def on_head(self, status: int, _headers: Headers) -> None:
        self.status = status

    def on_data(self, piece: bytes) -> None:
        """Ignore the body."""

    def on_end(self) -> None:
        self._on_ended(self.status)

    def on_failure(self, _: UpstreamError) -> None:
        self._on_ended(0)
