"""Gemma's per-layer embeddings (3n and 4): every layer is given a little about each token, from a table of its own."""

from __future__ import annotations

import math

import torch
from torch import nn

from kvist.engine.models.config import ModelConfig
from kvist.engine.models.layers import Embedding, Linear, RMSNorm, activate, hidden_norm


class PerLayerInputs(nn.Module):
    """What each layer is given: the token's own numbers, and as many projected from its embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inputs = config.per_layer_inputs
        assert inputs is not None
        self._vocab_size, self._size, total = inputs.vocab_size, inputs.size, inputs.size * len(config.layers)
        self.embed_tokens_per_layer = Embedding(inputs.vocab_size, total)
        self.per_layer_model_projection = Linear(config.hidden_size, total)
        self.per_layer_projection_norm = RMSNorm(inputs.size, config.norm_eps, config.norm_offset)
        self._projection_scale = config.hidden_size**-0.5
        # Rounded to the weights' dtype first, as the checkpoints were trained.
        dtype = self.embed_tokens_per_layer.weight.dtype
        self._embedding_scale = torch.tensor(inputs.size**0.5, device="cpu").to(dtype).item()

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, num_layers, size]`; `embedded` is what the first layer sees, `[num_tokens, hidden]`.

        A token that the table lacks has the numbers of token 0.
        """
        in_table = input_ids.masked_fill(input_ids >= self._vocab_size, 0)
        own = self.embed_tokens_per_layer(in_table) * self._embedding_scale
        projected = self.per_layer_model_projection(embedded) * self._projection_scale
        by_layer = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self._size)))
        given: torch.Tensor = (by_layer + own.view_as(by_layer)) * math.sqrt(0.5)
        return given


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
        mixed: torch.Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return mixed
