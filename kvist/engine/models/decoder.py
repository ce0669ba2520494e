"""The layers between token ids and the last hidden states, for every family whose layers are no more than these."""

from __future__ import annotations

import torch
from torch import nn

from kvist.engine.batch import ForwardBatch, LayerPages
from kvist.engine.models.config import LayerConfig, ModelConfig
from kvist.engine.models.layers import Attention, Embedding, GatedMlp, Rotary, RotaryTable, hidden_norm
from kvist.engine.models.moe import SparseMlp
from kvist.events.engine_events import FULL
from kvist.kvcache.stale import effective_window


class DecoderLayer(nn.Module):
    """Attention, then the MLP or experts, each from a normed input into the residual, normed again if so configured."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, window: int | None) -> None:
        super().__init__()
        self.attn_norm = hidden_norm(config)
        self.self_attn = Attention(config, layer, window)
        self.attn_out_norm = hidden_norm(config) if config.has_output_norms else nn.Identity()
        self.mlp_norm = hidden_norm(config)
        self.mlp = self._make_mlp(config, layer)
        self.mlp_out_norm = hidden_norm(config) if config.has_output_norms else nn.Identity()

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch, rotary: Rotary, pages: LayerPages) -> torch.Tensor:
        """Return the residual stream `[num_tokens, hidden_size]` after this layer."""
        hidden = hidden + self.attn_out_norm(self.self_attn(self.attn_norm(hidden), batch, rotary, pages))
        after: torch.Tensor = hidden + self.mlp_out_norm(self._feed_forward(hidden))
        return after

    def _make_mlp(self, config: ModelConfig, layer: LayerConfig) -> nn.Module:
        return GatedMlp(config, layer.intermediate_size) if layer.moe is None else SparseMlp(config, layer.moe)

    def _feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.mlp(self.mlp_norm(hidden))
        return given


class Decoder(nn.Module):
    """Embeddings, layers and the final norm."""

    layer_class = DecoderLayer

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            self.layer_class(config, layer, kernel_window(layer, max_model_len)) for layer in config.layers
        )
        self.norm = hidden_norm(config)
        self._ropes = [(layer.rope, layer.head_dim) for layer in config.layers]
        self._tables = {key: RotaryTable(*key, max_model_len) for key in dict.fromkeys(self._ropes)}
        # Rounded to the weights' dtype first, as the checkpoints were trained.
        scale = torch.tensor(config.embedding_scale, device="cpu")
        self._embedding_scale = scale.to(self.embed_tokens.weight.dtype).item()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the wanted rows' hidden states `[num_logit_rows, hidden_size]`; fills the step's cache slots."""
        hidden = self.run_layers(self.embed_tokens(batch.input_ids) * self._embedding_scale, batch)
        normed: torch.Tensor = self.norm(hidden[batch.logit_rows])
        return normed

    def run_layers(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        for layer, rotary, pages in zip(self.layers, self.rotaries(batch), batch.layers, strict=True):
            hidden = layer(hidden, batch, rotary, pages)
        return hidden

    def rotaries(self, batch: ForwardBatch) -> list[Rotary]:
        """Return each layer's cosines and sines at the step's positions."""
        by_rope = {key: table.at(batch.positions) for key, table in self._tables.items()}
        return [by_rope[key] for key in self._ropes]


def kernel_window(layer: LayerConfig, max_model_len: int) -> int | None:
    """Return the window the kernels mask by: None where no sequence can outgrow it."""
    window = effective_window(layer.window, max_model_len)
    return None if window is FULL else window
