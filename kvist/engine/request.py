"""A request inside the engine, its output as text, and what a step says about it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvist.engine.logits import Constraint, LogitsAdjuster
from kvist.kvcache import BlockHashChain, SequenceBlocks
from kvist.openai.requests import Handoff, SamplingParams
from kvist.openai.responses import FinishReason

if TYPE_CHECKING:
    from kvist.openai.tokenization import Detokenizer


class TextStream:
    """Releases text once no stop string can begin in it; a stop string itself only with `is_stop_included`."""

    def __init__(self, detokenizer: Detokenizer | None, stops: tuple[str, ...], is_stop_included: bool = False) -> None:
        """Follow one output; without a detokenizer the text stays empty and nothing stops it."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._is_stop_included = is_stop_included
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    def step(self, token_id: int, can_stop: bool = True) -> str:
        """Return the text to release, all of it unless it `can_stop`; sets `is_stopped` when a stop string is whole."""
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.step(token_id)
        return self._feed(piece) if can_stop else piece

    def finish(self) -> str:
        """Return what was held back, at the end of an output that nothing stopped."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        released = self._feed(self._detokenizer.flush())
        if not self.is_stopped:
            released, self._held = released + self._held, ""
        return released

    def _feed(self, piece: str) -> str:
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: each[0])
            self.stopped_by, self._held = stop, ""
            return text[: at + len(stop)] if self._is_stop_included else text[:at]
        num_held = max((held_for(text, stop) for stop in self._stops), default=0)
        released, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return released


class LogprobEntry(NamedTuple):
    """A token and its natural log probability before any sampling parameter."""

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """A token, the most likely ones, most likely first, and how many would have been as likely or more than it."""

    token: LogprobEntry
    top: tuple[LogprobEntry, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to a request. The last output of a request has a `finish_reason` or an `error`.

    The `stop_reason` is the text or token of the request's own that ended it.

    The first has the log probabilities of the prompt's tokens behind its first one, where they are wanted.
    Of one whose blocks are for another worker, the last has the `remote_request_id` to fetch them by; so has, as a
    rule, one without a token before it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    remote_request_id: str | None = None

    def __add__(self, later: RequestOutput) -> RequestOutput:
        """Return this output followed by a later one of the same request."""
        return RequestOutput(
            self.request_id,
            self.token_ids + later.token_ids,
            self.text + later.text,
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
            max(self.num_cached_tokens, later.num_cached_tokens),
            later.finish_reason,
            later.stop_reason,
            later.error,
            later.remote_request_id,
        )

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class SequenceInput(NamedTuple):
    """One sequence to generate; `params.n` is the caller's to unfold.

    `swa_scratch` False keeps its blocks out of scratch slots, so that all of its prompt can be reused; None means True
    in an engine with scratch slots, and False in others.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    detokenizer: Detokenizer | None = None
    cache_salt: str | None = None
    swa_scratch: bool | None = None
    handoff: Handoff | None = None
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, eq=False)
class RequestTimes:
    """How far a sequence has come, and when (by `time.monotonic`); None where it has not, or never will.

    The engine's thread writes each field once, but for a prompt that is computed here after all when it could not be
    fetched; any thread may read. A sequence that is dropped keeps what it had.
    """

    queued_s: float = field(default_factory=time.monotonic)
    fetching_s: float | None = None
    fetched_s: float | None = None
    fetch_error: str | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None
    remote_request_id: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate (a choice, when a client asks for `n`). The scheduler owns it until it is finished.

    `token_ids` is the prompt, then the output. The first `num_computed_tokens` of them are in `blocks`; the last token
    has never been computed when it was just sampled. `num_cached_tokens` is what the prefix cache served at first
    admission; after a preemption the request starts over, keeping its tokens and its random state. With
    `is_scratch_allowed`, blocks that one of its steps makes stale itself go to scratch slots. A `handoff` says
    which part of it is another worker's.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    chain: BlockHashChain
    text: TextStream
    random: random.Random
    end_token_ids: frozenset[int] = frozenset()
    is_scratch_allowed: bool = False
    handoff: Handoff | None = None
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    adjuster: LogitsAdjuster | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_complete: bool = False
    token_ids: list[int] = field(init=False)
    blocks: SequenceBlocks | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    times: RequestTimes = field(default_factory=RequestTimes)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    def append(self, token_id: int) -> None:
        """Add a token to the output; it `is_complete` when its grammar lets nothing but an end follow."""
        self.token_ids.append(token_id)
        if self.adjuster is not None:
            self.adjuster.add(token_id)
        if self.constraint is not None:
            self.is_complete = self.constraint.accept(token_id)

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Return of how many tokens of the prompt log probabilities are wanted and not there yet."""
        wanted = 0 if self.params.num_prompt_logprobs is None else len(self.prompt_token_ids) - 1
        return wanted - len(self.prompt_logprobs)

    @property
    def is_too_short(self) -> bool:
        """Return whether the output may not end yet; one that follows a grammar ends where that does."""
        return self.num_output_tokens < self.params.min_tokens and self.constraint is None

    @property
    def is_adjusted(self) -> bool:
        """Return whether the next token's logits are to be changed."""
        return self.params.is_adjusting or self.constraint is not None or bool(self.bad_words) or self.is_too_short

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]


def held_for(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
