"""Gemma 4's layers: experts beside the MLP, per-layer inputs, and a learned scale of everything a layer gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kvist.engine.batch import ForwardBatch, LayerPages
from kvist.engine.models.config import LayerConfig, ModelConfig, MoeConfig
from kvist.engine.models.decoder import Decoder, DecoderLayer
from kvist.engine.models.layers import BareNorm, GatedMlp, Linear, hidden_norm
from kvist.engine.models.moe import Experts, choose_experts
from kvist.engine.models.per_layer_inputs import PerLayerGate, PerLayerInputs


class Gemma4Router(nn.Module):
    """Scores of the normed and scaled residual; an expert's weight is scaled by a learned number of its own."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self._top_k, self._is_normalised = moe.top_k, moe.is_normalised
        self._norm, self._root_scale = BareNorm(config.hidden_size, config.norm_eps), config.hidden_size**-0.5
        self.scale = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.proj = Linear(config.hidden_size, moe.num_experts)
        self.per_expert_scale = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and weights `[num_tokens, top_k]` of each token's experts."""
        scores = self.proj(self._norm(hidden) * self.scale * self._root_scale)
        expert_ids, weights = choose_experts(scores, self._top_k, self._is_normalised)
        return expert_ids, weights * self.per_expert_scale[expert_ids]


class ParallelExperts(nn.Module):
    """Experts that see the residual under a norm of their own, and whose result is normed before it joins the MLP's."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.router = Gemma4Router(config, moe)
        self.expert_norm = hidden_norm(config)
        self.experts = Experts(config, moe)
        self.expert_out_norm = hidden_norm(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        mixed: torch.Tensor = self.expert_out_norm(self.experts(self.expert_norm(hidden), *self.router(hidden)))
        return mixed


class Gemma4Layer(DecoderLayer):
    """A decoder layer, whose MLP may have experts beside it, then the layer's own input; all times a scale."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, window: int | None) -> None:
        super().__init__(config, layer, window)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self._has_experts, self._has_input = layer.moe is not None, config.per_layer_inputs is not None
        if layer.moe is not None:
            self.dense_out_norm = hidden_norm(config)
            self.parallel_experts = ParallelExperts(config, layer.moe)
        if config.per_layer_inputs is not None:
            self.per_layer_gate = PerLayerGate(config)

    def forward(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pages: LayerPages,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the residual stream after this layer; `given` is its input `[num_tokens, size]`, where it has one."""
        hidden = super().forward(hidden, batch, rotary, pages)
        if self._has_input:
            hidden = hidden + self.per_layer_gate(hidden, given)
        return hidden * self.layer_scalar

    def _make_mlp(self, config: ModelConfig, layer: LayerConfig) -> nn.Module:
        return GatedMlp(config, layer.intermediate_size)

    def _feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dense = super()._feed_forward(hidden)
        return self.dense_out_norm(dense) + self.parallel_experts(hidden) if self._has_experts else dense


class Gemma4Decoder(Decoder):
    """A decoder that hands each layer its input."""

    layer_class = Gemma4Layer

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.per_layer_inputs = None if config.per_layer_inputs is None else PerLayerInputs(config)

    def run_layers(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return the residual stream after the last layer."""
        given: Sequence[torch.Tensor | None] = [None] * len(self.layers)
        if self.per_layer_inputs is not None:
            given = self.per_layer_inputs(batch.input_ids, hidden).unbind(1)
        rotaries = self.rotaries(batch)
        for layer, rotary, pages, own in zip(self.layers, rotaries, batch.layers, given, strict=True):
            hidden = layer(hidden, batch, rotary, pages, own)
        return hidden
