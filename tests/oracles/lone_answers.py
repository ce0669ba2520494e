"""Random requests, and what an engine answers to each that has nothing cached and nothing else to do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from unittest.mock import patch

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvist.engine import core as engine_core
from kvist.engine.core import EngineCore
from kvist.engine.request import Request, RequestOutput, SequenceInput, TokenLogprobs
from kvist.openai.requests import Handoff, SamplingParams

_NOISE = 1e-5  # of logits, many times what the order of a sum makes in float32
_SALTS = (None, None, None, "salt")


class Syllables:
    """A detokenizer of a few letters, some of which come with the next token only."""

    def __init__(self) -> None:
        self._pending = ""

    def step(self, token_id: int) -> str:
        self._pending += "abc"[token_id % 3] * (1 + token_id % 2)
        if token_id % 7 == 0:
            return ""
        piece, self._pending = self._pending, ""
        return piece

    def flush(self) -> str:
        return self._pending


class Turns:
    """A grammar: token ids modulo three take turns, from the fourth on an end may come, and the ninth is the last."""

    def __init__(self, vocab_size: int) -> None:
        self._ids = np.arange(vocab_size)
        self._num_tokens = 0
        self.error = ""

    def allowed(self) -> npt.NDArray[np.bool_]:
        is_in_turn: npt.NDArray[np.bool_] = self._ids % 3 == self._num_tokens % 3
        return is_in_turn | (self._ids == 1) if self._num_tokens > 3 else is_in_turn

    def accept(self, token_id: int) -> bool:
        assert self.allowed()[token_id], "a token that the grammar does not allow"
        self._num_tokens += 1
        self.error = "too much" if token_id % 15 == 14 else ""
        return self._num_tokens == 9


@dataclass(frozen=True)
class Ask:
    """A request for one sequence, apart from who computes what of it."""

    prompt: list[int]
    params: SamplingParams
    vocab_size: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    cache_salt: str | None = None
    swa_scratch: bool | None = None
    has_text: bool = False
    has_grammar: bool = False

    def sequence(self, handoff: Handoff | None = None) -> SequenceInput:
        """Return it as an engine takes it, at the beginning of its text and of its grammar."""
        text = Syllables() if self.has_text else None
        grammar = Turns(self.vocab_size) if self.has_grammar else None
        rest = (self.cache_salt, self.swa_scratch, handoff, grammar, self.bad_words)
        return SequenceInput(self.prompt, self.params, text, *rest)  # type: ignore[arg-type]


class Asker:
    """Makes requests up to a length; prompts share beginnings with each other and with answers, up to any token."""

    def __init__(self, rng: random.Random, vocab_size: int, max_len: int) -> None:
        self._rng = rng
        self._vocab_size, self._max_len = vocab_size, max_len
        self.texts: list[list[int]] = [self._tokens(rng.randint(max_len // 2, max_len)) for _ in range(2)]

    def ask(self) -> list[Ask]:
        """Return what one client asks: one choice or more of the same prompt."""
        rng = self._rng
        stem = rng.choice(self.texts)
        prompt = stem[: rng.randint(0, len(stem))] + self._tokens(rng.choice((0, 1, 1, 2, rng.randint(1, 20))))
        prompt = prompt[: self._max_len - 1] or self._tokens(1)
        self.texts.append(prompt)
        max_tokens = rng.randint(1, min(24, self._max_len - len(prompt)))
        has_grammar = rng.random() < 0.15
        params = self._params(max_tokens, has_grammar)
        ask = Ask(
            prompt,
            params,
            self._vocab_size,
            bad_words=tuple(tuple(self._tokens(rng.choice((1, 1, 2)))) for _ in range(self._seldom(3, has_grammar))),
            cache_salt=rng.choice(_SALTS),
            has_text=bool(params.stop) or rng.random() < 0.3,
            has_grammar=has_grammar,
        )
        choices = range(rng.choice((1, 1, 1, 3)))
        seeds = [None if params.seed is None else params.seed + choice for choice in choices]
        return [replace(ask, params=msgspec.structs.replace(params, seed=seed)) for seed in seeds]

    def _params(self, max_tokens: int, has_grammar: bool) -> SamplingParams:
        rng = self._rng
        asked: dict[str, object] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": rng.random() < 0.7}
        options: list[dict[str, object]] = [
            {"min_tokens": rng.randint(1, max_tokens)},
            {"presence_penalty": 0.8, "frequency_penalty": -0.3},
            {"repetition_penalty": rng.choice((0.8, 1.4))},
            {"logit_bias": {token_id: rng.choice((-100.0, 3.0)) for token_id in self._tokens(5)}},
            {"stop_token_ids": [*self._tokens(40), 1 << 31]},
            {"stop": ["".join(rng.choices("abc", k=rng.randint(2, 4))) for _ in range(rng.randint(1, 3))]},
            {"stop": "cab", "include_stop_str_in_output": True},
            {"logprobs": rng.randint(0, 3)},
            {"prompt_logprobs": rng.randint(0, 2)},
            {"echo": True, "logprobs": 1},
        ]
        if not has_grammar:
            few = {"allowed_token_ids": self._tokens(4), "presence_penalty": 1.5, "frequency_penalty": 0.7}
            options += [few, {"allowed_token_ids": self._tokens(80)}]
        if rng.random() < 0.5:
            asked |= {"temperature": rng.choice((0.5, 1.0, 3.0)), "seed": rng.randrange(1000)}
            asked |= rng.choice(({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.9}))
        for option in rng.sample(options, rng.choice((0, 1, 1, 2, 3))):
            asked |= option
        return msgspec.convert(asked, SamplingParams)

    def _seldom(self, most: int, is_never: bool) -> int:
        return 0 if is_never or self._rng.random() < 0.85 else self._rng.randint(1, most)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self._vocab_size) for _ in range(count)]


@dataclass(frozen=True)
class LoneAnswer:
    """A whole answer, of whose tokens so many are sure: the next was a choice that rounding could turn."""

    output: RequestOutput
    num_sure: int

    def check(self, output: RequestOutput, *, is_whole: bool = True) -> None:
        """Raise AssertionError unless an answer is this one, or begins it, as far as that is sure."""
        expected = self.output
        num_tokens = min(self.num_sure, len(expected.token_ids) if is_whole else len(output.token_ids))
        assert output.token_ids[:num_tokens] == expected.token_ids[:num_tokens]
        _check_logprobs(output.logprobs[:num_tokens], expected.logprobs[:num_tokens])
        if is_whole or output.token_ids:
            _check_logprobs(output.prompt_logprobs, expected.prompt_logprobs)
        if self.num_sure <= len(expected.token_ids):  # what fails by its last choice has no token of it
            return
        if is_whole:
            assert output.token_ids == expected.token_ids
            ends = [(each.text, each.finish_reason, each.stop_reason, each.error) for each in (output, expected)]
            assert ends[0] == ends[1]
        else:
            assert expected.text.startswith(output.text)


def _check_logprobs(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert [each.token.token_id for each in got] == [each.token.token_id for each in expected]
    assert [len(each.top) for each in got] == [len(each.top) for each in expected]
    values = [[entry.logprob for each in side for entry in (each.token, *each.top)] for side in (got, expected)]
    assert np.allclose(*values, atol=1e-3)


class Doubts:
    """Samples each token thrice, twice with noise, and notes by request the first that came out otherwise."""

    def __init__(self) -> None:
        self.first_unsure: dict[str, int] = {}
        self._draw = engine_core.draw
        self._noise = torch.Generator().manual_seed(0)

    def draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        noise = torch.randn(logits.shape, generator=self._noise) * _NOISE
        states = [request.random.getstate() for request in requests]
        others = []
        for each in (noise, -noise):
            others.append(self._draw(logits + each, requests).tolist())
            for request, state in zip(requests, states, strict=True):
                request.random.setstate(state)
        drawn = self._draw(logits, requests)
        for request, *choices in zip(requests, drawn.tolist(), *others, strict=True):
            if len(set(choices)) > 1:
                self.first_unsure.setdefault(request.request_id, request.num_output_tokens)
        return drawn


class LoneEngine:
    """Answers one request at a time."""

    def __init__(self, core: EngineCore) -> None:
        """Take over an engine that has room for the longest request, and no prefix cache."""
        self._core = core

    def answer(self, ask: Ask) -> LoneAnswer:
        doubts, outputs = Doubts(), []
        with patch.object(engine_core, "draw", doubts.draw):
            self._core.add_request("alone", ask.sequence())
            while self._core.has_work:
                outputs += self._core.step()
        return LoneAnswer(reduce(add, outputs), doubts.first_unsure.get("alone", 1 << 30))
