from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from kvist.engine.request import Request, TextStream
from kvist.engine.sampler import DrawnTokens, draw, logprobs_of
from kvist.kvcache import BlockHashChain
from kvist.openai.requests import SamplingParams

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]))


def make_request(output: tuple[int, ...] = (), ends: frozenset[int] = frozenset(), **params: Any) -> Request:
    sampling = SamplingParams(**({"seed": 0} | params))
    stream, chain = TextStream(None, ()), BlockHashChain(4)
    request = Request("r", [0], sampling, 9, chain, stream, random.Random(sampling.seed), ends)
    request.token_ids.extend(output)
    return request


def count_draws(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> Counter[int]:
    request = make_request(**params)
    return Counter(draw(logits.expand(count, -1), [request] * count).tolist())


def shares(counts: Counter[int]) -> list[float]:
    return [counts[token_id] / counts.total() for token_id in range(5)]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.06, 0.04]),
        ({"temperature": 0.5}, [0.16 / 0.2952, 0.09 / 0.2952, 0.04 / 0.2952, 0.0036 / 0.2952, 0.0016 / 0.2952]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": -1}, [0.4, 0.3, 0.2, 0.06, 0.04]),
        ({"top_k": 99}, [0.4, 0.3, 0.2, 0.06, 0.04]),
        ({"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.3}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9, 0, 0]),
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0, 0]),
    ],
)
def test_tokens_come_with_the_probabilities_the_parameters_leave(params: dict[str, Any], expected: list[float]) -> None:
    got = shares(count_draws(3000, **params))
    for share, probability in zip(got, expected, strict=True):
        assert share == pytest.approx(probability, abs=0.03)
        assert (share == 0) == (probability == 0)


def test_filters_follow_the_tokens_and_not_their_order() -> None:
    shuffled = torch.tensor([3, 0, 4, 2, 1])
    assert shares(count_draws(500, logits=LOGITS[shuffled], top_k=1)) == [0, 1, 0, 0, 0]


def test_temperature_zero_is_the_largest_logit() -> None:
    assert count_draws(3, temperature=0.0) == {0: 3}


@pytest.mark.parametrize("temperature", [1e-10, 1e-320])
def test_a_temperature_next_to_zero_is_the_largest_logit_too(temperature: float) -> None:
    assert count_draws(3, temperature=temperature) == {0: 3}
    assert count_draws(3, temperature=temperature, top_p=0.9) == {0: 3}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(4, 50)
    params = [{"seed": 1}, {"temperature": 0.0}, {"seed": 2, "top_p": 0.8}, {"seed": 3, "presence_penalty": 1.0}]
    alone = [draw(logits[i : i + 1], [make_request(**params[i])]).item() for i in range(4)]
    together = draw(logits, [make_request(**each) for each in params]).tolist()
    assert together == alone


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = LOGITS[None].clone()
    draw(logits, [make_request(output=(1,), frequency_penalty=2.0, repetition_penalty=1.5, logprobs=1)])
    assert torch.equal(logits[0], LOGITS)


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ((0, 0), {"frequency_penalty": 0.2}, 1),
        ((0,), {"frequency_penalty": 0.2}, 0),
        ((0,), {"presence_penalty": 0.3}, 1),
        ((0, 0, 0), {"presence_penalty": 0.2}, 0),
    ],
)
def test_penalties_count_the_output(output: tuple[int, ...], params: dict[str, float], expected: int) -> None:
    assert draw(LOGITS[None], [make_request(output, temperature=0.0, **params)]).tolist() == [expected]


def test_the_repetition_penalty_counts_the_prompt_and_shrinks_either_sign() -> None:
    request = make_request(temperature=0.0, repetition_penalty=2.0)
    assert draw(torch.tensor([[3.0, 2.0, 1.0]]), [request]).tolist() == [1]
    assert draw(torch.tensor([[-1.0, -1.5, -3.0]]), [request]).tolist() == [1]


def test_ends_are_forbidden_before_the_minimum() -> None:
    ends = frozenset({0, 1})
    early = make_request((4,), ends, temperature=0.0, min_tokens=2)
    late = make_request((4, 4), ends, temperature=0.0, min_tokens=2)
    assert draw(LOGITS.repeat(2, 1), [early, late]).tolist() == [2, 0]


def test_log_probabilities_are_of_the_raw_logits() -> None:
    request = make_request(output=(0,), temperature=0.0, presence_penalty=2.0, logprobs=2)
    logits = LOGITS[None] + 5.0
    (token_id,) = token_ids = draw(logits, [request]).tolist()
    (logprobs,) = logprobs_of(logits, token_ids, [request])
    assert token_id == 1
    assert logprobs is not None
    assert logprobs.token.logprob == pytest.approx(float(LOGITS[1]))
    assert [entry.token_id for entry in logprobs.top] == [0, 1]
    assert logprobs.top[0].logprob == pytest.approx(float(LOGITS[0]))


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    (logprobs,) = logprobs_of(LOGITS[None], [0], [make_request(temperature=0.0, logprobs=20)])
    assert logprobs is not None
    assert len(logprobs.top) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_drawn_tokens_arrive_before_what_is_launched_after_them_is_computed() -> None:
    drawn, later = DrawnTokens(torch.tensor([5, 7], device="cuda")), torch.cuda.Event()
    torch.cuda._sleep(1 << 31)  # about a second
    later.record()
    assert drawn.wait() == [5, 7]
    assert not later.query()
    assert DrawnTokens(drawn.on_device[:0]).wait() == []
    assert later.query(), "a step that draws no token is waited for, too"
