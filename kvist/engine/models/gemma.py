"""Gemma 3n's and Gemma 4's layers, which are more than those of other families.

Both give every layer a little about each token, from a table of its own. Gemma 4 has experts beside the MLP, and a
learned scale of everything a layer gives. A layer of Gemma 3n computes on one of several residual streams, by
alternating updates (Baykal et al. 2023, arXiv:2301.13310); streams are `[num_streams, num_tokens, hidden_size]`.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import nn
from torch.nn import functional

from kvist.engine.batch import ForwardBatch, LayerPages
from kvist.engine.models.config import Gemma3nConfig, LayerConfig, ModelConfig, MoeConfig
from kvist.engine.models.decoder import Decoder, DecoderLayer
from kvist.engine.models.layers import GatedMlp, Linear, RMSNorm, Rotary, activate, hidden_norm
from kvist.engine.models.moe import Experts, choose_experts

_MIN_MEAN_SQUARE = 1e-5  # of a stream that is brought to another one's magnitude


class Gemma4Router(nn.Module):
    """Scores of the normed and scaled residual; an expert's weight is scaled by a learned number of its own."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self._top_k, self._is_normalised = moe.top_k, moe.is_normalised
        self._norm, self._root_scale = (
            RMSNorm(config.hidden_size, config.norm_eps, has_weight=False),
            config.hidden_size**-0.5,
        )
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.proj = Linear(config.hidden_size, moe.num_experts)
        self.per_expert_scale = nn.Parameter(torch.empty(moe.num_experts))

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
        return self.expert_out_norm(self.experts(self.expert_norm(hidden), *self.router(hidden)))


class Gemma4Layer(DecoderLayer):
    """A decoder layer, whose MLP may have experts beside it, then the layer's own input; all times a scale."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, window: int | None) -> None:
        super().__init__(config, layer, window)
        self.layer_scalar = nn.Parameter(torch.empty(1))
        self._has_experts = layer.moe is not None
        if layer.moe is not None:
            self.dense_out_norm = hidden_norm(config)
            self.parallel_experts = ParallelExperts(config, layer.moe)

    def forward(
        self, hidden: torch.Tensor, batch: ForwardBatch, rotary: Rotary, pages: LayerPages, given: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the residual stream after this layer."""
        return super().forward(hidden, batch, rotary, pages, given) * self.layer_scalar

    def _make_mlp(self, config: ModelConfig, layer: LayerConfig) -> nn.Module:
        return GatedMlp(config, layer.intermediate_size)

    def _feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dense = super()._feed_forward(hidden)
        return self.dense_out_norm(dense) + self.parallel_experts(hidden) if self._has_experts else dense


class Gemma4Decoder(Decoder):
    """A decoder of such layers."""

    layer_class = Gemma4Layer


