"""The decoder: embeddings, layers, the final norm and the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from kvist.engine.batch import ForwardBatch
from kvist.engine.models.config import ModelConfig
from kvist.engine.models.layers import DecoderLayer, Embedding, Linear, RMSNorm
from kvist.engine.models.rope import RotaryTable
from kvist.events.windows import FULL
from kvist.kvcache.groups import KvGroup


class Decoder(nn.Module):
    """The layers between token ids and the last hidden states."""

    def __init__(self, config: ModelConfig, groups: Sequence[KvGroup], max_model_len: int) -> None:
        super().__init__()
        group_of = {layer_idx: group for group in groups for layer_idx in group.layer_indices}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, _kernel_window(group_of[i])) for i in range(len(config.layers))
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        self._ropes = [layer.rope for layer in config.layers]
        self._tables = {rope: RotaryTable(rope, config.head_dim, max_model_len) for rope in dict.fromkeys(self._ropes)}
        # Rounded to the weights' dtype first, as the checkpoints were trained.
        self._embedding_scale = torch.tensor(config.embedding_scale).to(self.embed_tokens.weight.dtype).item()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the wanted rows' hidden states `[num_logit_rows, hidden_size]`; fills the step's cache slots."""
        hidden = self.embed_tokens(batch.input_ids) * self._embedding_scale
        rotaries = {rope: table.at(batch.positions) for rope, table in self._tables.items()}
        for layer, rope, pages in zip(self.layers, self._ropes, batch.layers, strict=True):
            hidden = layer(hidden, batch, rotaries[rope], pages)
        normed: torch.Tensor = self.norm(hidden[batch.logit_rows])
        return normed


class CausalLM(nn.Module):
    """A decoder with a head over the vocabulary.

    Made on torch's default device in its default dtype, with uninitialised parameters: `weights.load_model` fills them.
    """

    def __init__(self, config: ModelConfig, groups: Sequence[KvGroup], max_model_len: int) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, groups, max_model_len)
        if not config.has_tied_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the wanted rows' logits, float32 `[num_logit_rows, vocab_size]`."""
        hidden = self.model(batch)
        head = self.model.embed_tokens if self.config.has_tied_embeddings else self.lm_head
        logits = functional.linear(hidden, head.weight).float()
        cap = self.config.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _kernel_window(group: KvGroup) -> int | None:
    return None if group.window is FULL else group.window
