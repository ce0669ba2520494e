"""The engine without threads or sockets: `add_request`, then call `step` for outputs until it has no work."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvist.engine.handoff import Handoffs, HandoffStatistics, check_handoff
from kvist.engine.request import (
    Request,
    RequestOutput,
    RequestTimes,
    SequenceInput,
    TextStream,
    TokenLogprobs,
)
from kvist.engine.runner import Runner
from kvist.engine.sampler import DrawnTokens, draw, logprobs_of, token_logprobs
from kvist.engine.scheduler import ScheduledRequest, Scheduler, SchedulerStatistics
from kvist.errors import InvalidValueError
from kvist.kvcache import BlockHashChain, KvCacheManager, KvCacheStatistics
from kvist.openai.requests import RemoteDecode, RemotePrefill
from kvist.openai.responses import FinishReason
from kvist.transfer.commands import FetchCompleted, FetchFailed, FetchReleased, OfferReleased, Report

logger = logging.getLogger(__name__)

_TOO_MANY = "kv transfer failed: too many prompts are held"
_NOBODY = "kv transfer failed: nobody fetches the prompt"


class PromptTooLongError(InvalidValueError):
    """A prompt and the tokens to generate for it do not fit into the context."""

    def __init__(self, num_prompt_tokens: int, num_wanted_tokens: int, max_model_len: int) -> None:
        value = f"{num_prompt_tokens} tokens and {num_wanted_tokens} to generate"
        super().__init__("prompt", value, f"together at most {max_model_len} tokens")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The counts of all parts of the engine; tokens and failures since the start."""

    scheduler: SchedulerStatistics
    kv_cache: KvCacheStatistics
    num_output_tokens: int
    num_failed_steps: int
    handoffs: HandoffStatistics


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds and ends an output."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that is being computed: its requests, those that get a token, their logits, and the tokens."""

    scheduled: Sequence[ScheduledRequest]
    sampled: Sequence[Request]
    logits: torch.Tensor
    drawn: DrawnTokens


