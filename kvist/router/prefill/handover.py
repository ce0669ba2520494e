"""Whether one worker computes a prompt and another goes on with it, and what each of the two is sent. No I/O.

A prefill worker gets the request with `"kv_transfer_params": {"do_remote_decode": true}`: it computes the prompt and
one token, keeps the blocks, and answers with params that name them. A decode worker gets the client's request with
those: it fetches the blocks and goes on. The first token is in them, so its answer is the whole answer.

What is not worth the way, or cannot go it, stays local: one worker does all, as if there were no prefill workers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from kvist.http import Headers
from kvist.router.policy.decision import Decision
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, Ask

logger = logging.getLogger(__name__)

MAX_HANDOFF_BYTES = 1024 * 1024
"""Largest answer of a prefill worker: a token, usage and the params."""

_PARAMS = "kv_transfer_params"


class Local(StrEnum):
    """Why one worker does all of a request, in a fleet that has prefill workers."""

    SHORT = "short"
    CACHED = "cached"
    SEVERAL_SEQUENCES = "several_sequences"
    LOGPROBS = "logprobs"
    OTHER_ENDPOINT = "other_endpoint"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_DECODE_WORKER = "no_decode_worker"
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    TRANSFER_FAILED = "transfer_failed"


FALLBACKS = frozenset({Local.PREFILL_REFUSED, Local.PREFILL_FAILED, Local.DECODE_FAILED, Local.TRANSFER_FAILED})
"""Reasons that show only after the prompt was sent to a prefill worker."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Who answers the client and, unless that is local, who computes the prompt for it.

    `local` is None where the plan is not, or where the fleet has no prefill workers and nothing was to be decided.
    """

    answer: Decision
    prefill: Decision | None = None
    local: Local | None = None


def is_worth_handing_over(local: Decision, max_local_prefill_tokens: int) -> Local | None:
    """Return None if so: the worker that would do all has more than so many tokens to compute; else why not."""
    num_tokens = local.prompt.num_tokens
    if num_tokens <= max_local_prefill_tokens:
        return Local.SHORT
    return Local.CACHED if num_tokens - local.overlap_tokens <= max_local_prefill_tokens else None


def obstacle(path: str, ask: Ask) -> Local | None:
    """Return why the request cannot be handed over, None if it can."""
    if path not in (CHAT_PATH, COMPLETION_PATH):
        return Local.OTHER_ENDPOINT
    said = ask.fields.get
    if ask.num_prompts != 1 or said("n") not in (None, 1) or said("best_of") not in (None, 1):
        return Local.SEVERAL_SEQUENCES
    logprobs = said("logprobs")
    if not (logprobs is None or logprobs is False) or said("echo"):
        return Local.LOGPROBS
    return None


def prefill_body(body: bytes) -> bytes:
    """Return what the prefill worker gets: the request for one token, at once, and for blocks that are kept."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop("stream_options", None)
    fields["stream"] = msgspec.Raw(b"false")
    for limit in ("max_tokens", "max_completion_tokens"):
        if limit in fields or limit == "max_tokens":
            fields[limit] = msgspec.Raw(b"1")
    if "min_tokens" in fields and fields["min_tokens"] != b"0":
        fields["min_tokens"] = msgspec.Raw(b"1")
    fields[_PARAMS] = msgspec.Raw(b'{"do_remote_decode":true}')
    return msgspec.json.encode(fields)


class Handoff(msgspec.Struct, frozen=True):
    """What a prefill worker says of the blocks it holds: as it came, and the name that it holds them under."""

    params: bytes
    remote_request_id: str | None


class _Params(msgspec.Struct, frozen=True):
    do_remote_prefill: Literal[True]
    remote_request_id: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw


def read_handoff(answer: bytes) -> Handoff | None:
    """Return what a prefill worker's answer hands over; None where it has nothing that can be used."""
    try:
        params = bytes(msgspec.json.decode(answer, type=_Answer).kv_transfer_params)
        return Handoff(params, msgspec.json.decode(params, type=_Params).remote_request_id)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_body(body: bytes, params: bytes) -> bytes:
    """Return what the decode worker gets: the client's bytes with the params put in at the front."""
    place = body.index(b"{") + 1
    return b"".join((body[:place], b'"', _PARAMS.encode(), b'":', params, b",", body[place:]))


@dataclass(slots=True)
class Handover:
    """A prompt that one worker computed, on its way to another, and how long each part of the request took.

    The transfer lasts from asking the decode worker to the first byte of its answer. Once that `is_fetched`, the decode
    worker has the blocks, or tells the prefill worker itself that it does not want them.
    """

    handoff: Handoff
    prefill_worker: str
    prefill_s: float
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

    def log(self, decision: Decision, now_s: float, request_id: bytes) -> None:
        """Log the whole way of a request that was answered."""
        text = "disaggregated prefill=%s decode=%s prefill_s=%.4f transfer_s=%.4f decode_s=%.4f request_id=%s"
        decode_s = now_s - self.sent_s - self.transfer_s
        workers = (self.prefill_worker, decision.chosen.target.worker)
        logger.debug(text, *workers, self.prefill_s, self.transfer_s, decode_s, request_id.decode("latin-1"))
