"""What a router must know of an engine to have one of its workers compute a prompt and another go on with it. No I/O.

A dialect is a module: `vllm`, of which Kvist's own is a kind, and `trtllm` ask the prefill worker first, whose answer
says what the decode worker is told; `sglang` asks both at once.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import NamedTuple

import msgspec

from kvist.openai.requests import Fields
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, Ask

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Largest answer that is kept: a prefill worker's token and params, with log probabilities of a prompt, or several."""


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


OBSTACLES = frozenset({Local.SEVERAL_SEQUENCES, Local.LOGPROBS, Local.OTHER_ENDPOINT})
"""Reasons that are in the request itself: no pair of the dialect can do it."""

FALLBACKS = frozenset({Local.PREFILL_REFUSED, Local.PREFILL_FAILED, Local.DECODE_FAILED, Local.TRANSFER_FAILED})
"""Reasons that show only after the prompt was sent to a prefill worker."""


class Side(NamedTuple):
    """One of the two workers; `rank` is None where it has one alone, or they are not known."""

    url: str
    bootstrap_port: int
    rank: int | None = None
    num_ranks: int = 1


class Handoff(msgspec.Struct, frozen=True):
    """What is set in the decode worker's body, and the name under which the prefill worker holds the prompt, if any.

    Its answer `is_merged` if it is to have what the prefill worker's says of the prompt. `num_tokens` of that are
    handed over, where its worker says so.
    """

    fields: Fields
    remote_request_id: str | None = None
    is_merged: bool = False
    num_tokens: int = 0


class Dialect:
    """One engine's protocol: here, what those have in common that ask a worker after the other."""

    works_alone = True
    """Whether a worker that has a role can do all of a request; else both of a pair are asked at once."""
    hands_logprobs = False
    """Whether the log probabilities of the first token come along."""
    hands_over_early = False
    """Whether a prefill worker's answer is a stream, whose beginning says what is handed over."""

    def obstacle(self, path: str, ask: Ask) -> Local | None:
        """Return why no pair can do the request, None if one can.

        What is held for one sequence is let go of when that has fetched it: for several it is not safe.
        """
        if path not in (CHAT_PATH, COMPLETION_PATH):
            return Local.OTHER_ENDPOINT
        said = ask.fields.get
        is_several = said("n") not in (None, 1) or said("best_of") not in (None, 1) or said("use_beam_search")
        if ask.num_prompts != 1 or is_several:
            return Local.SEVERAL_SEQUENCES
        is_lost = said("echo") or said("prompt_logprobs") is not None or (wants_logprobs(ask) > self.hands_logprobs)
        return Local.LOGPROBS if is_lost else None

    def begin(self, path: str, ask: Ask, prefill: Side, decode: Side, random: Random) -> tuple[Fields, Handoff | None]:
        """Return what is set in the prefill worker's body, and the decode worker's part if both are asked at once."""
        raise NotImplementedError

    def read_handoff(self, path: str, answer: bytes) -> Handoff | None:  # noqa: ARG002
        """Return what a prefill worker's answer, or so much of it, hands over; None where that can not be used."""
        return None


def wants_logprobs(ask: Ask) -> bool:
    """Return whether the answer is to have log probabilities of its tokens."""
    logprobs = ask.fields.get("logprobs")
    return not (logprobs is None or logprobs is False)
