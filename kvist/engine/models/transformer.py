"""A transformers model with paged attention; it sees a step of many sequences as one row of tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import transformers
from torch import distributed, nn
from torch.nn import functional
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvist.engine.batch import ForwardBatch
from kvist.engine.models.config import ModelConfig
from kvist.engine.models.projections import RowParallelLinear
from kvist.errors import InvalidValueError
from kvist.events.engine_events import FULL
from kvist.kernels import loops_for, paged_attention, write_kv
from kvist.kvcache.stale import effective_window

_ATTENTION = "kvist_paged"


class Step:
    """What attention knows of the step that is computed, and does not get from transformers.

    Attention modules have it as an attribute: torch would compile a layer anew for whatever differs in an argument.
    """

    __slots__ = ("batch", "model")

    batch: ForwardBatch

    def __init__(self, model: CausalLM) -> None:
        self.model = model


class CausalLM(nn.Module):
    """Computes the logits for the next token of every sequence.

    Parameters are on torch's default device and uninitialised: `weights.load_model` fills them, and `kv_scales`, by
    which a layer's keys and values are divided if the cache has eight bits; layers without scales have 1.
    """

    def __init__(self, config: ModelConfig, max_model_len: int, dtype: torch.dtype) -> None:
        """Raise InvalidValueError for sizes that no model can have."""
        super().__init__()
        self.config = config
        self.kv_scales: dict[int, tuple[float, float]] = {}
        windows = (effective_window(layer.window, max_model_len) for layer in config.layers)
        self.kernel_windows = [None if window is FULL else window for window in windows]
        kind = getattr(transformers, config.architecture)
        try:
            with no_init_weights():
                self.decoder = kind._from_config(config.text, dtype=dtype, attn_implementation=_ATTENTION)
                _fix_rope_frequencies(self.decoder, max_model_len)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidValueError("config.json", config.architecture, f"a model ({error})") from error
        self.decoder.tie_weights()
        self.step = Step(self)
        for module in self.decoder.modules():
            if hasattr(module, "layer_idx"):
                module.step = self.step
        if config.num_ranks > 1:
            for name, module in self.decoder.named_modules():
                if name.endswith((".o_proj", ".down_proj")):
                    module.__class__ = RowParallelLinear
        self.eval().requires_grad_(False)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Fill the step's cache slots, and return the logits of its `logit_rows`, float32 `[num_rows, vocab_size]`."""
        self.step.batch = batch
        ids, positions = batch.input_ids[None], batch.positions[None]
        output = self.decoder(ids, position_ids=positions, use_cache=False, logits_to_keep=batch.logit_rows)
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def _fix_rope_frequencies(decoder: nn.Module, max_model_len: int) -> None:
    """Let ropes that depend on a sequence's length use one length for all: cached keys cannot be rotated again.

    LongRoPE takes `max_model_len`, dynamic NTK the whole extended length, as vLLM's `phi3_long_rope_scaled_rope.py` and
    `dynamic_ntk_scaling_rope.py` do.
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
            # of any other type, transformers would compute the frequencies anew at each step
            if layer_type is None:
                module.inv_freq, module.rope_type = frequencies, "default"
            else:
                setattr(module, f"{layer_type}_inv_freq", frequencies)
                module.rope_type[layer_type] = "default"


class FusedRMSNorm(nn.Module):
    """A norm as one operation, rounded once, where transformers has eight. `fuse_norms` makes them."""

    scale: torch.Tensor
    eps: float
    loops: ModuleType | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.loops is None:
            return functional.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps).type_as(x)
        normed: torch.Tensor = self.loops.rms_norm(x, self.scale, self.eps)
        return normed


def fuse_norms(decoder: nn.Module) -> None:
    """Replace the norms of a decoder, after its weights are loaded, by fused ones."""
    module: Any
    for module in decoder.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and hasattr(module, "weight"):
            module.scale = module.weight.float() + (name in ("Gemma2RMSNorm", "Gemma3RMSNorm"))  # these store 1 less
            module.eps = getattr(module, "eps", None) or module.variance_epsilon
            module.loops = loops_for(module.scale)
            module.__class__ = FusedRMSNorm


def compile_layers(decoder: nn.Module) -> None:
    """Let torch fuse what a decoder's layers compute beside their products and attention, when they first run.

    They are compiled for one token and for any other number of them, in four parts: the norm, what comes before
    attention, what comes after it, and the rest.
    """
    torch._dynamo.config.recompile_limit = 64  # layers differ: in head size, window, or whose keys they use
    transformers.AttentionInterface.register(_ATTENTION, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    for module in decoder.modules():
        if isinstance(module, GradientCheckpointingLayer):  # each layer of a decoder is one
            module.compile(dynamic=True)


def split_vocabulary(decoder: Any, rank: int, vocab_size: int) -> None:
    """Split a decoder's embedding and head, which have this rank's rows of the vocabulary, over the ranks.

    Each rank looks up the tokens, and computes the logits, of its own rows; an all-reduce adds those of other ranks.
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
    s_aux: torch.Tensor | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention for transformers, after storing the step's keys and values in the layer's pages.

    The inputs are `[1, num_heads, num_tokens, head_dim]`, the result `[1, num_tokens, num_heads, head_dim]`. A layer
    without a cache of its own stores nothing.
    """
    model, batch = module.step.model, module.step.batch
    pages = batch.layers[module.layer_idx]
    taken = (x[0].transpose(0, 1) for x in (query, key, value))
    query, key, value = (x if x.stride(1) == x.shape[2] else x.contiguous() for x in taken)  # kernels take rows apart
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
    out = query.new_empty(query.shape)
    parts = (slice(batch.num_decodes), None), (slice(batch.num_decodes, None), batch.prefill_start_loc)
    for rows, start_loc in parts:
        lengths = batch.seq_lens[rows]
        if lengths.shape[0]:
            cache, tables, offsets = pages.cache, pages.block_tables[rows], pages.page_offsets[rows]
            options |= {"page_offsets": offsets, "out": out[rows]}
            paged_attention(query[rows], cache, tables, lengths, start_loc, **options)
    return (out if scales is None else out * scales[1])[None], None


transformers.AttentionInterface.register(_ATTENTION, attend)