class EngineCore:
    """Continuous batching, one step at a time. Not thread-safe: one thread calls everything.

    On a GPU the next step is launched before this one's tokens are waited for, where every running request has one
    token to compute and nothing but the model decides on it. A request that ends takes part in one step too many, whose
    token is dropped. Between calls of `step`, at most the step ahead is not computed yet.

    A step that fails ends its requests, with an error each, and releases their blocks; other requests continue.

    After `handoffs.attach`, a prompt's blocks can be held for another worker, or be fetched from one: the transfer
    service calls `on_report` between steps. No step that is not computed yet uses blocks that another worker may write,
    or writes those that it may read.
    """

    def __init__(self, limits: ModelLimits, kv_cache: KvCacheManager, scheduler: Scheduler, runner: Runner) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.handoffs = Handoffs(kv_cache)
        self._scheduler = scheduler
        self._runner = runner
        self._requests: dict[str, Request] = {}
        self._unreserved: deque[Request] = deque()
        self._reserved: list[Request] = []
        self._outputs: list[RequestOutput] = []
        self._ahead: _Launched | None = None
        self._is_stuck = False
        self._num_output_tokens = 0
        self._num_failed_steps = 0

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do; False if all requests wait for blocks of other workers."""
        return (
            bool(self._outputs)
            or self._ahead is not None
            or (not self._is_stuck and (self._scheduler.has_work or bool(self._unreserved)))
        )

    def check(self, sequence: SequenceInput) -> int:
        """Return how many tokens the request may generate; raises InvalidValueError for one that cannot be served.

        Without a limit of its own a request may fill the context. Reads only what never changes: any thread may call.
        """
        num_prompt, longest = len(sequence.prompt_token_ids), self.limits.max_model_len
        if not num_prompt:
            raise InvalidValueError("prompt", [], "at least one token")
        params, limit, handoff = sequence.params, sequence.params.token_limit, sequence.handoff
        num_wanted = 1 if limit is None else limit
        if num_prompt + num_wanted > longest:
            raise PromptTooLongError(num_prompt, num_wanted, longest)
        for name, token_ids in (
            ("prompt", sequence.prompt_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logit_bias", params.logit_bias),
            ("bad_words", [token_id for word in sequence.bad_words for token_id in word]),
        ):
            if token_ids and max(token_ids) >= self.limits.vocab_size:
                raise InvalidValueError(name, max(token_ids), f"token ids below {self.limits.vocab_size}")
        if sequence.swa_scratch and not self.kv_cache.has_scratch:
            raise InvalidValueError("swa_scratch", True, "false: this engine was started without scratch slots")
        if handoff is not None:
            if not self.handoffs.is_attached:
                expected = "none: this engine was started without --kv-transfer"
                raise InvalidValueError("kv_transfer_params", handoff, expected)
            if isinstance(handoff, RemoteDecode):
                return 1
            check_handoff(handoff, num_prompt)
        return longest - num_prompt if limit is None else limit

    def add_request(self, request_id: str, sequence: SequenceInput, times: RequestTimes | None = None) -> None:
        """Queue one sequence; raises as `check`. If log probabilities are asked for, the prompt is not fetched."""
        params, handoff = sequence.params, sequence.handoff
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.limits.eos_token_ids)}
        request = Request(
            request_id,
            sequence.prompt_token_ids,
            params,
            max_tokens=self.check(sequence),
            chain=BlockHashChain(self.kv_cache.block_size, cache_salt=sequence.cache_salt),
            text=TextStream(sequence.detokenizer, params.stop_strings, params.include_stop_str_in_output),
            random=random.Random(params.seed),
            end_token_ids=frozenset(token_id for token_id in ends if token_id < self.limits.vocab_size),
            is_scratch_allowed=self.kv_cache.has_scratch and sequence.swa_scratch is not False,
            handoff=handoff,
            constraint=sequence.constraint,
            bad_words=sequence.bad_words,
            times=RequestTimes() if times is None else times,
        )
        assert request_id not in self._requests, "request ids are unique"
        if isinstance(handoff, RemoteDecode) and handoff.max_cached_tokens is not None:
            if self._ahead is not None:  # it may fill what is cached already
                launched, self._ahead = self._ahead, None
                self._outputs += self._finish(launched)
            self._outputs.append(self._offer_cached(request, handoff.max_cached_tokens))
            return
        self._requests[request_id] = request
        self._is_stuck = False
        if isinstance(handoff, RemotePrefill) and params.num_logprobs is None and params.num_prompt_logprobs is None:
            self._unreserved.append(request)
            return
        self._scheduler.add(request)
        self._outputs += self._offer_next()

    def abort(self, request_id: str) -> None:
        """Abort a request, if it exists, and free its blocks once no other worker may write to them."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._record_end(request, "abort")
        self._is_stuck = False
        if request in self._unreserved:
            self._unreserved.remove(request)
        elif self._scheduler.receiving.pop(request_id, None) is not None:
            self.handoffs.cancel_fetch(request)
        else:
            self._scheduler.remove(request)

    def on_report(self, report: Report) -> None:
        """Apply a report of the transfer service on an offer or a fetch; it may free what `step` was waiting for."""
        self._is_stuck = False
        receiving = self._scheduler.receiving
        match report:
            case OfferReleased(remote_request_id, is_fetched):
                request = self.handoffs.on_offer_released(remote_request_id, is_fetched)
                if request is not None and request.request_id in self._requests:
                    self._outputs.append(self._end_with_error(request, _NOBODY))
            case FetchCompleted(request_id, int(token_id)) if token_id >= self.limits.vocab_size:
                expected = f"below {self.limits.vocab_size}"
                self.on_report(FetchFailed(request_id, f"first_token_id: got {token_id}, expected {expected}"))
                self.on_report(FetchReleased(request_id))
            case FetchCompleted(request_id, token_id) if request_id in receiving:
                self._start_fetched(receiving.pop(request_id), token_id)
            case FetchFailed(request_id, reason) if request_id in receiving:
                self._fall_back(receiving.pop(request_id), reason)
            case FetchCompleted(request_id) | FetchReleased(request_id):  # of one that has failed, or was aborted
                self.handoffs.on_fetch_released(request_id)

    def step(self) -> list[RequestOutput]:
        """Compute one step; return an output for each request that got a token, or an error.

        Outputs that need no computation are returned at once, and the step is left to the next call.
        """
        if not self._outputs:
            launched, self._ahead = self._ahead, None
            while self._unreserved and self._scheduler.reserve(self._unreserved[0]):
                self._reserved.append(self._unreserved.popleft())
            if launched is None:
                self._fetch_reserved()
                launched = self._launch(None)
            if launched is not None:
                if self._runner.can_wait and self._scheduler.can_look_ahead:
                    self._ahead = self._launch(launched)
                self._outputs += self._finish(launched)
            self._fetch_reserved()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _launch(self, last: _Launched | None) -> _Launched | None:
        """Schedule a step and start to compute it, or return None; a failure goes to the outputs.

        The tokens of the `last` step are pending.
        """
        num_preemptions = self._scheduler.num_preemptions
        scheduled = self._scheduler.schedule()
        has_preempted = self._scheduler.num_preemptions > num_preemptions
        if has_preempted:
            self.handoffs.withdraw_preempted()
        if not scheduled:
            self._is_stuck = not (has_preempted or last)
            return None
        sampled = [each.request for each in scheduled if each.is_sampled]
        try:
            logits = self._runner.forward(scheduled, None if last is None else (last.sampled, last.drawn.on_device))
            drawn = DrawnTokens(draw(logits[: len(sampled)], sampled))
            _record_prompt_logprobs(scheduled, logits[len(sampled) :])
        except (RuntimeError, ValueError) as error:  # what torch and the kernels raise; our own bugs end the engine
            with suppress(RuntimeError):
                self._runner.synchronize()  # what it launched before may still write
            self._outputs += self._fail(scheduled, error)
            return None
        self._scheduler.commit(scheduled)
        for request in sampled:
            request.num_pending_tokens += 1
        return _Launched(scheduled, sampled, logits[: len(sampled)], drawn)

    def _finish(self, launched: _Launched) -> list[RequestOutput]:
        """Wait until a step is computed, and give its tokens to their requests, unless these have ended.

        Nothing is being computed then but the step ahead, if there is one.
        """
        sampled = launched.sampled
        try:
            token_ids = launched.drawn.wait()
        except RuntimeError as error:  # the device failed after the launch
            ahead, self._ahead = self._ahead, None
            failed = {each.request: each for step in (launched, ahead) if step is not None for each in step.scheduled}
            outputs = self._fail([each for each in failed.values() if self._is_open(each.request)], error)
            self.kv_cache.flush()
            return outputs
        logprobs = logprobs_of(launched.logits, token_ids, sampled)
        outputs = []
        for request, _ in launched.scheduled:
            is_chunked = isinstance(request.handoff, RemoteDecode) and not request.num_pending_tokens
            if is_chunked and self._is_open(request):
                outputs += self._offer_computed(request)
        for row in zip(sampled, token_ids, logprobs, strict=True):
            row[0].num_pending_tokens -= 1
            if self._is_open(row[0]):
                outputs.append(self._advance(*row))
        return outputs + self._offer_next()

    def _is_open(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            self._scheduler.statistics(),
            self.kv_cache.statistics(),
            self._num_output_tokens,
            self._num_failed_steps,
            self.handoffs.statistics(),
        )

    def _offer_next(self) -> list[RequestOutput]:
        """Offer the prompt that is computed next, so that another worker can ask for it before it is computed."""
        request = self._scheduler.next_waiting
        if request is None or not isinstance(request.handoff, RemoteDecode) or request.times.remote_request_id:
            return []
        return self._offer_computed(request)

    def _offer_computed(self, request: Request) -> list[RequestOutput]:
        """Let another worker fetch what is computed of a prompt.

        The first time, return an output with the id to fetch it by; if too many prompts are held, end the request.
        """
        is_first = request.times.remote_request_id is None
        remote_request_id = self.handoffs.offer_computed(request)
        if remote_request_id is None:
            return [self._end_with_error(request, _TOO_MANY)]
        return [RequestOutput(request.request_id, remote_request_id=remote_request_id)] if is_first else []

    def _start_fetched(self, request: Request, first_token_id: int | None) -> None:
        """Start a request whose blocks hold its whole prompt; its first token is among the next step's outputs.

        If only a prefix was fetched, that is in the cache now, and the request is queued like any other.
        """
        self.handoffs.on_fetch_completed(request)
        assert request.blocks is not None
        if first_token_id is None or request.blocks.num_tokens < len(request.prompt_token_ids):
            self.kv_cache.close(request.blocks)
            request.blocks = request.num_cached_tokens = None
            self._scheduler.add(request)
            return
        self._scheduler.start_received(request)
        if request.params.temperature > 0:
            request.random.random()  # the other worker used one number to sample the first token
        self._outputs.append(self._advance(request, first_token_id, None))

    def _offer_cached(self, request: Request, max_tokens: int) -> RequestOutput:
        """Hold the cached part of a prompt for another worker, and end the request."""
        num_tokens, remote_request_id = self.handoffs.offer_cached(request, max_tokens)
        request.num_cached_tokens, request.times.remote_request_id = num_tokens, remote_request_id
        self._record_end(request, "length")
        return RequestOutput(
            request.request_id,
            num_cached_tokens=num_tokens,
            finish_reason="length",
            remote_request_id=remote_request_id,
        )

    def _fall_back(self, request: Request, reason: str) -> None:
        """Compute here the prompt of a failed fetch, or end its request with the reason."""
        self.handoffs.on_fetch_failed(request, reason)
        request.times.fetch_error = reason
        if self.handoffs.is_fallback_allowed:
            self._scheduler.add(request)
            return
        del self._requests[request.request_id]
        self._outputs.append(RequestOutput(request.request_id, error=f"kv transfer failed: {reason}"))

    def _fetch_reserved(self) -> None:
        """Start to fetch prompts, once every step that was launched before their blocks were reserved is computed."""
        for request in self._reserved:
            request.times.fetching_s = time.monotonic()
            self.handoffs.fetch(request)
        self._reserved.clear()

    def _advance(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        """Add a token to a request, and end the request if that was its last."""
        request.append(token_id)
        self._num_output_tokens += 1
        if request.constraint is not None and (error := request.constraint.error):
            return self._end_with_error(request, f"the output's grammar failed: {error}")
        if request.num_output_tokens == 1:
            request.times.first_token_s = time.monotonic()
        is_end = token_id in request.end_token_ids
        is_silent = is_end and not request.params.include_stop_str_in_output
        can_stop = request.num_output_tokens >= request.params.min_tokens
        text = "" if is_silent else request.text.step(token_id, can_stop)
        reason: FinishReason | None = None
        if is_end or request.is_complete or request.text.stopped_by is not None:
            reason = "stop"
        elif request.num_output_tokens >= request.max_tokens:
            reason = "length"
        remote_request_id = None
        if reason is not None:
            text += request.text.finish()
            self._record_end(request, reason)
            if isinstance(request.handoff, RemoteDecode):
                remote_request_id = self.handoffs.offer_computed(request, token_id)
                if remote_request_id is None:
                    return self._end_with_error(request, _TOO_MANY)
            del self._requests[request.request_id]
            assert request.blocks is not None
            self.kv_cache.catch_up(request.blocks, request.token_ids)
            self._scheduler.remove(request)
        return RequestOutput(
            request.request_id,
            (token_id,),
            text,
            () if logprobs is None else (logprobs,),
            tuple(request.prompt_logprobs) if request.num_output_tokens == 1 else (),
            request.num_cached_tokens or 0,
            reason,
            token_id if is_end and token_id in (request.params.stop_token_ids or ()) else request.text.stopped_by,
            remote_request_id=remote_request_id,
        )

    def _end_with_error(self, request: Request, error: str) -> RequestOutput:
        """Remove a request, withdraw what other workers may fetch of its prompt, and return its last output."""
        del self._requests[request.request_id]
        self._scheduler.remove(request)
        if request.times.remote_request_id is not None:
            self.handoffs.withdraw(request.times.remote_request_id)
        return RequestOutput(request.request_id, error=error)

    def _record_end(self, request: Request, reason: FinishReason) -> None:
        times = request.times
        times.ended_s, times.finish_reason = time.monotonic(), reason
        times.num_cached_tokens = request.num_cached_tokens or 0
        times.num_output_tokens = request.num_output_tokens

    def _fail(self, scheduled: Sequence[ScheduledRequest], error: Exception) -> list[RequestOutput]:
        logger.exception("step failed num_requests=%d", len(scheduled), exc_info=error)
        self._num_failed_steps += 1
        outputs = [self._end_with_error(request, f"the engine failed: {error}") for request, _ in scheduled]
        self.kv_cache.revoke()
        return outputs


def _record_prompt_logprobs(scheduled: Sequence[ScheduledRequest], logits: torch.Tensor) -> None:
    """Give requests that asked for them the log probabilities of their prompts' next tokens, one a row of logits."""
    rows = iter(logits)
    for each in scheduled:
        request, count = each.request, each.request.params.num_prompt_logprobs
        for row in each.prompt_rows:
            token_id = request.prompt_token_ids[request.num_computed_tokens + row + 1]
            assert count is not None
            request.prompt_logprobs.append(token_logprobs(next(rows), token_id, count))
