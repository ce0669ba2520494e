"""A request inside the engine, the text of its output, and the outputs that a step returns for it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.kvcache import BlockHashChain, SequenceBlocks
from kvist.openai.requests import Handoff, SamplingParams
from kvist.openai.responses import FinishReason

if TYPE_CHECKING:
    from kvist.engine.sampler import LogitsAdjuster
    from kvist.openai.tokenization import Detokenizer


class TokenMatcher:
    """The state of one output in the grammar that it follows, a matcher of `llguidance`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> TokenMatcher:
        return TokenMatcher(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return, by token id, which tokens may come next; an end token is among them where the output may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> bool:
        """Advance by one of the allowed tokens; return whether only an end token can follow."""
        self._matcher.consume_token(token_id)
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """Return why the output cannot continue, for example since the grammar exceeds a limit; empty while it can."""
        return str(self._matcher.get_error())


class TextStream:
    """Turns one output's tokens into text, and holds back what may be the beginning of a stop string.

    A stop string itself is part of the text only with `is_stop_included`.
    """

    def __init__(self, detokenizer: Detokenizer | None, stops: tuple[str, ...], is_stop_included: bool = False) -> None:
        """Start an output; without a detokenizer the text stays empty and nothing stops it."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._is_stop_included = is_stop_included
        self._held = ""
        self.stopped_by: str | None = None

    def step(self, token_id: int, can_stop: bool = True) -> str:
        """Add a token and return the text to release; sets `stopped_by` when a stop string is complete.

        Where the output may not stop yet, nothing is held back.
        """
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.step(token_id)
        return self._feed(piece) if can_stop else piece

    def finish(self) -> str:
        """Return the text that was held back, at the end of an output that no stop string ended."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        released = self._feed(self._detokenizer.flush())
        if self.stopped_by is None:
            released, self._held = released + self._held, ""
        return released

    def _feed(self, piece: str) -> str:
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: each[0])
            self.stopped_by, self._held = stop, ""
            return text[: at + len(stop)] if self._is_stop_included else text[:at]
        num_held = max((partial_match_length(text, stop) for stop in self._stops), default=0)
        released, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return released


class LogprobEntry(NamedTuple):
    """A token and its natural log probability before any sampling parameter."""

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """A token, the most likely tokens in descending order, and the token's rank: how many are at least as likely."""

    token: LogprobEntry
    top: tuple[LogprobEntry, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to a request. The last output of a request has a `finish_reason` or an `error`.

    `stop_reason` is the stop string or stop token, of those that the request names, that ended it. The first output
    has the log probabilities of the prompt's second and later tokens, if they were asked for. If another worker
    fetches the blocks, the last output has the `remote_request_id` to fetch them by; usually an earlier output,
    without a token, has it too.
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
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            num_cached_tokens=max(self.num_cached_tokens, later.num_cached_tokens),
        )

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class SequenceInput(NamedTuple):
    """One sequence to generate; for `params.n` choices the caller passes n of them.

    `swa_scratch` False keeps its blocks out of scratch slots, so that the whole prompt can be reused; None means True
    in an engine with scratch slots, and False in others.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    detokenizer: Detokenizer | None = None
    cache_salt: str | None = None
    swa_scratch: bool | None = None
    handoff: Handoff | None = None
    constraint: TokenMatcher | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, eq=False)
class RequestTimes:
    """When a sequence reached each stage, by `time.monotonic`; None for a stage that it has not reached.

    The engine's thread writes each field once, or again if a prompt that could not be fetched is computed here; any
    thread may read. An aborted sequence keeps its values.
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

    `token_ids` is the prompt, then the output. The first `num_computed_tokens` of them are in `blocks`; a token that
    was just sampled is not computed yet. Only the device knows so far which the `num_pending_tokens` after them are.
    `num_cached_tokens` is what the prefix cache served at first admission; after a preemption the request starts over,
    with its tokens and its random state. With `is_scratch_allowed`, blocks that a step both fills and makes stale go to
    scratch slots. A `handoff` says which part another worker computes.
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
    constraint: TokenMatcher | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    adjuster: LogitsAdjuster | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_complete: bool = False
    token_ids: list[int] = field(init=False)
    blocks: SequenceBlocks | None = None
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int | None = None
    times: RequestTimes = field(default_factory=RequestTimes)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    def append(self, token_id: int) -> None:
        """Add a token to the output; sets `is_complete` when the grammar lets only an end token follow."""
        self.token_ids.append(token_id)
        if self.adjuster is not None:
            self.adjuster.add(token_id)
        if self.constraint is not None:
            self.is_complete = self.constraint.accept(token_id)

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Return for how many tokens of the prompt the requested log probabilities are not computed yet."""
        wanted = 0 if self.params.num_prompt_logprobs is None else len(self.prompt_token_ids) - 1
        return wanted - len(self.prompt_logprobs)

    @property
    def is_too_short(self) -> bool:
        """Return whether the output must not end yet; an output that follows a grammar ends where the grammar does."""
        return self.num_output_tokens < self.params.min_tokens and self.constraint is None

    @property
    def is_adjusted(self) -> bool:
        """Return whether the request's parameters change the logits of the next token."""
        return self.params.is_adjusting or self.constraint is not None or bool(self.bad_words) or self.is_too_short

    @property
    def is_foreseeable(self) -> bool:
        """Return whether the token after the next depends on the next one through the model alone, not on its text."""
        return not self.is_adjusted and self.params.num_logprobs is None and self.params.num_prompt_logprobs is None

    @property
    def num_new_tokens(self) -> int:
        """Return how many tokens remain to be computed, pending ones included; 0 if a pending one is the last."""
        if self.num_pending_tokens and self.num_output_tokens + self.num_pending_tokens >= self.max_tokens:
            return 0
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]


def partial_match_length(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be an incomplete `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
