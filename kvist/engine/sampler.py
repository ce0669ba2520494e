"""Logits to tokens. A row's token depends on its own logits, parameters and random state, never on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.engine.request import LogprobEntry, Request, TokenLogprobs
from kvist.openai.requests import SamplingParams


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return each row's token, and its log probabilities where they were asked for.

    `logits`: float32 `[num_requests, vocab_size]`; left as they were. Log probabilities are those of the raw logits.
    Each random row takes one number from its request's `random`, whatever the method: the same seed gives the same
    tokens in any batch, and after a preemption.
    """
    if all(_is_plain_greedy(request.params) for request in requests):
        return logits.argmax(dim=-1).tolist(), [None] * len(requests)
    adjusted = logits.clone()
    for row, request in zip(adjusted, requests, strict=True):
        _penalise(row, request)
        _forbid_early_end(row, request)
    token_ids: list[int] = adjusted.argmax(dim=-1).tolist()
    for i, request in enumerate(requests):
        if request.params.temperature > 0:
            token_ids[i] = _draw(adjusted[i], request.params, request.random.random())
    return token_ids, [_logprobs(*row) for row in zip(logits, token_ids, requests, strict=True)]


def _is_plain_greedy(params: SamplingParams) -> bool:
    is_penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return not (params.temperature or params.min_tokens or is_penalised or params.num_logprobs is not None)


def _penalise(row: torch.Tensor, request: Request) -> None:
    """Apply vLLM's penalties in place: repetition for prompt and output, presence and frequency for the output."""
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(request.token_ids)), device=row.device)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and request.num_output_tokens:
        history = torch.tensor(request.output_token_ids, device=row.device)
        output, counts = torch.unique(history, return_counts=True)
        row[output] -= params.presence_penalty + params.frequency_penalty * counts


def _forbid_early_end(row: torch.Tensor, request: Request) -> None:
    if request.num_output_tokens < request.params.min_tokens and request.end_token_ids:
        row[torch.tensor(sorted(request.end_token_ids), device=row.device)] = -torch.inf


def _draw(row: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Return the token at quantile `uniform` in [0, 1) of the distribution that temperature and filters leave.

    Filters in vLLM's order: min-p, top-k, then top-p of what is left. Double precision, because a float32 running sum
    over a large vocabulary loses the tail.
    """
    probs = (row.double() / params.temperature).softmax(dim=-1)
    if params.min_p > 0:
        probs = probs.where(probs >= params.min_p * probs.max(), 0.0)
    token_ids: torch.Tensor | None = None
    if params.top_k > 0 or params.top_p < 1:
        probs, token_ids = probs.sort(descending=True, stable=True)
        if params.top_k > 0:
            probs[params.top_k :] = 0.0
        before = probs.cumsum(dim=-1) - probs
        probs = probs.where(before < params.top_p * probs.sum(), 0.0)
    running = probs.cumsum(dim=-1)
    at = int(torch.searchsorted(running, uniform * running[-1], right=True))
    return at if token_ids is None else int(token_ids[at])


def _logprobs(row: torch.Tensor, token_id: int, request: Request) -> TokenLogprobs | None:
    count = request.params.num_logprobs
    if count is None:
        return None
    logprobs = row.log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(map(LogprobEntry, token_ids.tolist(), values.tolist()))
    return TokenLogprobs(LogprobEntry(token_id, float(logprobs[token_id])), top)
