"""Logits to tokens. A row's token depends on its own logits, parameters and random state, never on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.engine.logits import LogitsAdjuster
from kvist.engine.request import LogprobEntry, Request, TokenLogprobs
from kvist.openai.requests import SamplingParams


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return each row's token, and its log probabilities where they were asked for.

    `logits`: float32 `[num_requests, vocab_size]`; left as they were. Log probabilities are those of the raw logits.
    Each random row takes one number from its request's `random`, whatever the method: the same seed gives the same
    tokens in any batch, and after a preemption.
    """
    adjusted = _adjust(logits, requests)
    # on a CPU torch takes 15 times as long as numpy
    token_ids: list[int] = (adjusted if adjusted.is_cuda else adjusted.numpy()).argmax(-1).tolist()
    is_random = [request.params.temperature > 0 for request in requests]
    for filtered in (False, True):
        rows = [i for i in range(len(requests)) if is_random[i] and _is_filtered(requests[i].params) is filtered]
        if rows:
            params = [requests[i].params for i in rows]
            uniforms = [requests[i].random.random() for i in rows]
            for i, token_id in zip(rows, _draw(adjusted[rows], params, uniforms, filtered), strict=True):
                token_ids[i] = token_id
    logprobs: list[TokenLogprobs | None] = []
    for row, token_id, request in zip(logits, token_ids, requests, strict=True):
        count = request.params.num_logprobs
        logprobs.append(None if count is None else token_logprobs(row, token_id, count))
    return token_ids, logprobs


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], is_filtered: bool
) -> list[int]:
    """Return each row's token at quantile `uniform` in [0, 1) of the distribution that its parameters leave.

    Filters in vLLM's order: min-p, top-k, then top-p of what is left. Double precision, because a float32 running sum
    over a large vocabulary loses the tail.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    below_best = logits.double() - logits.amax(dim=-1, keepdim=True)  # at most 0: no temperature makes it overflow
    probs = (below_best / column([each.temperature for each in params])).softmax(dim=-1)
    if not is_filtered:
        return _at_quantiles(probs, column(uniforms)).flatten().tolist()
    probs = probs.where(probs >= column([each.min_p for each in params]) * probs.amax(-1, keepdim=True), 0.0)
    probs, token_ids = probs.sort(descending=True, stable=True)
    top_k = column([each.top_k if each.top_k > 0 else probs.shape[-1] for each in params])
    probs = probs.where(torch.arange(probs.shape[-1], device=probs.device) < top_k, 0.0)
    before = probs.cumsum(dim=-1) - probs
    top_p = column([each.top_p for each in params]) * probs.sum(-1, keepdim=True)
    places = _at_quantiles(probs.where(before < top_p, 0.0), column(uniforms))
    return token_ids.gather(1, places).flatten().tolist()


def _at_quantiles(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return, int64 `[num_rows, 1]`, where each row's running sum first exceeds its share `uniforms` of the total."""
    running = weights.cumsum(dim=-1)
    return torch.searchsorted(running, uniforms * running[:, -1:], right=True).clamp(max=weights.shape[-1] - 1)


def _adjust(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Return the logits as the requests' parameters change them; the same tensor when none does."""
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
    """Return a token's log probability, and the `count` largest, of raw logits `[vocab_size]`."""
    logprobs = row.log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(map(LogprobEntry, token_ids.tolist(), values.tolist()))
    rank = int((logprobs >= logprobs[token_id]).sum())
    return TokenLogprobs(LogprobEntry(token_id, float(logprobs[token_id])), top, rank)
