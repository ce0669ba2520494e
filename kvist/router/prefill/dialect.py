"""An engine's protocol by which one of its workers computes a prompt and another generates from it. No I/O.

A dialect is a module: `vllm`, of which Kvist's own is a kind, and `trtllm` ask the prefill worker first, whose answer
has what the decode worker is sent; `sglang` asks both at once.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import NamedTuple

import msgspec

from kvist.openai.requests import Fields
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, ParsedRequest

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Largest answer that is kept: a prefill worker's token and params, with log probabilities of a prompt, or several."""


class LocalReason(StrEnum):
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


OBSTACLES = frozenset({LocalReason.SEVERAL_SEQUENCES, LocalReason.LOGPROBS, LocalReason.OTHER_ENDPOINT})
"""Reasons that lie in the request itself: no pair of the dialect can do it."""

FALLBACKS = frozenset(
    {LocalReason.PREFILL_REFUSED, LocalReason.PREFILL_FAILED, LocalReason.DECODE_FAILED, LocalReason.TRANSFER_FAILED}
)
"""Reasons that arise only after the prompt was sent to a prefill worker."""


class Side(NamedTuple):
    """One of the two workers; `rank` is None where it has only one, or its ranks are not known."""

    url: str
    bootstrap_port: int
    rank: int | None = None
    num_ranks: int = 1


class Handoff(msgspec.Struct, frozen=True):
    """How the decode worker gets the prompt."""

    fields: Fields
    """What is set in the decode worker's body."""
    is_merged: bool = False
    """Whether the prompt's log probabilities, in the prefill worker's answer, are merged into the decode worker's."""
    num_tokens: int = 0
    """How many of the prompt's tokens are handed over, where the prefill worker says so."""
    is_for_one: bool = False
    """Whether only one decode worker may be sent it: the blocks are freed after the first, and a second would read
    what they hold by then."""


class Dialect:
    """One engine's protocol; the methods here are those of engines that ask one worker after the other."""

    hands_logprobs = False
    """Whether the log probabilities of the first token come along."""
    hands_over_early = False
    """Whether a prefill worker's answer is a stream whose beginning has the handoff."""

    def works_alone(self, path: str) -> bool:  # noqa: ARG002
        """Return whether a worker with a role can do all of such a request; else both of a pair are asked at once."""
        return True

    def obstacle(self, parsed: ParsedRequest) -> LocalReason | None:
        """Return why no pair can do the request, None if one can.

        A prefill worker frees the blocks once one sequence has fetched them, so several sequences are not safe.
        """
        if parsed.path not in (CHAT_PATH, COMPLETION_PATH):
            return LocalReason.OTHER_ENDPOINT
        get = parsed.fields.get
        is_several = get("n") not in (None, 1) or get("best_of") not in (None, 1) or get("use_beam_search")
        if parsed.num_prompts != 1 or is_several:
            return LocalReason.SEVERAL_SEQUENCES
        is_lost = get("echo") or get("prompt_logprobs") is not None or (wants_logprobs(parsed) > self.hands_logprobs)
        return LocalReason.LOGPROBS if is_lost else None

    def begin(
        self, parsed: ParsedRequest, prefill: Side, decode: Side, random: Random
    ) -> tuple[Fields, Handoff | None]:
        """Return what is set in the prefill worker's body, and the handoff if both workers are asked at once."""
        raise NotImplementedError

    def read_handoff(self, parsed: ParsedRequest, answer: bytes) -> Handoff | None:  # noqa: ARG002
        """Return the handoff in a prefill worker's answer, or the beginning of it; None where there is none."""
        return None


def wants_logprobs(parsed: ParsedRequest) -> bool:
    """Return whether the answer is to have log probabilities of its tokens."""
    logprobs = parsed.fields.get("logprobs")
    return not (logprobs is None or logprobs is False)
