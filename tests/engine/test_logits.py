"""Logits as a request's parameters change them, beside vLLM's rules written out over the whole history each time."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvist.engine.request import Request, TextStream, TokenMatcher
from kvist.engine.sampler import draw
from kvist.kvcache import BlockHashChain
from kvist.openai.requests import SamplingParams

VOCAB = 12


class Alternating(TokenMatcher):
    """Even tokens and odd ones take turns; ends after `length`."""

    def __init__(self, length: int) -> None:
        self.taken: list[int] = []
        self._length = length

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.arange(VOCAB) % 2 == len(self.taken) % 2

    def accept(self, token_id: int) -> bool:
        self.taken.append(token_id)
        return len(self.taken) == self._length

    @property
    def error(self) -> str:
        return ""


def expected_logits(row: list[float], request: Request) -> list[float]:
    """Apply bias, allowed tokens, bans and grammar, then penalties, as vLLM orders them."""
    params, output = request.params, request.output_token_ids
    adjusted = list(row)
    for token_id in range(VOCAB):
        adjusted[token_id] += (params.logit_bias or {}).get(token_id, 0.0)
        is_banned = params.allowed_token_ids is not None and token_id not in params.allowed_token_ids
        is_banned |= token_id in request.end_token_ids and len(output) < params.min_tokens and not request.constraint
        is_banned |= any(
            [*output[len(output) - len(word) + 1 :], token_id] == list(word) or word == (token_id,)
            for word in request.bad_words
            if len(word) <= len(output) + 1
        )
        is_banned |= request.constraint is not None and not request.constraint.allowed()[token_id]
        if is_banned:
            adjusted[token_id] = float("-inf")
        if token_id in request.token_ids:
            factor = params.repetition_penalty
            adjusted[token_id] *= 1 / factor if adjusted[token_id] > 0 else factor
        if token_id in output:
            adjusted[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
    return adjusted


@pytest.mark.parametrize("seed", range(60))
def test_a_token_is_the_best_that_the_rules_leave_at_every_step(seed: int) -> None:
    rng = random.Random(seed)
    params = SamplingParams(
        temperature=0.0,
        min_tokens=rng.choice([0, 4]),
        presence_penalty=rng.choice([0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, -0.5, 0.7]),
        repetition_penalty=rng.choice([1.0, 0.8, 1.7]),
        logit_bias=rng.choice([None, {3: 2.0, 7: -100.0}]),
        allowed_token_ids=rng.choice([None, None, rng.sample(range(VOCAB), 9)]),
    )
    prompt = [rng.randrange(VOCAB) for _ in range(4)]
    words = tuple(tuple(rng.choices(range(VOCAB), k=rng.randint(1, 3))) for _ in range(rng.choice([0, 3])))
    constraint = Alternating(99) if params.allowed_token_ids is None and rng.random() < 0.3 else None
    request = Request(
        "r",
        prompt,
        params,
        99,
        BlockHashChain(4),
        TextStream(None, ()),
        random.Random(seed),
        frozenset({0, 5}),
        constraint=constraint,
        bad_words=() if constraint else words,
    )
    for step in range(12):
        if step == 6:  # as after a prompt computed elsewhere: what was counted is there without its sampler
            request.adjuster = None
        logits = torch.tensor([[rng.uniform(-2, 3) for _ in range(VOCAB)]])
        best = max(range(VOCAB), key=expected_logits(logits[0].tolist(), request).__getitem__)
        assert draw(logits, [request]).tolist() == [best]
        request.append(best)
    assert constraint is None or constraint.taken == request.output_token_ids
