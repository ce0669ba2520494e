"""A decoder with a head over the vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kvist.engine.batch import ForwardBatch
from kvist.engine.models.config import ModelConfig
from kvist.engine.models.decoder import Decoder
from kvist.engine.models.gemma import Gemma3nDecoder, Gemma4Decoder
from kvist.engine.models.layers import Linear

# Of the families whose layers are more than `decoder`'s.
_DECODERS: dict[str, type[Decoder]] = {"Gemma3nForCausalLM": Gemma3nDecoder, "Gemma4ForCausalLM": Gemma4Decoder}


class CausalLM(nn.Module):
    """Logits for the next token of every sequence.

    Made on torch's default device in its default dtype, with uninitialised parameters: `weights.load_model` fills them.
    """

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        self.model = _DECODERS.get(config.architecture, Decoder)(config, max_model_len)
        if not config.has_tied_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.requires_grad_(False)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the wanted rows' logits, float32 `[num_logit_rows, vocab_size]`."""
        hidden = self.model(batch)
        head = self.model.embed_tokens if self.config.has_tied_embeddings else self.lm_head
        logits = functional.linear(hidden, head.weight).float()
        cap = self.config.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
