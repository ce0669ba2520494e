"""The layers between token ids and the last hidden states, for every family whose layers are no more than these."""

from __future__ import annotations

import math

import torch
from torch import nn

from kvist.engine.batch import ForwardBatch, LayerPages
from kvist.engine.models.config import LayerConfig, ModelConfig
from kvist.engine.models.layers import (
    Attention,
    Embedding,
    GatedMlp,
    Linear,
    RMSNorm,
    Rotary,
    RotaryTable,
    activate,
    hidden_norm,
)
from kvist.engine.models.moe import SparseMlp
from kvist.events.engine_events import FULL
from kvist.kvcache.stale import effective_window


class PerLayerInputs(nn.Module):
    """What each layer of a later Gemma is given: the token's own numbers, and as many projected from its embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inputs = config.per_layer_inputs
        assert inputs is not None
        self._vocab_size, self._size, total = inputs.vocab_size, inputs.size, inputs.size * len(config.layers)
        self.embed_tokens_per_layer = Embedding(inputs.vocab_size, total, inputs.size**0.5)
        self.per_layer_model_projection = Linear(config.hidden_size, total)
        self.per_layer_projection_norm = RMSNorm(inputs.size, config.norm_eps, config.norm_offset)
        self._projection_scale = config.hidden_size**-0.5

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, num_layers, size]`; `embedded` is what the first layer sees, `[num_tokens, hidden]`.

        A token that the table lacks has the numbers of token 0.
        """
        in_table = input_ids.masked_fill(input_ids >= self._vocab_size, 0)
        own = self.embed_tokens_per_layer(in_table)
        projected = self.per_layer_model_projection(embedded) * self._projection_scale
        by_layer = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self._size)))
        return (by_layer + own.view_as(by_layer)) * math.sqrt(0.5)


class PerLayerGate(nn.Module):
    """What a layer makes of its input: norm(project(activation(gate(x)) * input))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inputs = config.per_layer_inputs
        assert inputs is not None
        self._activation = config.activation
        self.per_layer_input_gate = Linear(config.hidden_size, inputs.size)
        self.per_layer_projection = Linear(inputs.size, config.hidden_size)
        self.post_per_layer_input_norm = hidden_norm(config)

    def forward(self, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`, to be added to the residual; `given` is `[num_tokens, size]`."""
        gated = activate(self._activation, self.per_layer_input_gate(hidden)) * given
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class DecoderLayer(nn.Module):
    """Attention, then the MLP or experts, each from a normed input into the residual, normed again if so configured.

    A layer that is given something about each token adds that at the end.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, window: int | None) -> None:
        super().__init__()
        self.attn_norm = hidden_norm(config)
        self.self_attn = Attention(config, layer, window)
        self.attn_out_norm = hidden_norm(config) if config.has_output_norms else nn.Identity()
        self.mlp_norm = hidden_norm(config)
        self.mlp = self._make_mlp(config, layer)
        self.mlp_out_norm = hidden_norm(config) if config.has_output_norms else nn.Identity()
        self.per_layer_gate = None if config.per_layer_inputs is None else PerLayerGate(config)

    def forward(
        self, hidden: torch.Tensor, batch: ForwardBatch, rotary: Rotary, pages: LayerPages, given: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the residual stream `[num_tokens, hidden_size]` after this layer; `given` is `[num_tokens, size]`."""
        hidden = hidden + self.attn_out_norm(self.self_attn(self.attn_norm(hidden), batch, rotary, pages))
        hidden = hidden + self.mlp_out_norm(self._feed_forward(hidden))
        return hidden if self.per_layer_gate is None else hidden + self.per_layer_gate(hidden, given)

    def _make_mlp(self, config: ModelConfig, layer: LayerConfig) -> nn.Module:
        return GatedMlp(config, layer.intermediate_size) if layer.moe is None else SparseMlp(config, layer.moe)

    def _feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    """Embeddings, layers and the final norm."""

    layer_class = DecoderLayer

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = nn.ModuleList(
            self.layer_class(config, layer, kernel_window(layer, max_model_len)) for layer in config.layers
        )
        self.norm = hidden_norm(config)
        self._ropes = [(layer.rope, layer.head_dim) for layer in config.layers]
        self._tables = {key: RotaryTable(*key, max_model_len) for key in dict.fromkeys(self._ropes)}
        self.per_layer_inputs = None if config.per_layer_inputs is None else PerLayerInputs(config)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the wanted rows' hidden states `[num_logit_rows, hidden_size]`; fills the step's cache slots."""
        embedded = self.embed_tokens(batch.input_ids)
        return self.norm(self.run_layers(embedded, embedded, batch)[batch.logit_rows])

    def run_layers(self, hidden: torch.Tensor, embedded: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rotaries = {key: table.at(batch.positions) for key, table in self._tables.items()}
        inputs = self.per_layer_inputs
        given = [None] * len(self.layers) if inputs is None else inputs(batch.input_ids, embedded).unbind(1)
        for layer, rope, pages, own in zip(self.layers, self._ropes, batch.layers, given, strict=True):
            hidden = layer(hidden, batch, rotaries[rope], pages, own)
        return hidden


def kernel_window(layer: LayerConfig, max_model_len: int) -> int | None:
    """Return the window the kernels mask by: None where no sequence can outgrow it."""
    window = effective_window(layer.window, max_model_len)
    return None if window is FULL else window
