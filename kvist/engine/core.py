"""The engine without threads or sockets: add requests, call `step`, read outputs."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from kvist.engine.sampler import sample, token_logprobs
from kvist.engine.scheduler import ScheduledRequest, Scheduler, SchedulerStatistics
from kvist.errors import InvalidValueError
from kvist.kvcache import BlockHashChain, KvCacheManager, KvCacheStatistics
from kvist.openai.requests import RemoteDecode, RemotePrefill, SamplingParams
from kvist.openai.responses import FinishReason
from kvist.transfer.commands import Command, FetchCompleted, FetchFailed, FetchReleased, OfferReleased, Report

logger = logging.getLogger(__name__)

_TOO_MANY = "kv transfer failed: too many prompts are held"
_NOBODY = "kv transfer failed: nobody fetches the prompt"


class PromptTooLongError(InvalidValueError):
    """A prompt and the tokens wanted for it do not fit into the context."""

    def __init__(self, num_prompt_tokens: int, num_wanted_tokens: int, max_model_len: int) -> None:
        value = f"{num_prompt_tokens} tokens and {num_wanted_tokens} to generate"
        super().__init__("prompt", value, f"together at most {max_model_len} tokens")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The engine's counts; tokens and failures since the start."""

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


class EngineCore:
    """Continuous batching, one step at a time. Not thread-safe: one thread calls everything.

    A step that fails ends the requests it was for, with an error each, and gives back their blocks; the others go on.

    With `attach`, a prompt's blocks can be held for another worker, or come from one: whoever moves them calls
    `on_report`, between steps.
    """

    def __init__(self, limits: ModelLimits, kv_cache: KvCacheManager, scheduler: Scheduler, runner: Runner) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self._handoffs: Handoffs | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._requests: dict[str, Request] = {}
        self._unreserved: deque[Request] = deque()
        self._outputs: list[RequestOutput] = []
        self._is_stuck = False
        self._num_output_tokens = 0
        self._num_failed_steps = 0

    def attach(
        self,
        command: Callable[[Command], None],
        *,
        is_fallback_allowed: bool = True,
        tokens_per_s: float | None = None,
    ) -> None:
        """Take part in transfers from the start, by `command`; what cannot be fetched may be computed here.

        `tokens_per_s` is how fast prompts are fetched, as far as is known, if prefixes are to be.
        """
        self._handoffs = Handoffs(self.kv_cache, command, is_fallback_allowed, tokens_per_s)

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do; not when all there is waits for blocks in another's reach."""
        return bool(self._outputs) or (not self._is_stuck and (self._scheduler.has_work or bool(self._unreserved)))

    def check(self, wanted: SequenceInput) -> int:
        """Return how many tokens the request may generate; raises InvalidValueError for one that cannot be served.

        Without a limit of its own a request may fill the context. Reads only what never changes: any thread may call.
        """
        num_prompt, longest = len(wanted.prompt_token_ids), self.limits.max_model_len
        if not num_prompt:
            raise InvalidValueError("prompt", [], "at least one token")
        params, limit, handoff = wanted.params, wanted.params.token_limit, wanted.handoff
        num_wanted = 1 if limit is None else limit
        if num_prompt + num_wanted > longest:
            raise PromptTooLongError(num_prompt, num_wanted, longest)
        for name, token_ids in (
            ("prompt", wanted.prompt_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logit_bias", params.logit_bias),
            ("bad_words", [token_id for word in wanted.bad_words for token_id in word]),
        ):
            if token_ids and max(token_ids) >= self.limits.vocab_size:
                raise InvalidValueError(name, max(token_ids), f"token ids below {self.limits.vocab_size}")
        if wanted.swa_scratch and not self.kv_cache.has_scratch:
            raise InvalidValueError("swa_scratch", True, "false: this engine was started without scratch slots")
        if handoff is not None:
            if self._handoffs is None:
                expected = "none: this engine was started without --kv-transfer"
                raise InvalidValueError("kv_transfer_params", handoff, expected)
            if isinstance(handoff, RemoteDecode):
                return 1
            check_handoff(handoff, num_prompt)
        return longest - num_prompt if limit is None else limit

    def add_request(self, request_id: str, wanted: SequenceInput, times: RequestTimes | None = None) -> None:
        """Queue one sequence; raises as `check`. With log probabilities wanted, no prompt is fetched."""
        params, handoff = wanted.params, wanted.handoff
        request = Request(
            request_id,
            wanted.prompt_token_ids,
            params,
            max_tokens=self.check(wanted),
            chain=BlockHashChain(self.kv_cache.block_size, cache_salt=wanted.cache_salt),
            text=TextStream(wanted.detokenizer, params.stop_strings, params.include_stop_str_in_output),
            random=random.Random(params.seed),
            end_token_ids=self._end_token_ids(params),
            is_scratch_allowed=self.kv_cache.has_scratch and wanted.swa_scratch is not False,
            handoff=handoff,
            constraint=wanted.constraint,
            bad_words=wanted.bad_words,
            times=RequestTimes() if times is None else times,
        )
        assert request_id not in self._requests, "request ids are unique"
        if isinstance(handoff, RemoteDecode) and handoff.max_cached_tokens is not None:
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
        """Drop a request, if there is one, and free its blocks once no other worker may write to them."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._note_end(request, "abort")
        self._is_stuck = False
        if request in self._unreserved:
            self._unreserved.remove(request)
        elif self._handoffs is not None and self._handoffs.abandon(request):
            self._scheduler.leave(request)
        else:
            self._scheduler.remove(request)

    def withdraw(self, remote_request_id: str) -> bool:
        """Hold a prompt for nobody any more; its blocks are free once nobody reads them. False if it is not held."""
        return self._handoffs is not None and self._handoffs.withdraw(remote_request_id)

    def on_report(self, report: Report) -> None:
        """Take note of how an offer or a fetch went on: that may be what `step` was stuck for."""
        handoffs = self._handoffs
        assert handoffs is not None, "a report on a transfer in an engine without any"
        self._is_stuck = False
        match report:
            case OfferReleased(remote_request_id, is_fetched):
                self._end_unwanted(handoffs.offer_released(remote_request_id, is_fetched))
            case FetchReleased(request_id):
                handoffs.fetch_released(request_id)
            case FetchCompleted(request_id, int(token_id)) if token_id >= self.limits.vocab_size:
                expected = f"below {self.limits.vocab_size}"
                self.on_report(FetchFailed(request_id, f"first_token_id: got {token_id}, expected {expected}"))
                self.on_report(FetchReleased(request_id))
            case FetchCompleted(request_id, token_id):
                self._run_fetched(handoffs.fetch_completed(request_id), token_id)
            case FetchFailed(request_id, reason):
                self._do_without(handoffs.fetch_failed(request_id, reason), reason, handoffs.is_fallback_allowed)

    def step(self) -> list[RequestOutput]:
        """Compute one step; return what it added to each request that got a token, or an error.

        What is known without computing is returned at once, and the step is left to the next call.
        """
        outputs, self._outputs = self._outputs, []
        return outputs or self._step()

    def _step(self) -> list[RequestOutput]:
        num_preemptions = self._scheduler.statistics().num_preemptions
        has_reserved = self._reserve()
        scheduled = self._scheduler.schedule()
        has_preempted = self._scheduler.statistics().num_preemptions > num_preemptions
        if has_preempted and self._handoffs is not None:
            self._handoffs.withdraw_preempted()
        if not scheduled:
            self._is_stuck = not (has_reserved or has_preempted)
            return []
        sampled = [each.request for each in scheduled if each.is_sampled]
        try:
            logits = self._runner.forward(scheduled)
            token_ids, logprobs = sample(logits[: len(sampled)], sampled)
            _note_prompt_logprobs(scheduled, logits[len(sampled) :])
        except (RuntimeError, ValueError) as error:  # what torch and the kernels raise; our own bugs end the engine
            return self._fail(scheduled, error)
        self._scheduler.commit(scheduled)
        chunked = [each for each, _ in scheduled if each not in sampled and isinstance(each.handoff, RemoteDecode)]
        if chunked and logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # no token was waited for
        outputs = [output for request in chunked for output in self._hand_over(request)]
        outputs += [self._advance(*row) for row in zip(sampled, token_ids, logprobs, strict=True)]
        return outputs + self._offer_next()

    def flush_cache(self) -> None:
        self.kv_cache.flush()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            self._scheduler.statistics(),
            self.kv_cache.statistics(),
            self._num_output_tokens,
            self._num_failed_steps,
            HandoffStatistics() if self._handoffs is None else self._handoffs.statistics(),
        )

    def _offer_next(self) -> list[RequestOutput]:
        """Say where the prompt that comes next can be fetched, so that it has been asked for when it is computed."""
        request = self._scheduler.next_waiting
        if request is None or not isinstance(request.handoff, RemoteDecode) or request.times.remote_request_id:
            return []
        return self._hand_over(request)

    def _hand_over(self, request: Request) -> list[RequestOutput]:
        """Let another worker fetch what is computed, and say once where; where there is no room, end the request."""
        assert self._handoffs is not None
        if not self._handoffs.can_hold(request):
            del self._requests[request.request_id]
            self._scheduler.remove(request)
            return [RequestOutput(request.request_id, error=_TOO_MANY)]
        is_first = request.times.remote_request_id is None
        remote_request_id = self._handoffs.computed(request)
        return [RequestOutput(request.request_id, remote_request_id=remote_request_id)] if is_first else []

    def _end_unwanted(self, request: Request | None) -> None:
        """End a request that computes a prompt which nobody will fetch."""
        if request is not None and self._requests.pop(request.request_id, None) is not None:
            self._scheduler.remove(request)
            self._outputs.append(RequestOutput(request.request_id, error=_NOBODY))

    def _run_fetched(self, request: Request | None, first_token_id: int | None) -> None:
        """Let a request run whose blocks hold its prompt; its first token is among the next step's outputs.

        What was fetched of a prompt is cached: it begins as any other.
        """
        if request is None:
            return
        assert request.blocks is not None
        if first_token_id is None or request.blocks.num_tokens < len(request.prompt_token_ids):
            self.kv_cache.close(request.blocks)
            request.blocks = None
            self._scheduler.leave(request)
            self._scheduler.add(request)
            return
        self._scheduler.run(request)
        if request.params.temperature > 0:
            request.random.random()  # the first token has taken one number, wherever it was sampled
        self._outputs.append(self._advance(request, first_token_id, None))

    def _offer_cached(self, request: Request, max_tokens: int) -> RequestOutput:
        """Hold what is cached of a prompt for another worker, and end the request."""
        assert self._handoffs is not None
        num_tokens, remote_request_id = self._handoffs.offer_cached(request, max_tokens)
        request.num_cached_tokens, request.times.remote_request_id = num_tokens, remote_request_id
        self._note_end(request, "length")
        return RequestOutput(
            request.request_id,
            num_cached_tokens=num_tokens,
            finish_reason="length",
            remote_request_id=remote_request_id,
        )

    def _do_without(self, request: Request | None, reason: str, is_fallback_allowed: bool) -> None:
        """Compute a request's prompt here, or end it with the reason; its blocks stay out of use until released."""
        if request is None:
            return
        request.times.fetch_error = reason
        self._scheduler.leave(request)
        if is_fallback_allowed:
            self._scheduler.add(request)
            return
        del self._requests[request.request_id]
        self._outputs.append(RequestOutput(request.request_id, error=f"kv transfer failed: {reason}"))

    def _reserve(self) -> bool:
        """Reserve blocks for prompts that other workers have computed, in order; return whether any got theirs."""
        has_reserved = False
        while self._unreserved and self._scheduler.reserve(self._unreserved[0]):
            assert self._handoffs is not None
            request = self._unreserved.popleft()
            request.times.fetching_s = time.monotonic()
            self._handoffs.fetch(request)
            has_reserved = True
        return has_reserved

    def _advance(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        request.append(token_id)
        self._num_output_tokens += 1
        if request.constraint is not None and (error := request.constraint.error):
            del self._requests[request.request_id]
            self._withdraw(request)
            self._scheduler.remove(request)
            return RequestOutput(request.request_id, error=f"the output's grammar failed: {error}")
        if request.num_output_tokens == 1:
            request.times.first_token_s = time.monotonic()
        is_end = token_id in request.end_token_ids
        is_silent = is_end and not request.params.include_stop_str_in_output
        can_stop = request.num_output_tokens >= request.params.min_tokens
        text = "" if is_silent else request.text.step(token_id, can_stop)
        reason: FinishReason | None = None
        if is_end or request.is_complete or request.text.is_stopped:
            reason = "stop"
        elif request.num_output_tokens >= request.max_tokens:
            reason = "length"
        remote_request_id = None
        if reason is not None:
            text += request.text.finish()
            del self._requests[request.request_id]
            self._note_end(request, reason)
            if isinstance(request.handoff, RemoteDecode):
                assert self._handoffs is not None
                if not self._handoffs.can_hold(request):
                    self._scheduler.remove(request)
                    return RequestOutput(request.request_id, error=_TOO_MANY)
                remote_request_id = self._handoffs.computed(request, token_id)
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

    def _withdraw(self, request: Request) -> None:
        """Have nobody wait for the rest of a prompt that is not computed any more."""
        if request.times.remote_request_id is not None:
            self.withdraw(request.times.remote_request_id)

    def _note_end(self, request: Request, reason: FinishReason) -> None:
        times = request.times
        times.ended_s, times.finish_reason = time.monotonic(), reason
        times.num_cached_tokens = request.num_cached_tokens or 0
        times.num_output_tokens = request.num_output_tokens

    def _end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.limits.eos_token_ids)}
        return frozenset(token_id for token_id in ends if token_id < self.limits.vocab_size)

    def _fail(self, scheduled: Sequence[ScheduledRequest], error: Exception) -> list[RequestOutput]:
        logger.exception("step failed num_requests=%d", len(scheduled), exc_info=error)
        self._num_failed_steps += 1
        self._scheduler.discard(scheduled)
        for request, _ in scheduled:
            del self._requests[request.request_id]
            self._withdraw(request)
        return [RequestOutput(request.request_id, error=f"the engine failed: {error}") for request, _ in scheduled]


def _note_prompt_logprobs(scheduled: Sequence[ScheduledRequest], logits: torch.Tensor) -> None:
    """Give requests that want them the log probabilities of their prompts' next tokens, one for each row of logits."""
    rows = iter(logits)
    for each in scheduled:
        request, count = each.request, each.request.params.num_prompt_logprobs
        for row in each.prompt_rows:
            token_id = request.prompt_token_ids[request.num_computed_tokens + row + 1]
            assert count is not None
            request.prompt_logprobs.append(token_logprobs(next(rows), token_id, count))
