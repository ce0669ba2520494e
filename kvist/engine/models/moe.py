"""Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538): tokens sorted by expert, one grouped matmul a matrix."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional

from kvist.engine.models.config import ClampedSwiglu, ModelConfig, MoeConfig
from kvist.engine.models.layers import Linear, activate


class Experts(nn.Module):
    """The gated MLPs of all experts, stacked; each token's results are weighed and summed.

    Its work follows tokens * top_k, not tokens * experts, and it never asks the device how the tokens are spread.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self._num_experts, self._activation, self._swiglu = moe.num_experts, config.activation, moe.swiglu
        size = moe.intermediate_size
        self.gate_up_proj = _parameter(moe.num_experts, 2 * size, config.hidden_size)
        self.down_proj = _parameter(moe.num_experts, config.hidden_size, size)
        if moe.swiglu is not None:
            self.gate_up_proj_bias = _parameter(moe.num_experts, 2 * size)
            self.down_proj_bias = _parameter(moe.num_experts, config.hidden_size)

    def forward(self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`; `expert_ids` and `weights`, in float32, are `[num_tokens, top_k]`."""
        num_tokens, top_k = expert_ids.shape
        experts, order = expert_ids.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(self._num_experts, device=hidden.device), right=True)
        grouped = hidden[order // top_k]
        grouped = self._gate(self._project("gate_up_proj", grouped, experts, ends.int()))
        grouped = self._project("down_proj", grouped, experts, ends.int())
        by_token = torch.empty_like(grouped)
        by_token[order] = grouped
        weighed = by_token.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)  # in float32, as the weights are
        return weighed.sum(dim=1).to(hidden.dtype)

    def targets(self, prefix: str, stored: Collection[str]) -> dict[str, torch.Tensor]:
        """Return where the checkpoint's weights go: it may have the experts stacked, or each under its number."""
        gate_up, down = self.gate_up_proj.data, self.down_proj.data
        if self._swiglu is not None:
            transposed = {"gate_up_proj": gate_up.mT, "down_proj": down.mT}
            biases = {"gate_up_proj_bias": self.gate_up_proj_bias.data, "down_proj_bias": self.down_proj_bias.data}
            return {f"{prefix}.{name}": target for name, target in (transposed | biases).items()}
        if f"{prefix}.gate_up_proj" in stored:
            return {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down}
        gate, up = gate_up.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        return {
            f"{prefix}.{expert}.{name}.weight": part[expert]
            for name, part in parts.items()
            for expert in range(self._num_experts)
        }

    def _project(self, name: str, x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return rows of x, sorted by expert, each times its expert's matrix; expert e's rows end at `ends[e]`."""
        projected: torch.Tensor = functional.grouped_mm(x, getattr(self, name).mT, offs=ends)
        return projected if self._swiglu is None else projected + getattr(self, f"{name}_bias")[experts]

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._swiglu is not None:
            return clamped_swiglu(gate_up, self._swiglu)
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(self._activation, gate) * up


class SparseMlp(nn.Module):
    """Experts behind a linear router, in the place of an MLP."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self._top_k, self._is_normalised = moe.top_k, moe.is_normalised
        self.router = Linear(config.hidden_size, moe.num_experts, has_bias=moe.swiglu is not None)
        self.experts = Experts(config, moe)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        expert_ids, weights = choose_experts(self.router(hidden), self._top_k, self._is_normalised)
        return self.experts(hidden, expert_ids, weights)


def choose_experts(scores: torch.Tensor, top_k: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and float32 weights `[num_tokens, top_k]` of the experts with the largest scores.

    A weight is the expert's share in the softmax over all; `is_normalised`: over the chosen.
    """
    weights, expert_ids = scores.float().softmax(dim=-1).topk(top_k, dim=-1)
    return expert_ids, weights / weights.sum(dim=-1, keepdim=True) if is_normalised else weights


def clamped_swiglu(gate_up: torch.Tensor, swiglu: ClampedSwiglu) -> torch.Tensor:
    """Return gated numbers `[..., size]` of gates and ups in turn `[..., 2 * size]`."""
    gate = gate_up[..., ::2].clamp(max=swiglu.limit)
    up = gate_up[..., 1::2].clamp(min=-swiglu.limit, max=swiglu.limit)
    return gate * torch.sigmoid(swiglu.alpha * gate) * (up + 1)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))
