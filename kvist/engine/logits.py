"""What a request's parameters do to its logits before a token is drawn.

What depends on the tokens so far is held in vectors over the vocabulary, in which each new token changes one entry: a
step costs the same however long the context is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from kvist.engine.request import Request


class Constraint(Protocol):
    """A grammar that one output follows."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return, by token id, which tokens may come next; an end token where the output may end."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token, of those allowed; return whether none but an end token can follow."""

    @property
    def error(self) -> str:
        """Return why the output cannot go on, as where the grammar is beyond a limit; empty while it can."""


class LogitsAdjuster:
    """One request's changes to its logits, in vLLM's order: bias, bans and grammar, then penalties."""

    def __init__(self, request: Request, like: torch.Tensor) -> None:
        """Begin with the tokens that the request has by now; `like` is a row of its logits."""
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
        """Count a token of the output."""
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
            # A positive logit is divided and a negative one multiplied: which of both is less, or with a bonus more.
            is_penalty = self._request.params.repetition_penalty > 1
            choose = torch.minimum if is_penalty else torch.maximum
            choose(row / self._repetition, row * self._repetition, out=row)
        if self._penalty is not None:
            row -= self._penalty

    def _banned(self) -> list[int]:
        """Return the tokens that would end the output too early, or complete a bad word."""
        request = self._request
        banned = sorted(request.end_token_ids) if request.is_too_short else []
        for word in request.bad_words:
            num_before = len(word) - 1
            tail = request.token_ids[len(request.token_ids) - num_before :]
            if num_before <= request.num_output_tokens and tail == list(word[:-1]):
                banned.append(word[-1])
        return banned