class AltUp(nn.Module):
    """Alternating updates: what becomes of all streams when a layer computes on one of them."""

    def __init__(self, config: ModelConfig, own: Gemma3nConfig) -> None:
        super().__init__()
        self._num_streams, self._active = own.num_streams, own.active_stream
        self._router_scale = 1.0 / config.hidden_size
        self.router_norm = hidden_norm(config)
        self.modality_router = Linear(config.hidden_size, own.num_streams)
        self.prediction_coefs = Linear(own.num_streams, own.num_streams**2)
        self.correction_coefs = Linear(own.num_streams, own.num_streams)
        self.correct_output_scale = nn.Parameter(torch.empty(config.hidden_size))

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Return each stream plus a mixture of all, whose weights depend on the token's active stream."""
        weights = self.prediction_coefs(self._modalities(streams[self._active]))
        weights = weights.unflatten(-1, (self._num_streams, self._num_streams))
        return streams + torch.einsum("tij,jth->ith", weights, streams)

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return the predicted streams, each moved by its share of what the layer found beyond the prediction."""
        shares = self.correction_coefs(self._modalities(computed)) + 1.0
        return predicted + shares.T.unsqueeze(-1) * (computed - predicted[self._active])

    def _modalities(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = self.modality_router(self.router_norm(hidden) * self._router_scale)
        return torch.tanh(routed.float()).to(hidden.dtype)


class Laurel(nn.Module):
    """x + norm(right(left(x))): a learned residual of low rank."""

    def __init__(self, config: ModelConfig, rank: int) -> None:
        super().__init__()
        self.linear_left = Linear(config.hidden_size, rank)
        self.linear_right = Linear(rank, config.hidden_size)
        self.post_laurel_norm = hidden_norm(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        return hidden + self.post_laurel_norm(self.linear_right(self.linear_left(hidden)))


class SparseGateMlp(GatedMlp):
    """A gated MLP whose gate passes only what stands out: about `1 - sparsity` of a token's values.

    The threshold is the mean plus the standard deviation times the normal distribution's quantile at `sparsity`.
    """

    def __init__(self, config: ModelConfig, intermediate_size: int, sparsity: float) -> None:
        super().__init__(config, intermediate_size)
        self._num_deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        deviation, mean = torch.std_mean(gate, dim=-1, correction=0, keepdim=True)
        gate = functional.relu(gate - (mean + deviation * self._num_deviations))
        return self.down_proj(activate(self._activation, gate) * up)


class Gemma3nLayer(DecoderLayer):
    """Attention beside Laurel, then the MLP, on the active stream; then the layer's own input into the others."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, window: int | None) -> None:
        super().__init__(config, layer, window)
        assert config.gemma3n is not None
        self._active, self._has_output_scale = config.gemma3n.active_stream, config.gemma3n.has_output_scale
        self.altup = AltUp(config, config.gemma3n)
        self.laurel = Laurel(config, config.gemma3n.laurel_rank)

    def forward(
        self, hidden: torch.Tensor, batch: ForwardBatch, rotary: Rotary, pages: LayerPages, given: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the streams after this layer, from the streams before it and its input `[num_tokens, size]`."""
        predicted = self.altup.predict(hidden)
        computed = self._compute(predicted[self._active], batch, rotary, pages)
        corrected = self.altup.correct(predicted, computed)
        active = corrected[self._active]
        if self._has_output_scale:
            active = active * self.altup.correct_output_scale
        assert self.per_layer_gate is not None
        # Into all but the first stream, whichever is the active one: as the checkpoints were trained.
        corrected[1:] += self.per_layer_gate(active, given)
        return corrected

    def _compute(self, hidden: torch.Tensor, batch: ForwardBatch, rotary: Rotary, pages: LayerPages) -> torch.Tensor:
        normed = self.attn_norm(hidden)
        attended = hidden + self.attn_out_norm(self.self_attn(normed, batch, rotary, pages))
        mixed = (attended + self.laurel(normed)) * math.sqrt(0.5)
        return mixed + self.mlp_out_norm(self._feed_forward(mixed))

    def _make_mlp(self, config: ModelConfig, layer: LayerConfig) -> nn.Module:
        if not layer.activation_sparsity:
            return GatedMlp(config, layer.intermediate_size)
        return SparseGateMlp(config, layer.intermediate_size, layer.activation_sparsity)


class Gemma3nDecoder(Decoder):
    """A decoder of several streams: projections of the embedding at first, folded into their mean at the end."""

    layer_class = Gemma3nLayer

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        assert config.gemma3n is not None
        others = range(1, config.gemma3n.num_streams)
        self.altup_projections = nn.ModuleList(Linear(config.hidden_size, config.hidden_size) for _ in others)
        self.altup_unembed_projections = nn.ModuleList(Linear(config.hidden_size, config.hidden_size) for _ in others)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the wanted rows' hidden states `[num_logit_rows, hidden_size]`; fills the step's cache slots."""
        embedded = self.embed_tokens(batch.input_ids)
        streams = _joined(embedded, [project(embedded) for project in self.altup_projections])
        first, *others = self.run_layers(streams, embedded, batch)[:, batch.logit_rows]
        projected = [project(each) for project, each in zip(self.altup_unembed_projections, others, strict=True)]
        return self.norm(_joined(first, projected).mean(dim=0))


def _joined(first: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """Return the streams as one tensor, the others brought to the magnitude of the first, token by token."""
    magnitude = first.square().mean(dim=-1, keepdim=True).sqrt()
    scaled = [
        each * magnitude / each.square().mean(dim=-1, keepdim=True).clamp(min=_MIN_MEAN_SQUARE).sqrt()
        for each in others
    ]
    return torch.stack([first, *scaled])
