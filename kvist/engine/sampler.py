"""Logits to tokens. A row's token depends on its own logits, parameters and random state, never on other rows.

What a request's parameters do to its logits depends on its tokens so far. That is kept in vectors over the vocabulary
(`LogitsAdjuster`), in which each new token changes one entry: a step costs the same however long the context is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.engine.request import LogprobEntry, Request, TokenLogprobs
from kvist.openai.requests import SamplingParams


def draw(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Return each row's token, int64 on the device of the logits; nobody waits for it unless a request is adjusted.

    `logits`: float32 `[num_requests, vocab_size]`, not changed. Each random row draws one number from its request's
    `random`, whatever the method: the same seed gives the same tokens in any batch, and after a preemption.
    """
    adjusted = _adjust(logits, requests)
    # on a CPU torch takes 15 times as long as numpy
    token_ids = adjusted.argmax(-1) if adjusted.is_cuda else torch.from_numpy(adjusted.numpy().argmax(-1))
    is_random = [request.params.temperature > 0 for request in requests]
    for filtered in (False, True):
        rows = [i for i in range(len(requests)) if is_random[i] and _is_filtered(requests[i].params) is filtered]
        if rows:
            params = [requests[i].params for i in rows]
            uniforms = [requests[i].random.random() for i in rows]
            places = _on_device(rows, torch.int64, logits.device)
            token_ids[places] = _draw(adjusted[places], params, uniforms, filtered)
    return token_ids


class DrawnTokens:
    """The tokens that a step draws: int64 on its device, and on their way to the host."""

    def __init__(self, on_device: torch.Tensor) -> None:
        self.on_device = on_device
        self._on_host = on_device.to("cpu", non_blocking=True)
        self._has_arrived: torch.cuda.Event | None = None
        if on_device.is_cuda:
            self._has_arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._has_arrived.record(torch.cuda.current_stream(on_device.device))

    def wait(self) -> list[int]:
        """Return them once their step is computed, also if there are none; later steps are not waited for."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        token_ids: list[int] = self._on_host.tolist()
        return token_ids


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], requests: Sequence[Request]
) -> list[TokenLogprobs | None]:
    """Return the log probabilities of each row's token for requests that ask for them: those of the raw logits."""
    counts = [request.params.num_logprobs for request in requests]
    return [
        None if count is None else token_logprobs(row, token_id, count)
        for row, token_id, count in zip(logits, token_ids, counts, strict=True)
    ]


def _on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a vector on the device, for which nobody waits."""
    is_pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_pinned).to(device, non_blocking=is_pinned)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], is_filtered: bool
) -> torch.Tensor:
    """Return each row's token at quantile `uniform` in [0, 1) of its filtered distribution.

    The filters come in vLLM's order: min-p, top-k, then top-p of the rest. Computes in double precision, because a
    float32 running sum over a large vocabulary loses the tail.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return _on_device(values, torch.float64, logits.device)[:, None]

    below_best = logits.double() - logits.amax(dim=-1, keepdim=True)  # at most 0: no temperature makes it overflow
    probs = (below_best / column([each.temperature for each in params])).softmax(dim=-1)
    if not is_filtered:
        return _at_quantiles(probs, column(uniforms)).flatten()
    probs = probs.where(probs >= column([each.min_p for each in params]) * probs.amax(-1, keepdim=True), 0.0)
    probs, token_ids = probs.sort(descending=True, stable=True)
    top_k = column([each.top_k if each.top_k > 0 else probs.shape[-1] for each in params])
    probs = probs.where(torch.arange(probs.shape[-1], device=probs.device) < top_k, 0.0)
    before = probs.cumsum(dim=-1) - probs
    top_p = column([each.top_p for each in params]) * probs.sum(-1, keepdim=True)
    places = _at_quantiles(probs.where(before < top_p, 0.0), column(uniforms))
    return token_ids.gather(1, places).flatten()


def _at_quantiles(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the index, int64 `[num_rows, 1]`, where each row's running sum first exceeds `uniforms` of its total."""
    running = weights.cumsum(dim=-1)
    return torch.searchsorted(running, uniforms * running[:, -1:], right=True).clamp(max=weights.shape[-1] - 1)


def _adjust(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Return the logits with each request's parameters applied; the same tensor if no request changes any."""
    adjusted = [i for i, request in enumerate(requests) if request.is_adjusted]
    if not adjusted:
        return logits
    logits = logits.clone()
    for i in adjusted:
        request = requests[i]
        if request.adjuster is None:
            request.adjuster = LogitsAdjuster(request, logits[i])
        request.adjuster.apply(logits[i])
    return logits


def token_logprobs(row: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Return a token's log probability and the `count` largest ones, from raw logits `[vocab_size]`."""
    logprobs = row.log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(map(LogprobEntry, token_ids.tolist(), values.tolist()))
    rank = int((logprobs >= logprobs[token_id]).sum())
    return TokenLogprobs(LogprobEntry(token_id, float(logprobs[token_id])), top, rank)


class LogitsAdjuster:
    """Applies one request's parameters to its logits, in vLLM's order: bias, bans and grammar, then penalties."""

    def __init__(self, request: Request, like: torch.Tensor) -> None:
        """Start from the request's tokens so far; `like` is a row of its logits."""
        self._request = request
        params = request.params
        self._bias: torch.Tensor | None = None
        if params.logit_bias or params.allowed_token_ids is not None:
            self._bias = torch.zeros_like(like)
            if params.allowed_token_ids is not None:
                self._bias.fill_(-torch.inf)[params.allowed_token_ids] = 0.0
            for token_id, bias in (params.logit_bias or {}).items():
                self._bias[token_id] += bias
        self._repetition: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._repetition = torch.ones_like(like)
            self._repetition[request.token_ids] = params.repetition_penalty
        self._penalty: torch.Tensor | None = None
        self._penalised = set(request.output_token_ids)
        if params.presence_penalty or params.frequency_penalty:
            counts = torch.bincount(torch.tensor(request.output_token_ids, dtype=torch.int64), minlength=len(like))
            penalty = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
            self._penalty = penalty.to(like)

    def add(self, token_id: int) -> None:
        if self._repetition is not None:
            self._repetition[token_id] = self._request.params.repetition_penalty
        if self._penalty is not None:
            params = self._request.params
            once = 0.0 if token_id in self._penalised else params.presence_penalty
            self._penalised.add(token_id)
            self._penalty[token_id] += params.frequency_penalty + once

    def apply(self, row: torch.Tensor) -> None:
        """Change a row of logits, float32 `[vocab_size]`, in place."""
        if self._bias is not None:
            row += self._bias
        if banned := self._banned():
            row[banned] = -torch.inf
        if self._request.constraint is not None:
            row[~torch.from_numpy(self._request.constraint.allowed()).to(row.device)] = -torch.inf
        if self._repetition is not None:
            # A positive logit is divided and a negative one multiplied: the smaller of both, or for a bonus the larger.
            is_penalty = self._request.params.repetition_penalty > 1
            choose = torch.minimum if is_penalty else torch.maximum
            choose(row / self._repetition, row * self._repetition, out=row)
        if self._penalty is not None:
            row -= self._penalty

    def _banned(self) -> list[int]:
        """Return the tokens that would end the output before `min_tokens`, or complete a bad word."""
        request = self._request
        banned = sorted(request.end_token_ids) if request.is_too_short else []
        for word in request.bad_words:
            num_before = len(word) - 1
            tail = request.token_ids[len(request.token_ids) - num_before :]
            if num_before <= request.num_output_tokens and tail == list(word[:-1]):
                banned.append(word[-1])
        return banned
