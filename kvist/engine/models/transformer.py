"""A model of transformers whose attention is over pages: a step of many sequences is one row of tokens to it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import transformers
from torch import distributed, nn
from torch.nn import functional
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvist.engine.batch import ForwardBatch
from kvist.engine.models.config import ModelConfig
from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL
from kvist.kernels import loops_for, paged_attention, write_kv
from kvist.kvcache.stale import effective_window

_ATTENTION = "kvist_paged"


class CausalLM(nn.Module):
    """Logits for the next token of every sequence.

    Made on torch's default device with uninitialised parameters: `weights.load_model` fills them, and `kv_scales`, by
    which a layer's keys and values are divided in a cache of eight bits (none: 1).
    """

    def __init__(self, config: ModelConfig, max_model_len: int, dtype: torch.dtype) -> None:
        """Raise InvalidValueError for sizes that are no model's."""
        super().__init__()
        self.config = config
        self.kv_scales: dict[int, tuple[float, float]] = {}
        windows = (effective_window(layer.window, max_model_len) for layer in config.layers)
        self.kernel_windows = [None if window is FULL else window for window in windows]  # where any can be outgrown
        kind = getattr(transformers, config.architecture)
        try:
            with no_init_weights():
                self.decoder = kind._from_config(config.text, dtype=dtype, attn_implementation=_ATTENTION)
                _fix_rope_frequencies(self.decoder, max_model_len)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidValueError("config.json", config.architecture, f"a model ({error})") from error
        self.decoder.tie_weights()
        if config.num_ranks > 1:
            for name, module in self.decoder.named_modules():
                if name.endswith((".o_proj", ".down_proj")):
                    module.__class__ = RowParallelLinear
        self.eval().requires_grad_(False)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the wanted rows' logits, float32 `[num_logit_rows, vocab_size]`; fills the step's cache slots."""
        ids, positions = batch.input_ids[None], batch.positions[None]
        step = {"model": self, "batch": batch}
        output = self.decoder(ids, position_ids=positions, use_cache=False, logits_to_keep=batch.logit_rows, **step)
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def _fix_rope_frequencies(decoder: nn.Module, max_model_len: int) -> None:
    """Give ropes that depend on a sequence's length one length for all: cached keys cannot be turned again.

    LongRoPE is long if any sequence may be, dynamic NTK is for the whole stretched length, as in vLLM's
    `phi3_long_rope_scaled_rope.py` and `dynamic_ntk_scaling_rope.py`.
    """
    module: Any
    for module in decoder.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind not in ("dynamic", "longrope"):
                continue
            config, length = module.config, max_model_len
            if kind == "dynamic":
                rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
                length = int(config.max_position_embeddings * rope["factor"])
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length, layer_type=layer_type)
            # with another type transformers would choose anew at each step
            if layer_type is None:
                module.inv_freq, module.rope_type = frequencies, "default"
            else:
                setattr(module, f"{layer_type}_inv_freq", frequencies)
                module.rope_type[layer_type] = "default"


class FusedRMSNorm(nn.Module):
    """A norm as one operation, where transformers has eight, rounded once. `fuse_norms` makes them."""

    scale: torch.Tensor
    eps: float
    loops: ModuleType | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `x`, whose last dimension is normed."""
        if self.loops is None:
            return functional.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps).type_as(x)
        normed: torch.Tensor = self.loops.rms_norm(x, self.scale, self.eps)
        return normed


def fuse_norms(decoder: nn.Module) -> None:
    """Have the norms of a decoder, whose weights are in place, computed as one operation each."""
    module: Any
    for module in decoder.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and hasattr(module, "weight"):
            module.scale = module.weight.float() + (name in ("Gemma2RMSNorm", "Gemma3RMSNorm"))  # they keep 1 less
            module.eps = getattr(module, "eps", None) or module.variance_epsilon
            module.loops = loops_for(module.scale)
            module.__class__ = FusedRMSNorm


class RowParallelLinear(nn.Linear):
    """A projection whose inputs are split over the ranks: each gets the sum of all, and the bias once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]`, the same on every rank."""
        out = functional.linear(x, self.weight)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


def split_vocabulary(decoder: Any, rank: int, vocab_size: int) -> None:
    """Have a token looked up, and its logit computed, by the rank that has its row; all get the sum of what all give.

    The decoder's embedding and head have this rank's rows of the vocabulary.
    """
    embedding, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    own_rows, own_logits, size = embedding.forward, head.forward, embedding.num_embeddings

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        rows = token_ids - rank * size
        is_elsewhere = (rows < 0) | (rows >= size)
        embedded: torch.Tensor = own_rows(rows.masked_fill(is_elsewhere, 0)).masked_fill(is_elsewhere[..., None], 0)
        distributed.all_reduce(embedded)
        return embedded

    def compute_logits(x: torch.Tensor) -> torch.Tensor:
        logits = functional.pad(own_logits(x), (rank * size, vocab_size - (rank + 1) * size))
        if logits.numel():
            distributed.all_reduce(logits)
        return logits

    embedding.forward, head.forward = embed, compute_logits


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: None,
    *,
    scaling: float,
    model: CausalLM,
    batch: ForwardBatch,
    s_aux: torch.Tensor | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Return `[1, num_tokens, num_heads, head_dim]`, as transformers asks a layer's attention: its heads come first.

    Stores the step's keys and values in the layer's pages first, if it has any of its own.
    """
    pages = batch.layers[module.layer_idx]
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    source = model.config.layers[module.layer_idx].kv_source
    owner = module.layer_idx if source is None else source
    scales = model.kv_scales.get(owner) if pages.cache.itemsize == 1 else None
    if scales is not None:
        key, value, scaling = key / scales[0], value / scales[1], scaling * scales[0]
    options: dict[str, Any] = {
        "scale": scaling,
        "window": model.kernel_windows[module.layer_idx],
        "soft_cap": getattr(model.config.text, "attn_logit_softcapping", None),
        "sinks": None if s_aux is None else s_aux.float(),
    }
    if batch.num_decodes == len(query) and (loops := loops_for(pages.cache)):
        if source is None:
            loops.write_rows(key, value, pages.cache, pages.slot_mapping)
        options["page_offsets"] = pages.page_offsets
        return loops.attend_last(query, pages.cache, pages.block_tables, batch.seq_lens, options)[None], None
    if source is None:
        write_kv(key, value, pages.cache, pages.slot_mapping)
    out = torch.empty_like(query)
    parts = (slice(batch.num_decodes), None), (slice(batch.num_decodes, None), batch.prefill_start_loc)
    for rows, start_loc in parts:
        lengths = batch.seq_lens[rows]
        if lengths.shape[0]:
            cache, tables, offsets = pages.cache, pages.block_tables[rows], pages.page_offsets[rows]
            options |= {"page_offsets": offsets, "out": out[rows]}
            paged_attention(query[rows], cache, tables, lengths, start_loc, **options)
    return (out if scales is None else out * scales[1])[None], None


transformers.AttentionInterface.register(_ATTENTION, attend)
