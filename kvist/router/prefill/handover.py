"""Handing a prompt that one worker has computed over to another: the plan and its state.

A prompt that is not worth it, or cannot be handed over, stays local: one worker does all, as if there were no prefill
workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from kvist.openai.requests import Fields
from kvist.router.policy.decision import Decision, is_worth_handing_over
from kvist.router.prefill.dialect import Dialect, Handoff, LocalReason
from kvist.router.prefill.sglang import SglangDialect
from kvist.router.prefill.trtllm import TrtllmDialect
from kvist.router.prefill.vllm import KvistDialect, VllmDialect

KVIST = KvistDialect()
DIALECTS: Mapping[str, Dialect] = {
    "kvist": KVIST,
    "vllm": VllmDialect(),
    "sglang": SglangDialect(),
    "tensorrt_llm": TrtllmDialect(),
}
"""By the names that engines give themselves."""

MAX_FIRST_EVENTS_BYTES = 65536
"""What is kept of a stream until it shows whether it begins with an error."""


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

    @property
    def computed_by(self) -> Decision:
        """Return the decision of who computes the prompt, or what of it is not fetched."""
        return self.answer if self.prefill is None or self.pulled_tokens else self.prefill


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
    """

    handoff: Handoff
    prefill_worker: str
    prefill_s: float = 0.0
    sent_s: float = 0.0
    transfer_s: float = 0.0
