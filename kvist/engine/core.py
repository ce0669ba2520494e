"""The engine without threads or sockets: add requests, call `step`, read outputs."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.engine.request import Request, RequestOutput, TokenLogprobs
from kvist.engine.runner import Runner
from kvist.engine.sampler import sample
from kvist.engine.scheduler import ScheduledRequest, Scheduler, SchedulerStatistics
from kvist.engine.text import Detokenizer, TextStream
from kvist.errors import InvalidValueError
from kvist.kvcache import BlockHashChain, KvCacheManager, KvCacheStatistics
from kvist.openai.requests import SamplingParams
from kvist.openai.responses import FinishReason

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds and ends an output."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class EngineCore:
    """Continuous batching, one step at a time. Not thread-safe: one thread calls everything.

    A step that fails ends the requests it was for, with an error each, and gives back their blocks; the others go on.
    """

    def __init__(self, limits: ModelLimits, kv_cache: KvCacheManager, scheduler: Scheduler, runner: Runner) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self._scheduler = scheduler
        self._runner = runner
        self._requests: dict[str, Request] = {}
        self._num_output_tokens = 0
        self._num_failed_steps = 0

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do."""
        return self._scheduler.has_work

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams, swa_scratch: bool | None = None) -> int:
        """Return how many tokens the request may generate; raises InvalidValueError for one that cannot be served.

        Without a limit of its own a request may fill the context. Reads only what never changes: any thread may call.
        """
        num_prompt, longest = len(prompt_token_ids), self.limits.max_model_len
        if not num_prompt:
            raise InvalidValueError("prompt", [], "at least one token")
        num_wanted = 1 if params.token_limit is None else params.token_limit
        if num_prompt + num_wanted > longest:
            raise PromptTooLongError(num_prompt, num_wanted, longest)
        largest = max(prompt_token_ids)
        if largest >= self.limits.vocab_size:
            raise InvalidValueError("prompt", largest, f"token ids below {self.limits.vocab_size}")
        if swa_scratch and not self.kv_cache.has_scratch:
            raise InvalidValueError("swa_scratch", True, "false: this engine was started without scratch slots")
        return longest - num_prompt if params.token_limit is None else params.token_limit

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        detokenizer: Detokenizer | None = None,
        cache_salt: str | None = None,
        swa_scratch: bool | None = None,
    ) -> None:
        """Queue one sequence, `params.n` being the caller's to unfold; raises InvalidValueError as `check`.

        `swa_scratch` False keeps its blocks out of scratch slots, so that all of its prompt can be reused; None means
        True in an engine with scratch slots, and False in others.
        """
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_tokens=self.check(prompt_token_ids, params, swa_scratch),
            chain=BlockHashChain(self.kv_cache.block_size, cache_salt=cache_salt),
            text=TextStream(detokenizer, params.stop_strings, params.include_stop_str_in_output),
            random=random.Random(params.seed),
            end_token_ids=self._end_token_ids(params),
            is_scratch_allowed=self.kv_cache.has_scratch and swa_scratch is not False,
        )
        assert request_id not in self._requests, "request ids are unique"
        self._requests[request_id] = request
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; one that has finished, or never was, is no error."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)

    def step(self) -> list[RequestOutput]:
        """Compute one step; return what it added to each request that got a token, or an error."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return []
        sampled = [each.request for each in scheduled if each.is_sampled]
        try:
            logits = self._runner.forward(scheduled)
            token_ids, logprobs = sample(logits, sampled)
        except (RuntimeError, ValueError) as error:  # what torch and the kernels raise; our own bugs end the engine
            return self._fail(scheduled, error)
        self._scheduler.commit(scheduled)
        return [self._advance(*row) for row in zip(sampled, token_ids, logprobs, strict=True)]

    def flush_cache(self) -> None:
        """Forget all cached blocks that no request is using."""
        self.kv_cache.flush()

    def statistics(self) -> EngineStatistics:
        """Return the counts."""
        return EngineStatistics(
            self._scheduler.statistics(), self.kv_cache.statistics(), self._num_output_tokens, self._num_failed_steps
        )

    def check_invariants(self) -> None:
        """Assert that requests, scheduler and memory agree."""
        counts = self._scheduler.statistics()
        assert len(self._requests) == counts.num_running + counts.num_waiting
        self._scheduler.check_invariants()

    def _advance(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        request.token_ids.append(token_id)
        self._num_output_tokens += 1
        is_end = token_id in request.end_token_ids
        is_silent = is_end and not request.params.include_stop_str_in_output
        can_stop = request.num_output_tokens >= request.params.min_tokens
        text = "" if is_silent else request.text.step(token_id, can_stop)
        reason: FinishReason | None = None
        if is_end or request.text.is_stopped:
            reason = "stop"
        elif request.num_output_tokens >= request.max_tokens:
            reason = "length"
        if reason is not None:
            text += request.text.finish()
            del self._requests[request.request_id]
            self._scheduler.remove(request)
        return RequestOutput(
            request.request_id,
            (token_id,),
            text,
            () if logprobs is None else (logprobs,),
            request.num_cached_tokens or 0,
            reason,
        )

    def _end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.limits.eos_token_ids)}
        return frozenset(token_id for token_id in ends if token_id < self.limits.vocab_size)

    def _fail(self, scheduled: Sequence[ScheduledRequest], error: Exception) -> list[RequestOutput]:
        logger.exception("step failed num_requests=%d", len(scheduled), exc_info=error)
        self._num_failed_steps += 1
        self._scheduler.discard(scheduled)
        for request, _ in scheduled:
            del self._requests[request.request_id]
        return [RequestOutput(request.request_id, error=f"the engine failed: {error}") for request, _ in scheduled]
